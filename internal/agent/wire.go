// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net"
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
// The agent that manages the node keeps a table in the host's namespace, by which only devices of
// the cluster's nodes and configured peers can send to the node's own devices. The agent that holds
// the node's lock owns the table. A successor replaces the table in one transaction; the agent
// before it changes nothing after the handover. If an agent is killed, its table stays in force
// until the next agent replaces it.
//
// An agent that ends in order leaves no table behind. If it manages the node, it removes whatever
// table there is. If it stands by, it removes its own table if that is still there, which means
// that its successor is of a version without the filter.
//
// Each round of the manager compares the table with what is wanted: at once when an object or the
// file changed, and else once a second, which notices devices that came or moved, and a table that
// somebody deleted.

// hostNet is what the agent does in the host's network namespace.
type hostNet interface {
	filterWire(cfg linux.WireConfig) (wireFilter, error)
	// sweepWire removes the table of an agent that was killed.
	sweepWire() error
	// addresses are the IPv4 addresses of a network interface.
	addresses(netdev string) ([]netip.Addr, error)
}

// wireFilter is *linux.WireFilter.
type wireFilter interface {
	Update(cfg linux.WireConfig) error
	Drops() (linux.WireDrops, error)
	Lacks() error
	Remove() error
	RemoveOwn() error
	Close() error
}

// linuxHost is the network namespace at a path; the agent's own if that is "".
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

func (h linuxHost) addresses(netdev string) (all []netip.Addr, err error) {
	err = h.in(func(ns *linux.NetNS) error {
		return ns.Do(func() error {
			i, err := net.InterfaceByName(netdev)
			if err != nil {
				return err
			}
			addrs, err := i.Addrs()
			for _, a := range addrs {
				if p, ok := a.(*net.IPNet); ok && p.IP.To4() != nil {
					all = append(all, netip.AddrFrom4([4]byte(p.IP.To4())))
				}
			}
			return err
		})
	})
	return all, err
}

// wire is the agent's filter of RoCE packets. What is above mu belongs to the manager's goroutine
// and, after its end, to the goroutine that waited for it.
type wire struct {
	a            *agent
	filter       wireFilter       // nil: this agent has no table
	cfg          linux.WireConfig // of the table
	swept        bool             // no earlier agent's table is left, either
	handedOver   wireFilter       // filter as of the handover; nil: there was none
	earlierDrops linux.WireDrops  // of filters that this agent removed or handed over

	retryAt time.Time
	pause   time.Duration

	logged        agentapi.Wire // what the log says
	dropsLoggedAt time.Time     // when dropped packets were logged last

	mu    sync.Mutex // guards what is below
	shown agentapi.Wire
	drops linux.WireDrops
}

// wirePlan is what is wanted of the filter.
type wirePlan struct {
	state  agentapi.WireState
	detail string
	cfg    linux.WireConfig
	// keep means to leave the table as it is: devices are missing, perhaps because the agent before
	// this one still has them, so it is not known yet what is wanted.
	keep bool
}

// planWire says what the configuration and the devices call for.
func (a *agent) planWire() wirePlan {
	n := a.node.Load()
	w, inCluster := &n.Wire, n.InCluster()
	cfg := linux.WireConfig{
		Peers: w.Peers, Nodes: slices.Clone(w.Nodes), Interfaces: slices.Clone(w.Interfaces), UID: uint32(os.Geteuid()),
	}
	missing := len(a.rnics.Node().States()) < len(n.Devices)
	for _, d := range a.rnics.All() {
		missing = missing || d.Open == nil
		addr, netdev := addressOf(d.Open)
		switch {
		case !addr.IsValid() || addr.IsLoopback(): // nobody else can send to a loopback address
		case d.InPod:
			cfg.Nodes = append(cfg.Nodes, addr) // in the pod's namespace, so its packets come like those of another node
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
		return wirePlan{keep: missing}
	case !w.Filter:
		return wirePlan{state: agentapi.WireOpen, detail: setting("wire.filter", n) + " is false"}
	case inCluster && !w.NodesKnown:
		return wirePlan{state: agentapi.WirePending, detail: "the other nodes are not known yet; a filter that the agent before this one left stays in force"}
	case !inCluster && len(w.Peers) == 0:
		return wirePlan{state: agentapi.WireOpen, detail: "name the networks of the other devices in node.wire.peers"}
	}
	return wirePlan{state: agentapi.WireFiltered, cfg: cfg}
}

// addressOf is the RoCEv2 address of a device, and the network interface that has it.
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

// reconcile brings the table in line with what is wanted. After a failure it pauses; force skips
// the pause.
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
	w.logChanges(now)
}

// apply carries a plan out.
func (w *wire) apply(p *wirePlan) error {
	switch {
	case (p.state == agentapi.WirePending || p.keep) && w.filter == nil:
		return nil
	case p.state == agentapi.WirePending || p.keep:
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
		return errors.Join(w.closeHandedOver(), w.count())
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

// count reads how many packets were dropped.
func (w *wire) count() error {
	drops, err := w.filter.Drops()
	for i := range drops {
		drops[i] += w.earlierDrops[i]
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drops = drops
	return err
}

// show sets what info returns.
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

// logChanges logs what changed since the last time.
func (w *wire) logChanges(now time.Time) {
	s := w.info()
	log := w.a.cfg.Log
	if was := w.logged; was.State != s.State || was.Detail != s.Detail {
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
	if s.Sum() > w.logged.Sum() && now.Sub(w.dropsLoggedAt) >= wireLogPause {
		log.Warn("RoCE packets dropped: of strangers, or of a node or peer that is not known or comes by another interface", "dropped", s.Dropped)
		w.dropsLoggedAt = now
	} else {
		s.Dropped = w.logged.Dropped
	}
	w.logged = s
}

// info is the state of the filter for the API. Any goroutine may call info.
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

// remove removes this agent's table. The agent must hold the node's lock.
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

// end removes whatever table there is, this agent's or an earlier one's, since no other agent is
// left to remove it. The agent must hold the node's lock.
func (w *wire) end() error {
	if w.filter != nil || w.swept {
		return errors.Join(w.remove(), w.closeHandedOver())
	}
	return errors.Join(w.a.cfg.host.sweepWire(), w.closeHandedOver())
}

// handOver leaves the table to a successor.
func (w *wire) handOver() error {
	if w.filter == nil {
		return nil
	}
	err := w.closeHandedOver()
	w.handedOver = w.filter
	w.forget()
	return err
}

// endStandby ends the filter of an agent that stands by: it removes this agent's table if the
// successor did not replace it. If the successor has no filter yet, because it waits for something
// or failed, the table stays in force.
func (w *wire) endStandby(successor agentapi.WireState) error {
	if w.handedOver == nil || successor == agentapi.WirePending || successor == agentapi.WireFailed {
		return w.closeHandedOver()
	}
	err := w.handedOver.RemoveOwn()
	w.handedOver = nil
	return err
}

// closeHandedOver closes the handle on the table that was left to a successor.
func (w *wire) closeHandedOver() error {
	if w.handedOver == nil {
		return nil
	}
	err := w.handedOver.Close()
	w.handedOver = nil
	return err
}

// forget resets the fields after the end of a filter, but for the counts.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.filter, w.cfg, w.earlierDrops, w.swept = nil, linux.WireConfig{}, w.drops, false
	w.shown = agentapi.Wire{}
}

// wireProblem is a line for the status; "" if all is well.
func wireProblem(s agentapi.Wire) string {
	if s.State != agentapi.WireFailed {
		return ""
	}
	return "RoCE packets are not filtered as wanted: " + s.Detail
}
