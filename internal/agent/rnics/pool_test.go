// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// host has devices, by the names that they are opened with.
type host struct {
	mu     sync.Mutex // guards what is below
	absent map[string]error
	open   map[string][]*fakeDevice
	log    []string // changes, and devices that users lost
	twins  []string // names of one device, whose RDMA device is twin
}

// fakeDevice is one opening of a device.
type fakeDevice struct {
	rdma.Device
	name   string
	events chan rdma.AsyncEvent
	table  atomic.Pointer[[]rdma.GIDEntry] // nil: one of an IPv4 address
	down   atomic.Bool                     // the port
}

func (d *fakeDevice) Name() string                { return d.name }
func (d *fakeDevice) Open() (rdma.Context, error) { return fakeContext{d: d}, nil }
func (d *fakeDevice) Port() rdma.PortAttr {
	if d.down.Load() {
		return rdma.PortAttr{State: rdma.PortDown}
	}
	return rdma.PortAttr{State: rdma.PortActive}
}

func (d *fakeDevice) GIDs() []rdma.GIDEntry {
	if table := d.table.Load(); table != nil {
		return *table
	}
	return []rdma.GIDEntry{{GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.9")), Type: rdma.GIDTypeRoCEv2, NetDev: "eth3"}}
}

type fakeContext struct {
	rdma.Context
	d *fakeDevice
}

func (c fakeContext) Events() <-chan rdma.AsyncEvent { return c.d.events }
func (fakeContext) Close() error                     { return nil }

var errUnplugged = errors.New("it was unplugged")

func newHost() *host {
	return &host{absent: map[string]error{}, open: map[string][]*fakeDevice{}}
}

func (h *host) opens(name string) (rdma.Device, func() error, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.absent[name]; err != nil {
		return nil, nil, err
	}
	d := &fakeDevice{name: h.rdmaName(name), events: make(chan rdma.AsyncEvent)}
	h.open[name] = append(h.open[name], d)
	return d, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.open[name] = slices.DeleteFunc(h.open[name], func(o *fakeDevice) bool { return o == d })
		return nil
	}, nil
}

func (h *host) rdmaName(name string) string {
	if slices.Contains(h.twins, name) {
		return "twin"
	}
	return "rdma-" + name
}

// lacks makes a device go, or come back if err is nil.
func (h *host) lacks(name string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.absent[name] = err
}

func (h *host) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

// noted returns what was noted since the last call of noted.
func (h *host) noted() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := strings.Join(h.log, "; ")
	h.log = nil
	return s
}

func (h *host) count(name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.open[name])
}

func (h *host) first(name string) *fakeDevice {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open[name][0]
}

// RemoveDevice makes the host a User.
func (h *host) RemoveDevice(name string) { h.note("lost %s", name) }

// pool is one on the host, with devices of the node.
func (h *host) pool(t *testing.T, names ...string) *Pool {
	t.Helper()
	p := NewPool(Config{
		Log: slog.New(slog.DiscardHandler), Stay: true,
		Open:    func(name string, _ config.Device) (rdma.Device, func() error, error) { return h.opens(name) },
		OpenOwn: func(d *Own, _ Namespace) (rdma.Device, func() error, error) { return h.opens(d.ID) },
		Learn: func(d Own) (Own, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			d.RDMA, d.Mode = []string{"rxe0"}, string(vf.ModeIPVlan)
			return d, h.absent[d.ID]
		},
		Changed: func(device string, c Change) { h.note("%s %s", device, c) },
	})
	var all []config.Device
	for _, name := range names {
		all = append(all, config.Device{RDMA: name})
	}
	must(t, p.Open(t.Context(), all))
	return p
}

func names(open []rdma.Device) (out []string) {
	for _, d := range open {
		out = append(out, d.Name())
	}
	return out
}

// TestPool_Open: without Config.Stay every device must be there. With Stay, missing devices say why they are
// missing.
func TestPool_Open(t *testing.T) {
	h := newHost()
	h.lacks("b", errUnplugged)
	p := h.pool(t, "a", "b")
	open, count := p.Node().Usable()
	if diff := cmp.Diff([]string{"rdma-a"}, names(open)); diff != "" || count != 0 {
		t.Errorf("count %d, usable (-want +got)\n%s", count, diff)
	}
	if all := p.All(); len(all) != 2 || !errors.Is(all[1].Err, errUnplugged) || !strings.Contains(all[1].Err.Error(), "node.devices[1]") {
		t.Errorf("all %+v", all)
	}
	if !p.CanOpen() {
		t.Error("none can be opened")
	}
	strict := NewPool(Config{Log: slog.New(slog.DiscardHandler), Open: p.cfg.Open})
	if err := strict.Open(t.Context(), []config.Device{{RDMA: "b"}}); !errors.Is(err, errUnplugged) {
		t.Errorf("without Stay: %v", err)
	}
	if strict.CanOpen() {
		t.Error("one without devices can open some")
	}
	must(t, p.Close())
	if n := h.count("a"); n != 0 {
		t.Errorf("after Close it is open %d times", n)
	}
}

// TestPool_Open_shared: while two agents have a device, Open waits for one to end.
func TestPool_Open_shared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.lacks("a", soft.ErrShared)
		began := time.Now()
		time.AfterFunc(5*sharePoll, func() { h.lacks("a", nil) })
		p := h.pool(t, "a")
		if open, _ := p.Node().Usable(); len(open) != 1 || time.Since(began) < 5*sharePoll {
			t.Errorf("%d open after %v", len(open), time.Since(began))
		}
		h.lacks("b", soft.ErrShared)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := p.Open(ctx, []config.Device{{RDMA: "b"}}); !errors.Is(err, soft.ErrShared) {
			t.Errorf("the agent ends meanwhile: %v", err)
		}
	})
}

// TestPool_share: pods that want the same device of the host share one opening, and
// the last of these pods closes the device. A device that moves into a pod is that pod's alone.
func TestPool_share(t *testing.T) {
	h := newHost()
	p := h.pool(t, "a")
	own := func(pod, id, mode string) []Own { return p.Arrange([]Own{{Pod: pod, ID: id, Mode: mode, Rail: -1}}) }
	one, two, three := p.NewSet(nil), p.NewSet(nil), p.NewSet(nil)
	one.Update(t.Context(), h, own("one", "x", string(vf.ModeIPVlan)))
	two.Update(t.Context(), h, own("two", "x", string(vf.ModeIPVlan)))
	three.Update(t.Context(), h, own("three", "a", "")) // the node's
	if n := h.count("x"); n != 1 {
		t.Errorf("the device of two pods is open %d times", n)
	}
	if now := three.States(); len(now) != 1 || now[0].Own == nil || now[0].Own.Pod != "three" || h.count("a") != 1 {
		t.Errorf("the node's device in a pod's set: %+v", now)
	}
	must(t, one.Release())
	if n := h.count("x"); n != 1 {
		t.Errorf("after one of two it is open %d times", n)
	}
	must(t, errors.Join(two.Release(), three.Release()))
	if h.count("x") != 0 || h.count("a") != 1 {
		t.Errorf("after both: open %d times, the node's %d times", h.count("x"), h.count("a"))
	}
	one, two = p.NewSet(nil), p.NewSet(nil)
	one.Update(t.Context(), h, own("one", "y", string(vf.ModeMove)))
	two.Update(t.Context(), h, own("two", "y", string(vf.ModeMove)))
	if n := h.count("y"); n != 2 {
		t.Errorf("a device inside two pods is open %d times", n)
	}
	must(t, errors.Join(one.Release(), two.Release()))
}

// TestPool_lockID: pods that get the same device at the same time share it.
func TestPool_lockID(t *testing.T) {
	h := newHost()
	p := h.pool(t)
	sets := make([]*Set, 8)
	var wg sync.WaitGroup
	for i := range sets {
		sets[i] = p.NewSet(nil)
		wg.Go(func() {
			sets[i].Update(t.Context(), h, []Own{{Pod: fmt.Sprint(i), ID: "x", Mode: string(vf.ModeIPVlan)}})
		})
	}
	wg.Wait()
	if n := h.count("x"); n != 1 {
		t.Errorf("open %d times", n)
	}
	for _, s := range sets {
		must(t, s.Release())
	}
	if n := h.count("x"); n != 0 {
		t.Errorf("open %d times in the end", n)
	}
}
