// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// clientIdleExtra lets the server end an idle group first, so that a client
// does not name a group that its server is just giving up.
const clientIdleExtra = 10 * time.Second

// group is a link group with what it needs of the device. It is guarded by
// the stack's turn.
type group struct {
	s      *Stack
	id     uint32
	role   linkgroup.Role
	peer   clc.PeerID
	lg     *linkgroup.Group
	opened time.Time

	links   [linkgroup.MaxLinks]*link
	touched bool // on the stack's list
	rmbs    map[linkgroup.RMBID]*region

	// Who waits for set-up and RMB events. setup has room for all events of
	// one set-up.
	setup   chan setupEvent
	formed  chan struct{} // closed when the first contact ended, either way
	rmbWait map[linkgroup.RMBID][]chan bool
}

// setupEvent is what a first contact's goroutine hears of its group.
type setupEvent struct {
	kind linkgroup.EventKind
	err  error
}

// newGroup makes a group with a queue pair in state INIT, ready for the CLC
// exchange. peerGID is the peer's RNIC that the first link will end at, at a
// server the one that the client thinks of.
func (s *Stack) newGroup(role linkgroup.Role, peer clc.PeerID, peerGID rdma.GID) (_ *group, err error) {
	g := &group{
		s: s, id: lastGroupID.Add(1), role: role, peer: peer, opened: time.Now(),
		rmbs:    map[linkgroup.RMBID]*region{},
		setup:   make(chan setupEvent, 4),
		formed:  make(chan struct{}),
		rmbWait: map[linkgroup.RMBID][]chan bool{},
	}
	defer func() {
		if err != nil {
			g.free()
		}
	}()
	r := s.pickRNIC(0, peerGID, role == linkgroup.Client)
	if r == nil {
		return nil, errNoDevice
	}
	first, err := g.newLink(0, r)
	if err != nil {
		return nil, err
	}
	idle := s.cfg.IdleGroupTimeout
	if idle > 0 && role == linkgroup.Client {
		idle += clientIdleExtra
	}
	g.lg = linkgroup.New(linkgroup.Config{
		Role: role, AllowRFC: s.cfg.Dialects == DialectsBoth, UserID: g.id,
		SendBuffer:  uint32(s.cfg.SendBufferBytes),
		IdleTimeout: idle, CloseTimeout: s.cfg.CloseTimeout,
		Rand: rand.New(rand.NewPCG(s.rand.Uint64(), s.rand.Uint64())),
	})
	g.lg.AddFirstLink(first.local)
	s.groups[g.id] = g
	return g, nil
}

// flush carries out what the machine wants, in order.
func (g *group) flush(now time.Time) {
	g.carryOut(now)
	for _, l := range g.links {
		if l != nil && len(l.recv) > 0 {
			l.postRecv(now)
			g.carryOut(now) // if it failed
		}
	}
	for _, id := range g.lg.TakeGoneRMBs() {
		g.freeRMB(id)
	}
	if t, ok := g.lg.NextTimeout(); ok && t.Before(g.s.alarm) {
		g.s.alarm = t // once is enough
		g.s.poke()
	}
}

func (g *group) carryOut(now time.Time) {
	for !g.lg.Idle() {
		g.s.outs = g.lg.Poll(now, g.s.outs[:0])
		outs := g.s.outs
		for i := range outs {
			g.do(now, &outs[i])
		}
		for _, l := range g.links {
			if l != nil {
				l.post(now)
			}
		}
		clear(outs)
	}
}

func (g *group) do(now time.Time, o *linkgroup.Output) {
	if o.Kind == linkgroup.OutEvent {
		g.event(now, o)
		return
	}
	l := g.links[o.Link]
	if l == nil {
		return // it failed while the machine's outputs were carried out
	}
	switch o.Kind {
	case linkgroup.OutWrite:
		l.write(o)
	case linkgroup.OutSend:
		l.send(o)
	case linkgroup.OutReceive:
		l.check(now, "queue pair to RTR", l.toRTR(now, *o.Peer))
	case linkgroup.OutTransmit:
		l.check(now, "queue pair to RTS", l.toRTS())
	case linkgroup.OutCloseLink:
		l.post(now)
		l.shut(now)
	case linkgroup.OutEvent:
	}
}

// event tells whoever waits.
func (g *group) event(now time.Time, o *linkgroup.Output) {
	switch o.Event {
	case linkgroup.EventConn:
		if c, ok := o.Conn.User.(*Conn); ok {
			c.handle(o.Events)
		}
	case linkgroup.EventConnDone:
		if c, ok := o.Conn.User.(*Conn); ok {
			c.groupDone()
		} else {
			o.Conn.Release(time.Now()) // its rendezvous failed before it had a shell
			g.freeIfUnused()
		}
	case linkgroup.EventPointOfNoReturn:
		g.setup <- setupEvent{kind: o.Event}
	case linkgroup.EventReady:
		g.prepareRMB()
		g.changed()
		g.setup <- setupEvent{kind: o.Event}
		close(g.formed)
	case linkgroup.EventSetupFailed:
		g.setup <- setupEvent{kind: o.Event, err: o.Err}
		g.remove()
		close(g.formed)
	case linkgroup.EventRMBConfirmed, linkgroup.EventRMBRefused:
		for _, w := range g.rmbWait[o.RMB] {
			w <- o.Event == linkgroup.EventRMBConfirmed
		}
		delete(g.rmbWait, o.RMB)
	case linkgroup.EventWantLink:
		g.wantLink(now, o)
	case linkgroup.EventLink:
		g.changed()
	case linkgroup.EventDead:
		g.remove()
	}
}

// wantLink gives the machine a queue pair for another link: on a device that
// carries none of the group's links or, unless it has to be such a one, on
// another (RFC 7609 3.5.1.6).
func (g *group) wantLink(now time.Time, o *linkgroup.Output) {
	used := g.lg.RNICsInUse()
	r := g.s.pickRNIC(used, o.Peer.GID, true)
	if (r == nil || !r.active()) && !o.Fresh {
		r = g.s.pickRNIC(0, o.Peer.GID, true)
	}
	// A port that is said to be down may just be reported late; it is taken
	// where the group works over it already. At first contact the client waits
	// for an offer, even of a link that it will refuse.
	forming := g.lg.State() == linkgroup.Forming
	if r == nil || !forming && !r.active() && (o.Fresh || used>>r.index&1 == 0) {
		g.lg.NoLink(now, o.Link)
		return
	}
	l, err := g.newLink(o.Link, r)
	if err != nil {
		g.s.malformed("another link", err)
		g.lg.NoLink(now, o.Link)
		return
	}
	if !g.lg.OfferLink(now, o.Link, l.local) {
		l.close() // the machine wants it no more
	}
}

func (g *group) changed() {
	if h := g.s.cfg.Hooks.GroupChanged; h != nil {
		h(g.info())
	}
}

// abandon ends a first contact that its rendezvous gave up.
func (g *group) abandon() {
	forming := g.lg.State() == linkgroup.Forming
	g.lg.Terminate(time.Now(), llc.DeleteOperator)
	g.flush(time.Now())
	if forming { // no event says it; every other group is removed by one
		g.remove()
		close(g.formed)
	}
}

// remove takes a dead group off the stack. Its memory goes with its last
// connection.
func (g *group) remove() {
	g.changed()
	delete(g.s.groups, g.id)
	g.s.stats.LLCSent += g.lg.LLCSent
	g.s.stats.CDCSent += g.lg.CDCSent
	for id, ws := range g.rmbWait {
		for _, w := range ws {
			w <- false
		}
		delete(g.rmbWait, id)
	}
	g.freeIfUnused()
}

// kill ends the group because the stack does, or because the peer does not
// have it.
func (g *group) kill(err error) {
	now := time.Now()
	for _, l := range g.links {
		if l != nil {
			l.fail(now, err)
		}
	}
	g.flush(now)
}

// freeIfUnused frees a dead group once no connection uses its memory.
func (g *group) freeIfUnused() {
	if g.lg.State() == linkgroup.Dead && g.lg.Conns() == 0 {
		g.free()
	}
}

func (g *group) free() {
	for _, l := range g.links {
		if l != nil {
			l.close()
		}
	}
	for id := range g.rmbs {
		g.freeRMB(id)
	}
}

// deviceName names the device of a link.
func (g *group) deviceName(i linkgroup.LinkIndex) string {
	if l := g.links[i]; l != nil {
		return l.rnic.dev.Name()
	}
	return ""
}

func (g *group) info() GroupInfo {
	info := GroupInfo{
		ID: g.id, Role: Role(g.role), PeerID: g.peer, State: g.lg.State().String(), Dialect: g.lg.Dialect().String(),
		Redundancy: g.lg.Redundancy().String(), Version: 1, Conns: g.lg.Conns(), Opened: g.opened, Err: g.lg.Err(),
	}
	for _, r := range g.rmbs {
		info.RMBBytes += len(r.mem)
	}
	for _, l := range g.lg.Links() {
		info.Links = append(info.Links, LinkInfo{
			ID: uint8(l.ID), State: l.State, Device: g.deviceName(l.Index),
			LocalGID: l.Local.GID, PeerGID: l.Peer.GID, LocalQPN: l.Local.QPN, PeerQPN: l.Peer.QPN,
			MTU: l.Peer.MTU, UserID: g.id, Conns: l.Conns, BytesSent: l.Sent, BytesRecv: l.Recv,
		})
	}
	return info
}
