// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// negotiation is what clc.Client and clc.Server have in common.
type negotiation interface {
	Want() int
	HandleData(now time.Time, b []byte) error
	HandleEOF(now time.Time)
	HandleTimeout(now time.Time)
	NextTimeout() (time.Time, bool)
	Poll(dst []clc.Output) []clc.Output
	State() clc.State
	Decline(now time.Time, r clc.Reason, outOfSync bool)
	PassPointOfNoReturn(now time.Time)
	Complete(now time.Time)
}

// rendezvous runs one CLC negotiation on one TCP connection. It is owned by
// the goroutine that dials or accepts.
type rendezvous struct {
	s       *Stack
	tcp     *net.TCPConn
	m       negotiation
	client  *clc.Client // m, if we dial
	server  *clc.Server // m, if we accept
	started time.Time

	group *group
	first bool
	conn  *Conn
	named bool    // our Accept or Confirm went out: the peer may know the RMBE
	with  contact // with whom

	halfOpen bool // the client owes its Confirm

	reads   chan readResult // the answer of the read under way
	reading bool
	partial []byte // of a message that is not complete
}

type readResult struct {
	b   []byte
	err error
}

// Client runs the rendezvous on a connection that was dialed with the
// option's ControlDial. It owns tcp. An error means that the connection was
// broken; every other failure gives a connection in ModeTCP.
func (s *Stack) Client(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	r := &rendezvous{s: s, tcp: tcp, started: time.Now(), reads: make(chan readResult, 1)}
	if s.cfg.Option == nil {
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	switch offered, err := s.cfg.Option.PeerOffered(tcp); {
	case err != nil: // it says nothing about the peer
		s.malformed("TCP option", err)
		return r.plain(clc.ReasonInternal), nil
	case !offered:
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	cfg := s.clcConfig(tcp)
	r.client = clc.NewClient(cfg)
	r.m = r.client
	r.with.role, r.with.addr = linkgroup.Client, addrOf(tcp.RemoteAddr())
	if p, err := cfg.Proposal(s.offer()); err == nil {
		r.client.Propose(r.started, p)
	} else {
		r.decline(err)
	}
	return r.run(ctx)
}

// Server runs the rendezvous on a connection that was accepted from a
// listener made with the option's ControlListen. It owns tcp, as Client does.
func (s *Stack) Server(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	return s.ServerDecline(ctx, tcp, 0)
}

// ServerDecline is Server, but declines the proposal with reason unless it
// is 0.
func (s *Stack) ServerDecline(ctx context.Context, tcp *net.TCPConn, reason clc.Reason) (*Conn, error) {
	r := &rendezvous{s: s, tcp: tcp, started: time.Now(), reads: make(chan readResult, 1)}
	if s.cfg.Option == nil {
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	offered, err := s.cfg.Option.SYNOffered(tcp)
	if err != nil {
		s.malformed("TCP option", err)
	}
	if !offered {
		return r.plain(clc.ReasonPeerNoSMC), nil
	}
	r.server = clc.NewServer(r.started, s.clcConfig(tcp))
	r.m = r.server
	r.with.role, r.with.addr = linkgroup.Server, addrOf(tcp.RemoteAddr())
	if reason != 0 {
		r.m.Decline(r.started, reason, false)
	}
	return r.run(ctx)
}

func (s *Stack) malformed(where string, err error) {
	if h := s.cfg.Hooks.Malformed; h != nil {
		h(where, err)
	}
}

// plain wraps a connection that carries no CLC messages.
func (r *rendezvous) plain(why clc.Reason) *Conn {
	c := newTCPConn(r.s, r.tcp, r.info(ModeTCP), nil)
	c.info.Reason = why
	r.opened(c)
	return c
}

func (r *rendezvous) info(m Mode) Info {
	role := RoleServer
	if r.client != nil {
		role = RoleClient
	}
	i := Info{
		Local: r.tcp.LocalAddr(), Peer: r.tcp.RemoteAddr(), Mode: m, Role: role,
		Opened: r.started, Setup: time.Since(r.started), FirstContact: r.first,
	}
	if m == ModeSMCR {
		i.Version, i.NoV2 = r.with.agreed.Version, r.with.agreed.NoV2
	}
	return i
}

func (r *rendezvous) opened(c *Conn) {
	r.s.lock()
	if c.info.Mode == ModeSMCR {
		r.s.stats.ConnsSMCR++
	} else {
		r.s.stats.ConnsTCP++
	}
	r.s.unlock()
	if h := r.s.cfg.Hooks.ConnOpened; h != nil {
		h(c.Info())
	}
}

// run drives the negotiation to one of its three ends.
func (r *rendezvous) run(ctx context.Context) (*Conn, error) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var outs []clc.Output
	for {
		outs = r.m.Poll(outs[:0])
		for i := range outs {
			c, done, err := r.do(ctx, &outs[i])
			if done || err != nil {
				return c, err
			}
		}
		if len(outs) > 0 {
			continue
		}
		r.startRead()
		if t, ok := r.m.NextTimeout(); ok {
			timer.Reset(time.Until(t))
		} else {
			timer.Reset(time.Hour)
		}
		var events chan setupEvent
		if r.first && r.group != nil {
			events = r.group.setup
		}
		select {
		case res := <-r.reads:
			r.reading = false
			r.handleRead(res)
		case ev := <-events:
			r.handleSetup(ev)
		case <-timer.C:
			r.m.HandleTimeout(time.Now())
		case <-r.s.closing:
			return nil, r.abort(errStackClosed)
		case <-ctx.Done():
			return nil, r.abort(fmt.Errorf("smcr: rendezvous with %v: %w", r.tcp.RemoteAddr(), context.Cause(ctx)))
		}
	}
}

// startRead reads what the negotiation wants, and not a byte more: what
// follows may be the application's.
func (r *rendezvous) startRead() {
	want := r.m.Want()
	if want == 0 || r.reading {
		return
	}
	r.reading = true
	go func() {
		b := make([]byte, want)
		n, err := io.ReadFull(r.tcp, b)
		r.reads <- readResult{b[:n], err}
	}()
}

// stopRead ends a read under way, keeping what it got.
func (r *rendezvous) stopRead() {
	if r.reading {
		_ = r.tcp.SetReadDeadline(time.Unix(1, 0)) // fails only on a closed connection, where the read ends too
		res := <-r.reads
		r.reading = false
		r.partial = append(r.partial, res.b...)
	}
	_ = r.tcp.SetDeadline(time.Time{}) // likewise
}

func (r *rendezvous) handleRead(res readResult) {
	now := time.Now()
	if res.err != nil {
		r.m.HandleEOF(now)
		return
	}
	r.partial = append(r.partial, res.b...)
	if err := r.m.HandleData(now, res.b); err != nil {
		r.s.malformed("CLC", fmt.Errorf("from %v: %w", r.tcp.RemoteAddr(), err))
	}
	if r.m.Want() == 0 || r.m.Want() == clc.HeaderLen {
		r.partial = nil // the message is complete
	}
}

// handleSetup takes what the first contact's LLC part reports.
func (r *rendezvous) handleSetup(ev setupEvent) {
	now := time.Now()
	switch ev.kind {
	case linkgroup.EventPointOfNoReturn:
		r.m.PassPointOfNoReturn(now)
	case linkgroup.EventReady:
		r.m.Complete(now)
	case linkgroup.EventSetupFailed:
		r.s.malformed("link group", ev.err)
		r.m.Decline(now, setupReason(ev.err), false)
	case linkgroup.EventRMBConfirmed, linkgroup.EventRMBRefused, linkgroup.EventConn, linkgroup.EventConnDone, linkgroup.EventDead,
		linkgroup.EventWantLink, linkgroup.EventLink:
	}
}

// setupReason is the diagnosis code for a failed first contact.
func setupReason(err error) clc.Reason {
	var se *linkgroup.SetupError
	if !errors.As(err, &se) {
		return clc.ReasonInternal
	}
	switch se.Fault {
	case linkgroup.FaultConfirmLinkTimeout:
		return clc.ReasonTimeoutCL
	case linkgroup.FaultAddLinkTimeout:
		return clc.ReasonTimeoutAL
	case linkgroup.FaultEyeCatcher:
		return clc.ReasonRMBEEC
	case linkgroup.FaultProtocol:
		return clc.ReasonInternal
	case linkgroup.FaultLink:
		return clc.ReasonErrReadyLnk
	}
	return clc.ReasonInternal
}

// do carries out one output; done means that the rendezvous has ended.
func (r *rendezvous) do(ctx context.Context, o *clc.Output) (_ *Conn, done bool, _ error) {
	switch o.Kind {
	case clc.OutputSend:
		_ = r.tcp.SetWriteDeadline(time.Now().Add(r.s.cfg.MessageTimeout)) // the write below reports a dead connection
		if _, err := r.tcp.Write(o.Data); err != nil {
			return nil, true, r.abort(fmt.Errorf("send CLC message: %w", err))
		}
		r.s.clcSent.Add(1)
	case clc.OutputProposed:
		r.with.agreed = o.Selected
		r.propose(ctx, o.Proposal)
	case clc.OutputAccepted:
		r.with.agreed = o.Selected
		r.accept(ctx, o.Accept)
	case clc.OutputConfirmed:
		r.confirm(ctx, o.Confirm)
	case clc.OutputDeclined:
		return r.fallBack(o.Declined), true, nil
	case clc.OutputAbort:
		return nil, true, r.abort(o.Err)
	case clc.OutputEstablished:
		c, err := r.establish()
		return c, true, err
	}
	return nil, false, nil
}

// decline gives up SMC-R for a reason of ours.
func (r *rendezvous) decline(err error) {
	reason, outOfSync := declineReason(err)
	r.s.malformed("rendezvous", err)
	r.m.Decline(time.Now(), reason, outOfSync)
}

// errOutOfSync: the peer names a link group that we do not have (appendix
// C.4). errNoLink: it names none of the group's links.
var (
	errOutOfSync = errors.New("smcr: peer uses a link group that does not exist here")
	errNoLink    = errors.New("smcr: peer names an unknown link")
	errMaxConns  = errors.New("smcr: connection limit of the stack reached")
	errRMB       = errors.New("smcr: peer did not confirm the RMB")
	errNoPlace   = errors.New("smcr: too many clients of this address, or in all, owe their Confirm")
	errSlow      = errors.New("smcr: no answer for the client in time")
)

func declineReason(err error) (_ clc.Reason, outOfSync bool) {
	var mem *errMemory
	var de *clc.DeclineError
	switch {
	case errors.As(err, &de):
		return de.Reason, false
	case errors.As(err, &mem), errors.Is(err, errMaxConns), errors.Is(err, rdma.ErrNoResources), errors.Is(err, linkgroup.ErrFull):
		return clc.ReasonMem, false
	case errors.Is(err, errNoDevice):
		return clc.ReasonNoDevR, false
	case errors.Is(err, errOutOfSync):
		return clc.ReasonSyncErr, true
	case errors.Is(err, errNoPlace):
		return clc.ReasonMem, false
	case errors.Is(err, errSlow), errors.Is(err, errBarred): // it passes
		return clc.ReasonNoActLink, false
	case errors.Is(err, errNoLink), errors.Is(err, linkgroup.ErrLinkLost):
		return clc.ReasonNoSrvLink, false
	case errors.Is(err, linkgroup.ErrUnknownRToken), errors.Is(err, linkgroup.ErrPeerRMBE):
		return clc.ReasonErrRToken, false
	case errors.Is(err, errRMB):
		return clc.ReasonErrRegBuf, false
	}
	return clc.ReasonInternal, false
}

// confirmRMB makes sure that the peer knows the connection's RMB before CLC
// names it (RFC 7609 3.5.2).
func (r *rendezvous) confirmRMB(ctx context.Context) error {
	g := r.group
	r.s.lock()
	id := r.conn.lc.Local().RMB
	if g.lg.IsConfirmed(id) {
		r.s.unlock()
		return nil
	}
	r.s.stats.RMBWaits++
	wait := make(chan bool, 1)
	g.rmbWait[id] = append(g.rmbWait[id], wait)
	g.lg.ConfirmRMB(id)
	g.flush(time.Now())
	r.s.unlock()
	select {
	case ok := <-wait:
		if !ok {
			return errRMB
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.s.closing:
		return errStackClosed
	}
}

// endpoint fills what Accept and Confirm have in common; the caller holds
// the turn.
func (r *rendezvous) endpoint() clc.Endpoint {
	e := r.conn.lc.Local()
	l := r.conn.lc.Endpoint()
	return clc.Endpoint{ // the machine adds what was negotiated
		FirstContact: r.first, PeerID: r.s.peerIDFor(r.with.addr),
		GID: l.GID, MAC: l.MAC, QPN: l.QPN, PSN: l.PSN, MTU: l.MTU,
		RKey: e.RKey, RMBAddr: e.VAddr, RMBEIndex: e.Index, RMBESize: clc.RMBESizeFor(int(e.Size)), AlertToken: uint32(e.Token),
		Ext: clc.FirstContactExtension{Direct: r.first && !r.route().Gateway},
	}
}

// route is how a first contact's link reaches the peer.
func (r *rendezvous) route() clc.Route { return r.with.routes[r.group.first] }

func (r *rendezvous) peerEndpoint(e *clc.Endpoint) linkgroup.Endpoint {
	p := linkgroup.Endpoint{QPN: e.QPN, GID: e.GID, MAC: e.MAC, PSN: e.PSN, MTU: e.MTU}
	if to := r.route(); to.Gateway {
		p.Router = to.MAC
	}
	return p
}

func peerRMBE(e *clc.Endpoint) linkgroup.RMBE {
	return linkgroup.RMBE{
		Index: e.RMBEIndex, Size: uint32(e.RMBESize.Bytes()), Token: cdc.AlertToken(e.AlertToken),
		RToken: linkgroup.RToken{RKey: e.RKey, VAddr: e.RMBAddr},
	}
}

// propose answers a Proposal, at the server.
func (r *rendezvous) propose(ctx context.Context, p *clc.Proposal) {
	// The client waits as long as we would, and resets its connection then: so it has
	// to have an answer before.
	ctx, stop := context.WithTimeoutCause(ctx, min(r.s.cfg.MessageTimeout, clc.DefaultMessageTimeout)*2/3, errSlow)
	defer stop()
	a, err := r.prepareAccept(ctx, p)
	if err != nil {
		r.decline(err)
		return
	}
	r.named = true
	r.server.Accept(time.Now(), a)
}

func (r *rendezvous) prepareAccept(ctx context.Context, p *clc.Proposal) (clc.Accept, error) {
	s := r.s
	r.with.key, r.with.peer = p.Key(r.with.agreed.Version), p.PeerID
	if err := r.joinGroup(ctx, p); err != nil {
		return clc.Accept{}, err
	}
	if !r.first {
		if err := r.confirmRMB(ctx); err != nil {
			return clc.Accept{}, err
		}
	}
	s.lock()
	defer s.unlock()
	return clc.Accept{Endpoint: r.endpoint()}, nil
}

// findRoutes asks how the client's RNIC is reached, at a server. Version 2 needs a
// route; without one version 1 is left.
func (r *rendezvous) findRoutes(ctx context.Context, p *clc.Proposal) error {
	v2 := r.with.agreed.Version >= clc.V2
	r.with.gid = p.GID
	if v2 {
		r.with.gid = p.Ext.GID
	}
	r.with.routes = r.s.routesTo(ctx, r.with.gid)
	if !v2 || r.with.routes.any() {
		return nil
	}
	v1, ok := r.server.WithoutV2(time.Now(), clc.ReasonNoRoute)
	if !ok {
		return &clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no device has a route to the client's RNIC %v", p.Ext.GID)}
	}
	r.with.agreed, r.with.key = v1, p.Key(v1.Version)
	return r.findRoutes(ctx, p)
}

// accept answers an Accept, at the client.
func (r *rendezvous) accept(ctx context.Context, a *clc.Accept) {
	if err := r.prepareConfirm(ctx, a); err != nil {
		r.decline(err)
		return
	}
	r.s.lock()
	c := clc.Confirm{Endpoint: r.endpoint()}
	c.MTU = min(c.MTU, a.MTU)
	c.GIDs = r.s.gids(c.GID)
	r.s.unlock()
	r.named = true
	r.client.Confirm(time.Now(), c, r.first)
	if !r.first {
		r.client.Complete(time.Now())
	}
}

func (r *rendezvous) prepareConfirm(ctx context.Context, a *clc.Accept) error {
	s := r.s
	r.with.peer, r.with.gid, r.with.host = a.PeerID, a.GID, a.Ext.Host()
	if a.FirstContact {
		r.with.routes = s.routesTo(ctx, a.GID)
		if err := r.checkRoutes(a); err != nil {
			return err
		}
		s.lock()
		defer s.unlock()
		if s.closed {
			return errStackClosed
		}
		if err := r.admitTo(nil); err != nil {
			return err
		}
		return r.connect(&a.Endpoint)
	}
	s.lock()
	if s.closed {
		s.unlock()
		return errStackClosed
	}
	g, err := s.clientGroup(r.with.party(), a)
	if err == nil {
		err = r.admit(g)
	}
	s.unlock()
	if err == nil {
		err = r.confirmRMB(ctx)
	}
	if err != nil {
		return err
	}
	s.lock()
	defer s.unlock()
	return r.activate(&a.Endpoint)
}

// checkRoutes takes away the routes that do not agree with what a server of
// version 2 says about them. One must be left.
func (r *rendezvous) checkRoutes(a *clc.Accept) error {
	if a.Version < clc.V2 {
		return nil
	}
	var refused error
	to := &r.with.routes
	for i := range to {
		if !to[i].Found {
			continue
		}
		if _, err := a.NextHop(to[i]); err != nil {
			to[i], refused = clc.Route{}, err
		}
	}
	if to.any() {
		return nil
	}
	if refused == nil {
		return &clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no device has a route to the server's RNIC %v", a.GID)}
	}
	return refused
}

// connect brings a first contact's link up; the caller holds the turn.
func (r *rendezvous) connect(e *clc.Endpoint) error {
	now := time.Now()
	if err := r.conn.lc.Activate(peerRMBE(e)); err != nil {
		return err
	}
	r.group.lg.ConnectPeer(now, r.peerEndpoint(e))
	r.group.flush(now)
	return nil
}

// activate gives a subsequent connection the peer's RMBE; the caller holds
// the turn.
func (r *rendezvous) activate(e *clc.Endpoint) error {
	if i, ok := r.group.lg.FindLink(e.QPN, e.GID, e.MAC); ok {
		r.conn.lc.UseLink(i) // its RKey is the one for this link
	}
	if err := r.conn.lc.Activate(peerRMBE(e)); err != nil {
		return err
	}
	r.group.flush(time.Now())
	return nil
}

// confirm takes the client's Confirm, at the server.
func (r *rendezvous) confirm(ctx context.Context, c *clc.Confirm) {
	if !r.first {
		r.endHalfOpen() // at first contact only the link proves that there is a client
	}
	if !r.with.key.Matches(*c) || !r.first && c.PeerID != r.group.peer {
		r.decline(fmt.Errorf("smcr: Confirm of peer %v, the Proposal was from %v", c.PeerID, r.with.peer))
		return
	}
	if r.first && c.Version >= clc.V2 && c.GID != r.with.gid { // not the RNIC that the Proposal was about
		r.with.gid, r.with.routes = c.GID, r.s.routesTo(ctx, c.GID)
		if !r.route().Found {
			r.decline(&clc.DeclineError{Reason: clc.ReasonNoRoute, What: fmt.Sprintf("no route to the client's RNIC %v", c.GID)})
			return
		}
	}
	r.s.lock()
	var err error
	if r.first {
		r.group.meet(c)
		err = r.connect(&c.Endpoint)
	} else {
		err = r.activate(&c.Endpoint)
	}
	r.s.unlock()
	switch {
	case err != nil:
		r.decline(err)
	case !r.first:
		r.server.Complete(time.Now())
	}
}

// establish hands the connection over.
func (r *rendezvous) establish() (*Conn, error) {
	r.stopRead()
	if len(r.partial) > 0 {
		return nil, r.abort(fmt.Errorf("%w: %d bytes after the last CLC message", clc.ErrUnexpectedData, len(r.partial)))
	}
	r.endHalfOpen()
	c := r.conn
	r.s.lock()
	c.info = r.info(ModeSMCR)
	c.settle()
	closed := r.s.closed
	if !closed {
		c.opened = true
		if err := r.s.tcpWatch.add(c); err != nil {
			r.s.malformed("TCP connection", err) // it works; a dead peer is noticed later
		}
	}
	r.s.unlock()
	if closed {
		return nil, r.abort(errStackClosed)
	}
	r.opened(c)
	return c, nil
}

// fallBack gives the TCP connection to the application.
func (r *rendezvous) fallBack(d clc.Declined) *Conn {
	r.stopRead()
	r.discard(d.FromPeer)
	if d.OutOfSync && d.FromPeer {
		r.doubtGroup()
	}
	c := newTCPConn(r.s, r.tcp, r.info(ModeTCP), r.partial)
	c.info.Reason, c.info.PeerDeclined = d.Reason, d.FromPeer
	c.mayCross = d.MayCross
	r.opened(c)
	return c
}

// abort resets the TCP connection.
func (r *rendezvous) abort(err error) error {
	_ = r.tcp.SetLinger(0) // Close resets; there is nothing to do about an error
	_ = r.tcp.Close()
	if r.reading {
		<-r.reads
		r.reading = false
	}
	r.discard(false)
	return &net.OpError{Op: "rendezvous", Net: "tcp", Source: r.tcp.LocalAddr(), Addr: r.tcp.RemoteAddr(), Err: err}
}

// discard gives back what the rendezvous took.
func (r *rendezvous) discard(peerDeclined bool) {
	s := r.s
	s.lock()
	if r.conn != nil {
		if r.halfOpen { // what the peer may know of is not free yet: see becomeZombie
			r.halfOpen, r.conn.halfOpen = false, r.with.addr
		}
		r.conn.keepTCP = true
		r.conn.closed.Store(true)
		r.conn.lc.Abandon(time.Now(), peerDeclined || !r.named)
		r.group.flush(time.Now())
	}
	if r.first && r.group != nil {
		r.group.abandon()
	}
	s.unlock()
	r.endHalfOpen()
	if r.conn != nil {
		r.conn.drop()
		r.conn = nil
	}
}
