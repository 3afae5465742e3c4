// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// TestDriver: the life of a claim, from the ResourceSlice to its end, with the calls that kubelet makes.
func TestDriver(t *testing.T) {
	b := newBench(t)
	d := b.driver("agent-1")
	stop := b.run(d)
	k := b.register()
	b.eventually("the slices", func() string {
		if n := len(b.slices()); n != 5 {
			return fmt.Sprintf("%d devices", n)
		}
		return ""
	})

	// A port goes down: the slice and the health say so.
	next := k.unhealthy(t.Context())
	if diff := cmp.Diff([]string{"node-a/soft1: the port is down"}, next()); diff != "" {
		t.Errorf("unhealthy devices (-want +got)\n%s", diff)
	}
	list := devices()
	list[0].Up = false
	b.inv.set(list)
	if diff := cmp.Diff([]string{"node-a/soft0: the port is down", "node-a/soft1: the port is down"}, next()); diff != "" {
		t.Errorf("unhealthy devices (-want +got)\n%s", diff)
	}
	b.eventually("linkState of soft0", func() string {
		if got := values(b.slices()["soft0"])[attrLinkState]; got != "down" {
			return got
		}
		return ""
	})

	c := b.claim("web", []string{"pod-1"}, "soft1", "0000-41-10-2")
	want := []string{"node-a/soft1", "node-a/0000-41-10-2"}
	for range 2 { // kubelet asks again after its restart
		got, err := k.prepare(c)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("prepared: %v (-want +got)\n%s", err, diff)
		}
	}
	of, err := claims.NewStore(d.cfg.DataDir).OfPod("uid-pod-1")
	wantOf := []claims.Device{
		{ID: "soft1", Request: "nic0", Pool: nodeName, Name: "soft1", Shared: true},
		{ID: "0000:41:10.2", Request: "nic1", Pool: nodeName, Name: "0000-41-10-2"},
	}
	if diff := cmp.Diff(wantOf, of); diff != "" || err != nil {
		t.Errorf("record: %v (-want +got)\n%s", err, diff)
	}

	// Another agent takes over beside this one, and unprepares.
	stop2 := b.run(b.driver("agent-2"))
	k2 := b.register(k)
	stop()
	if _, err := os.Stat(k.socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket of the first agent: %v", err)
	}
	for range 2 {
		if err := k2.unprepare(c); err != nil {
			t.Error(err)
		}
	}
	if all, err := claims.NewStore(d.cfg.DataDir).List(); len(all) > 0 || err != nil {
		t.Errorf("records after unprepare: %v, %v", all, err)
	}
	stop2()
	if n := len(b.slices()); n != 5 {
		t.Errorf("%d devices in the slices after the agents' end, want all: the next agent goes on", n)
	}
}

// TestDriver_slicesRemoved: a kubelet that starts removes the slices of its node.
func TestDriver_slicesRemoved(t *testing.T) {
	b := newBench(t)
	b.run(b.driver("agent-1"))
	all := func() string {
		if n := len(b.slices()); n != 5 {
			return fmt.Sprintf("%d devices", n)
		}
		return ""
	}
	b.eventually("the slices", all)
	list, err := b.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		t.Fatalf("%d slices, %v", len(list.Items), err)
	}
	for _, s := range list.Items {
		if err := b.client.ResourceV1().ResourceSlices().Delete(t.Context(), s.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	b.eventually("the slices again, before anybody waits for them", all)
}

func TestPrepare(t *testing.T) {
	parameters := func(c *resourceapi.ResourceClaim, source resourceapi.AllocationConfigSource, text string, requests ...string) {
		c.Status.Allocation.Devices.Config = append(c.Status.Allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: source, Requests: requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: DriverName, Parameters: runtime.RawExtension{Raw: []byte(text)}},
			},
		})
	}
	named := func(name string) string {
		return fmt.Sprintf(`{"apiVersion": %q, "kind": %q, "interfaceName": %q}`, parametersVersion, parametersKind, name)
	}
	yes := true
	const function, other = "0000-41-10-0", "0000-41-10-2"
	tests := []struct {
		name    string
		pods    []string
		devices []string
		change  func(*bench, *resourceapi.ResourceClaim)
		want    []string // ID=IFNAME of the record
		err     string
	}{
		{name: "shared by two pods", pods: []string{"pod-1", "pod-2"}, devices: []string{"soft0"}, want: []string{"soft0="}},
		{name: "VF for two pods", pods: []string{"pod-1", "pod-2"}, devices: []string{function}, err: "use a ResourceClaimTemplate"},
		{name: "another driver's result", devices: []string{"gpu0", "soft0"}, want: []string{"soft0="}, change: func(_ *bench, c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
		}},
		{name: "administrator's access", devices: []string{function}, change: func(_ *bench, c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].AdminAccess = &yes
		}},
		{name: "not here any more", devices: []string{"soft7"}, err: "device soft7 is not on this node any more"},
		{name: "another node's", devices: []string{"soft0"}, err: "of pool node-b", change: func(_ *bench, c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Pool = "node-b"
		}},
		{name: "bound to vfio", devices: []string{function}, err: "not on this node", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			list := devices()
			list[2].State = vf.StateVFIO
			b.inv.set(list)
		}},
		{name: "another pod's", devices: []string{function}, err: "device 0000:41:10.0 belongs to interface net1 of container c1 (pod ns/other, UID uid-other): that pod runs, and got the device without a claim", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			list := devices()
			list[2].State, list[2].Owner = vf.StatePod, &vf.Owner{ContainerID: "c1", IfName: "net1", Pod: records.Pod{Namespace: "ns", Name: "other", UID: "uid-other"}}
			b.inv.set(list)
		}},
		{name: "the pod's own", devices: []string{function}, want: []string{"0000:41:10.0="}, change: func(b *bench, _ *resourceapi.ResourceClaim) {
			list := devices()
			list[2].State, list[2].Owner = vf.StatePod, &vf.Owner{Pod: records.Pod{Namespace: "ns", Name: "pod-1", UID: "uid-pod-1"}}
			b.inv.set(list)
		}},
		{name: "interface names", devices: []string{function, other}, want: []string{"0000:41:10.0=net1", "0000:41:10.2=net2"}, change: func(_ *bench, c *resourceapi.ResourceClaim) {
			parameters(c, resourceapi.AllocationConfigSourceClass, named("fromclass"))
			parameters(c, resourceapi.AllocationConfigSourceClaim, named("net1"), "nic0")
			parameters(c, resourceapi.AllocationConfigSourceClaim, named("net2"), "nic1")
		}},
		{name: "name of all requests", devices: []string{function, other}, err: "two devices would be interface net1", change: func(_ *bench, c *resourceapi.ResourceClaim) {
			parameters(c, resourceapi.AllocationConfigSourceClaim, named("net1"))
		}},
		{name: "name of a main request", devices: []string{function}, want: []string{"0000:41:10.0=net1"}, change: func(_ *bench, c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Request = "nic0/first"
			parameters(c, resourceapi.AllocationConfigSourceClaim, named("net1"), "nic0")
		}},
		{name: "junk parameters", devices: []string{function}, err: `parameters of request "nic0" (of the Claim)`, change: func(_ *bench, c *resourceapi.ResourceClaim) {
			parameters(c, resourceapi.AllocationConfigSourceClaim, `{"interface": 1}`)
		}},
		{name: "VF of a claim that runs", devices: []string{function}, err: "prepared for claim ns/before (UID uid-before): delete its pod first", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			c := b.claim("before", []string{"pod-0"}, function)
			if _, err := b.driver("").prepare(b.Context(), nil, c); err != nil {
				b.Fatal(err)
			}
		}},
		{name: "VF of a claim that is gone", devices: []string{function}, want: []string{"0000:41:10.0="}, change: func(b *bench, _ *resourceapi.ResourceClaim) {
			c := b.claim("before", []string{"pod-0"}, function)
			if _, err := b.driver("").prepare(b.Context(), nil, c); err != nil {
				b.Fatal(err)
			}
			if err := b.client.ResourceV1().ResourceClaims("ns").Delete(b.Context(), "before", metav1.DeleteOptions{}); err != nil {
				b.Fatal(err)
			}
		}},
		{name: "VF of a claim of the same name", devices: []string{function}, want: []string{"0000:41:10.0="}, change: func(b *bench, _ *resourceapi.ResourceClaim) {
			err := b.driver("").store.Write(claims.Claim{Namespace: "ns", Name: "web", UID: "uid-of-the-last-one", Devices: []claims.Device{{ID: "0000:41:10.0"}}})
			if err != nil {
				b.Fatal(err)
			}
		}},
		{name: "record is junk", devices: []string{"soft0"}, want: []string{"soft0="}, change: func(b *bench, _ *resourceapi.ResourceClaim) {
			s := b.driver("").store
			err := errors.Join(s.MakeDir(), os.WriteFile(filepath.Join(s.Dir(), "uid-web.json"), []byte("{"), 0o600))
			if err != nil {
				b.Fatal(err)
			}
		}},
		{name: "more than a pod may have", devices: []string{function}, err: "pod ns/pod-1 would have 33 devices for itself, at most 32 are allowed", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			hasDevices(b, "pod-1", claims.MaxDevices, 0)
		}},
		{name: "as many as a pod may have", devices: []string{function, "soft0"}, want: []string{"0000:41:10.0=", "soft0="}, change: func(b *bench, _ *resourceapi.ResourceClaim) {
			hasDevices(b, "pod-1", claims.MaxDevices-1, 5)
			hasDevices(b, "pod-2", 5, 0)
		}},
		{name: "records cannot be read", devices: []string{function}, err: "not known whether another claim has device 0000:41:10.0", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			dir := b.driver("").store.Dir()
			if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o700), os.WriteFile(dir, nil, 0o600)); err != nil {
				b.Fatal(err)
			}
		}},
		{name: "disk is full", devices: []string{"soft0"}, err: "write claim ns/web: mkdir", change: func(b *bench, _ *resourceapi.ResourceClaim) {
			if err := os.WriteFile(filepath.Join(b.dir, "run"), nil, 0o600); err != nil {
				b.Fatal(err)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			pods := tt.pods
			if pods == nil {
				pods = []string{"pod-1"}
			}
			c := b.claim("web", pods, tt.devices...)
			if tt.change != nil {
				tt.change(b, c)
			}
			d := b.driver("")
			result, err := d.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c})
			if err != nil {
				t.Fatal(err)
			}
			if problem := contains(result[c.UID].Err, tt.err); problem != "" {
				t.Fatal(problem)
			}
			got, err := d.store.Get(string(c.UID))
			if tt.err != "" {
				if err == nil {
					t.Errorf("a claim that failed is recorded: %+v", got)
				}
				return
			}
			var have []string
			for _, x := range got.Devices {
				have = append(have, x.ID+"="+x.IfName)
			}
			if diff := cmp.Diff(tt.want, have); diff != "" || err != nil {
				t.Errorf("record: %v (-want +got)\n%s", err, diff)
			}
		})
	}
}

// hasDevices writes the record of a claim of a pod, with devices for itself and shared ones.
func hasDevices(b *bench, pod string, own, shared int) {
	b.Helper()
	c := claims.Claim{Namespace: "ns", Name: "of-" + pod, UID: "uid-of-" + pod, Pods: []records.Pod{{Namespace: "ns", Name: pod, UID: "uid-" + pod}}}
	for i := range own + shared {
		c.Devices = append(c.Devices, claims.Device{ID: fmt.Sprintf("%s/%d", pod, i), Shared: i >= own})
	}
	if err := b.driver("").store.Write(c); err != nil {
		b.Fatal(err)
	}
}

// A pod that is made anew under the name of one that still ends on the node gets its VF when that is back. If it
// takes long, the error says whose the VF still is: of the former pod, by its UID, with the interface of the VF.
func TestPrepare_formerPod(t *testing.T) {
	const function = "0000-41-10-0"
	taken := func() []inventory.Device {
		list := devices()
		list[2].State, list[2].PodIfName = vf.StatePod, "smcr0"
		list[2].Owner = &vf.Owner{ContainerID: "c1", IfName: "eth0", Pod: records.Pod{Namespace: "ns", Name: "pod-1", UID: "uid-of-the-former"}}
		return list
	}
	start := func(b *bench, wait time.Duration) (<-chan error, *resourceapi.ResourceClaim) {
		d := b.driver("")
		d.cfg.Ending, d.cfg.returnWait = func(uid string) bool { return uid == "uid-of-the-former" }, wait
		c := b.claim("web", []string{"pod-1"}, function)
		done := make(chan error, 1)
		go func() {
			out, err := d.PrepareResourceClaims(b.Context(), []*resourceapi.ResourceClaim{c})
			done <- errors.Join(err, out[c.UID].Err)
		}()
		return done, c
	}
	t.Run("comes back", func(t *testing.T) {
		b := newBench(t)
		b.inv.set(taken())
		done, _ := start(b, returnWait)
		b.eventually("wait for the device", func() string { return b.inv.subscribed() })
		select {
		case err := <-done:
			t.Fatalf("done while the former pod has the device: %v", err)
		default:
		}
		list := taken()
		list[0].Up = false // another change of the devices
		b.inv.set(list)
		b.inv.set(devices())
		if err := <-done; err != nil {
			t.Errorf("not prepared although the device is back: %v", err)
		}
	})
	t.Run("removed meanwhile", func(t *testing.T) {
		b := newBench(t)
		b.inv.set(taken())
		done, _ := start(b, returnWait)
		b.eventually("wait for the device", func() string { return b.inv.subscribed() })
		b.inv.set(devices()[:2])
		if err := <-done; err == nil || !strings.Contains(err.Error(), "is not on this node any more") {
			t.Errorf("error %v", err)
		}
	})
	t.Run("does not come back", func(t *testing.T) {
		b := newBench(t)
		b.inv.set(taken())
		done, c := start(b, 100*time.Millisecond)
		err := <-done
		want := "claim ns/web: device 0000:41:10.0 belongs to interface smcr0 of container c1 (pod ns/pod-1, UID uid-of-the-former): that pod is ending, " +
			"and the CNI plugin has not yet been told to take the device back: kubelet tries again"
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
		if _, err := b.driver("").store.Get(string(c.UID)); err == nil {
			t.Error("a claim that failed is recorded")
		}
	})
}

// TestPrepare_clockSetBack: the claim of a pod that was made anew counts, not that of the former pod
// of the name, which was prepared when the node's clock was ahead.
func TestPrepare_clockSetBack(t *testing.T) {
	b := newBench(t)
	d := b.driver("agent-1")
	b.run(d)
	k := b.register()
	former := claims.Claim{
		Namespace: "ns", Name: "former", UID: "former", Prepared: time.Now().Add(time.Hour),
		Pods: []records.Pod{{Namespace: "ns", Name: "pod-1", UID: "uid-former"}}, Devices: []claims.Device{{ID: "soft0", Shared: true}},
	}
	if err := claims.NewStore(d.cfg.DataDir).Write(former); err != nil {
		t.Fatal(err)
	}
	if _, err := k.prepare(b.claim("web", []string{"pod-1"}, "soft1")); err != nil {
		t.Fatal(err)
	}
	a := NewAssigned(d.cfg.DataDir, slog.New(slog.DiscardHandler))
	if diff := cmp.Diff([]string{"soft1"}, a.Devices(config.PodName{Namespace: "ns", Name: "pod-1"})); diff != "" {
		t.Errorf("devices of the pod (-want +got)\n%s", diff)
	}
}

// TestReturnWait: a VF that takes as long to come back as on a busy node is waited for, as kubelet tries a refused claim
// again only after a minute; and kubelet does not end the calls behind two such.
func TestReturnWait(t *testing.T) {
	const seen = 10 * time.Second // from the deletion of a pod to the end of its DEL, in a guest
	if returnWait <= seen || 3*returnWait > callTimeout {
		t.Errorf("a call waits %v", returnWait)
	}
}

// TestPrepare_deviceGone: a prepared claim stays prepared when its device goes away. The pod may be running,
// and kubelet prepares the claim again after each restart of kubelet.
func TestPrepare_deviceGone(t *testing.T) {
	b := newBench(t)
	c := b.claim("web", []string{"pod-1"}, "0000-41-10-0")
	d := b.driver("")
	if _, err := d.prepare(t.Context(), nil, c); err != nil {
		t.Fatal(err)
	}
	before, err := d.store.Get("uid-web")
	if err != nil {
		t.Fatal(err)
	}
	b.inv.set(nil)
	if _, err := d.prepare(t.Context(), nil, c); err != nil {
		t.Error(err)
	}
	after, err := d.store.Get("uid-web")
	if diff := cmp.Diff(before, after); diff != "" || err != nil {
		t.Errorf("record: %v (-want +got)\n%s", err, diff)
	}
}

// TestDriver_noConsumableCapacity: an API server that does not know consumable capacity drops its fields.
// For such a server each share of a device is a device of its own, a slot.
func TestDriver_noConsumableCapacity(t *testing.T) {
	b := newBench(t)
	old := func(a k8stesting.Action) (bool, runtime.Object, error) {
		o := a.(interface{ GetObject() runtime.Object }).GetObject().(*resourceapi.ResourceSlice)
		for i := range o.Spec.Devices {
			o.Spec.Devices[i].AllowMultipleAllocations, o.Spec.Devices[i].Capacity = nil, nil
		}
		return false, nil, nil
	}
	b.client.PrependReactor("create", "resourceslices", old)
	b.client.PrependReactor("update", "resourceslices", old)
	b.run(b.driver("agent-1"))
	k := b.register()
	b.eventually("slots", func() string {
		if got := b.slices(); len(got) != 3*MaxSharers+2 || values(got["soft0-slot-07"])[attrID] != "soft0" {
			return fmt.Sprintf("%d devices", len(got))
		}
		return ""
	})
	for i, slot := range []string{"soft0-slot-07", "soft0-slot-08"} {
		if _, err := k.prepare(b.claim(fmt.Sprint("claim-", i), []string{"pod-1"}, slot)); err != nil {
			t.Error(err)
		}
	}
}

// TestDriver_slotsStay: after a restart of the agent the slots stay what they are, and claims that are allocated by them are
// prepared, also before anything was published. Once the API server knows consumable capacity there are none any more.
func TestDriver_slotsStay(t *testing.T) {
	b := newBench(t)
	var mu sync.Mutex
	var shared []string // published as devices that nobody else may have
	old := true
	react := func(a k8stesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		o := a.(interface{ GetObject() runtime.Object }).GetObject().(*resourceapi.ResourceSlice)
		dry := false
		if c, ok := a.(k8stesting.CreateActionImpl); ok {
			dry = len(c.CreateOptions.DryRun) > 0
		}
		for i := range o.Spec.Devices {
			x := &o.Spec.Devices[i]
			if old && !dry && x.AllowMultipleAllocations != nil {
				shared = append(shared, x.Name)
			}
			if old {
				x.AllowMultipleAllocations, x.Capacity = nil, nil
			}
		}
		return dry, o, nil
	}
	b.client.PrependReactor("create", "resourceslices", react)
	b.client.PrependReactor("update", "resourceslices", react)
	published := func(want int) func() string {
		return func() string {
			if got := b.slices(); len(got) != want {
				return fmt.Sprintf("%d devices", len(got))
			}
			return ""
		}
	}
	stop := b.run(b.driver("agent-1"))
	first := b.register()
	b.eventually("slots", published(3*MaxSharers+2))
	stop()
	mu.Lock()
	shared = nil
	mu.Unlock()

	stop = b.run(b.driver("agent-2"))
	k := b.register(first)
	if _, err := k.prepare(b.claim("claim", []string{"pod-1"}, "soft0-slot-07")); err != nil {
		t.Error(err)
	}
	b.inv.set(devices()[1:])
	b.eventually("slots of what is left", published(2*MaxSharers+2))
	mu.Lock()
	if len(shared) > 0 {
		t.Errorf("published in place of slots: %v", shared)
	}
	old = false
	mu.Unlock()
	stop()

	b.run(b.driver("agent-3"))
	b.eventually("shared devices", published(4))
}

// TestRun_kubeletComesLate: the driver waits for kubelet's directories, and goes
// on after an error that ends its servers.
func TestRun_kubeletComesLate(t *testing.T) {
	b := newBench(t)
	if err := os.Remove(RegistryDir(b.dir)); err != nil {
		t.Fatal(err)
	}
	d := b.driver("agent-1")
	if err := d.serve(t.Context()); contains(err, "kubelet's --root-dir") != "" {
		t.Error(err)
	}
	if err := os.Mkdir(RegistryDir(b.dir), 0o750); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.serve(t.Context()) }()
	b.register()
	d.HandleError(t.Context(), errors.New("the listener broke"), "gRPC server failed")
	select {
	case err := <-ended:
		if problem := contains(err, "gRPC server failed: the listener broke"); problem != "" {
			t.Error(problem)
		}
	case <-time.After(waitLimit):
		t.Fatal("the driver goes on without its server")
	}
}

// TestRemoveDead: sockets of agents that were killed go; those of others stay.
func TestRemoveDead(t *testing.T) {
	dir := newBench(t).dir
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	listen(DriverName + "-lives-reg.sock")
	for _, name := range []string{DriverName + "-dead-reg.sock", "gpu.example.com-reg.sock"} {
		if err := listen(name).Close(); err != nil {
			t.Fatal(err)
		}
	}
	removeDead(dir, DriverName+"-*.sock")
	var left []string
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !e.IsDir() {
			left = append(left, e.Name())
		}
	}
	slices.Sort(left)
	if diff := cmp.Diff([]string{"gpu.example.com-reg.sock", DriverName + "-lives-reg.sock"}, left); diff != "" || err != nil {
		t.Errorf("%v (-want +got)\n%s", err, diff)
	}
}

func TestAssigned(t *testing.T) {
	dir := t.TempDir()
	a := NewAssigned(dir, slog.New(slog.DiscardHandler))
	ctx := t.Context()
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.Run(ctx)
	}()
	t.Cleanup(func() { <-done })
	b := &bench{T: t}
	store := claims.NewStore(dir)
	pod := config.PodName{Namespace: "ns", Name: "web"}
	write := func(uid string, at int64, ids ...string) {
		c := claims.Claim{Namespace: "ns", Name: uid, UID: uid, Prepared: time.Unix(at, 0), Pods: []records.Pod{{Namespace: "ns", Name: "web", UID: "pod-1"}}}
		for _, id := range ids {
			c.Devices = append(c.Devices, claims.Device{ID: id})
		}
		if err := store.Write(c); err != nil {
			t.Fatal(err)
		}
	}
	told := func(want ...string) {
		t.Helper()
		b.eventually("the devices", func() string {
			select {
			case <-a.Changed():
			default:
			}
			return cmp.Diff(want, a.Devices(pod))
		})
		if got := a.Claimed("pod-1"); got != (len(want) > 0) {
			t.Errorf("claimed: %v", got)
		}
	}
	told()
	write("b", 1, "soft1")
	told("soft1")
	write("a", 2, "0000:01:10.2", "soft1")
	told("soft1", "0000:01:10.2")
	if got := a.Devices(config.PodName{Namespace: "other", Name: "web"}); len(got) > 0 {
		t.Errorf("a pod of the same name in another namespace has %q", got)
	}
	// A pod is made anew under the name of one whose claims kubelet has not unprepared yet.
	anew := claims.Claim{
		Namespace: "ns", Name: "c", UID: "c", Prepared: time.Unix(3, 0), Pods: []records.Pod{{Namespace: "ns", Name: "web", UID: "pod-2"}},
		Devices: []claims.Device{{ID: "0000:01:10.4"}},
	}
	if err := store.Write(anew); err != nil {
		t.Fatal(err)
	}
	told("0000:01:10.4")
	for _, uid := range []string{"a", "b", "c"} {
		if err := store.Delete(uid); err != nil {
			t.Fatal(err)
		}
	}
	told()
	if again := NewAssigned(dir, slog.New(slog.DiscardHandler)); again.Claimed("pod-1") {
		t.Error("a new agent sees claims that are over")
	}
}

// scarce calls f without any descriptors but those that are open.
func scarce(t *testing.T, f func()) {
	t.Helper()
	var limit syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit)
	if err == nil {
		err = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1, Max: limit.Max})
	}
	f()
	if err := errors.Join(err, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit)); err != nil {
		t.Fatal(err)
	}
}

// TestPrepare_unread: a record that cannot be read for want of descriptors is not replaced, and no claim is prepared while it is
// not known which others are.
func TestPrepare_unread(t *testing.T) {
	b := newBench(t)
	c := b.claim("web", []string{"pod-1"}, "soft0")
	d := b.driver("")
	own := claims.Claim{UID: "own", Pods: []records.Pod{{UID: "uid-1"}}, Devices: []claims.Device{{ID: "eth9"}}}
	for _, tt := range []struct {
		name string
		call func() error
		text string
	}{
		{"prepare", func() error { _, err := d.prepare(t.Context(), nil, c); return err }, "read claim"},
		{"afterAll", func() error { _, err := d.afterAll(time.Now()); return err }, "which claims are prepared"},
		{"fits", func() error { return d.fits(own) }, "how many devices"},
	} {
		var err error
		scarce(t, func() { err = tt.call() })
		if !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// TestAssigned_unread: while the records cannot be read for want of descriptors, pods have the devices that they had.
func TestAssigned_unread(t *testing.T) {
	dir := t.TempDir()
	c := claims.Claim{
		Namespace: "ns", Name: "a", UID: "a", Pods: []records.Pod{{Namespace: "ns", Name: "web", UID: "pod-1"}}, Devices: []claims.Device{{ID: "soft1"}},
	}
	store := claims.NewStore(dir)
	if err := store.Write(c); err != nil {
		t.Fatal(err)
	}
	a := NewAssigned(dir, slog.New(slog.DiscardHandler))
	<-a.Changed()
	scarce(t, a.look)
	if diff := cmp.Diff([]string{"soft1"}, a.Devices(config.PodName{Namespace: "ns", Name: "web"})); diff != "" || !a.Claimed("pod-1") {
		t.Errorf("claimed: %t, devices (-want +got)\n%s", a.Claimed("pod-1"), diff)
	}
	select {
	case <-a.Changed():
		t.Error("there was a change")
	default:
	}
	if err := store.Delete("a"); err != nil {
		t.Fatal(err)
	}
	if a.look(); a.Claimed("pod-1") {
		t.Error("a claim that is over is still there")
	}
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)
