// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// talk is the rendezvous of one connection (RFC 7609 §3.5.1, §3.5.2): a CLC
// machine at each end and the TCP connection between them. What the shell would
// decide is decided here, for each side from what that side knows.
type talk struct {
	w      *World
	c      *pair
	p      *path // nil before the server has chosen one
	m      [2]clcMachine
	client *clc.Client
	server *clc.Server

	in    [2][]byte    // what has arrived at a side
	last  [2]time.Time // when the last segment arrives there
	eof   [2]bool
	over  [2]bool // the machine has come to its end, or the process has
	named [2]bool // the peer has been told of this side's RMBE
	first bool
	agree [2]clc.Selection
}

// clcMachine is what clc.Client and clc.Server share.
type clcMachine interface {
	State() clc.State
	Poll(dst []clc.Output) []clc.Output
	Want() int
	HandleData(now time.Time, b []byte) error
	HandleEOF(now time.Time)
	HandleTimeout(now time.Time)
	NextTimeout() (time.Time, bool)
	Decline(now time.Time, r clc.Reason, outOfSync bool)
	Complete(now time.Time)
	PassPointOfNoReturn(now time.Time)
}

// peerID names a peer's process.
func (w *World) peerID(peer int) clc.PeerID {
	return clc.NewPeerID(w.peers[peer].instance, rdma.MAC{5: byte(peer + 1)})
}

// EIDs that peers have.
var eids = [...]clc.EID{eid("SMC-A"), eid("SMC-B")}

func eid(s string) clc.EID {
	e, _ := clc.NewEID(s)
	return e
}

// clcConfig is what a peer tells and takes.
func (w *World) clcConfig(peer int) clc.Config {
	c := clc.Config{PeerID: w.peerID(peer), OS: clc.OSLinux, Hostname: fmt.Sprintf("peer-%d", peer)}
	v := w.cfg.versions(peer)
	c.V1, c.V2 = v&1 != 0, v&2 != 0
	net := byte(0)
	if w.cfg.Routed {
		net = byte(peer)
	}
	c.Subnets = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, net, 0}), 24)}
	for i, e := range eids {
		if w.cfg.EIDs[peer]&(1<<i) != 0 || w.cfg.EIDs[peer] == 0 && i == 0 {
			c.EIDs = append(c.EIDs, e)
		}
	}
	c.Release, c.MaxLinks, c.MaxConns = uint8(w.cfg.Release[peer]), uint8(w.cfg.MaxLinks[peer]), uint8(w.cfg.MaxConns[peer])
	return c
}

// versions is the set of versions that a peer has: bit 0 is version 1.
func (c *Config) versions(peer int) int {
	if v := c.Versions[peer]; v != 0 {
		return v
	}
	return 1
}

// version is what two peers must agree on; 0 is nothing.
func (w *World) version(client, server int) uint8 {
	a, b := w.clcConfig(client), w.clcConfig(server)
	for _, e := range a.EIDs {
		for _, o := range b.EIDs {
			if a.V2 && b.V2 && e == o {
				return clc.V2
			}
		}
	}
	if a.V1 && b.V1 && !w.cfg.Routed {
		return clc.V1
	}
	return 0
}

// Connect starts a connection from a peer to another one; Run completes it.
func (w *World) Connect(client, server int, name string) {
	if w.conns[name] != nil || client == server {
		return
	}
	c := &pair{name: name, peers: [2]int{client, server}}
	if client > server {
		c.peers, c.client = [2]int{server, client}, 1
	}
	w.conns[name] = c
	t := &talk{w: w, c: c}
	w.talks = append(w.talks, t)
	t.client, t.server = clc.NewClient(w.clcConfig(client)), clc.NewServer(t.now(1-c.client), w.clcConfig(server))
	t.m[c.client], t.m[1-c.client] = t.client, t.server
	t.propose()
	t.drive(c.client)
	t.drive(1 - c.client)
	w.pump()
}

// now is what a side thinks the time is.
func (t *talk) now(side int) time.Time { return t.w.now.Add(t.w.peers[t.c.peers[side]].skew) }

// propose begins, at the client.
func (t *talk) propose() {
	side := t.c.client
	r := t.w.anyRNIC(t.c.peers[side], nil)
	if r == nil {
		t.decline(side, errNoDevice)
		return
	}
	e := r.endpoint()
	p, err := t.w.clcConfig(t.c.peers[side]).Proposal(clc.Offer{GID: e.GID, MAC: e.MAC, GIDv2: e.GID})
	if err != nil {
		t.decline(side, err)
		return
	}
	t.client.Propose(t.now(side), p)
}

// drive carries out what a machine wants, and gives it what it may read.
func (t *talk) drive(side int) {
	m := t.m[side]
	for moved := true; moved && !t.over[side]; {
		moved = false
		for _, o := range m.Poll(nil) {
			moved = true
			if !t.over[side] {
				t.do(side, &o)
			}
		}
		switch n := m.Want(); {
		case n > 0 && len(t.in[side]) >= n:
			b := t.in[side][:n]
			t.in[side] = t.in[side][n:]
			_ = m.HandleData(t.now(side), b) // the outputs say it, too
			moved = true
		case t.eof[side] && !m.State().Done():
			m.HandleEOF(t.now(side))
			moved = true
		}
	}
	if next, ok := m.NextTimeout(); ok && !t.over[side] {
		t.w.at(next.Add(-t.w.peers[t.c.peers[side]].skew), func() {
			if due, ok := m.NextTimeout(); ok && !due.After(t.now(side)) && !t.over[side] {
				m.HandleTimeout(t.now(side))
				t.drive(side)
			}
		})
	}
}

// deliver lets something happen at the other side behind what was sent before.
func (t *talk) deliver(to int, f func()) {
	at := t.w.now.Add(t.w.delay())
	if at.Before(t.last[to]) {
		at = t.last[to]
	}
	t.last[to] = at
	t.w.at(at, func() {
		if !t.over[to] {
			f()
			t.drive(to)
			return
		}
		if t.m[to].State() == clc.StateEstablished {
			t.reset(to) // nothing but the end of the TCP connection comes now
		}
	})
}

// do carries out one output of a machine.
func (t *talk) do(side int, o *clc.Output) {
	switch o.Kind {
	case clc.OutputSend:
		if t.w.tracing {
			t.w.trace("%v %d> %s", t.w.Elapsed(), side, describeCLC(o.Data))
		}
		t.deliver(1-side, func() { t.in[1-side] = append(t.in[1-side], o.Data...) })
	case clc.OutputProposed:
		t.agree[side] = o.Selected
		t.choose(o.Proposal)
	case clc.OutputAccepted:
		t.agree[side] = o.Selected
		t.accepted(o.Accept)
	case clc.OutputConfirmed:
		t.confirmed(o.Confirm)
	case clc.OutputDeclined:
		t.end(side, o.Declined.FromPeer, fmt.Errorf("%w: %v", errDeclined, o.Declined.Reason))
		if o.Declined.OutOfSync && t.p != nil {
			t.p.excused = "the peers were out of step"
			t.p.nodes[side].giveUp(t.p.clock(side))
		}
	case clc.OutputAbort:
		t.end(side, false, o.Err)
		t.deliver(1-side, func() { t.eof[1-side] = true })
	case clc.OutputEstablished:
		t.over[side] = true
		t.c.stands[side] = true
		if side == t.c.client {
			t.c.opened = true // the client may write before its Confirm is read
		}
		if len(t.in[side]) > 0 { // a Decline that came too late (C.6)
			t.reset(side)
			t.deliver(1-side, func() { t.eof[1-side] = true })
		}
	}
}

// declineReason is the code for an error.
func declineReason(err error) (_ clc.Reason, outOfSync bool) {
	var d *clc.DeclineError
	switch {
	case errors.As(err, &d):
		return d.Reason, false
	case errors.Is(err, errNoDevice):
		return clc.ReasonNoDevR, false
	case errors.Is(err, errOutOfSync):
		return clc.ReasonSyncErr, true
	case errors.Is(err, errLinkLost), errors.Is(err, linkgroup.ErrLinkLost), errors.Is(err, errPathDead):
		return clc.ReasonNoSrvLink, false
	case errors.Is(err, linkgroup.ErrFull), errors.Is(err, errWish):
		return clc.ReasonMem, false
	}
	return clc.ReasonErrRegBuf, false
}

// decline gives SMC-R up at one side.
func (t *talk) decline(side int, err error) {
	if t.over[side] {
		return
	}
	if t.c.failed == nil {
		t.c.failed = err
	}
	r, outOfSync := declineReason(err)
	t.m[side].Decline(t.now(side), r, outOfSync)
}

// end is the end of a rendezvous without success, as one side sees it.
func (t *talk) end(side int, fromPeer bool, err error) {
	w, c := t.w, t.c
	t.over[side] = true
	if c.failed == nil {
		c.failed = err
	}
	w.trace("%v rendezvous of %s at peer %d: %v", w.Elapsed(), c.name, c.peers[side], err)
	if t.p == nil {
		return
	}
	n := t.p.nodes[side]
	// Before the client could write, each side hears the other's Decline, or has
	// not told the other of its RMBE.
	free := fromPeer || !t.named[side]
	c.kept = c.kept || !free
	n.abandon(t.p.clock(side), c.name, free)
	if !t.first {
		return
	}
	if n.condition() == forming {
		t.p.excused = "its first contact failed"
		n.giveUp(t.p.clock(side))
	}
	t.neverThere(1 - side)
}

// reset is the end of the TCP connection when one side took the rendezvous for
// complete.
func (t *talk) reset(side int) {
	if e := t.p.nodes[side].end(t.c.name); e != nil {
		t.c.kept = true
		e.abort(t.p.clock(side))
	}
}

// die is the end of a side's process.
func (t *talk) die(side int) {
	if t.over[side] {
		return
	}
	t.over[side] = true
	if t.c.failed == nil {
		t.c.failed = errRestarted
	}
	if t.over[1-side] && t.first {
		t.neverThere(1 - side) // nobody is left who would find out
	}
	t.deliver(1-side, func() { t.eof[1-side] = true })
}

// neverThere ends the wait for a side of the group that the rendezvous has not brought about.
func (t *talk) neverThere(side int) {
	if o, ok := t.p.nodes[side].(*gone); ok {
		o.giveUp(t.w.now)
	}
}

// await polls for a condition at one side, as the goroutine of a rendezvous
// waits for it; err ends the rendezvous.
func (t *talk) await(side int, cond func() (bool, error), then func()) {
	w := t.w
	began := w.now
	var try func()
	try = func() {
		if t.over[side] {
			return
		}
		ok, err := cond()
		if t.p != nil && t.p.nodes[side].condition() == dead {
			err = errPathDead
		}
		switch {
		case err != nil:
			t.decline(side, err)
		case ok:
			then()
		case w.now.Sub(began) > patience:
			t.decline(side, errPatience)
		default:
			// The longer it takes, the less often it looks.
			w.after(min(20*time.Microsecond+w.now.Sub(began)/8, 10*time.Millisecond), try)
			return
		}
		t.drive(side)
	}
	try()
}

// choose answers a Proposal: it finds a group of the client, or makes one. One
// first contact of a client is under way at a time.
func (t *talk) choose(prop *clc.Proposal) {
	w, c, side := t.w, t.c, 1-t.c.client
	if w.wish() {
		t.decline(side, errWish)
		return
	}
	key := prop.Key(t.agree[side].Version)
	wait := false
	for _, p := range w.paths {
		if p.client != c.client || p.peers != c.peers || p.key != key {
			continue
		}
		if p.nodes[side].usable() {
			t.p, c.path = p, p
			t.join(side)
			return
		}
		wait = wait || p.nodes[side].condition() == forming
	}
	if wait {
		w.after(time.Millisecond, func() {
			if !t.over[side] && t.m[side].State() == clc.StateDeciding {
				t.choose(prop)
				t.drive(side)
			}
		})
		return
	}
	t.found(side, key)
}

// join takes an RMBE for the connection in a group, at the server, and tells the
// client when that knows the RMB.
func (t *talk) join(side int) {
	n := t.p.nodes[side]
	if err := n.open(t.p.clock(side), t.c.name, nil); err != nil {
		if errors.Is(err, linkgroup.ErrFull) {
			t.w.fault("%v is full, and said that it is usable", n)
		}
		t.decline(side, err)
		return
	}
	t.await(side, func() (bool, error) { return n.confirmed(t.c.name) }, func() { t.accept(side) })
}

// found makes a group, at the server (§3.5.1, §3.5.3).
func (t *talk) found(side int, key clc.PeerKey) {
	w, c := t.w, t.c
	r := w.anyRNIC(c.peers[side], nil)
	if r == nil {
		t.decline(side, errNoDevice)
		return
	}
	t.first = true
	t.p = &path{w: w, id: len(w.paths), peers: c.peers, client: c.client, key: key, first: t}
	t.p.nodes[c.client] = &gone{state: forming, name: fmt.Sprintf("peer %d, group %d, client", c.peers[c.client], t.p.id)}
	c.path = t.p
	t.newNode(side, linkgroup.Server, r)
	w.paths = append(w.paths, t.p)
	if err := t.p.nodes[side].open(t.p.clock(side), c.name, nil); err != nil {
		w.fault("first RMBE: %w", err)
		return
	}
	t.accept(side)
}

// newNode makes one side of a group.
func (t *talk) newNode(side int, role linkgroup.Role, r *rnic) {
	w, peer := t.w, t.c.peers[side]
	terms := t.agree[side]
	if terms.Version < clc.V2 || terms.Release < clc.Release1 {
		terms.MaxLinks, terms.MaxConns = uint8(w.cfg.MaxLinks[peer]), uint8(w.cfg.MaxConns[peer])
	}
	if w.cfg.Linux[peer] {
		t.p.nodes[side] = newLinux(w, t.p, side, role, terms, r)
	} else {
		t.p.nodes[side] = newEngine(w, t.p, side, role, terms, r)
	}
}

// endpoint is what Accept and Confirm have in common.
func (t *talk) endpoint(side int) clc.Endpoint {
	n := t.p.nodes[side]
	l, e := n.localEndpoint(t.c.name), n.rmbe(t.c.name)
	t.named[side] = true
	return clc.Endpoint{
		FirstContact: t.first, PeerID: t.w.peerID(t.c.peers[side]),
		GID: l.GID, MAC: l.MAC, QPN: l.QPN, PSN: l.PSN, MTU: l.MTU,
		RKey: e.RKey, RMBAddr: e.VAddr, RMBEIndex: e.Index, RMBESize: clc.RMBESizeFor(int(e.Size)), AlertToken: uint32(e.Token),
		Ext: clc.FirstContactExtension{Direct: !t.w.cfg.Routed},
	}
}

func halfOf(e *clc.Endpoint) linkgroup.Endpoint {
	return linkgroup.Endpoint{QPN: e.QPN, GID: e.GID, MAC: e.MAC, PSN: e.PSN, MTU: e.MTU}
}

func rmbeOf(e *clc.Endpoint) linkgroup.RMBE {
	return linkgroup.RMBE{
		Index: e.RMBEIndex, Size: uint32(e.RMBESize.Bytes()), Token: cdc.AlertToken(e.AlertToken),
		RToken: linkgroup.RToken{RKey: e.RKey, VAddr: e.RMBAddr},
	}
}

// route is how each peer reaches the others.
func (w *World) route() clc.Route {
	return clc.Route{Found: true, Gateway: w.cfg.Routed, MAC: w.router()}
}

func (t *talk) accept(side int) { t.server.Accept(t.now(side), clc.Accept{Endpoint: t.endpoint(side)}) }

// accepted answers an Accept.
func (t *talk) accepted(a *clc.Accept) {
	side := t.c.client
	if err := t.checkTerms(a.FirstContact); err != nil {
		t.w.fault("%s: %w", t.c.name, err)
	}
	if t.w.wish() {
		t.decline(side, errWish)
		return
	}
	var err error
	if a.FirstContact {
		err = t.enter(a)
	} else {
		err = t.find(a)
	}
	if err != nil {
		t.decline(side, err)
	}
}

// checkTerms compares what the two sides have agreed on.
func (t *talk) checkTerms(first bool) error {
	server, client := t.agree[1-t.c.client], t.agree[t.c.client]
	if want := t.w.version(t.c.peers[t.c.client], t.c.peers[1-t.c.client]); server.Version != want {
		return fmt.Errorf("version %d was chosen, want %d", server.Version, want)
	}
	if server.Version != client.Version || server.EID != client.EID || first && server.Release != client.Release ||
		first && server.Release > 0 && (server.MaxConns != client.MaxConns || server.MaxLinks != client.MaxLinks) {
		return fmt.Errorf("the server has agreed to %+v, the client to %+v", server, client)
	}
	return nil
}

// enter is a first contact at the client.
func (t *talk) enter(a *clc.Accept) error {
	w, side := t.w, t.c.client
	r := w.anyRNIC(t.c.peers[side], nil)
	if r == nil {
		return errNoDevice
	}
	hop, err := a.NextHop(w.route())
	if err != nil {
		return err
	}
	t.newNode(side, linkgroup.Client, r)
	n := t.p.nodes[side]
	half := halfOf(&a.Endpoint)
	if hop != half.MAC {
		half.Router = hop
	}
	err = n.open(t.p.clock(side), t.c.name, nil)
	if err == nil {
		err = n.activate(t.p.clock(side), t.c.name, rmbeOf(&a.Endpoint), half)
	}
	if err != nil {
		w.fault("first contact of %s at the client: %w", t.c.name, err)
		return err
	}
	n.connectPeer(t.p.clock(side), half)
	t.client.Confirm(t.now(side), clc.Confirm{Endpoint: t.endpoint(side)}, true)
	t.setUp(side)
	return nil
}

// find is a subsequent contact at the client: the Accept names a link.
func (t *talk) find(a *clc.Accept) error {
	w, c, side := t.w, t.c, t.c.client
	half := halfOf(&a.Endpoint)
	var found *path
	err := errOutOfSync
	for _, p := range w.paths {
		if p.client != side || p.peers != c.peers || p.server != a.PeerID || p.nodes[side].condition() == dead {
			continue
		}
		err = errLinkLost
		if p.nodes[side].condition() == forming {
			continue
		}
		for _, l := range p.nodes[side].links() {
			if l.active && l.peer.QPN == half.QPN && l.peer.GID == half.GID && l.peer.MAC == half.MAC {
				found = p
			}
		}
	}
	switch {
	case found == nil:
		return err
	case found != t.p:
		w.fault("%s: the Accept of group %d names a link of group %d", c.name, t.p.id, found.id)
		return errOutOfSync
	}
	n := t.p.nodes[side]
	if err := n.open(t.p.clock(side), c.name, &half); err != nil {
		return err
	}
	t.await(side, func() (bool, error) { return n.confirmed(c.name) }, func() {
		if err := n.activate(t.p.clock(side), c.name, rmbeOf(&a.Endpoint), half); err != nil {
			t.decline(side, err)
			return
		}
		t.client.Confirm(t.now(side), clc.Confirm{Endpoint: t.endpoint(side)}, false)
		t.client.Complete(t.now(side))
	})
	return nil
}

// confirmed takes a Confirm.
func (t *talk) confirmed(m *clc.Confirm) {
	side := 1 - t.c.client
	n, half := t.p.nodes[side], halfOf(&m.Endpoint)
	if !t.p.key.Matches(*m) {
		t.w.fault("%s: Confirm of peer %v, Proposal of %v", t.c.name, m.PeerID, t.p.key)
	}
	if n.condition() == dead {
		t.decline(side, errPathDead)
		return
	}
	if hop := m.NextHop(t.w.route()); hop != half.MAC {
		half.Router = hop
	}
	err := n.activate(t.p.clock(side), t.c.name, rmbeOf(&m.Endpoint), half)
	switch {
	case err != nil && (t.first || t.p.carries(t.p.nodes[side].localEndpoint(t.c.name))) && !t.misled():
		t.w.fault("Confirm of %s: %w", t.c.name, err)
	case err != nil:
		t.decline(side, fmt.Errorf("%w: %w", errLinkLost, err)) // it resets the TCP connection
	case t.first:
		n.connectPeer(t.p.clock(side), half)
		t.setUp(side)
	default:
		t.server.Complete(t.now(side))
	}
}

// misled reports whether the client may name an RMB of which the server has not
// heard yet or, being a kernel that drops requests that cross, never will: it is
// a kernel, too, and does not look which CONFIRM RKEY an answer is for.
func (t *talk) misled() bool {
	client, ok := t.p.nodes[t.c.client].(*linux)
	return ok && client.misled
}

// setUp waits for the LLC part of a first contact. A group of this project tells
// when the point of no return is passed; of the kernel's model only the end is
// seen.
func (t *talk) setUp(side int) {
	n := t.p.nodes[side]
	if t.c.client != side {
		t.p.server = t.w.peerID(t.c.peers[side])
	}
	if _, ok := n.(*engine); ok {
		return
	}
	t.await(side, func() (bool, error) {
		if n.condition() == dead {
			return false, errSetUp
		}
		return n.condition() == active, nil
	}, func() { t.m[side].Complete(t.now(side)) })
}

// setUpEvent takes what a group of this project says of its first contact.
func (t *talk) setUpEvent(side int, o linkgroup.EventKind, err error) {
	t.w.at(t.w.now, func() {
		switch {
		case t.over[side]:
			return
		case o == linkgroup.EventPointOfNoReturn:
			t.m[side].PassPointOfNoReturn(t.now(side))
		case o == linkgroup.EventReady:
			t.m[side].Complete(t.now(side))
		case o == linkgroup.EventSetupFailed:
			t.m[side].Decline(t.now(side), clc.ReasonTimeoutCL, false)
			if t.c.failed == nil {
				t.c.failed = err
			}
		}
		t.drive(side)
	})
}

// carries reports whether both sides have a link with this half of the server.
func (p *path) carries(via linkgroup.Endpoint) bool {
	sides := 0
	for side, n := range p.nodes {
		for _, l := range n.links() {
			half := l.local
			if side == p.client {
				half = l.peer
			}
			if l.active && half.QPN == via.QPN {
				sides++
			}
		}
	}
	return sides == 2
}

// wish reports that a peer declines for reasons of its own.
func (w *World) wish() bool { return w.cfg.Declines > 0 && w.rng.IntN(1000) < w.cfg.Declines }

func describeCLC(b []byte) string {
	if p, err := clc.ParseProposal(b); err == nil {
		return fmt.Sprintf("CLC Proposal of %v: version 1 %v, version 2 %v", p.PeerID, p.V1, p.V2)
	}
	if d, err := clc.ParseDecline(b); err == nil {
		return fmt.Sprintf("CLC Decline: %v", d.Reason)
	}
	kind, e := "Accept", clc.Endpoint{}
	if a, err := clc.ParseAccept(b); err == nil {
		e = a.Endpoint
	} else if c, err := clc.ParseConfirm(b); err == nil {
		kind, e = "Confirm", c.Endpoint
	}
	s := fmt.Sprintf("CLC %s v%d: qpn=%v rkey=%#x index=%d token=%#08x", kind, e.Version, e.QPN, uint32(e.RKey), e.RMBEIndex, e.AlertToken)
	if e.FirstContact {
		s += " first contact"
	}
	return s
}
