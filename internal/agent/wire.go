// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// # The filter of RoCE packets
//
// The agent that manages the node keeps a table in the host's namespace, which
// lets only devices of the cluster's nodes and configured peers send to its own.
// A successor replaces the table, and the agent before it leaves it alone from the
// handover on; so the claim on the node is the right to the table, too. A table
// whose agent was killed stays in force until the next one replaces it.
//
// What is wanted is looked at with every turn of the manager: at once when an
// object or the file changed, and else once a second, which finds devices that
// came or moved, and a table that somebody deleted.

// hostNet is what the agent does in the host's network namespace.
type hostNet interface {
	filterWire(cfg linux.WireConfig) (wireFilter, error)
	// sweepWire removes the table of an agent that was killed.
	sweepWire() error
}

// wireFilter is *linux.WireFilter.
type wireFilter interface {
	Update(cfg linux.WireConfig) error
	Drops() (linux.WireDrops, error)
	Lacks() error
	Remove() error
	Close() error
}

// linuxHost is the namespace at a path, or the agent's own.
type linuxHost struct{ path string }

func (h linuxHost) in(f func(*linux.NetNS) error) error {
	open := linux.CurrentNetNS
	if h.path != "" {
		open = func() (*linux.NetNS, error) { return linux.OpenNetNS(h.path) }
	}
	ns, err := open()
	if err != nil {
		return err
	}
	return errors.Join(f(ns), ns.Close())
}

func (h linuxHost) filterWire(cfg linux.WireConfig) (f wireFilter, err error) {
	err = h.in(func(ns *linux.NetNS) error {
		lf, err := linux.InstallWireFilter(ns, cfg)
		if err == nil {
			f = lf
		}
		return err
	})
	return f, err
}

func (h linuxHost) sweepWire() error { return h.in(linux.SweepWireFilter) }

// wire is the agent's filter of RoCE packets. But for what is below mu it belongs
// to the manager's goroutine, and to who waits for its end.
type wire struct {
	a      *agent
	filter wireFilter       // nil: there is no table of this agent's
	cfg    linux.WireConfig // in force
	swept  bool             // nor one of an earlier agent's
	before linux.WireDrops  // of filters that are no more

	retryAt time.Time
	pause   time.Duration

	told   agentapi.Wire // in the log
	toldAt time.Time     // of dropped packets

	mu    sync.Mutex // guards what is below
	shown agentapi.Wire
	drops linux.WireDrops
}

// wirePlan is what the filter is to be.
type wirePlan struct {
	state  agentapi.WireState
	detail string
	cfg    linux.WireConfig
}

// planWire says what the configuration and the devices want.
func (a *agent) planWire() wirePlan {
	w := &a.node.Load().Wire
	inCluster := a.node.Load().InCluster()
	cfg := linux.WireConfig{
		Peers: w.Peers, Nodes: slices.Clone(w.Nodes), Interfaces: slices.Clone(w.Interfaces), UID: uint32(os.Geteuid()),
	}
	for _, d := range a.devices.all() {
		addr, netdev := addressOf(d.open)
		switch {
		case !addr.IsValid() || addr.IsLoopback(): // the kernel lets nobody else in
		case d.inPod:
			cfg.Nodes = append(cfg.Nodes, addr) // on the wire as if it were another node's
		default:
			cfg.Own = append(cfg.Own, addr)
			if netdev != "" && netdev != "lo" {
				cfg.Interfaces = append(cfg.Interfaces, netdev)
			}
		}
	}
	slices.Sort(cfg.Interfaces)
	cfg.Interfaces = slices.Compact(cfg.Interfaces)
	switch {
	case len(cfg.Own) == 0:
		return wirePlan{}
	case !w.Filter:
		return wirePlan{state: agentapi.WireOpen, detail: "node.wire.filter is false"}
	case inCluster && !w.NodesKnown:
		return wirePlan{state: agentapi.WirePending, detail: "the other nodes are not known yet; a filter that the agent before this one left stays in force"}
	case !inCluster && len(w.Peers) == 0:
		return wirePlan{state: agentapi.WireOpen, detail: "name the networks of the other devices in node.wire.peers"}
	}
	return wirePlan{state: agentapi.WireFiltered, cfg: cfg}
}

// addressOf is the address and network interface that links of a device have.
func addressOf(dev rdma.Device) (addr netip.Addr, netdev string) {
	if dev == nil {
		return netip.Addr{}, ""
	}
	for _, g := range dev.GIDs() {
		if g.Type == rdma.GIDTypeRoCEv2 {
			return g.GID.Addr(), g.NetDev
		}
	}
	return netip.Addr{}, ""
}

// reconcile brings the table in line with what is wanted. With force it does not
// wait for the pause after a failure.
func (w *wire) reconcile(now time.Time, force bool) {
	if !force && now.Before(w.retryAt) {
		return
	}
	plan := w.a.planWire()
	err := w.apply(&plan)
	w.retryAt, w.pause = time.Time{}, min(max(2*w.pause, retryFirst), retryMost)
	if err == nil {
		w.pause = 0
	} else {
		w.retryAt = now.Add(w.pause)
	}
	w.show(&plan, err)
	w.tell(now)
}

// apply does what a plan says.
func (w *wire) apply(p *wirePlan) error {
	switch {
	case p.state == agentapi.WirePending && w.filter == nil:
		return nil
	case p.state == agentapi.WirePending:
		return w.count()
	case p.state != agentapi.WireFiltered && w.filter != nil:
		return w.remove()
	case p.state != agentapi.WireFiltered && !w.swept:
		err := w.a.cfg.host.sweepWire()
		w.swept = err == nil
		return err
	case p.state != agentapi.WireFiltered:
		return nil
	case w.filter == nil:
		f, err := w.a.cfg.host.filterWire(p.cfg)
		if err != nil {
			return err
		}
		w.filter, w.cfg, w.swept = f, p.cfg, false
		return w.count()
	case !reflect.DeepEqual(w.cfg, p.cfg):
		if err := w.filter.Update(p.cfg); err != nil {
			return err
		}
		w.cfg = p.cfg
	}
	err := w.count()
	if errors.Is(err, linux.ErrNoTable) {
		w.a.cfg.Log.Warn("filter of RoCE packets was deleted by somebody; it is put back")
		err = w.filter.Update(w.cfg)
	}
	return err
}

// count reads what was dropped.
func (w *wire) count() error {
	drops, err := w.filter.Drops()
	for i := range drops {
		drops[i] += w.before[i]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drops = drops
	return err
}

// show puts down how it stands.
func (w *wire) show(p *wirePlan, err error) {
	s := agentapi.Wire{State: p.state, Detail: p.detail}
	if p.state == agentapi.WireFiltered && w.filter != nil {
		s.Allowed = len(w.cfg.Nodes) + len(w.cfg.Peers)
		if lacks := w.filter.Lacks(); lacks != nil {
			s.Detail = fmt.Sprintf("packets of nodes are taken by the devices' interfaces only, whatever the routes are: %v", lacks)
		}
	}
	if err != nil {
		s.State, s.Detail = agentapi.WireFailed, err.Error()
		if w.filter != nil {
			s.Detail = "an earlier filter stays in force: " + s.Detail
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shown = s
}

// tell logs what is new.
func (w *wire) tell(now time.Time) {
	s := w.info()
	log := w.a.cfg.Log
	if was := w.told; was.State != s.State || was.Detail != s.Detail {
		switch s.State {
		case agentapi.WireFailed:
			log.Warn("RoCE packets are not filtered as wanted; it is tried again", "err", s.Detail)
		case agentapi.WireOpen, agentapi.WirePending:
			log.Warn("everybody may send RoCE packets to the devices of this node", "why", s.Detail)
		case agentapi.WireFiltered:
			log.Info("RoCE packets are taken from known addresses only", "addresses", s.Allowed, "lacks", s.Detail)
		case agentapi.WireNone:
		}
	}
	if s.Sum() > w.told.Sum() && now.Sub(w.toldAt) >= wireLogPause {
		log.Warn("RoCE packets dropped: of strangers, or of a node or peer that is not known or comes by another interface", "dropped", s.Dropped)
		w.toldAt = now
	} else {
		s.Dropped = w.told.Dropped
	}
	w.told = s
}

// info says how it stands. Any goroutine may call it.
func (w *wire) info() agentapi.Wire {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.shown
	for why, n := range w.drops {
		if n > 0 {
			if s.Dropped == nil {
				s.Dropped = map[string]uint64{}
			}
			s.Dropped[linux.WireReason(why).String()] = n
		}
	}
	return s
}

// remove takes the table away. The agent must have the claim on the node.
func (w *wire) remove() error {
	if w.filter == nil {
		return nil
	}
	countErr := w.count()
	if errors.Is(countErr, linux.ErrNoTable) {
		countErr = nil
	}
	err := errors.Join(countErr, w.filter.Remove())
	w.forget()
	return err
}

// release leaves the table to a successor.
func (w *wire) release() error {
	if w.filter == nil {
		return nil
	}
	err := w.filter.Close()
	w.forget()
	return err
}

// forget is after the end of a filter.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.filter, w.cfg, w.before, w.swept = nil, linux.WireConfig{}, w.drops, false
	w.shown = agentapi.Wire{}
}

// wireProblem is a line of the status; "" if nothing is wrong.
func wireProblem(s agentapi.Wire) string {
	if s.State != agentapi.WireFailed {
		return ""
	}
	return "RoCE packets are not filtered as wanted: " + s.Detail
}
