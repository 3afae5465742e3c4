// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// suspension moves a socket to another transport connection (§13). Who asks by SuspComm will accept that, and who answers by
// SuspCommAck makes it, whoever did so at first. Before either of them goes, what is under way ends; behind it
// nothing goes. While the old connection is gone and the new one not there, the socket is in StateHello again: programs may
// write and read, and nothing moves.
type suspension struct {
	want bool // SuspComm is to be sent
	port uint16
	sent bool // and was

	due      bool // SuspCommAck is to be sent
	peerPort uint16
	answered bool // and was

	away bool // OutSuspended went: what comes of the old connection is nothing to us
}

// isActive reports whether the connection is being suspended.
func (x *suspension) isActive() bool { return x.want || x.sent || x.due || x.answered }

// Suspend ends the transport connection, without the peer's program seeing it, to go on with another one: the peer connects to
// a port at the address that it knows. OutSuspended says when it is told. [Config.Suspends] must be set.
func (s *Socket) Suspend(now time.Time, port uint16) error {
	switch {
	case !s.cfg.Suspends || port == 0:
		return fmt.Errorf("suspend, port %d: %w", port, ErrInvalid)
	case s.state > StateOpen || s.susp.want || s.susp.sent || s.end.finSent && s.snk.done:
		return fmt.Errorf("suspend: %w", ErrState)
	}
	s.susp.want, s.susp.port = true, port
	if s.state == StateOpen { // else as soon as it is
		s.deadline = now.Add(s.cfg.SuspendTimeout)
	}
	s.flush(now)
	return nil
}

// Resume says that the transport connection stands that OutSuspended asked for, at the peer that makes it; the other one
// calls HandleHello. From [Config.RecvBuffers] on all is as for a new socket: receive buffers of the size
// that Hello or HelloAck tells are posted, with the numbers from 0 on.
func (s *Socket) Resume(now time.Time) error {
	if !s.susp.away || s.state != StateHello || s.cfg.Role != Connecting {
		return fmt.Errorf("resume: %w", ErrState)
	}
	s.susp.away = false
	s.deadline = now.Add(s.cfg.SetupTimeout)
	s.out.put(Output{Kind: OutHello, Message: s.hello(bsdh.Hello)})
	return nil
}

// HandleLeft says that the old transport connection is gone, and the one that OutSuspended asked for does not come.
func (s *Socket) HandleLeft(err error) {
	if s.state == StateHello {
		s.susp.away = false
		s.down(err)
	}
}

// take takes the peer's SuspComm. If ours crossed it, the accepting peer disregards it; the other one answers, and
// sends its own again on the next connection (§13.1.2).
func (x *suspension) take(m *bsdh.Message, cfg *Config) error {
	switch {
	case !cfg.Suspends, x.due, x.answered, m.Port == 0:
		return violation(UnexpectedMessage, "unexpected %v, port %d", m.MID, m.Port)
	case x.sent && cfg.Role == Accepting:
		return nil
	}
	x.want, x.sent = x.want || x.sent, false
	x.due, x.peerPort = true, m.Port
	return nil
}

// stepSuspend ends what is under way, and then says so. Nothing else goes.
func (s *Socket) stepSuspend(now time.Time) bool {
	x, o, k := &s.susp, &s.src, &s.snk
	if s.deadline.IsZero() { // SuspComm that is sent again
		s.deadline = now.Add(s.cfg.SuspendTimeout)
	}
	s.credits.holds = s.credits.holds && !k.flight.isEmpty() // as in stepSink
	switch {
	case x.answered:
		return false
	case x.sent: // the peer could not answer for ever
		return s.credits.peerHas() <= 0 && s.credits.raises() && s.maySend(false) && s.sendKind(bsdh.Data)
	case !s.maySend(false) && (!x.due || !s.sends.hasRoom(&s.cfg) || s.credits.available() == 0):
		return false // behind the peer's SuspComm no credit comes: what was kept back for that is for the answer
	case k.reportDue():
		return s.reportRead()
	case !k.flight.isEmpty() || !o.flight.isEmpty(), k.holdsMuch(&s.cfg, s.size.recvBytes):
		return false
	case k.count.buffers > 0: // the peer gets no more credit, and may need some
		s.keep()
		return true
	case x.due:
		x.due, x.answered = false, true
		return s.sendKind(bsdh.SuspCommAck)
	}
	x.want = false
	if s.end.finSent && s.snk.done {
		return true // too late: both streams have ended
	}
	x.sent = true
	return s.send(bsdh.Message{MID: bsdh.SuspComm, Port: x.port}, 0)
}

// suspend leaves the old connection. Adverts are canceled by that (§13): what they offered and nobody took is unsent
// again, and their buffers are ordinary Reads. An end of our stream is told again.
func (s *Socket) suspend() {
	x := s.susp
	m := bsdh.Message{MID: bsdh.SuspCommAck, Port: x.port}
	s.cfg.Role = Accepting
	if x.answered {
		m, s.cfg.Role = bsdh.Message{MID: bsdh.SuspComm, Port: x.peerPort}, Connecting
	}
	if s.snk.count.buffers > 0 {
		s.keep()
	}
	s.src.restart(s.cfg.Memory)
	s.snk.restart(s.cfg.Memory)
	s.size.restart()
	s.end.finSent, s.credits, s.sends = false, credits{}, sendQueue{}
	s.susp = suspension{want: x.want, port: x.port, away: true}
	s.state = StateHello
	s.out.put(Output{Kind: OutSuspended, Message: m})
}

// restart forgets what belongs to a connection.
func (o *source) restart(m Memory) {
	o.override(m)
	o.dropSinks()
	o.mode, o.want, o.reads, o.refusals = bsdh.Combined, bsdh.Combined, 0, 0
	o.window, o.potential, o.forced, o.patience, o.ackDue = window{}, 0, 0, time.Time{}, false
}

func (k *sink) restart(m Memory) {
	k.endAdverts(m)
	k.dropSrcs()
	k.mode, k.owed, k.nonDiscards, k.stop = bsdh.Combined, 0, 0, false
	k.again = k.done
}

// restart lets the receive buffers have the size that the peer knows, and asks again for what was not answered.
func (r *resizing) restart() {
	*r = resizing{pool: r.pool, recvBytes: r.recvBytes, want: max(r.want, r.asked)}
}
