// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// ending is how far both streams are closed (§8.2).
type ending struct {
	shutdown bool   // no more Writes
	closed   bool   // nor Reads: the program is gone, and what arrives is lost
	finSent  bool   // our DisConn went
	finSeq   uint32 // its number
	second   bool   // the peer's DisConn came before ours went
	crossed  bool   // the peer's DisConn did not know ours

	closeBy time.Time // when a closed socket ends at the latest; zero: it is not closed

	abortSent bool
	abortAt   uint64 // place of AbortConn in the send queue
}

// limit returns when the state st ends at the latest, zero if never: at its own deadline, and, once the program has closed the socket, at
// closeBy. So a peer cannot keep a closed socket alive, for example by one suspension after the other, each of which has a new deadline.
func (e *ending) limit(st State, deadline time.Time) time.Time {
	if by := e.closeBy; !by.IsZero() && st != StateAbort && st != StateClosed && (deadline.IsZero() || by.Before(deadline)) {
		return by
	}
	return deadline
}

// stepDisConn ends our stream when every byte before is with the peer (§8.2.1).
func (s *Socket) stepDisConn() bool {
	e := &s.end
	if !e.shutdown || e.finSent || !s.src.isIdle() || !s.maySend(false) {
		return false
	}
	s.sendKind(bsdh.DisConn)
	s.src.dropSinks() // the peer takes them back when it sees DisConn
	e.finSent, e.finSeq, e.second = true, s.credits.sent, s.snk.done && !s.snk.again
	return true
}

// takeDisConn takes the end of the peer's stream: nobody will write into what we advertised.
func (s *Socket) takeDisConn() {
	again := s.snk.again
	s.snk.done, s.snk.again = true, false
	s.snk.endAdverts(s.cfg.Memory)
	s.end.crossed = s.end.finSent && !s.credits.acked(s.end.finSeq)
	if !again {
		s.out.put(Output{Kind: OutPeerDone})
	}
}

// settleEnd goes towards the end of the connection when both streams have ended and nothing of ours is under way. The peer that sent its
// DisConn second ends the transport connection; if the DisConns crossed, both do. The peer that sent it first waits for that, but no
// longer than lingerTimeout.
func (s *Socket) settleEnd(now time.Time) {
	e := &s.end
	if s.state != StateOpen || !e.finSent || !s.snk.done || s.snk.again || s.susp.isActive() || s.sends.done < s.sends.posted {
		return
	}
	if e.second || e.crossed {
		s.close(OutClose, nil)
		return
	}
	s.state, s.deadline = StateLinger, now.Add(lingerTimeout)
}

// abort ends the connection at once. A peer that has our DisConn would take that for an orderly end, so
// AbortConn goes first (§8.2.2).
func (s *Socket) abort(now time.Time, err error) {
	switch {
	case s.state == StateClosed || s.state == StateAbort:
	case s.end.finSent:
		s.state, s.err, s.deadline = StateAbort, err, now.Add(abortTimeout)
	default:
		s.close(OutReset, err)
	}
}

// stepAbort sends AbortConn. Without credit the connection is reset when the time is up: a FIN would look like
// an orderly end.
func (s *Socket) stepAbort() bool {
	if s.end.abortSent || !s.maySend(false) {
		return false
	}
	s.sendKind(bsdh.AbortConn)
	s.end.abortSent, s.end.abortAt = true, s.sends.posted
	return true
}

// settleAbort ends the connection when AbortConn is out and no RDMA touches memory of the program any more: its buffers go
// back with the end.
func (s *Socket) settleAbort() {
	if s.state == StateAbort && s.end.abortSent && s.sends.done >= s.end.abortAt && s.snk.flight.isEmpty() && s.src.flight.isEmpty() {
		s.close(OutClose, s.err)
	}
}

// down ends a connection whose transport is gone. It is in order if the peer's DisConn came, no AbortConn came behind it (§8.2.1),
// our own DisConn went, and the peer has that: we know so if the transport ended in order (err is nil), for the peer would not have
// ended it before; else only if the peer has acknowledged it. That the message completed here does not say that it arrived.
func (s *Socket) down(err error) {
	switch {
	case s.err != nil: // AbortConn is under way
		err = s.err
	case s.snk.done && s.end.finSent && (err == nil || s.credits.acked(s.end.finSeq)):
		err = nil
	case err == nil:
		err = ErrLost
	default:
		err = fmt.Errorf("%w: %w", ErrLost, err)
	}
	s.finish(err)
}

// close ends the transport connection, and everything.
func (s *Socket) close(how OutputKind, err error) {
	s.out.put(Output{Kind: how})
	s.finish(err)
}

// finish gives everything back to the program, and says that it is over.
func (s *Socket) finish(err error) {
	s.state, s.err, s.deadline = StateClosed, err, time.Time{}
	s.endAll()
	s.out.put(Output{Kind: OutEnded, Err: err})
}

// endAll makes every key worthless and gives every buffer back, with what came before the end.
func (s *Socket) endAll() {
	o, k := &s.src, &s.snk
	for !o.srcs.isEmpty() {
		s.cfg.Memory.Revoke(o.srcs.pop().key)
	}
	k.endAdverts(s.cfg.Memory)
	k.dropSrcs()
	k.flight.clear()
	o.flight.clear()
	k.cancel, o.cancel = revocation{}, revocation{}
	s.returnWrites()
	if s.mayRead() {
		s.deliver()
	}
	for !k.reads.isEmpty() {
		r := k.reads.pop()
		s.out.put(Output{Kind: OutRead, ID: r.ID, Len: r.got, Canceled: true})
	}
}
