// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// listenerSet are the listeners of one pod for one direction: one for IPv4 and, where the pod has
// it, one for IPv6, on the same port.
type listenerSet struct {
	dir  agentapi.Direction // of the connections that are diverted to them
	port uint16
	// control and wanted are what the listeners were opened with.
	control linux.Control
	wanted  uint16
	// dst returns the destination that a connection had before it was diverted; the error is
	// linux.ErrNotRedirected if the connection was not diverted. handle carries the connection
	// there, and owns the reservation.
	dst    func(*net.TCPConn) (netip.AddrPort, error)
	handle func(context.Context, *net.TCPConn, netip.AddrPort, *reservation)
	// progress is when the accept loop of each listener last came round, in nanoseconds since the
	// agent's start; 0: there is no loop.
	progress []atomic.Int64

	mu        sync.Mutex // guards what is below
	listeners []*net.TCPListener
	closed    bool
}

// lacksIPv6 reports whether the only listener is the one for IPv4.
func (set *listenerSet) lacksIPv6() bool {
	set.mu.Lock()
	defer set.mu.Unlock()
	return len(set.listeners) == 1
}

// add enters a listener that came later. It returns false, and closes the listener, if the set was closed.
func (set *listenerSet) add(l *net.TCPListener) bool {
	set.mu.Lock()
	defer set.mu.Unlock()
	if set.closed {
		_ = l.Close() // nothing was accepted
		return false
	}
	set.listeners = append(set.listeners, l)
	return true
}

func (set *listenerSet) listener(i int) *net.TCPListener {
	set.mu.Lock()
	defer set.mu.Unlock()
	return set.listeners[i]
}

func (set *listenerSet) close() error {
	set.mu.Lock()
	defer set.mu.Unlock()
	set.closed = true
	var errs []error
	for _, l := range set.listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// acceptor is the accept loop of one listener. When the pod has no pending reservation left, the
// loop waits with the connection that it has just accepted, and later connections wait in the
// listener's backlog, which has room for net.core.somaxconn of them (4096 if nobody changed it).
// Each listener of each pod has a loop of its own, so a full pod holds up no other pod.
type acceptor struct {
	proxy    *proxy
	set      *listenerSet
	listener *net.TCPListener
	progress *atomic.Int64
	// fullSince is when this listener's last connections began to find no pending reservation, and fullLast
	// until when they did; zero: the last connection got its reservation.
	fullSince, fullLast time.Time
}

func (px *proxy) accept(set *listenerSet, i int) {
	a := &acceptor{proxy: px, set: set, listener: set.listener(i), progress: &set.progress[i]}
	a.loop()
}

// loop accepts connections until the listener is closed, or the diversion has ended: then none may
// have come for drainAccept or, since a program in the pod may connect to the port for as long as it
// likes, none that was diverted for drainLimit. The loop comes round at least renewalsPerTTL times in a redirection's
// TTL, as heartbeat expects.
//
//	0 ms    the loop waits for connections, until 1,000 ms
//	990 ms  the proxy begins to drain; the rule that diverts is still there
//	1,000   nothing came; the loop goes on, as the rule may still divert one
//	1,010   the rule is gone (closing); the handshake of a diverted connection is under way
//	1,012   the loop takes that connection, and waits for drainAccept from now on
//	1,062   nothing came: the loop ends
func (a *acceptor) loop() {
	px := a.proxy
	a.noteProgress()
	var end time.Time
	for {
		now, closing := time.Now(), px.closing.Load()
		next := now.Add(px.renewEvery())
		if closing {
			if end.IsZero() {
				end = now.Add(drainLimit)
			}
			if next = now.Add(drainAccept); next.After(end) {
				next = end
			}
		}
		// SetDeadline fails only for a listener that was closed, and then Accept fails, too.
		_ = a.listener.SetDeadline(next)
		c, err := a.listener.AcceptTCP()
		switch {
		case err == nil:
			a.noteProgress()
			diverted, goOn := a.admit(c)
			if !goOn {
				return
			}
			if diverted {
				end = time.Time{}
			}
		case errors.Is(err, os.ErrDeadlineExceeded):
			a.noteProgress()
			if closing {
				return
			}
		case errors.Is(err, net.ErrClosed):
			return
		default: // no progress is noted: if the error lasts, the diversion ends
			px.agent.metrics.acceptErrors.Inc()
			if !px.sleep(acceptPause) {
				return
			}
		}
	}
}

func (a *acceptor) noteProgress() { a.progress.Store(int64(time.Since(a.proxy.agent.started))) }

// admit starts the session of an accepted connection, once the pod has a pending reservation for
// it. A connection that was not diverted is reset at once: a program in the pod connected to the
// agent's port, so its "original destination" is that port, and the agent would dial itself without
// end. goOn is false to end the loop.
func (a *acceptor) admit(c *net.TCPConn) (diverted, goOn bool) {
	dst, err := a.set.dst(c)
	if err != nil {
		a.proxy.resetUndiverted(a.set, c, err)
		return false, true
	}
	return true, a.admitDiverted(c, dst)
}

// admitDiverted is admit for a connection that was diverted on its way to dst.
func (a *acceptor) admitDiverted(c *net.TCPConn, dst netip.AddrPort) (goOn bool) {
	px := a.proxy
	// If the agent is killed while the connection waits, the application must get a reset and not
	// an orderly end.
	if err := resetOnClose(c); err != nil {
		px.log.Debug("connection refused", "err", err) // the connection is broken already
		reset(c)
		return true
	}
	s := &session{dir: a.set.dir, src: addrPort(c.RemoteAddr()), dst: dst, app: c}
	if s.dir == agentapi.Outbound && px.hold.Load().deliver(synqueue.Conn{Src: s.src, Dst: s.dst}, c) {
		return true
	}
	rv, freed := a.reserve(s)
	px.notifyBudget()
	if rv == nil {
		var goOn bool
		if rv, goOn = a.awaitReservation(s, freed); rv == nil {
			return goOn
		}
	}
	a.fullLast = time.Time{}
	px.sessionTasks.Go(func() { a.set.handle(px.life, c, dst, rv) })
	return true
}

// reserve takes a pending reservation for a session. If rv is nil, freed is closed when it is worth
// asking again; freed is nil if the client already has all that one client may have.
func (a *acceptor) reserve(s *session) (rv *reservation, freed <-chan struct{}) {
	px := a.proxy
	var source netip.Addr
	if s.dir == agentapi.Inbound {
		source = s.src.Addr()
	}
	if rv, freed = px.account.reserve(source, true); rv != nil || freed != nil {
		return rv, freed
	}
	if px.decide(s); s.decision.Required { // a session that must be on SMC-R never becomes a relay
		return px.account.reserve(source, false)
	}
	return nil, nil
}

// awaitReservation waits for a pending reservation, as the application would wait for a slow
// destination. rv is nil if the connection was reset instead:
//
//   - there was no reservation for pendingPatience, and a policy requires SMC-R or the proxy drains;
//   - the client has all that one client may have;
//   - the proxy ends.
//
// loop is false if the accept loop is to end, too. Connections of the listener that meet the same shortage share the
// patience. A shortage that none of them met for twice as long may have ended meanwhile.
func (a *acceptor) awaitReservation(s *session, freed <-chan struct{}) (rv *reservation, loop bool) {
	px, c := a.proxy, s.app
	if freed == nil {
		a.refuseGreedy(s)
		return nil, true
	}
	if now := time.Now(); now.Sub(a.fullLast) >= 2*pendingPatience {
		a.fullSince = now
	}
	px.agent.metrics.pendingWaits.Inc()
	look := min(px.renewEvery(), pendingPatience)
	for rv == nil {
		a.fullLast = time.Now()
		if a.fullLast.Sub(a.fullSince) >= pendingPatience {
			if px.draining.Load() {
				px.agent.metrics.reset(agentapi.CodeDraining)
				reset(c)
				return nil, false
			}
			// The policy may have changed while the connection waited.
			if px.decide(s); s.decision.Required {
				px.refuse(s, nil, fallback{code: agentapi.CodeBudgetPending})
				return nil, true
			}
		}
		t := time.NewTimer(look)
		select {
		case <-freed:
		case <-t.C:
		case <-px.life.Done():
			t.Stop()
			reset(c)
			return nil, false
		}
		t.Stop()
		a.noteProgress()
		if rv, freed = a.reserve(s); rv == nil && freed == nil {
			a.refuseGreedy(s)
			return nil, true
		}
	}
	return rv, true
}

// refuseGreedy resets a connection of a client that has sourceMost hundredths of what the pod has
// for all its clients. The pod's table leaves such a client alone from sourceShare on, so these are
// connections that the client opened faster than the table was replaced, or to a port that is
// always diverted. Letting them wait would hold up the connections of other clients behind them.
func (a *acceptor) refuseGreedy(s *session) {
	px := a.proxy
	px.decide(s)
	if s.decision.Required {
		px.refuse(s, nil, fallback{code: agentapi.CodeBudgetSource})
		return
	}
	px.resetBroken(s, nil, agentapi.CodeBudgetSource, errors.New(agentapi.CodeBudgetSource.Text()))
}

// resetUndiverted resets a connection that was made to the agent's own port.
func (px *proxy) resetUndiverted(set *listenerSet, c *net.TCPConn, err error) {
	defer reset(c)
	if !errors.Is(err, linux.ErrNotRedirected) {
		px.log.Debug("connection refused", "err", err) // the connection is broken already
		return
	}
	px.agent.metrics.undiverted.WithLabelValues(string(set.dir)).Inc()
	if ok, dropped := px.agent.strayLogLimit.allow(time.Now()); ok {
		px.log.Warn("connection reset that was not diverted: a program in the pod connects to the agent's port", "door", set.dir, "err", err, "leftOut", dropped)
	}
}
