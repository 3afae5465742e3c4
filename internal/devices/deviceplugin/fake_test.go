// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// timeout is how long a test waits on a busy machine.
const timeout = 20 * time.Second

// kubelet behaves as the real one does towards device plugins (v1beta1): it
// connects back in Register, watches, empties its directory when it starts, and
// takes the end of an earlier plugin's watch for that of the present one.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer

	t   *testing.T
	dir string

	mu      sync.Mutex // guards what is below
	server  *grpc.Server
	clients map[string]*client
	came    int // registrations
	pods    []*podresources.PodResources
	lists   int // questions about pods
	watches sync.WaitGroup
}

// client is kubelet's view of a plugin.
type client struct {
	conn    *grpc.ClientConn
	options *pluginapi.DevicePluginOptions
	devices map[string]*pluginapi.Device // nil: none were told of yet
}

func newKubelet(t *testing.T) *kubelet {
	k := &kubelet{t: t, dir: t.TempDir()}
	t.Cleanup(k.stop)
	return k
}

func (k *kubelet) start() {
	k.t.Helper()
	old, err := filepath.Glob(filepath.Join(k.dir, "*"))
	if err != nil {
		k.t.Fatal(err)
	}
	for _, f := range old {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.t.Fatal(err)
		}
	}
	ln, err := net.Listen("unix", k.socket())
	if err != nil {
		k.t.Fatal(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.clients = map[string]*client{}
	k.server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(k.server, k)
	podresources.RegisterPodResourcesListerServer(k.server, k)
	server := k.server
	k.watches.Go(func() { _ = server.Serve(ln) })
}

func (k *kubelet) socket() string { return filepath.Join(k.dir, kubeletSocket) }

func (k *kubelet) stop() {
	k.mu.Lock()
	server := k.server
	k.server = nil
	for _, c := range k.clients {
		_ = c.conn.Close()
	}
	k.mu.Unlock()
	if server != nil {
		server.Stop()
	}
	k.watches.Wait()
}

// Register implements pluginapi.RegistrationServer.
func (k *kubelet) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if r.GetVersion() != pluginapi.Version {
		return nil, fmt.Errorf("version %q", r.GetVersion())
	}
	conn, err := dial(filepath.Join(k.dir, r.GetEndpoint()))
	if err != nil {
		return nil, err
	}
	api := pluginapi.NewDevicePluginClient(conn)
	options, err := api.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.came++
	k.clients[r.GetResourceName()] = &client{conn: conn, options: options}
	k.watches.Go(func() { k.watch(r.GetResourceName(), api) })
	return &pluginapi.Empty{}, nil
}

func (k *kubelet) watch(resource string, api pluginapi.DevicePluginClient) {
	stream, err := api.ListAndWatch(context.Background(), &pluginapi.Empty{})
	for err == nil {
		var r *pluginapi.ListAndWatchResponse
		if r, err = stream.Recv(); err != nil {
			break
		}
		k.mu.Lock()
		if c := k.clients[resource]; c != nil {
			c.devices = map[string]*pluginapi.Device{}
			for _, d := range r.GetDevices() {
				c.devices[d.GetID()] = d
			}
		}
		k.mu.Unlock()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.clients[resource]; c != nil { // whichever that is now
		_ = c.conn.Close()
		delete(k.clients, resource)
	}
}

// List implements podresources.PodResourcesListerServer.
func (k *kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.lists++
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}

// asked counts the questions about pods.
func (k *kubelet) asked() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lists
}

// healthy counts the devices of a resource; -1 if it is not registered.
func (k *kubelet) healthy(resource string) (healthy, all int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.clients[resource]
	if c == nil || c.devices == nil {
		return -1, -1
	}
	for _, d := range c.devices {
		if d.GetHealth() == pluginapi.Healthy {
			healthy++
		}
	}
	return healthy, len(c.devices)
}

// awaits waits until kubelet knows so many devices.
func (k *kubelet) awaits(resource string, healthy, all int) {
	k.t.Helper()
	eventually(k.t, func() error {
		if h, a := k.healthy(resource); h != healthy || a != all {
			return fmt.Errorf("%s: %d of %d devices are healthy, want %d of %d", resource, h, a, healthy, all)
		}
		return nil
	})
}

// api is how kubelet calls the plugin.
func (k *kubelet) api(resource string) pluginapi.DevicePluginClient {
	k.t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.clients[resource]
	if c == nil {
		k.t.Fatalf("%s is not registered", resource)
	}
	return pluginapi.NewDevicePluginClient(c.conn)
}

func eventually(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %v", timeout, err)
		}
		time.Sleep(5 * time.Millisecond) // polls condition
	}
}

// node is what a plugin offers.
type node struct {
	mu      sync.Mutex // guards what is below
	devices []Device
	err     error
	changed chan struct{}
}

func (n *node) set(err error, devices ...Device) {
	n.mu.Lock()
	n.devices, n.err = devices, err
	n.mu.Unlock()
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

func (n *node) get() ([]Device, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.devices, n.err
}

// plugin makes a plugin for a kubelet.
func (k *kubelet) plugin(slots int, devices ...Device) (*Plugin, *node) {
	k.t.Helper()
	dir := k.t.TempDir()
	n := &node{devices: devices, changed: make(chan struct{}, 1)}
	p, err := New(Config{
		Dir: k.dir, Lock: filepath.Join(dir, "lock"), InfoDir: filepath.Join(dir, "info"), Slots: slots, VFs: true,
		Devices: n.get, Changed: n.changed, Log: slog.New(slog.NewTextHandler(k.t.Output(), nil)),
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return p, n
}

// run runs a plugin until stop, or until the test ends.
func run(t *testing.T, p *Plugin) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx)
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}
