// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/smcr-io/kube-smcr/internal/files/watch"
)

// kubeletSocket is the name of kubelet's socket in the directory of device plugins.
const kubeletSocket = "kubelet.sock"

// errNoKubelet says that there is no kubelet to register with.
var errNoKubelet = errors.New("kubelet's socket is not there")

// run keeps the resource registered until ctx ends.
func (r *resource) run(ctx context.Context) {
	events, stop := r.watchDir()
	defer stop()
	var (
		pause    = firstPause
		said     string
		lastSaid time.Time
	)
	for ctx.Err() == nil {
		lasted, err := r.session(ctx, events)
		r.cfg.Metrics.registered.WithLabelValues(r.name).Set(0)
		if ctx.Err() != nil {
			return
		}
		if text := fmt.Sprint(err); text != said || time.Since(lastSaid) > complainEvery {
			said, lastSaid = text, time.Now()
			if errors.Is(err, errNoKubelet) {
				r.cfg.Log.Info("waiting for kubelet", "resource", r.name, "dir", r.cfg.Dir)
			} else {
				r.cfg.Log.Warn("not registered with kubelet; trying again", "resource", r.name, "err", err)
			}
		}
		if pause = min(2*pause, maxPause); lasted {
			pause = firstPause
		}
		r.pause(ctx, events, pause)
	}
}

// pause waits for d, or until something changes in kubelet's directory.
func (r *resource) pause(ctx context.Context, events <-chan fsnotify.Event, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-events:
			if e.Name == "" || filepath.Base(e.Name) == kubeletSocket && e.Has(fsnotify.Create) {
				return
			}
		}
	}
}

// watchDir tells of changes in kubelet's directory. If the directory cannot be watched,
// there are no events, and the caller checks from time to time.
func (r *resource) watchDir() (events <-chan fsnotify.Event, stop func()) {
	events, stop, err := watch.Dirs(r.cfg.Dir)
	if err != nil {
		r.cfg.Log.Debug("kubelet's directory is looked at from time to time only", "err", err)
	}
	return events, stop
}

// session is one registration. It returns why the registration ended. lasted says that
// kubelet called ListAndWatch in between.
func (r *resource) session(ctx context.Context, events <-chan fsnotify.Event) (lasted bool, err error) {
	kubelet, err := os.Stat(filepath.Join(r.cfg.Dir, kubeletSocket))
	if errors.Is(err, fs.ErrNotExist) {
		return false, errNoKubelet
	}
	if err != nil {
		return false, err
	}
	stop, own, err := r.serve(ctx)
	if err != nil {
		return false, err
	}
	defer stop()
	if err := r.register(ctx); err != nil {
		return false, err
	}
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	unwatchedSince := time.Now()
	for {
		watched, ended := r.watched()
		if watched {
			if !lasted {
				r.cfg.Metrics.registrations.WithLabelValues(r.name).Inc()
				r.cfg.Metrics.registered.WithLabelValues(r.name).Set(1)
				r.cfg.Log.Info("registered with kubelet", "resource", r.name)
			}
			lasted = true
		} else if lasted || time.Since(unwatchedSince) > streamGrace {
			return lasted, errors.New("kubelet does not watch the devices")
		}
		select {
		case <-ctx.Done():
			return lasted, nil
		case <-ended:
			lasted = true
		case <-events:
		case <-tick.C:
		}
		if !stands(own, filepath.Join(r.cfg.Dir, r.endpoint)) || !stands(kubelet, filepath.Join(r.cfg.Dir, kubeletSocket)) {
			return lasted, errors.New("kubelet started again")
		}
	}
}

// stands says whether f is still the file at the path.
func stands(f fs.FileInfo, path string) bool {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(f, now)
}

// serve answers kubelet on a new socket.
func (r *resource) serve(ctx context.Context) (stop func(), socket fs.FileInfo, err error) {
	path := filepath.Join(r.cfg.Dir, r.endpoint)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("socket of an earlier plugin: %w", err)
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, nil, fmt.Errorf("socket for kubelet: %w", err)
	}
	// When this socket is closed, the file at its path may be the next plugin's.
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	err = os.Chmod(path, 0o600)
	if err == nil {
		socket, err = os.Lstat(path)
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("socket for kubelet: %w", err), ln.Close())
	}
	s := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(s, r)
	halt := make(chan struct{})
	r.mu.Lock()
	r.halt = halt
	r.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ln) }) // it ends by Stop; if it fails, so does the registration
	return func() {
		close(halt)
		// Answer the calls under way first: kubelet would refuse the pods that they are for.
		force := time.AfterFunc(stopTimeout, s.Stop)
		s.GracefulStop()
		force.Stop()
		wg.Wait()
		if stands(socket, path) {
			_ = os.Remove(path) // after an error the next plugin removes it
		}
	}, socket, nil
}

// register makes kubelet connect to the socket.
func (r *resource) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	conn, err := dial(filepath.Join(r.cfg.Dir, kubeletSocket))
	if err != nil {
		return fmt.Errorf("register with kubelet: %w", err)
	}
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: r.endpoint, ResourceName: r.name,
		Options: &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	if err = errors.Join(err, conn.Close()); err != nil {
		return fmt.Errorf("register with kubelet: %w", err)
	}
	return nil
}

// dial prepares calls to a server at a Unix socket.
func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr)
		}),
	)
}
