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
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// fakeHardware is a device of the kernel that can be opened more than once.
type fakeHardware struct {
	fakeDevice
	name string

	mu     sync.Mutex // guards what is below
	absent error
	opened []*fakeOpen
}

// fakeOpen is one opened device.
type fakeOpen struct {
	fakeDevice
	h      *fakeHardware
	events chan rdma.AsyncEvent
	closed bool // guarded by h.mu
}

func (h *fakeHardware) open() (rdma.Device, func() error, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.absent != nil {
		return nil, nil, h.absent
	}
	o := &fakeOpen{h: h, events: make(chan rdma.AsyncEvent)}
	h.opened = append(h.opened, o)
	return o, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		o.closed = true
		return nil
	}, nil
}

// set removes the device or puts it back; it returns what was opened so far.
func (h *fakeHardware) set(absent error) []*fakeOpen {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.absent = absent
	return slices.Clone(h.opened)
}

func (o *fakeOpen) Name() string                { return o.h.name }
func (o *fakeOpen) GIDChoice() string           { return "GID 1, because" }
func (o *fakeOpen) Open() (rdma.Context, error) { return fakeContext{o: o}, nil }
func (o *fakeOpen) GIDs() []rdma.GIDEntry {
	return []rdma.GIDEntry{{GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.9")), Type: rdma.GIDTypeRoCEv2, NetDev: "eth3"}}
}

type fakeContext struct {
	rdma.Context
	o *fakeOpen
}

func (c fakeContext) Events() <-chan rdma.AsyncEvent { return c.o.events }
func (fakeContext) Close() error                     { return nil }

var errUnplugged = errors.New("it was unplugged")

// hardwareBench has an agent on devices of the kernel.
func hardwareBench(t *testing.T, names ...string) (*bench, []*fakeHardware) {
	t.Helper()
	b := newBench(t, "", "policies:\n- {name: p, pods: {names: [a, b]}}\n- {name: r, mode: Required, pods: {names: [required]}}\n")
	var hs []*fakeHardware
	b.cfg.Node.Devices = nil
	for _, name := range names {
		hs = append(hs, &fakeHardware{name: name})
		b.cfg.Node.Devices = append(b.cfg.Node.Devices, config.Device{RDMA: name})
	}
	b.cfg.openDevice = func(name string, _ config.Device, _ bool) (rdma.Device, func() error, error) {
		return hs[slices.Index(names, name)].open()
	}
	b.cfg.Stay, b.cfg.deviceEvery, b.cfg.ableEvery = true, 5*time.Millisecond, 20*time.Millisecond
	return b, hs
}

// TestRun_deviceGone: the only device goes and comes back. Meanwhile pods that were served still are, new
// pods are not, and a connection that needs SMC-R is refused.
func TestRun_deviceGone(t *testing.T) {
	b, hs := hardwareBench(t, "rxe0")
	h := hs[0]
	b.attach("a", 1)
	b.start()
	s := b.status()
	if d := s.Devices[0]; !s.Accelerating || d.Address != "192.0.2.9" || d.Interface != "eth3" || d.Choice != "GID 1, because" || d.Missing != "" {
		t.Errorf("status %+v", s)
	}

	first := h.set(errUnplugged)[0]
	first.events <- rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errUnplugged}
	eventually(t, func() string {
		if s := b.status(); s.Accelerating || s.UnableCode != "NOSMCDEV" || !strings.Contains(s.Devices[0].Missing, "rxe0 is gone: it was unplugged") {
			return fmt.Sprintf("status %+v", s)
		}
		return ""
	})
	h.set(errUnplugged)
	if !first.closed {
		t.Error("the device was not closed")
	}
	b.attach("b", 2)
	required := b.attach("required", 3)
	required.dst = b.server()
	b.sync()
	for name, want := range map[string]string{"a": agentapi.StateReady, "b": agentapi.StateIdle, "required": agentapi.StateReady} {
		if a := b.attachment(name); a.State != want {
			t.Errorf("pod %s without a device: %+v, want %s", name, a, want)
		}
	}
	b.dialReset(required, 0)

	h.set(nil)
	eventually(t, func() string {
		s := b.status()
		if !s.Accelerating || s.Devices[0].Missing != "" || len(s.Problems) > 0 {
			return fmt.Sprintf("status %+v", s)
		}
		b.stack.mu.Lock()
		defer b.stack.mu.Unlock()
		if again := h.set(nil)[1]; !slices.Contains(b.stack.added, rdma.Device(again)) {
			return "the pod's stack does not have the device again"
		}
		return ""
	})
	b.sync()
	for _, name := range []string{"a", "b", "required"} {
		if a := b.attachment(name); a.State != agentapi.StateReady {
			t.Errorf("pod %s with the device: %+v", name, a)
		}
	}
	_, metrics := b.get(agentapi.PathMetrics)
	for _, want := range []string{
		`kube_smcr_device_changes_total{change="gone",device="rxe0"} 1`,
		`kube_smcr_device_changes_total{change="back",device="rxe0"} 1`,
		`kube_smcr_device_up{device="rxe0"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("no %s in the metrics:\n%s", want, metrics)
		}
	}
}

// TestRun_deviceRefuses: what a device refuses is shown in the status and the log, and does not count as a
// message that was not understood.
func TestRun_deviceRefuses(t *testing.T) {
	b, _ := hardwareBench(t, "rxe0")
	hooks := make(chan smcr.Hooks, 1)
	b.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		hooks <- cfg.Hooks
		return b.stack, nil
	}
	b.attach("a", 1)
	b.start()
	tell := <-hooks
	if s := b.status(); len(s.Problems) > 0 {
		t.Errorf("problems %q before anything was refused", s.Problems)
	}
	for range 3 {
		tell.Failed("rendezvous", fmt.Errorf("register 64 bytes: %w: the limit is 0", rdma.ErrNoResources))
	}
	tell.Failed("rendezvous", errors.New("the budget is used up"))
	tell.Malformed("link group", errors.New("junk"))
	if s := b.status(); len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "register 64 bytes: rdma: device has no resources left: the limit is 0") {
		t.Errorf("problems %q", s.Problems)
	}
	if n := strings.Count(b.log.String(), "refuses what a connection needs"); n != 1 {
		t.Errorf("the log says it %d times, want once", n)
	}
	_, m := b.get(agentapi.PathMetrics)
	for _, want := range []string{"kube_smcr_device_refusals_total 3", "kube_smcr_malformed_messages_total 1", "kube_smcr_stack_failures_total 1"} {
		if !strings.Contains(m, want) {
			t.Errorf("no %s in the metrics", want)
		}
	}
}

// TestRun_oneDeviceGone: the other device goes on. A stack that cannot take the returned device yet gets it
// later.
func TestRun_oneDeviceGone(t *testing.T) {
	b, hs := hardwareBench(t, "rxe0", "rxe1")
	b.attach("a", 1)
	b.start()
	gone := hs[1].set(errUnplugged)[0]
	gone.events <- rdma.AsyncEvent{Kind: rdma.EventPortDown}
	gone.events <- rdma.AsyncEvent{Kind: rdma.EventGIDChange}
	close(gone.events) // as after its contexts ended
	eventually(t, func() string {
		s := b.status()
		if !s.Accelerating || s.Unable != "" || !strings.Contains(strings.Join(s.Problems, " "), "rxe1 is gone") {
			return fmt.Sprintf("status %+v", s)
		}
		return ""
	})
	b.stack.mu.Lock()
	b.stack.addErr = rdma.ErrBusy
	b.stack.mu.Unlock()
	hs[1].set(nil)
	eventually(t, func() string {
		if !strings.Contains(b.log.String(), "not used by the pod yet") {
			return "nothing is said about the stack's refusal"
		}
		return ""
	})
	b.stack.mu.Lock()
	b.stack.addErr = nil
	b.stack.mu.Unlock()
	eventually(t, func() string {
		b.stack.mu.Lock()
		defer b.stack.mu.Unlock()
		if len(b.stack.added) == 0 {
			return "the stack was not asked again"
		}
		return ""
	})
	if _, m := b.get(agentapi.PathMetrics); !strings.Contains(m, `{change="port_down",device="rxe1"} 1`) || !strings.Contains(m, `{change="gid_table",device="rxe1"} 1`) {
		t.Errorf("metrics:\n%s", m)
	}
}

// TestRun_oneDeviceFull: a device of which a new stack gets nothing is left out of that, and tried again.
func TestRun_oneDeviceFull(t *testing.T) {
	b, _ := hardwareBench(t, "rxe0", "rxe1", "rxe2")
	full := fmt.Errorf("create completion queue: %w", rdma.ErrNoResources)
	b.stack.addErr = full
	made := make(chan []string, 9)
	b.cfg.newStack = func(cfg smcr.Config) (stack, error) {
		var names []string
		for _, d := range cfg.Devices {
			names = append(names, d.Name())
		}
		if slices.Contains(names, "rxe1") {
			return nil, full
		}
		made <- names
		return b.stack, nil
	}
	b.attach("a", 1)
	b.start()
	b.sync()
	if a := b.attachment("a"); a.State != agentapi.StateReady {
		t.Fatalf("pod %+v", a)
	}
	if got := <-made; !slices.Equal(got, []string{"rxe0", "rxe2"}) {
		t.Errorf("a stack on %q", got)
	}
	for _, want := range []string{"left out of the pod's stack", "device=rxe1"} {
		if !strings.Contains(b.log.String(), want) {
			t.Errorf("no %q in the log", want)
		}
	}
	b.stack.change(func() { b.stack.addErr = nil })
	eventually(t, func() (problem string) {
		b.stack.change(func() {
			if !slices.ContainsFunc(b.stack.added, func(d rdma.Device) bool { return d.Name() == "rxe1" }) {
				problem = "the stack was not asked again"
			}
		})
		return problem
	})
}
