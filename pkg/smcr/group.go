// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"container/list"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// clientIdleExtra lets the server end an idle group first, so that a client
// does not name a group that its server is just giving up.
const clientIdleExtra = 10 * time.Second

// group is a link group with what it needs of the devices. A group is guarded by
// the stack's turn.
type group struct {
	s  *Stack
	id uint32
	contact
	version uint8
	first   uint8              // number of the first link's device
	gids    clc.List[rdma.GID] // version 2, server: of the client's RNICs
	lg      *linkgroup.Group
	opened  time.Time

	links       [linkgroup.MaxLinks]*link
	shells      []*Conn            // of connections, by their slots in lg; nil: there is none yet
	resolving   int                // links whose way to the peer is being found out
	later       []linkgroup.Output // outputs that came meanwhile: see waits
	ready       bool               // the first contact went well
	symmetric   bool               // the group could lose any one RNIC, now or before
	heardDelete bool               // since the last flush the peer has said that a link is deleted
	idle        *list.Element      // the group's place among the idle groups; nil: it is not idle
	doubts      int                // how often somebody said that the peer does not have the group
	doubted     time.Time          // when somebody said so last; see doubt
	abandoned   int                // connections that have a client's half-open place; see Conn.abandon

	touched bool      // the group is in groupTable.touched
	due     time.Time // when the stack looks at the group's timers
	timer   int       // the group's place in groupTable.timers, from 1 on; 0: none
	mem     memory
	rmbs    map[linkgroup.RMBID]*region
	// How large the rings of connections are.
	rmbeSizes, sendSizes ringSizes

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
// exchange.
func (s *Stack) newGroup(with *contact) (_ *group, err error) {
	if s.trespassers.isBarred(time.Now(), with.addr) {
		return nil, errBarred
	}
	g := &group{
		s: s, id: lastGroupID.Add(1), contact: *with, version: max(with.agreed.Version, clc.V1), opened: time.Now(),
		mem:     memory{s: s, client: with.client()},
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
	var reach *routes
	if g.version >= clc.V2 {
		reach = &g.routes
	}
	r := s.devices.first(with, reach)
	if r == nil {
		return nil, errNoDevice
	}
	if g.role == linkgroup.Client && reach != nil && r.index != g.offered {
		s.preferred.set(with.addr, r.index)
	}
	g.first = r.index
	first, err := g.newLink(0, r)
	if err != nil {
		return nil, err
	}
	g.rmbeSizes, g.sendSizes = ringSizes{s.cfg.RMBESizeBytes, s.cfg.RMBESizeBytes}, ringSizes{s.cfg.SendBufferBytes, s.cfg.SendBufferBytes}
	g.growRings(first.slots.canDiscard())
	g.lg = linkgroup.New(g.config())
	g.lg.AddFirstLink(first.local)
	s.groups.add(g)
	return g, nil
}

// config is what the group's machine is told.
func (g *group) config() linkgroup.Config {
	s := g.s
	idle := s.cfg.IdleGroupTimeout
	if idle > 0 && g.role == linkgroup.Client {
		idle += clientIdleExtra
	}
	cfg := linkgroup.Config{
		Role: g.role, Version: g.version, AllowRFC: s.cfg.Dialects == DialectsBoth, UserID: g.id,
		MaxLinks: uint8(s.cfg.LinksPerGroup), MaxConns: uint8(s.cfg.ConnsPerGroup),
		IdleTimeout: idle, CloseTimeout: s.cfg.CloseTimeout, ReleaseTimeout: releaseTimeout,
		Rand: rand.New(rand.NewPCG(s.rand.Uint64(), s.rand.Uint64())),
	}
	if g.agreed.Version >= clc.V2 && g.agreed.Release >= clc.Release1 {
		cfg.Release, cfg.MaxLinks, cfg.MaxConns = g.agreed.Release, g.agreed.MaxLinks, g.agreed.MaxConns
	}
	return cfg
}

// takeConfirm takes what the client's Confirm tells about the client.
func (g *group) takeConfirm(c *clc.Confirm) {
	g.peer = c.PeerID
	g.host, g.gids = c.Ext.Host(), c.GIDs
}

// flush carries out what the machine wants, in order.
func (g *group) flush(now time.Time) {
	g.carryOut(now)
	for _, l := range g.links {
		if l != nil && len(l.recv) >= recvBatch {
			l.postRecv(now)
			g.carryOut(now) // what follows if postRecv failed
		}
	}
	for _, l := range g.links {
		if l != nil {
			l.awaitSends(g.lg.AwaitsSent(l.index))
		}
	}
	for _, id := range g.lg.TakeGoneRMBs() {
		g.freeRMB(id)
	}
	g.heardDelete = false
	g.noteIdle()
	g.schedule()
}

func (g *group) carryOut(now time.Time) {
	for !g.lg.Idle() {
		g.s.groups.outs = g.lg.Poll(now, g.s.groups.outs[:0])
		outs := g.s.groups.outs
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
	if l == nil { // the link failed while the machine's outputs were carried out, or the group is over
		g.sendLate(now, o)
		return
	}
	if g.waits(l, o) {
		g.later = append(g.later, *o)
		return
	}
	switch o.Kind {
	case linkgroup.OutWrite:
		l.write(o)
	case linkgroup.OutSend:
		l.send(o)
	case linkgroup.OutReceive:
		l.receive(now, *o.Peer)
	case linkgroup.OutTransmit:
		l.check(now, "queue pair to RTS", l.toRTS())
	case linkgroup.OutCloseLink:
		l.post(now)
		g.endLink(now, l)
		g.doLater(now)
	case linkgroup.OutEvent:
	}
}

// setShell notes the shell of a connection: the Conn, whose protocol state is a linkgroup.Conn.
func (g *group) setShell(c *Conn) {
	slot := c.lc.Slot()
	for len(g.shells) <= slot {
		g.shells = append(g.shells, nil)
	}
	g.shells[slot] = c
}

// shellOf finds the shell of a connection; nil: the connection has none yet, or not any more.
func (g *group) shellOf(lc *linkgroup.Conn) *Conn {
	if slot := lc.Slot(); slot < len(g.shells) {
		if c := g.shells[slot]; c != nil && c.lc == lc {
			return c
		}
	}
	return nil
}

// event acts on an event of the machine, and tells whoever waits for it.
func (g *group) event(now time.Time, o *linkgroup.Output) {
	switch o.Event {
	case linkgroup.EventConn:
		if c := g.shellOf(o.Conn); c != nil {
			c.handle(o.Events)
		}
	case linkgroup.EventConnDone:
		if c := g.shellOf(o.Conn); c != nil {
			c.groupDone()
		} else {
			o.Conn.Release(time.Now()) // its rendezvous failed before it had a shell
			g.freeIfUnused()
		}
	case linkgroup.EventPointOfNoReturn:
		g.setup <- setupEvent{kind: o.Event}
	case linkgroup.EventReady:
		g.ready = true
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
		g.symmetric = g.symmetric || g.lg.Redundancy() == linkgroup.Symmetric
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
	peer, reach := g.nextPeer(o.Peer.GID)
	bound := !o.Peer.GID.IsZero()
	r := g.s.devices.pick(used, peer, bound, reach)
	if (r == nil || !r.active()) && !o.Fresh {
		r = g.s.devices.pick(0, peer, bound, reach)
	}
	// A port that is said to be down may just be reported late; the port is taken
	// where a link of the group works over it already. At first contact the client waits
	// for an offer, even of a link that the client will refuse.
	forming := g.lg.State() == linkgroup.Forming
	if r == nil || !forming && !r.active() && (o.Fresh || used>>r.index&1 == 0) {
		g.lg.NoLink(now, o.Link)
		return
	}
	l, err := g.newLink(o.Link, r)
	if err != nil && forming && r.index != g.first {
		r = g.s.devices.list[g.first] // the offer of a link that the client refuses will do
		l, err = g.newLink(o.Link, r)
	}
	if err != nil {
		g.s.failed("another link", err)
		if forming && g.role == linkgroup.Server {
			// Without an offer the client gives up when we are done, and its connection
			// is reset. Now the connection can still be TCP.
			g.lg.HandleLinkFailure(now, 0, err)
			return
		}
		g.lg.NoLink(now, o.Link)
		return
	}
	if reach != nil && reach[r.index].Gateway {
		l.local.Router = reach[r.index].MAC
	}
	if !g.lg.OfferLink(now, o.Link, l.local) {
		l.close() // the machine wants no link any more
	}
}

// nextPeer returns the peer's RNIC where another link may end, zero if any will
// do, and in version 2 how it is reached. A server that has not been asked for
// one goes by the client's list, as far as it has routes. Where the list names no
// other RNIC the client's answer does, or refuses the link; so it is at first contact, when the
// client waits for an offer, also where no other one is reached.
func (g *group) nextPeer(asked rdma.GID) (rdma.GID, *routes) {
	if g.version < clc.V2 {
		return asked, nil
	}
	if !asked.IsZero() {
		return asked, g.reach(asked)
	}
	links, used := g.lg.Links(), g.lg.RNICsInUse()
	if !slices.ContainsFunc(g.s.devices.list, func(r *rnic) bool { return !r.dead && used>>r.index&1 == 0 }) {
		used = 0
	}
	var other rdma.GID
	var toOther *routes // nil: the list names no other RNIC
	reached := false    // a device reaches other, but only one that carries a link
	for _, gid := range g.gids.Slice() {
		if slices.ContainsFunc(links, func(l linkgroup.LinkInfo) bool { return l.Peer.GID == gid }) {
			continue
		}
		to := g.reach(gid)
		if g.s.devices.pick(used, gid, false, to) != nil { // best by a device that carries no link
			return gid, to
		}
		if again := g.s.devices.pick(0, gid, false, to) != nil; toOther == nil || again && !reached {
			other, toOther, reached = gid, to, again
		}
	}
	if reached || toOther != nil && g.lg.State() != linkgroup.Forming {
		return other, toOther
	}
	to := g.reach(g.gid) // a guess
	for i := range to {
		to[i].Found = true
	}
	return asked, to
}

// reach tells how each device reaches a peer's RNIC now.
func (g *group) reach(peer rdma.GID) *routes {
	to := &routes{}
	for _, r := range g.s.devices.list {
		to[r.index] = g.s.route(r, r.gids.v2, peer)
	}
	return to
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
	if forming { // no event tells of this end; every other group is removed by EventDead
		g.remove()
		close(g.formed)
	}
}

// remove takes a dead group off the stack. The group's memory goes with its last
// connection.
func (g *group) remove() {
	g.noteIdle()
	g.changed()
	g.s.groups.remove(g)
	g.s.groups.lost.note(g)
	g.s.counters.past.countGroup(g)
	for id, ws := range g.rmbWait {
		for _, w := range ws {
			w <- false
		}
		delete(g.rmbWait, id)
	}
	g.freeIfUnused()
}

// finish ends the group because the stack does, and waits for the peer no longer.
func (g *group) finish() {
	now := time.Now()
	for _, l := range g.links {
		if l != nil {
			g.lg.HandleLinkFailure(now, l.index, errStackClosed)
		}
	}
	g.flush(now)
}

// doubt is called when the peer of a rendezvous says that it does not have the group.
// The links know better: without answers to TEST LINK they are lost, and until there
// is one no connection is put into the group.
func (g *group) doubt() {
	now := time.Now()
	g.doubted = now
	g.doubts++
	g.lg.TestLinks(now)
	g.flush(now)
}

// isTrusted reports whether the peer has the group, as far as we know. Where it says twice
// that it does not, somebody may have made the group in its name.
func (g *group) isTrusted() bool {
	return g.doubts == 0 || g.doubts == 1 && g.lg.ProvenSince(g.doubted)
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
	g.mem.trim()
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
		Redundancy: g.lg.Redundancy().String(), Degraded: g.symmetric && g.lg.Redundancy() != linkgroup.Symmetric, Version: g.version, NoV2: g.agreed.NoV2, Conns: g.lg.Conns(), Opened: g.opened, Err: g.lg.Err(),
	}
	if g.version >= clc.V2 {
		info.EID, info.Release, info.PeerHost = g.agreed.EID.String(), g.agreed.Release, g.host
	}
	for _, r := range g.rmbs {
		info.RMBBytes += len(r.mem)
	}
	for _, l := range g.lg.Links() {
		info.Links = append(info.Links, LinkInfo{
			ID: uint8(l.ID), State: l.State, Device: g.deviceName(l.Index),
			LocalGID: l.Local.GID, PeerGID: l.Peer.GID, LocalQPN: l.Local.QPN, PeerQPN: l.Peer.QPN,
			MTU: l.Peer.MTU, UserID: l.UserID, Conns: l.Conns, BytesSent: l.Sent, BytesRecv: l.Recv,
		})
	}
	return info
}
