// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// outbound carries a connection that the application made to dst. outbound owns app, on which
// resetOnClose was called, and rv. It returns when nothing is left to do but to relay.
func (px *proxy) outbound(ctx context.Context, app *net.TCPConn, dst netip.AddrPort, rv *reservation) {
	s, ctx, end := px.register(ctx, app, &session{dir: agentapi.Outbound, src: addrPort(app.RemoteAddr()), dst: dst, reservation: rv})
	defer end()
	why := px.admitSMCR(s)
	if why.code != agentapi.CodeOK && s.decision.Required {
		px.refuse(s, nil, why)
		return
	}
	code := why.code
	if code != agentapi.CodeOK && !px.bypassFirst(s, code) {
		px.resetBroken(s, nil, code, errors.New("the connection could come back here: its destination was not entered in the negative cache"))
		return
	}
	control := linux.ControlMark(markPlain)
	if code == agentapi.CodeOK && px.agent.option != nil {
		control = px.agent.option.ControlDial
	}
	dctx, stop := context.WithTimeout(ctx, dialTimeout)
	tcp, err := px.net.dialOut(dctx, control, s.src.Addr(), dst)
	stop()
	if err == nil {
		err = resetOnClose(tcp)
	}
	if err != nil {
		broken := connectCode(err)
		if broken != agentapi.CodeConnect {
			px.bypass(s, broken, true) // the next connections to it go directly
		}
		px.resetBroken(s, tcp, broken, err)
		return
	}
	if code != agentapi.CodeOK {
		px.relayPlain(s, tcp, why)
		return
	}
	short := px.shortage()
	c, err := px.stack.client(ctx, tcp)
	if err != nil {
		if !errors.Is(err, syscall.ECONNRESET) && ctx.Err() == nil {
			px.bypass(s, agentapi.CodeRendezvous, false) // the next connections to it go directly
		}
		px.resetBroken(s, nil, agentapi.CodeRendezvous, err)
		return
	}
	px.afterRendezvous(s, c, tcp, short)
}

// inbound carries a connection from the network to dst whose SYN had the option. inbound owns tcp,
// on which resetOnClose was called, and rv. The agent connects to the application before the rendezvous: if
// the application refuses, the client gets a reset, as it would without SMC-R.
func (px *proxy) inbound(ctx context.Context, tcp *net.TCPConn, dst netip.AddrPort, rv *reservation) {
	src := addrPort(tcp.RemoteAddr())
	if px.agent.holds.isLocal(src) {
		reset(tcp)
		rv.release()
		return
	}
	// abort resets session.app. Until the application's connection is there, that is the network's.
	s, ctx, end := px.register(ctx, tcp, &session{dir: agentapi.Inbound, src: src, dst: dst, reservation: rv})
	defer end()
	dial := px.dialApplication(ctx, s)
	patience := px.agent.cfg.appPatience
	if s.decision.Required {
		patience = appTimeout
	}
	if !dial.endsWithin(patience) {
		if !s.decision.Required {
			px.inboundLate(ctx, s, tcp, dial)
			return
		}
		dial.stop()
	}
	if err := dial.result(); err != nil {
		px.resetBroken(s, nil, agentapi.CodeApplication, err)
		return
	}
	why := px.admitSMCR(s)
	short := px.shortage()
	c, err := px.stack.server(ctx, tcp, declineReason(why.code))
	if err != nil {
		px.resetBroken(s, nil, agentapi.CodeRendezvous, err)
		return
	}
	if why.code != agentapi.CodeOK {
		px.relayTCP(s, c, tcp, why)
		return
	}
	px.afterRendezvous(s, c, tcp, short)
}

// inboundLate carries a session whose application has not accepted it yet: its backlog is full. The session
// declines SMC-R, for which the client does not wait so long, and then waits as the client would:
//
//	client             agent                          application
//	SYN, Proposal ---> SYN ------------------------->  backlog is full
//	                   SYN, after 1 s -------------->
//	    <--- Decline   appPatience is over
//	data ------------> the relay's socket has it
//	                   SYN, after 3, 7, 15 ... s --->  takes it
//	                   data ------------------------>
//
// A client whose application's SYN was held resets the connection behind the Decline, and goes directly, and others give up. The
// dial ends with them: it would take a place in the backlog for a connection that is over. A client that has only ended its
// stream is still there.
func (px *proxy) inboundLate(ctx context.Context, s *session, tcp *net.TCPConn, dial *appDial) {
	why := fallback{code: agentapi.CodeBacklog}
	c, err := px.stack.server(ctx, tcp, declineReason(why.code))
	if err != nil {
		dial.stop()
		_ = dial.result() // the connection to the client is broken: what the application says does not matter
		px.resetBroken(s, nil, agentapi.CodeRendezvous, err)
		return
	}
	s.reservation.becomeRelay() // a client whose connections wait holds no pending connection of others
	px.notifyBudget()
	left := false
	for !dial.endsWithin(px.agent.cfg.clientEvery) {
		if over, err := linux.IsOver(tcp); err == nil && over { // an error: the session was aborted, and the dial ends
			left = true
			dial.stop()
		}
	}
	err = dial.result()
	if err == nil {
		px.relayTCP(s, c, tcp, why)
		return
	}
	_ = c.Abort() // an error says no more than that the connection is broken already
	if !left {
		px.resetBroken(s, nil, agentapi.CodeApplication, err)
		return
	}
	why.detail = "the client left before the application took the connection"
	px.record(s, smcr.ModeTCP.String(), why)
	px.agent.metrics.fallback(why.code)
}

// appDial is a dial to the pod's application, for an inbound session.
type appDial struct {
	stop context.CancelFunc
	done chan struct{} // closed when err is set
	err  error
}

// dialApplication dials a session's application, and enters the connection into the session.
func (px *proxy) dialApplication(ctx context.Context, s *session) *appDial {
	ctx, stop := context.WithTimeout(ctx, dialTimeout)
	d := &appDial{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(d.done)
		defer stop()
		app, err := px.net.dialApp(ctx, s.src.Addr(), s.dst)
		if err == nil {
			err = resetOnClose(app)
		}
		if err == nil && !s.setApp(app) {
			err = errEnded
		}
		if err != nil {
			reset(app)
		}
		d.err = err
	}()
	return d
}

// endsWithin reports whether the dial ends within this time.
func (d *appDial) endsWithin(limit time.Duration) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-d.done:
		return true
	case <-t.C:
		return false
	}
}

// result waits for the end of the dial. Without an error the session has its application's connection.
func (d *appDial) result() error {
	<-d.done
	return d.err
}

// afterRendezvous relays a session on what the rendezvous gave: SMC-R, or TCP.
func (px *proxy) afterRendezvous(s *session, c peerConn, tcp *net.TCPConn, before shortage) {
	i := c.Info()
	px.agent.metrics.setup.Observe(i.Setup.Seconds())
	if i.Mode != smcr.ModeSMCR {
		why := px.fallbackOf(i, before)
		if s.dir == agentapi.Outbound && !s.decision.Required {
			px.bypass(s, why.code, temporary(i.Reason))
		}
		px.relayTCP(s, c, tcp, why)
		return
	}
	px.relaySMCR(s, c, tcp)
}

// relaySMCR relays a session on SMC-R.
func (px *proxy) relaySMCR(s *session, c peerConn, tcp *net.TCPConn) {
	px.limitBuffers(s.app, s.reservation.becomeConn())
	if !s.setPeerConn(c, smcr.ModeSMCR.String(), agentapi.CodeOK) {
		px.resetAborted(s, c)
		return
	}
	px.record(s, smcr.ModeSMCR.String(), fallback{})
	px.agent.metrics.opened(s.dir, smcr.ModeSMCR)
	px.relay(s, c, tcp, func(sent, recv int64, err error) {
		px.agent.metrics.relayed(smcr.ModeSMCR, uint64(sent+recv))
		px.recordEnd(s, err)
	})
}

// limitBuffers bounds the buffers of a socket. It fails for a socket that was reset meanwhile,
// which has no buffers any more.
func (px *proxy) limitBuffers(c *net.TCPConn, bufferBytes int) {
	if err := linux.LimitBuffers(c, bufferBytes); err != nil {
		px.log.Debug("socket's buffers not bounded", "err", err)
	}
}

// relayTCP relays a session on plain TCP, or resets it if a policy requires SMC-R: one that did when the session
// began, or does now.
func (px *proxy) relayTCP(s *session, c peerConn, tcp *net.TCPConn, why fallback) {
	if s.decision.Required || px.agent.node.Load().Decide(s.pod, s.peer()).Required {
		px.refuse(s, c, why)
		return
	}
	px.limitBuffers(tcp, s.reservation.becomeRelay())
	px.limitBuffers(s.app, appBufferBytes)
	px.notifyBudget()
	if !s.setPeerConn(c, smcr.ModeTCP.String(), why.code) {
		px.resetAborted(s, c)
		return
	}
	if why.code == agentapi.CodeNoPolicy {
		why.detail = s.decision.Reason.String()
	}
	px.enforcePolicy(s)
	px.record(s, smcr.ModeTCP.String(), why)
	px.agent.metrics.opened(s.dir, smcr.ModeTCP)
	px.agent.metrics.fallback(why.code)
	px.relay(s, c, tcp, func(sent, recv int64, err error) {
		px.agent.metrics.relayed(smcr.ModeTCP, uint64(sent+recv))
		px.recordEnd(s, err)
	})
}

// relayPlain relays a session on plain TCP, without a rendezvous.
func (px *proxy) relayPlain(s *session, tcp *net.TCPConn, why fallback) {
	px.relayTCP(s, plainTCP{tcp, s.opened}, tcp, why)
}

// refuse resets a session that a policy requires to be on SMC-R. Who saw the reset finds its reason: it
// is recorded before.
func (px *proxy) refuse(s *session, c peerConn, why fallback) {
	px.recordRequired(s, why)
	px.agent.metrics.fallback(why.code)
	px.agent.metrics.reset(agentapi.CodeRequired)
	if c != nil {
		_ = c.Abort() // an error says no more than that the connection is broken already
	}
	reset(s.app)
}

// recordRequired records that a session is required to be on SMC-R, and why it is not.
func (px *proxy) recordRequired(s *session, why fallback) {
	text := why.code.Text()
	if why.code == agentapi.CodeUnknownReason {
		text = why.detail // which the code does not say
	}
	px.record(s, agentapi.ModeReset, fallback{agentapi.CodeRequired, why.peerDeclined, string(why.code) + ": " + text})
}

// resetAborted resets a session that was aborted during the rendezvous.
func (px *proxy) resetAborted(s *session, c peerConn) {
	_ = c.Abort() // an error says no more than that the connection is broken already
	px.resetBroken(s, nil, agentapi.CodeRendezvous, errEnded)
}

// resetBroken resets a session one side of which could not be connected: the network's of an
// outbound session, the application's of an inbound one.
func (px *proxy) resetBroken(s *session, tcp *net.TCPConn, code agentapi.Code, err error) {
	if by := s.endedBy(); by != "" {
		code = by
	}
	px.record(s, agentapi.ModeReset, fallback{code: code, detail: err.Error()})
	px.agent.metrics.reset(code)
	if tcp != nil {
		reset(tcp)
	}
	reset(s.app)
}
