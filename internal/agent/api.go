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
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
)

// apiServer is the agent's servers: the API's socket and the metrics' port.
type apiServer struct {
	servers []*server
}

type server struct {
	name    string
	ln      net.Listener
	http    http.Server
	retired atomic.Bool // the listener is closed, answers under way go on
}

// retire closes the listeners: their addresses are free for another agent.
func (s *apiServer) retire() error {
	var errs []error
	for _, x := range s.servers {
		x.retired.Store(true)
		errs = append(errs, x.ln.Close())
	}
	return errors.Join(errs...)
}

// run serves until ctx ends.
func (s *server) run(ctx context.Context) error {
	stopped := make(chan error, 1)
	go func() {
		<-ctx.Done()
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiStopTimeout)
		defer cancel()
		stopped <- errors.Join(s.http.Shutdown(sctx), s.http.Close())
	}()
	if err := s.http.Serve(s.ln); !errors.Is(err, http.ErrServerClosed) && !s.retired.Load() {
		return err // the group ends ctx, and so the goroutine
	}
	err := <-stopped
	if errors.Is(err, context.DeadlineExceeded) || s.retired.Load() && errors.Is(err, net.ErrClosed) {
		return nil // who asked was slow, or the listener was closed before
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
	mux.HandleFunc("GET "+agentapi.PathStatus, answer(a.apiStatus))
	mux.HandleFunc("GET "+agentapi.PathLinks, answer(a.apiLinks))
	mux.HandleFunc("GET "+agentapi.PathConns, answer(a.apiConns))
	mux.HandleFunc("GET "+agentapi.PathExplain, answer(a.apiExplain))
	mux.HandleFunc("GET "+agentapi.PathAttachments, answer(a.apiAttachments))
	mux.HandleFunc("GET "+agentapi.PathDevices, answer(a.apiDevices))
	mux.HandleFunc("POST "+agentapi.PathSync, a.apiSync)
	mux.HandleFunc("POST "+agentapi.PathHandover, a.apiHandover)
	mux.Handle("GET "+agentapi.PathMetrics, a.metricsHandler())
	api := &apiServer{servers: []*server{a.newServer("API socket", ln, a.checked(mux))}}
	if !n.MetricsAddress.IsValid() {
		return api, nil
	}
	mln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", n.MetricsAddress.String())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("metrics: %w: choose another node.metricsAddress, or none", err), ln.Close())
	}
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

func (a *agent) newServer(name string, ln net.Listener, h http.Handler) *server {
	return &server{name: name, ln: ln, http: http.Server{
		Handler: h, ReadHeaderTimeout: apiHeaderTimeout, ReadTimeout: apiHeaderTimeout, WriteTimeout: apiWriteTimeout,
		MaxHeaderBytes: apiHeaderBytes, ConnContext: withPeer,
		// Whoever connects and says nothing is worth no line of the log.
		ErrorLog: slog.NewLogLogger(a.cfg.Log.Handler(), slog.LevelDebug),
	}}
}

func (a *agent) metricsHandler() http.Handler {
	return promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{})
}

// listenUnix listens on a socket of mode 0600. A socket that nobody answers is
// a dead agent's, and is replaced.
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
	// The mode must be right from the first moment, and the umask belongs to
	// the whole process; so the socket is made under another name.
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

// unlinking removes its socket file when it is closed.
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

// Addr names the final path.
func (u *unlinking) Addr() net.Addr { return &net.UnixAddr{Name: u.path, Net: "unix"} }

type peerKey struct{}

// peer is who is at the other end of the API's socket.
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

// checked lets only those through who may use the API. The mode of the socket
// says the same; this holds also when somebody changed it.
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

// errStopping says that the agent does nothing new.
var errStopping = errors.New("the agent is stopping")

// badRequest is an error of the one who asks.
type badRequest struct{ error }

// answer serves what f returns.
func answer[T any](f func(*http.Request) (T, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		v, err := f(req)
		if err != nil {
			code := http.StatusInternalServerError
			if errors.As(err, new(badRequest)) {
				code = http.StatusBadRequest
			}
			problem(w, code, err)
			return
		}
		writeJSON(w, http.StatusOK, v)
	}
}

func problem(w http.ResponseWriter, code int, err error) {
	writeJSON(w, code, agentapi.Problem{APIVersion: agentapi.Version, Error: err.Error()})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// Who asked may have gone away.
	_ = json.NewEncoder(w).Encode(v)
}

// apiSync reads the records and answers when everything is done or, if the event
// names a container, what concerns that. Nothing else of the event matters: the
// directory is the truth.
func (a *agent) apiSync(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		problem(w, http.StatusBadRequest, err)
		return
	}
	var event cni.Event
	if json.Unmarshal(body, &event) != nil {
		event = cni.Event{} // then for all
	}
	if a.draining.Load() {
		problem(w, http.StatusServiceUnavailable, errStopping)
		return
	}
	if err := a.manager.sync(req.Context(), event.ContainerID); err != nil {
		problem(w, http.StatusServiceUnavailable, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
