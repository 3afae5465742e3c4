// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
)

// apiServer are the agent's HTTP servers: one on the API's socket, one on the metrics' port.
type apiServer struct {
	servers []*server
}

type server struct {
	name    string
	ln      net.Listener
	http    http.Server
	retired atomic.Bool // the listener is closed; answers under way go on
}

// retire closes the listeners, so that another agent can take their addresses.
func (s *apiServer) retire() error {
	var errs []error
	for _, x := range s.servers {
		x.retired.Store(true)
		errs = append(errs, x.ln.Close())
	}
	return errors.Join(errs...)
}

// serve serves until ctx ends.
func (s *server) serve(ctx context.Context) error {
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiStopTimeout)
		defer cancel()
		stopped <- errors.Join(s.http.Shutdown(sctx), s.http.Close())
	}()
	if err := s.http.Serve(s.ln); !errors.Is(err, http.ErrServerClosed) && !s.retired.Load() {
		return err // the error ends the errgroup's ctx, and so the goroutine above
	}
	err := <-stopped
	if errors.Is(err, context.DeadlineExceeded) || s.retired.Load() && errors.Is(err, net.ErrClosed) {
		return nil // a client was slow, or retire closed the listener before
	}
	return err
}

// listenAPI opens the API's socket and the metrics' port.
func (a *agent) listenAPI(ctx context.Context) (*apiServer, error) {
	n := a.node.Load()
	ln, err := listenUnix(ctx, n.APISocket)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	v := View{a}
	mux.HandleFunc("GET "+agentapi.PathStatus, show(v.askedStatus))
	mux.HandleFunc("GET "+agentapi.PathLinks, show(v.Links))
	mux.HandleFunc("GET "+agentapi.PathConns, showConns(v))
	mux.HandleFunc("GET "+agentapi.PathAttachments, show(v.Attachments))
	mux.HandleFunc("GET "+agentapi.PathDevices, show(v.Devices))
	mux.HandleFunc("GET "+agentapi.PathExplain, showExplanation(v))
	mux.HandleFunc("POST "+agentapi.PathSync, a.apiSync)
	mux.HandleFunc("POST "+agentapi.PathHandover, a.apiHandover)
	mux.Handle("GET "+agentapi.PathMetrics, a.metricsHandler())
	api := &apiServer{servers: []*server{a.newServer("API socket", ln, a.checked(mux))}}
	if !n.MetricsAddress.IsValid() {
		return api, nil
	}
	var mln net.Listener = openMetricsPort(ctx, n.MetricsAddress, a.cfg.ableEvery, a.tellMetrics)
	handler := a.metricsHandler()
	if a.cfg.GuardMetrics != nil {
		handler = a.cfg.GuardMetrics(handler)
	}
	if a.cfg.MetricsListener != nil {
		mln = a.cfg.MetricsListener(mln)
	}
	mm := http.NewServeMux()
	mm.Handle("GET "+agentapi.PathMetrics, handler)
	api.servers = append(api.servers, a.newServer("metrics", mln, mm))
	return api, nil
}

// tellMetrics logs and shows why nobody gets metrics; "": they are served.
func (a *agent) tellMetrics(problem string) {
	was := a.noMetrics.Swap(&problem)
	switch {
	case was == nil && problem == "" || was != nil && *was == problem:
	case problem == "":
		a.cfg.Log.Info("metrics are served now")
	default:
		a.cfg.Log.Error("connections are carried, but nobody gets metrics; tried again", "problem", problem, "every", a.cfg.ableEvery)
	}
}

func (a *agent) newServer(name string, ln net.Listener, h http.Handler) *server {
	return &server{name: name, ln: ln, http: http.Server{
		Handler: h, ReadHeaderTimeout: apiHeaderTimeout, ReadTimeout: apiHeaderTimeout, WriteTimeout: apiWriteTimeout,
		MaxHeaderBytes: apiHeaderBytes, ConnContext: withPeer,
		// Errors of this kind are for example clients that connect and send nothing.
		ErrorLog: slog.NewLogLogger(a.cfg.Log.Handler(), slog.LevelDebug),
	}}
}

func (a *agent) metricsHandler() http.Handler {
	return promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{})
}

// listenUnix listens on a socket of mode 0600. If a socket is there and nobody answers, a killed
// agent left it, and it is replaced.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return nil, errors.Join(answersError(path), c.Close())
	case errors.Is(err, syscall.ECONNREFUSED):
		st, err := os.Lstat(path)
		if err == nil && st.Mode().Type() != fs.ModeSocket {
			err = fmt.Errorf("%s is not a socket: remove it, or choose another node.apiSocket", path)
		}
		if err == nil {
			err = os.Remove(path)
		}
		if err != nil {
			return nil, fmt.Errorf("API socket: %w", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("API socket: %w", err)
	}
	// The socket must have its mode from the first moment. A umask would hold for the whole
	// process, so the socket is made under another name, changed, and renamed.
	temp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", temp)
	if err != nil {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	ul := ln.(*net.UnixListener)
	ul.SetUnlinkOnClose(false)
	err = os.Chmod(temp, 0o600)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("API socket: %w", err), ln.Close(), os.Remove(temp))
	}
	return &unlinking{UnixListener: ul, path: path}, nil
}

// unlinking removes the file of its socket when it is closed.
type unlinking struct {
	*net.UnixListener
	path string
}

// Close closes the listener and removes its file, once.
func (u *unlinking) Close() error {
	if err := u.UnixListener.Close(); err != nil {
		return err
	}
	return os.Remove(u.path)
}

// Addr is the path after the rename.
func (u *unlinking) Addr() net.Addr { return &net.UnixAddr{Name: u.path, Net: "unix"} }

type peerKey struct{}

// peer is the user at the other end of a connection to the API's socket.
type peer struct {
	uid uint32
	err error
}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	var p peer
	rc, err := u.SyscallConn()
	if err == nil {
		var cred *syscall.Ucred
		cerr := rc.Control(func(fd uintptr) {
			cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
		})
		if err = errors.Join(cerr, err); err == nil {
			p.uid = cred.Uid
		}
	}
	p.err = err
	return context.WithValue(ctx, peerKey{}, p)
}

// mayUseAPI allows root and the agent's own user.
func mayUseAPI(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

// checked passes on the requests of users that may use the API. The mode of the socket lets nobody
// else connect; checked also holds if somebody changed that mode.
func (a *agent) checked(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		p, ok := req.Context().Value(peerKey{}).(peer)
		if !ok || p.err != nil || !a.cfg.mayUseAPI(p.uid) {
			a.metrics.apiDenied.Inc()
			a.cfg.Log.Warn("API request refused", "uid", p.uid, "err", p.err)
			problem(w, http.StatusForbidden, fmt.Errorf("user %d may not use this socket: run as root or as the agent's user", p.uid))
			return
		}
		req.Body = http.MaxBytesReader(w, req.Body, apiBodyBytes)
		h.ServeHTTP(w, req)
	})
}

// errStopping says that the agent takes no new requests for its manager.
var errStopping = errors.New("the agent is stopping")

// show serves what f returns.
func show[T any](f func() T) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, f()) }
}

// showConns serves View.Conns.
func showConns(v View) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		pod := req.URL.Query().Get("pod")
		if pod != "" && !strings.Contains(pod, "/") {
			problem(w, http.StatusBadRequest, fmt.Errorf("pod %q: want NAMESPACE/NAME", pod))
			return
		}
		writeJSON(w, http.StatusOK, v.Conns(pod))
	}
}

// showExplanation serves View.Explain.
func showExplanation(v View) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		q := req.URL.Query()
		e, err := v.Explain(q.Get("src"), q.Get("dst"))
		if err != nil {
			problem(w, http.StatusBadRequest, err)
			return
		}
		writeJSON(w, http.StatusOK, e)
	}
}

func problem(w http.ResponseWriter, code int, err error) {
	writeJSON(w, code, agentapi.Problem{APIVersion: agentapi.Version, Error: err.Error()})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// An error here means that the client went away.
	_ = json.NewEncoder(w).Encode(v)
}

// apiSync makes the manager read the records, and answers when that is done: for all pods or, if
// the event names a container, for the pod of that container. STATUS is answered as soon as the manager can read them.
// apiSync ignores the rest of the event, since the records have it, too.
func (a *agent) apiSync(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		problem(w, http.StatusBadRequest, err)
		return
	}
	var event cni.Event
	if json.Unmarshal(body, &event) != nil {
		event = cni.Event{} // wait for all pods
	}
	if a.draining.Load() {
		problem(w, http.StatusServiceUnavailable, errStopping)
		return
	}
	if err := a.manager.sync(req.Context(), event); err != nil {
		problem(w, http.StatusServiceUnavailable, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
