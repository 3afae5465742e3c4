// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

const (
	nodeName  = "node-a"
	waitLimit = 20 * time.Second // for what takes milliseconds
)

// fakeInventory is an inventory that the test changes.
type fakeInventory struct {
	mu      sync.Mutex // guards what is below
	list    []inventory.Device
	looked  bool
	changed []chan struct{}
}

func (f *fakeInventory) Devices() []inventory.Device {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list
}

func (f *fakeInventory) Looked() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.looked
}

func (f *fakeInventory) Subscribe() (<-chan struct{}, func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := make(chan struct{}, 1)
	c <- struct{}{}
	f.changed = append(f.changed, c)
	return c, func() {}
}

// subscribed is "" when somebody waits for changes.
func (f *fakeInventory) subscribed() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.changed) == 0 {
		return "nobody waits"
	}
	return ""
}

func (f *fakeInventory) set(list []inventory.Device) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list, f.looked = list, true
	for _, c := range f.changed {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// bench is a node with a driver, and an API server.
type bench struct {
	*testing.T
	dir    string
	client *fake.Clientset
	inv    *fakeInventory
}

func newBench(t *testing.T) *bench {
	t.Helper()
	// Paths of sockets have at most 107 bytes.
	dir, err := os.MkdirTemp("", "dra") //nolint:usetesting // the test's name is in the other
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(RegistryDir(dir), 0o750); err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid"}})
	var n atomic.Int64
	client.PrependReactor("create", "resourceslices", func(a k8stesting.Action) (bool, runtime.Object, error) {
		o := a.(k8stesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		if o.Name == "" { // as the API server does
			o.Name = fmt.Sprintf("%s%d", o.GenerateName, n.Add(1))
		}
		return false, nil, nil
	})
	b := &bench{T: t, dir: dir, client: client, inv: &fakeInventory{}}
	b.inv.set(devices())
	return b
}

func (b *bench) driver(instance string) *Driver {
	return New(Config{
		Client: b.client, Node: nodeName, Instance: instance, DataDir: filepath.Join(b.dir, "run"), KubeletDir: b.dir,
		Inventory: b.inv, Log: slog.New(slog.NewTextHandler(b.Output(), nil)),
	})
}

// run runs a driver until stop.
func (b *bench) run(d *Driver) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.Run(ctx)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	b.Cleanup(stop)
	return stop
}

// eventually waits until a condition is "".
func (b *bench) eventually(what string, condition func() string) {
	b.Helper()
	problem := ""
	for end := time.Now().Add(waitLimit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) { // polls the condition
		if problem = condition(); problem == "" {
			return
		}
	}
	b.Fatalf("%s: %s", what, problem)
}

// slices are the devices of the node's ResourceSlices, by name.
func (b *bench) slices() map[string]resourceapi.Device {
	b.Helper()
	list, err := b.client.ResourceV1().ResourceSlices().List(b.Context(), metav1.ListOptions{})
	if err != nil {
		b.Fatal(err)
	}
	out := map[string]resourceapi.Device{}
	for _, s := range list.Items {
		if s.Spec.Driver == DriverName && s.Spec.NodeName != nil && *s.Spec.NodeName == nodeName && s.Spec.Pool.Name == nodeName {
			for _, d := range s.Spec.Devices {
				out[d.Name] = d
			}
		}
	}
	return out
}

// kubelet is what kubelet knows of a driver.
type kubelet struct {
	b      *bench
	socket string // of the registration
	conn   *grpc.ClientConn
	plugin drapb.DRAPluginClient
}

// register waits for a driver to register, one that kubelet does not know.
func (b *bench) register(known ...*kubelet) *kubelet {
	b.Helper()
	k := &kubelet{b: b}
	b.eventually("a registration", func() string {
		sockets, err := filepath.Glob(filepath.Join(RegistryDir(b.dir), "*-reg.sock"))
		if err != nil {
			return err.Error()
		}
		for _, s := range sockets {
			if slices.ContainsFunc(known, func(o *kubelet) bool { return o.socket == s }) {
				continue
			}
			conn := b.dial(s)
			defer func() { _ = conn.Close() }()
			client := registerapi.NewRegistrationClient(conn)
			info, err := client.GetInfo(b.Context(), &registerapi.InfoRequest{})
			if err != nil {
				return err.Error()
			}
			if info.Type != registerapi.DRAPlugin || info.Name != DriverName || !slices.Contains(info.SupportedVersions, drapb.DRAPluginService) {
				b.Fatalf("registered as %+v", info)
			}
			if _, err := client.NotifyRegistrationStatus(b.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
				return err.Error()
			}
			k.socket, k.conn = s, b.dial(info.Endpoint)
			return ""
		}
		return fmt.Sprintf("no new socket among %q", sockets)
	})
	b.Cleanup(func() { _ = k.conn.Close() })
	k.plugin = drapb.NewDRAPluginClient(k.conn)
	return k
}

func (b *bench) dial(socket string) *grpc.ClientConn {
	b.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	return conn
}

// claim makes a claim of a pod that is allocated to devices.
func (b *bench) claim(name string, pods []string, devices ...string) *resourceapi.ResourceClaim {
	b.Helper()
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for i, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("nic%d", i), Driver: DriverName, Pool: nodeName, Device: d,
		})
	}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p, UID: types.UID("uid-" + p)})
	}
	if _, err := b.client.ResourceV1().ResourceClaims("ns").Create(b.Context(), c, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	return c
}

func (k *kubelet) of(c *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}

// prepare returns the names of the devices.
func (k *kubelet) prepare(c *resourceapi.ResourceClaim) ([]string, error) {
	k.b.Helper()
	r, err := k.plugin.NodePrepareResources(k.b.Context(), &drapb.NodePrepareResourcesRequest{Claims: k.of(c)})
	if err != nil {
		k.b.Fatal(err)
	}
	a := r.Claims[string(c.UID)]
	if a == nil {
		k.b.Fatalf("no answer for claim %s in %+v", c.Name, r)
	}
	if a.Error != "" {
		return nil, fmt.Errorf("%s", a.Error)
	}
	var out []string
	for _, d := range a.Devices {
		out = append(out, d.PoolName+"/"+d.DeviceName)
		if len(d.CdiDeviceIds) > 0 || len(d.RequestNames) != 1 {
			k.b.Errorf("prepared %+v, want one request and nothing for the runtime", d)
		}
	}
	return out, nil
}

func (k *kubelet) unprepare(c *resourceapi.ResourceClaim) error {
	k.b.Helper()
	r, err := k.plugin.NodeUnprepareResources(k.b.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: k.of(c)})
	if err != nil {
		k.b.Fatal(err)
	}
	a := r.Claims[string(c.UID)]
	if a == nil {
		k.b.Fatalf("no answer for claim %s in %+v", c.Name, r)
	}
	if a.Error != "" {
		return fmt.Errorf("%s", a.Error)
	}
	return nil
}

// unhealthy watches the health of devices.
func (k *kubelet) unhealthy(ctx context.Context) func() []string {
	k.b.Helper()
	stream, err := drahealth.NewDRAResourceHealthClient(k.conn).NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{})
	if err != nil {
		k.b.Fatal(err)
	}
	return func() []string {
		k.b.Helper()
		r, err := stream.Recv()
		if err != nil {
			k.b.Fatal(err)
		}
		var out []string
		for _, d := range r.Devices {
			if d.Health != drahealth.HealthStatus_HEALTHY {
				out = append(out, d.Device.PoolName+"/"+d.Device.DeviceName+": "+d.Message)
			}
		}
		return out
	}
}

// contains says what is wrong with an error.
func contains(err error, want string) string {
	switch {
	case want == "" && err == nil:
	case want == "":
		return err.Error()
	case err == nil:
		return "no error, want " + want
	case !strings.Contains(err.Error(), want):
		return fmt.Sprintf("error %q, want %q in it", err, want)
	}
	return ""
}
