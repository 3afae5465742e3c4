// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// ownBench is an agent with node device rxe0 and hardware for pods' devices, by
// their ID.
type ownBench struct {
	*bench
	hardware map[string]*fakeHardware

	mu     sync.Mutex // guards what follows
	stacks []*ownStack
}

// ownStack is a stack with what it was made of.
type ownStack struct {
	fakeStack
	cfg smcr.Config
}

func newOwnBench(t *testing.T, ids ...string) *ownBench {
	t.Helper()
	b, hs := hardwareBench(t, "rxe0")
	o := &ownBench{bench: b, hardware: map[string]*fakeHardware{"rxe0": hs[0]}}
	for _, id := range ids {
		o.hardware[id] = &fakeHardware{name: "rdma-" + id}
	}
	b.cfg.openOwn = func(d *rnics.Own, in rnics.Namespace) (rdma.Device, func() error, error) {
		if inPod := d.Mode == "move"; inPod != d.InPod() || in == nil {
			return nil, nil, fmt.Errorf("device %+v is in the pod: %t, namespace %v", d, d.InPod(), in)
		}
		return o.hardware[d.ID].open()
	}
	b.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		o.mu.Lock()
		defer o.mu.Unlock()
		s := &ownStack{fakeStack: fakeStack{mode: smcr.ModeSMCR}, cfg: cfg}
		o.stacks = append(o.stacks, s)
		return s, nil
	}
	return o
}

// give writes the record of an attachment with devices of these IDs; the rail is
// the last letter of an ID.
func (o *ownBench) give(pod, ifName string, ids ...string) {
	o.t.Helper()
	att := cni.Attachment{
		ContainerID: pod, IfName: ifName, NetNS: "/netns/" + pod, NetNSID: 1, Network: "n",
		Pod: records.Pod{Namespace: "test", Name: pod}, IPs: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")},
	}
	for _, id := range ids {
		att.Devices = append(att.Devices, cni.AttachedDevice{
			ID: id, PCI: id, RDMA: []string{"rdma-" + id}, NetDev: "h" + id, VF: 3, NUMANode: -1, Rail: int(id[len(id)-1] - '0'), Mode: "move",
		})
	}
	must(o.t, o.store.Write(att))
}

// last is the newest stack.
func (o *ownBench) last() *ownStack {
	o.t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.stacks) == 0 {
		o.t.Fatal("no stack was made")
	}
	return o.stacks[len(o.stacks)-1]
}

// on are the names of the devices that the newest stack was made of.
func (o *ownBench) on() (names []string) {
	for _, d := range o.last().cfg.Devices {
		names = append(names, d.Name())
	}
	return names
}

// openNow counts how often a device is open.
func (o *ownBench) openNow(id string) (n int) {
	h := o.hardware[id]
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range h.opened {
		if !d.closed {
			n++
		}
	}
	return n
}

func (o *ownBench) wantOn(names ...string) {
	o.t.Helper()
	if diff := cmp.Diff(names, o.on()); diff != "" {
		o.t.Errorf("devices of the stack (-want +got):\n%s", diff)
	}
}

// TestRun_ownDevices: a pod gets its devices one by one, and loses them.
func TestRun_ownDevices(t *testing.T) {
	o := newOwnBench(t, "vf1", "vf2")
	o.cfg.hostDevices = func() ([]vf.Device, error) {
		return []vf.Device{{ID: "vf2", VF: 2, Rail: 2, State: vf.StatePod}, {ID: "vf3", VF: 3, Rail: 7, State: vf.StateUp}}, errors.New("half of it")
	}
	o.attach("a", 1)
	o.start()
	o.wantOn("rxe0")

	o.give("a", "net1", "vf1")
	o.sync()
	o.wantOn("rdma-vf1")
	first := o.last()
	if !o.stacks[0].closed {
		t.Error("the stack on the node's device is still there")
	}

	o.give("a", "net2", "vf2")
	o.sync()
	o.wantListed()
	if o.last() != first || len(first.added) == 0 || first.added[len(first.added)-1].Name() != "rdma-vf2" {
		t.Errorf("a second device: %d stacks, added %v", len(o.stacks), first.added)
	}
	if a, b := first.cfg.Rail("rdma-vf1"), first.cfg.Rail("rdma-vf2"); a != 1 || b != 2 {
		t.Errorf("rails %d and %d, want 1 and 2", a, b)
	}
	own, err := first.cfg.Route(netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("198.51.100.1"))
	if err != nil || !own.Gateway {
		t.Errorf("route of a device in the pod: %+v, %v, want the pod's", own, err)
	}

	must(t, o.store.Delete("a", "net1"))
	o.sync()
	if o.last() != first || !slices.Equal(first.removed, []string{"rdma-vf1"}) || o.openNow("vf1") != 0 || o.openNow("vf2") != 1 {
		t.Errorf("after a device was taken: removed %v, open %d and %d", first.removed, o.openNow("vf1"), o.openNow("vf2"))
	}
	must(t, o.store.Delete("a", "net2"))
	o.sync()
	o.wantOn("rxe0")
	if o.openNow("vf2") != 0 || !first.closed {
		t.Error("the last device or its stack is still open")
	}
}

// wantListed wants the API to show VF 1 and 2 with pod a, and VF 3 without one.
func (o *ownBench) wantListed() {
	o.t.Helper()
	l := value(o.client.Devices(o.t.Context()))(o.t)
	var got []string
	for _, d := range l.Devices {
		line := fmt.Sprintf("%s %s %v rail %d", d.ID, d.State, d.Pods, d.Rail)
		if d.Used != nil {
			line += " " + d.Used.Address
		}
		got = append(got, line)
	}
	want := []string{"vf1 pod [test/a] rail 1 192.0.2.9", "vf2 pod [test/a] rail 2 192.0.2.9", "vf3 up [] rail 7"}
	if diff := cmp.Diff(want, got); diff != "" || l.Problem != "half of it" {
		o.t.Errorf("devices (-want +got):\n%s; problem %q", diff, l.Problem)
	}
	if a := o.attachment("a"); !slices.Equal(a.Devices, []string{"vf1", "vf2"}) {
		o.t.Errorf("attachment %+v", a)
	}
}

// TestRun_ownDeviceGone: the pod's device goes and comes back. Meanwhile the pod
// is not on the node's device, and everybody can read why.
func TestRun_ownDeviceGone(t *testing.T) {
	o := newOwnBench(t, "vf1")
	h := o.hardware["vf1"]
	h.set(errUnplugged)
	o.kernel.add("/netns/a", 1)
	o.give("a", "net1", "vf1")
	o.start()
	if len(o.stacks) != 0 {
		t.Errorf("a pod whose device is missing runs on %v", o.on())
	}
	a := o.attachment("a")
	if a.State != agentapi.StateIdle || a.Reason != agentapi.CodePodDevice || !strings.Contains(a.Detail, "device vf1 of pod test/a cannot be used: it was unplugged") {
		t.Errorf("attachment %+v", a)
	}
	if s := o.status(); !strings.Contains(strings.Join(s.Problems, " "), "device vf1 of pod test/a") || s.Unable != "" {
		t.Errorf("status %+v", s)
	}
	e := value(o.client.Explain(t.Context(), "test/a", "192.0.2.9:80"))(t)
	if e.Code != agentapi.CodePodDevice || !strings.Contains(e.Verdict, "it was unplugged") {
		t.Errorf("explanation %+v", e)
	}

	h.set(nil)
	eventually(t, func() string {
		o.sync()
		if a := o.attachment("a"); a.State != agentapi.StateReady || a.Reason != agentapi.CodeOK {
			return fmt.Sprintf("with the device: %+v", a)
		}
		return ""
	})
	o.wantOn("rdma-vf1")

	opened := h.set(errUnplugged)
	opened[0].events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errUnplugged}
	eventually(t, func() string {
		if n := o.openNow("vf1"); n != 0 {
			return fmt.Sprintf("the device that is gone is open %d times", n)
		}
		if a := o.attachment("a"); a.State != agentapi.StateReady || a.Reason != agentapi.CodePodDevice || !strings.Contains(a.Detail, "it was unplugged") {
			return fmt.Sprintf("attachment without its device: %+v", a)
		}
		return ""
	})
	if r := declineReason(agentapi.CodePodDevice); r != clc.ReasonNoDev {
		t.Errorf("peers are told %v, want %v", r, clc.ReasonNoDev)
	}
	h.set(nil)
	eventually(t, func() string {
		o.sync()
		s := o.last()
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.added) == 0 {
			return "the stack did not get the device that is back"
		}
		return ""
	})
	if len(o.stacks) != 1 {
		t.Errorf("%d stacks were made, want one", len(o.stacks))
	}

	must(t, o.store.Delete("a", "net1"))
	o.sync()
	if o.openNow("vf1") != 0 {
		t.Error("the device of a pod that ended is still open")
	}
}

// TestRun_ownSoftAndHardware: a pod has a software device of the agent and a
// device of the kernel at once. It loses the one of the kernel, for a while and
// then for good, and goes on with the other.
func TestRun_ownSoftAndHardware(t *testing.T) {
	o := newOwnBench(t, "vf2")
	o.cfg.Node.Devices = []config.Device{{SoftAddress: netip.MustParseAddr("192.0.2.1")}}
	soft := &fakeHardware{name: "soft0"}
	o.hardware["soft0"] = soft
	o.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) { return soft.open() }
	o.kernel.add("/netns/a", 1)
	o.give("a", "net1", "vf2")
	att := value(o.store.Get("a", "net1"))(t)
	att.IfName = "net2"
	att.Devices = []cni.AttachedDevice{{ID: "soft0/3", VF: -1, NUMANode: -1, Rail: -1, Mode: "chained"}} // one slot of it
	must(t, o.store.Write(att))
	o.start()
	o.wantOn("soft0", "rdma-vf2")
	if n := o.openNow("soft0"); n != 1 {
		t.Errorf("the node's software device is open %d times", n)
	}
	s := o.last()
	if own, other := s.cfg.Rail("rdma-vf2"), s.cfg.Rail("soft0"); own != 2 || other >= 0 {
		t.Errorf("rails %d and %d, want 2 and one of its own", own, other)
	}

	opened := o.hardware["vf2"].set(errUnplugged)
	opened[0].events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errUnplugged}
	eventually(t, func() string {
		if s, a := o.status(), o.attachment("a"); a.State != agentapi.StateReady || a.Detail != "" || !strings.Contains(fmt.Sprint(s.Problems), "it was unplugged") {
			return fmt.Sprintf("without the VF: attachment %+v, problems %v", a, s.Problems)
		}
		return ""
	})
	o.hardware["vf2"].set(nil)
	eventually(t, func() string {
		o.sync()
		s.mu.Lock()
		defer s.mu.Unlock()
		back := o.hardware["vf2"].set(nil)[1:]
		if len(back) == 0 || !slices.Contains(s.added, rdma.Device(back[0])) {
			return "the stack did not get the VF that is back"
		}
		return ""
	})
	must(t, o.store.Delete("a", "net1"))
	o.sync()
	if o.last() != s || !slices.Equal(s.removed, []string{"rdma-vf2"}) || o.openNow("vf2") != 0 {
		t.Errorf("without the VF: %d stacks, removed %v, the VF is open %d times", len(o.stacks), s.removed, o.openNow("vf2"))
	}
	must(t, o.store.Delete("a", "net2"))
	o.sync()
	if n := o.openNow("soft0"); n != 1 {
		t.Errorf("the node's device went with the pod: it is open %d times", n)
	}
}

// TestRun_ownDeviceUnselected: the agent holds no device of a pod that no policy
// selects.
func TestRun_ownDeviceUnselected(t *testing.T) {
	o := newOwnBench(t, "vf1", "vf2")
	for _, pod := range []string{"other", "a"} {
		o.kernel.add("/netns/"+pod, 1)
	}
	o.give("other", "net1", "vf1")
	o.give("a", "net1", "vf2")
	o.start()
	if o.openNow("vf1") != 0 || o.openNow("vf2") != 1 {
		t.Errorf("open: %d and %d", o.openNow("vf1"), o.openNow("vf2"))
	}
	o.text = strings.Replace(o.text, "names: [a, b]", "names: [other]", 1)
	o.text = strings.Replace(o.text, "devices: [{soft: {address: 192.0.2.1}}]", "devices: [{rdma: rxe0}]", 1)
	o.reload <- struct{}{}
	eventually(t, func() string {
		if x, y := o.openNow("vf1"), o.openNow("vf2"); x != 1 || y != 0 {
			return fmt.Sprintf("after the policy changed, open: %d and %d", x, y)
		}
		return ""
	})
}

// TestRun_onlyOwnDevices: a node without devices of its own serves the pods that
// have some, and no others.
func TestRun_onlyOwnDevices(t *testing.T) {
	o := newOwnBench(t, "vf1")
	o.cfg.Node.Devices = nil
	o.attach("b", 2)
	o.start()
	if s := o.status(); s.Accelerating || s.UnableCode != "NOSMCDEV" || !strings.Contains(s.Unable, "setting devices is empty") {
		t.Errorf("status %+v", s)
	}
	o.kernel.add("/netns/a", 1)
	o.give("a", "net1", "vf1")
	o.sync()
	o.wantOn("rdma-vf1")
	if s := o.status(); !s.Accelerating || s.Unable != "" || len(s.Problems) > 0 {
		t.Errorf("status with a pod's device: %+v", s)
	}
	if a := o.attachment("b"); a.State != agentapi.StateIdle || a.Reason != agentapi.CodeOf(clc.ReasonNoDev) || !strings.Contains(a.Detail, "the pod has none for itself") {
		t.Errorf("attachment %+v", a)
	}
}

// assigned are the devices of pods.
type assigned map[config.PodName][]string

func (a assigned) Devices(pod config.PodName) []string { return a[pod] }

// TestRun_assigned: pods that have no record of a device use what kubelet gave
// them, which others may have too. What kubelet's device is, is found out when it
// is opened.
func TestRun_assigned(t *testing.T) {
	o := newOwnBench(t, "eth1", "eth2")
	o.cfg.Assigned = assigned{
		{Namespace: "test", Name: "a"}: {"eth1"}, {Namespace: "test", Name: "b"}: {"eth1"}, {Namespace: "test", Name: "required"}: {"rxe0"},
	}
	var known sync.Map
	o.cfg.learn = func(d rnics.Own) (rnics.Own, error) {
		if _, ok := known.Load(d.ID); !ok {
			return d, errors.New("no such device on this node")
		}
		d.RDMA, d.NetDev, d.Rail, d.Mode = []string{"rdma-" + d.ID}, "lo", 4, "ipvlan"
		return d, nil
	}
	o.attach("a", 1)
	o.start()
	if a := o.attachment("a"); a.State != agentapi.StateIdle || !strings.Contains(a.Detail, "no such device on this node") {
		t.Errorf("attachment %+v", a)
	}
	known.Store("eth1", true)
	eventually(t, func() string {
		o.sync()
		if a := o.attachment("a"); a.State != agentapi.StateReady {
			return fmt.Sprintf("with the device: %+v", a)
		}
		return ""
	})
	o.wantOn("rdma-eth1")
	if rail := o.last().cfg.Rail("rdma-eth1"); rail != 4 {
		t.Errorf("rail %d, want 4", rail)
	}
	o.attach("b", 2)
	o.sync()
	o.wantOn("rdma-eth1")
	if n := o.openNow("eth1"); n != 1 {
		t.Errorf("the device of two pods is open %d times", n)
	}
	must(t, o.store.Delete("a", "eth0"))
	o.sync()
	if n := o.openNow("eth1"); n != 1 || len(o.stacks) != 2 || o.stacks[1].closed {
		t.Errorf("after one of two pods went, the device is open %d times", n)
	}
	must(t, o.store.Delete("b", "eth0"))
	o.attach("required", 3)
	o.sync()
	o.wantOn("rxe0") // the node's own
	if n := o.openNow("eth1"); n != 0 {
		t.Errorf("after both pods went, the device is open %d times", n)
	}
	if n := o.openNow("rxe0"); n != 1 {
		t.Errorf("the node's device is open %d times", n)
	}
}

// TestHandover_ownDevices: both agents have a pod's device open while the old one
// carries what it carried, and neither once the pod is gone.
func TestHandover_ownDevices(t *testing.T) {
	b := newHandoverBench(t, "old")
	h := &fakeHardware{name: "rdma-vf1"}
	b.cfg.openOwn = func(*rnics.Own, rnics.Namespace) (rdma.Device, func() error, error) { return h.open() }
	o := &ownBench{bench: b, hardware: map[string]*fakeHardware{"vf1": h}}
	p := b.kernel.add("/netns/a", 1)
	p.dst = b.server()
	o.give("a", "net1", "vf1")
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	b.successor("new")
	if n := o.openNow("vf1"); n != 2 {
		t.Errorf("after the handover the device is open %d times, want once by each agent", n)
	}
	pingOnce(t, c)
	b.kernel.change(func() { p.isGone = true })
	must(t, b.store.Delete("a", "net1"))
	eventually(t, func() string {
		if n, k := o.openNow("vf1"), b.kernel.handles(); n != 0 || k != 0 {
			return fmt.Sprintf("the device of a pod that is gone is open %d times, its namespace %d times", n, k)
		}
		return ""
	})
}
