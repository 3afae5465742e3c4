// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// negotiation is what clc.Client and clc.Server have in common.
type negotiation interface {
	Want() int
	Partial() bool
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

func (s *Stack) malformed(where string, err error) {
	if h := s.cfg.Hooks.Malformed; h != nil {
		h(where, err)
	}
}

func (s *Stack) failed(what string, err error) {
	if h := s.cfg.Hooks.Failed; h != nil {
		h(what, err)
	}
}

// plain wraps a connection that carries no CLC messages.
func (r *rendezvous) plain(why clc.Reason) *Conn {
	c := newTCPConn(r.s, r.tcp, r.info(ModeTCP), nil, false)
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
		r.s.counters.past.ConnsSMCR++
	} else {
		r.s.counters.past.ConnsTCP++
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
		if r.startRead() {
			continue
		}
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
// follows may be the application's. True: what was wanted was there. Else a goroutine waits for
// it: of a message only the header is waited for, mostly.
func (r *rendezvous) startRead() bool {
	want := r.m.Want()
	if want == 0 || r.reading {
		return false
	}
	b := make([]byte, want)
	n := r.readNow(b)
	if n == want {
		r.handleRead(readResult{b, nil})
		return true
	}
	r.reading = true
	go func() {
		m, err := io.ReadFull(r.tcp, b[n:])
		r.reads <- readResult{b[:n+m], err}
	}()
	return false
}

// readNow reads what is there, without waiting.
func (r *rendezvous) readNow(b []byte) int {
	raw, err := r.tcp.SyscallConn()
	if err != nil {
		return 0
	}
	t := transfer{buf: b}
	err = raw.Read(func(fd uintptr) bool {
		t.do(syscall.SYS_READ, fd)
		return true
	})
	if err != nil || t.errno != 0 {
		return 0 // who waits finds out
	}
	return t.n
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
	if !r.m.Partial() {
		r.partial = nil
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
		r.s.failed("link group", ev.err)
		r.m.Decline(now, setupReason(ev.err), false)
	case linkgroup.EventRMBConfirmed, linkgroup.EventRMBRefused, linkgroup.EventConn, linkgroup.EventConnDone, linkgroup.EventDead,
		linkgroup.EventWantLink, linkgroup.EventLink:
	}
}

// setupReason is the diagnosis code for a failed first contact.
func setupReason(err error) clc.Reason {
	var se *linkgroup.SetupError
	switch {
	case isExhausted(err):
		return clc.ReasonMem
	case !errors.As(err, &se):
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
		r.s.counters.clcSent.Add(1)
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

// declineUnless is decline, unless the rendezvous is to end with its connection, which run sees to.
func (r *rendezvous) declineUnless(ctx context.Context, err error) {
	if ctx.Err() == nil && !errors.Is(err, errStackClosed) {
		r.decline(err)
	}
}

// decline gives up SMC-R for a reason of ours.
func (r *rendezvous) decline(err error) {
	reason, outOfSync := declineReason(err)
	if isPeersFault(err) {
		r.s.malformed("CLC", fmt.Errorf("from %v: %w", r.tcp.RemoteAddr(), err))
	} else {
		r.s.failed("rendezvous", err)
	}
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
	errPeerID    = errors.New("smcr: the peer's Confirm has another peer ID than its Proposal, or than its link group")
	errSlow      = errors.New("smcr: no answer for the client in time")
)

// isPeersFault reports whether an error says that the peer's message contradicts what it, or
// its link group, said before. That it names a link group or a link that is not here
// (errOutOfSync, errNoLink) need not be its fault.
func isPeersFault(err error) bool {
	return errors.Is(err, errPeerID) || errors.Is(err, linkgroup.ErrUnknownRToken) || errors.Is(err, linkgroup.ErrPeerRMBE)
}

// isExhausted reports whether an error says that memory or queue pairs are used up, of
// the stack or of a device.
func isExhausted(err error) bool {
	return isShort(err) || errors.Is(err, errQueuePairs) || errors.Is(err, rdma.ErrNoResources)
}

func declineReason(err error) (_ clc.Reason, outOfSync bool) {
	var de *clc.DeclineError
	switch {
	case errors.As(err, &de):
		return de.Reason, false
	case isExhausted(err), errors.Is(err, errMaxConns), errors.Is(err, linkgroup.ErrFull):
		return clc.ReasonMem, false
	case errors.Is(err, errNoDevice):
		return clc.ReasonNoDevR, false
	case errors.Is(err, errOutOfSync):
		return clc.ReasonSyncErr, true
	case errors.Is(err, errNoPlace):
		return clc.ReasonMem, false
	case errors.Is(err, errSlow), errors.Is(err, errBarred), errors.Is(err, errPathMTU): // it passes
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
	r.s.counters.past.RMBWaits++
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
		Ext: clc.FirstContactExtension{Direct: r.first && isDirect(r.route())},
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
	c.applyNegotiated()
	closed := r.s.closed
	if !closed {
		c.life.opened = true
		if err := r.s.tcpWatch.add(c); err != nil {
			r.s.failed("TCP connection", err) // it works; a dead peer is noticed later
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
	c := newTCPConn(r.s, r.tcp, r.info(ModeTCP), r.partial, d.MayCross)
	c.info.Reason, c.info.PeerDeclined = d.Reason, d.FromPeer
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
	return &net.OpError{Op: "rendezvous", Net: "tcp", Source: r.tcp.LocalAddr(), Addr: r.tcp.RemoteAddr(), Err: rendezvousError{err}}
}

// rendezvousError is why a rendezvous ended its connection. It is a timeout if one is behind it, as
// that of a context: [net.OpError] asks nothing that is further below.
type rendezvousError struct{ error }

func (e rendezvousError) Unwrap() error { return e.error }

func (e rendezvousError) Timeout() bool {
	var t interface{ Timeout() bool }
	return errors.As(e.error, &t) && t.Timeout()
}

// discard gives back what the rendezvous took.
func (r *rendezvous) discard(peerDeclined bool) {
	s := r.s
	s.lock()
	if r.conn != nil {
		now := time.Now()
		if r.halfOpen {
			r.halfOpen = false
			r.conn.abandon(now, r.with.addr)
		}
		r.conn.life.keepTCP = true
		r.conn.life.closed.Store(true)
		r.conn.lc.Abandon(now, peerDeclined || !r.named)
		r.group.flush(now)
		r.conn.giveSend() // the RMBE may be the peer's for longer
	}
	if r.first && r.group != nil {
		r.group.abandon()
	}
	s.unlock()
	r.endHalfOpen()
	if r.conn != nil {
		r.conn.unref()
		r.conn = nil
	}
}
