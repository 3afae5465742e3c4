// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// fakeHost is a machine with one table, for which agents have handles.
type fakeHost struct {
	mu       sync.Mutex // guards what is below, and the handles
	table    *fakeWire  // nil: there is none
	installs int
	sweeps   int
	fail     error
	lacks    error
	addrs    map[string][]netip.Addr // of interfaces
}

type fakeWire struct {
	h       *fakeHost
	cfg     linux.WireConfig
	updates int
	drops   linux.WireDrops
	closed  bool
}

func (h *fakeHost) look(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

func (h *fakeHost) now() *fakeWire {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.table
}

func (h *fakeHost) filterWire(cfg linux.WireConfig) (wireFilter, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fail != nil {
		return nil, h.fail
	}
	h.installs++
	h.table = &fakeWire{h: h, cfg: cfg}
	return h.table, nil
}

func (h *fakeHost) sweepWire() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.table = nil
	h.sweeps++
	return h.fail
}

func (h *fakeHost) addresses(netdev string) ([]netip.Addr, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if all, ok := h.addrs[netdev]; ok {
		return slices.Clone(all), nil
	}
	return nil, errors.New("no such network interface")
}

func (w *fakeWire) Update(cfg linux.WireConfig) error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.h.fail != nil {
		return w.h.fail
	}
	w.cfg, w.h.table = cfg, w
	w.updates++
	return nil
}

func (w *fakeWire) Drops() (linux.WireDrops, error) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	if w.h.table != w {
		return w.drops, linux.ErrNoTable
	}
	return w.drops, nil
}

func (w *fakeWire) Lacks() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	return w.h.lacks
}

func (w *fakeWire) Remove() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	w.closed, w.h.table = true, nil
	return nil
}

func (w *fakeWire) RemoveOwn() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	w.closed = true
	if w.h.table == w {
		w.h.table = nil
	}
	return nil
}

func (w *fakeWire) Close() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	w.closed = true
	return nil
}

// wireDevice is a device with an address.
type wireDevice struct {
	fakeDevice
	addr, netdev string
}

func (d wireDevice) GIDs() []rdma.GIDEntry {
	return []rdma.GIDEntry{{Type: rdma.GIDTypeRoCEv2, GID: rdma.GIDFromAddr(netip.MustParseAddr(d.addr)), NetDev: d.netdev}}
}

func (b *bench) onDevice(d rdma.Device) *bench {
	b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
		return d, func() error { return nil }, nil
	}
	return b
}

func newWireBench(t testing.TB, node string) *bench {
	t.Helper()
	return newBench(t, node, preferAll).onDevice(wireDevice{addr: "192.0.2.1", netdev: "eth1"})
}

const wirePeers = "  wire: {peers: [192.0.2.0/24], interfaces: [eth2]}\n"

func addrs(texts ...string) (out []netip.Addr) {
	for _, s := range texts {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// devicesOf are a device of the node, one that is missing, and one inside a pod.
func devicesOf(t *testing.T, node wireDevice, inPod *wireDevice) *rnics.Pool {
	t.Helper()
	return poolOf(t, node, inPod, config.Device{RDMA: "there"}, config.Device{RDMA: "missing"})
}

// poolOf are devices of the node, of which that with the name missing is not there, and one inside a pod
// if there is to be one.
func poolOf(t *testing.T, node wireDevice, inPod *wireDevice, devices ...config.Device) *rnics.Pool {
	t.Helper()
	opened := func(d rdma.Device) (rdma.Device, func() error, error) { return d, func() error { return nil }, nil }
	pool := rnics.NewPool(rnics.Config{
		Log: slog.New(slog.DiscardHandler), Stay: true,
		Open: func(_ string, cfg config.Device) (rdma.Device, func() error, error) {
			if cfg.RDMA == "missing" {
				return nil, nil, errUnplugged
			}
			return opened(node)
		},
		OpenOwn: func(*rnics.Own, rnics.Namespace) (rdma.Device, func() error, error) { return opened(*inPod) },
	})
	must(t, pool.Open(t.Context(), devices))
	if inPod != nil {
		set := pool.NewSet(nil)
		set.Update(t.Context(), nil, []rnics.Own{{ID: "vf", Mode: string(vf.ModeMove)}})
		t.Cleanup(func() { must(t, set.Release()) })
	}
	return pool
}

// TestWire_plan: what is wanted of the filter.
func TestWire_plan(t *testing.T) {
	peers := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	tests := []struct {
		name    string
		wire    config.Wire
		cluster bool
		dev     wireDevice
		inPod   *wireDevice
		want    agentapi.WireState
		cfg     linux.WireConfig
	}{
		{name: "standalone without peers", wire: config.Wire{Filter: true}, want: agentapi.WireOpen},
		{name: "standalone with peers", wire: config.Wire{Filter: true, Peers: peers}, want: agentapi.WireFiltered, cfg: linux.WireConfig{
			Own: addrs("192.0.2.1"), Peers: peers, Interfaces: []string{"eth1"},
		}},
		{name: "not filtered", wire: config.Wire{Peers: peers}, want: agentapi.WireOpen},
		{name: "not filtered in a cluster", wire: config.Wire{NodesKnown: true}, cluster: true, want: agentapi.WireOpen},
		{name: "nodes not known yet", wire: config.Wire{Filter: true, Peers: peers}, cluster: true, want: agentapi.WirePending},
		{name: "no other node", wire: config.Wire{Filter: true, NodesKnown: true}, cluster: true, want: agentapi.WireFiltered, cfg: linux.WireConfig{
			Own: addrs("192.0.2.1"), Interfaces: []string{"eth1"},
		}},
		{
			name: "nodes, peers, interfaces", cluster: true, want: agentapi.WireFiltered,
			wire: config.Wire{Filter: true, NodesKnown: true, Nodes: addrs("192.0.2.2"), Peers: peers, Interfaces: []string{"eth2", "eth1"}},
			cfg:  linux.WireConfig{Own: addrs("192.0.2.1"), Nodes: addrs("192.0.2.2"), Peers: peers, Interfaces: []string{"eth1", "eth2"}},
		},
		{
			name: "a device in a pod", cluster: true, want: agentapi.WireFiltered, inPod: &wireDevice{addr: "198.51.100.7", netdev: "net1"},
			wire: config.Wire{Filter: true, NodesKnown: true}, cfg: linux.WireConfig{Own: addrs("192.0.2.1"), Nodes: addrs("198.51.100.7"), Interfaces: []string{"eth1"}},
		},
		{name: "a device on loopback", wire: config.Wire{Filter: true, Peers: peers}, dev: wireDevice{addr: "127.0.0.7", netdev: "lo"}, want: agentapi.WireNone},
		{name: "an address on loopback", wire: config.Wire{Filter: true, Peers: peers}, dev: wireDevice{addr: "192.0.2.1", netdev: "lo"}, want: agentapi.WireFiltered, cfg: linux.WireConfig{
			Own: addrs("192.0.2.1"), Peers: peers,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := &config.Node{Wire: tt.wire}
			if tt.cluster {
				n.Pods = map[config.PodName]config.PodConfig{}
			}
			if tt.dev.addr == "" {
				tt.dev = wireDevice{addr: "192.0.2.1", netdev: "eth1"}
			}
			a := &agent{}
			a.node.Store(n)
			a.rnics = devicesOf(t, tt.dev, tt.inPod)
			p := a.planWire()
			if strings.Contains(p.detail, "node.") == tt.cluster && !tt.wire.Filter {
				t.Errorf("in a cluster: %v, detail %q", tt.cluster, p.detail)
			}
			if p.state != tt.want || (p.detail == "") != (tt.want == agentapi.WireFiltered || tt.want == agentapi.WireNone) {
				t.Errorf("state %q, detail %q, want %q", p.state, p.detail, tt.want)
			}
			equal := cmp.Options{cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.IgnoreFields(linux.WireConfig{}, "UID"), cmpopts.EquateEmpty()}
			if diff := cmp.Diff(tt.cfg, p.cfg, equal); diff != "" {
				t.Errorf("filter (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWire_open: without peers there is no filter, the status says so, and the table of an agent that was
// killed is removed.
func TestWire_open(t *testing.T) {
	b := newWireBench(t, "")
	b.wires.table = &fakeWire{h: b.wires}
	b.start()
	s := b.status()
	if s.Wire.State != agentapi.WireOpen || !strings.Contains(s.Wire.Detail, "node.wire.peers") || len(s.Problems) != 0 {
		t.Errorf("status %+v, problems %q", s.Wire, s.Problems)
	}
	if !strings.Contains(b.log.String(), "everybody may send RoCE packets") {
		t.Error("nothing in the log")
	}
	b.wires.look(func() {
		if b.wires.table != nil || b.wires.sweeps != 1 || b.wires.installs != 0 {
			t.Errorf("%+v", b.wires)
		}
	})
}

// TestWire_life: the filter follows the configuration, counts, is put back when
// somebody deletes it, and ends with the agent.
func TestWire_life(t *testing.T) {
	b := newWireBench(t, wirePeers)
	b.start()
	if s := b.status(); s.Wire.State != agentapi.WireFiltered || s.Wire.Allowed != 1 || len(s.Wire.Dropped) != 0 {
		t.Errorf("status %+v", s.Wire)
	}
	first := b.wires.now()
	b.wires.look(func() { first.drops[linux.WireUnknownSource] = 3 })
	dropped := func(want uint64) {
		t.Helper()
		b.sync()
		if s := b.status(); s.Wire.Dropped["unknown-source"] != want || s.Wire.Sum() != want {
			t.Errorf("status %+v, want %d dropped", s.Wire, want)
		}
		if _, text := b.get(agentapi.PathMetrics); !strings.Contains(text, fmt.Sprintf("kube_smcr_wire_dropped_packets_total{reason=\"unknown-source\"} %d", want)) {
			t.Errorf("the metrics do not have %d dropped packets", want)
		}
	}
	dropped(3)
	if !strings.Contains(b.log.String(), "unknown-source:3") {
		t.Error("nothing in the log")
	}

	b.wires.look(func() { b.wires.table = nil }) // somebody deletes it
	b.sync()
	b.wires.look(func() {
		if b.wires.table != first || first.updates != 1 {
			t.Errorf("not put back: %+v", b.wires)
		}
	})
	reload := func(node string, want agentapi.WireState) {
		t.Helper()
		b.configure(node, preferAll)
		b.reload <- struct{}{}
		eventually(t, func() string {
			if s := b.status(); s.Wire.State != want {
				return fmt.Sprintf("status %+v, want %s", s.Wire, want)
			}
			return ""
		})
	}
	b.wires.look(func() { b.wires.lacks = errors.New("no nft_fib") })
	reload("  wire: {peers: [192.0.2.0/24, 198.51.100.0/24]}\n", agentapi.WireFiltered)
	eventually(t, func() string {
		if s := b.status(); s.Wire.Allowed != 2 || !strings.Contains(s.Wire.Detail, "no nft_fib") {
			return fmt.Sprintf("status %+v", s.Wire)
		}
		return ""
	})
	reload("", agentapi.WireOpen)
	dropped(3) // a counter does not go back
	reload(wirePeers, agentapi.WireFiltered)
	b.wires.look(func() { b.wires.table.drops[linux.WireUnknownSource] = 1 })
	dropped(4)
	b.stop()
	b.wires.look(func() {
		if b.wires.table != nil || !first.closed || b.wires.installs != 2 {
			t.Errorf("after the end: %+v", b.wires)
		}
	})
}

// TestWire_fails: an agent that cannot filter says so, and tries again.
func TestWire_fails(t *testing.T) {
	b := newWireBench(t, wirePeers)
	b.wires.fail = errors.New("no nf_tables")
	b.start()
	s := b.status()
	if s.Wire.State != agentapi.WireFailed || len(s.Problems) != 1 || !strings.Contains(s.Problems[0], "no nf_tables") {
		t.Errorf("status %+v, problems %q", s.Wire, s.Problems)
	}
	b.wires.look(func() { b.wires.fail = nil })
	eventually(t, func() string {
		if s := b.status(); s.Wire.State != agentapi.WireFiltered || len(s.Problems) != 0 {
			return fmt.Sprintf("status %+v", s.Wire)
		}
		return ""
	})
	b.wires.look(func() { b.wires.fail = errors.New("too many") })
	b.configure("  wire: {peers: [198.51.100.0/24]}\n", preferAll)
	b.reload <- struct{}{}
	eventually(t, func() string {
		if s := b.status(); s.Wire.State != agentapi.WireFailed || !strings.Contains(s.Wire.Detail, "an earlier filter stays in force: too many") {
			return fmt.Sprintf("status %+v", s.Wire)
		}
		return ""
	})
	b.wires.look(func() { b.wires.fail = nil })
}

// TestWire_handover: the successor replaces the table. The agent before it leaves the table alone, and
// makes a new one when the successor is gone.
func TestWire_handover(t *testing.T) {
	node := "  takeover: true\n" + wirePeers
	b := newBench(t, node, preferAll).onDevice(wireDevice{addr: "192.0.2.1", netdev: "eth1"})
	b.cfg.Instance = "old"
	b.start()
	old := b.wires.now()
	c := b.successor("new")
	young := b.wires.now()
	b.wires.look(func() {
		if young == old || b.wires.sweeps != 0 {
			t.Errorf("after the handover: %+v, the old one %+v", b.wires, old)
		}
	})
	c.stop()
	b.wires.look(func() {
		if b.wires.table != nil || !young.closed {
			t.Errorf("the successor ended: %+v", b.wires)
		}
	})
	eventually(t, func() string {
		if b.wires.now() == nil {
			return "nobody filters"
		}
		return ""
	})
	b.wires.look(func() {
		if !old.closed {
			t.Error("the handle on the table that was handed over is open")
		}
	})
}

// TestWire_rollback: an agent that handed over to an agent of a version without the filter removes the
// table when it ends.
func TestWire_rollback(t *testing.T) {
	node := "  takeover: true\n" + wirePeers
	b := newBench(t, node, preferAll).onDevice(wireDevice{addr: "192.0.2.1", netdev: "eth1"})
	b.cfg.Instance = "new"
	b.start()
	table := b.wires.now()
	c := *b
	c.wires = &fakeHost{} // a version without the filter knows of no table
	c.cfg.host = c.wires
	before := c.onDevice(wireDevice{addr: "127.0.0.1", netdev: "lo"}).successor("old")
	if s := before.status(); s.Wire.State != agentapi.WireNone {
		t.Fatalf("status %+v, want none", s.Wire)
	}
	if b.wires.now() != table {
		t.Error("the table is gone before its agent's connections are")
	}
	b.cancel()
	must(t, <-b.done)
	b.done = nil
	if b.wires.now() != nil {
		t.Error("the table stays")
	}
}

// TestWire_part: an agent that stands by removes its own table when it ends, and leaves a table that the
// successor counts on.
func TestWire_part(t *testing.T) {
	for _, c := range []struct {
		successor agentapi.WireState
		replaced  bool
		want      bool // there is a table afterwards
	}{
		{agentapi.WireNone, false, false},
		{agentapi.WirePending, false, true},
		{agentapi.WireFailed, false, true},
		{agentapi.WireFiltered, true, true},
	} {
		t.Run(string(c.successor), func(t *testing.T) {
			h := &fakeHost{}
			own := value(h.filterWire(linux.WireConfig{}))(t)
			w := wire{filter: own}
			must(t, w.handOver())
			if c.replaced {
				value(h.filterWire(linux.WireConfig{}))(t)
			}
			must(t, w.endStandby(c.successor))
			must(t, w.endStandby(c.successor))
			if (h.table != nil) != c.want || !own.(*fakeWire).closed {
				t.Errorf("a table is there: %t, want %t; own handle %+v", h.table != nil, c.want, own)
			}
		})
	}
}

// TestWire_devicesGone: the table stays in force while its devices are gone. Without it, packets could come
// in between the return of a device and the next look.
func TestWire_devicesGone(t *testing.T) {
	h := &fakeHost{}
	w := wire{a: &agent{cfg: Config{platform: platform{host: h}}}, filter: value(h.filterWire(linux.WireConfig{}))(t)}
	for _, plan := range []wirePlan{{keep: true}, {state: agentapi.WirePending}} {
		must(t, w.apply(&plan))
		if h.table == nil || w.filter == nil {
			t.Fatalf("%+v: no table", plan)
		}
	}
	must(t, w.apply(&wirePlan{}))
	if h.table != nil {
		t.Error("the table of devices that nobody wants stays")
	}
}

// TestWire_inherited: an agent that cannot make a table yet leaves the table of an earlier agent in force,
// and removes that table when it ends.
func TestWire_inherited(t *testing.T) {
	for name, prepare := range map[string]func(*bench){
		"no device": func(b *bench) {
			b.cfg.Stay = true
			b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
				return nil, nil, errors.New("another one has the port")
			}
		},
		"no nf_tables": func(b *bench) { b.wires.fail = errors.New("no nf_tables") },
	} {
		t.Run(name, func(t *testing.T) {
			b := newWireBench(t, wirePeers)
			prepare(b)
			earlier := &fakeWire{h: b.wires}
			b.wires.table = earlier
			b.start()
			b.sync()
			b.wires.look(func() {
				if b.wires.table != earlier || b.wires.sweeps != 0 {
					t.Errorf("%+v, want the earlier agent's table", b.wires)
				}
				b.wires.fail = nil
				b.wires.table = earlier
			})
			b.stop()
			if b.wires.now() != nil {
				t.Error("a table is left after an ordered end")
			}
		})
	}
}

// TestWire_leave: an agent that leaves the node removes the table, even if another agent made it.
func TestWire_leave(t *testing.T) {
	for name, node := range map[string]string{"filtered": wirePeers, "open": ""} {
		t.Run(name, func(t *testing.T) {
			b := newWireBench(t, node)
			leave := make(chan struct{})
			b.cfg.Leave = leave
			b.start()
			b.wires.look(func() { b.wires.table = &fakeWire{h: b.wires} })
			close(leave)
			must(t, <-b.done)
			b.done = nil
			b.wires.look(func() {
				if b.wires.table != nil {
					t.Errorf("%+v", b.wires)
				}
			})
		})
	}
}
