// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// State is how far a socket is.
type State uint8

// States.
const (
	StateHello  State = iota // waits for Hello or HelloAck
	StateOpen                // established; each direction may be closed
	StateAbort               // AbortConn is due, or under way
	StateLinger              // both directions are closed, and the peer ends the connection
	StateClosed
)

func (s State) String() string {
	names := [...]string{"HELLO", "OPEN", "ABORT", "LINGER", "CLOSED"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Socket is one SDP socket: the Data Source of one direction, the Data Sink of the other, one credit account.
// It is not safe for concurrent use.
type Socket struct {
	cfg   Config
	state State
	err   error // why the connection ends, if not in order

	credits credits
	src     source
	snk     sink
	peer    peerTerms
	end     ending
	size    resizing
	susp    suspension
	sends   sendQueue
	out     outbox

	deadline time.Time // of the state
}

// peerTerms is what the peer said of itself.
type peerTerms struct {
	recvBytes  uint32 // size of its receive buffers
	maxAdverts int    // that we may have outstanding
	reads      int    // RDMA READs of ours that it serves at a time, and we ask for
}

// sendQueue counts messages in the send queue, which complete in order.
type sendQueue struct{ posted, done uint64 }

// New returns a socket. A connecting one has its Hello to be polled.
func New(now time.Time, cfg Config) (*Socket, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	s := &Socket{cfg: cfg, src: newSource(&cfg), snk: newSink(&cfg), deadline: now.Add(cfg.SetupTimeout)}
	s.size.pool, s.size.recvBytes = cfg.RecvBuffers, cfg.RecvBytes
	if cfg.Role == Connecting {
		m := s.hello(bsdh.Hello)
		s.out.put(Output{Kind: OutHello, Message: m})
	}
	return s, nil
}

// State returns the state.
func (s *Socket) State() State { return s.state }

// Err returns why the connection ended, or nil if it did in order, or did not.
func (s *Socket) Err() error { return s.err }

// Poll appends to dst what is to be done, in order, and forgets it.
func (s *Socket) Poll(dst []Output) []Output { return s.out.moveTo(dst) }

// Commands.

// Write sends bytes of the program, behind all that it wrote before. The program must leave them alone until
// OutWritten.
func (s *Socket) Write(now time.Time, w Write) error {
	switch {
	case s.state > StateOpen || s.end.shutdown || s.src.cancel.wanted:
		return fmt.Errorf("write %d: %w", w.ID, ErrState)
	case w.Len == 0:
		return fmt.Errorf("write %d of 0 bytes: %w", w.ID, ErrInvalid)
	case s.src.writes.isFull():
		return fmt.Errorf("write %d: %w: %d writes", w.ID, ErrFull, MaxWrites)
	}
	s.src.produced += uint64(w.Len)
	s.src.writes.push(posted{w, s.src.produced})
	s.flush(now)
	return nil
}

// WriteUrgent is Write; the last byte is out-of-band data (§9.5.3).
func (s *Socket) WriteUrgent(now time.Time, w Write) error {
	if s.src.urgent.isFull() {
		return fmt.Errorf("urgent write %d: %w: %d urgent bytes", w.ID, ErrFull, MaxUrgent)
	}
	if s.state > StateOpen || s.end.shutdown || s.src.cancel.wanted || w.Len == 0 || s.src.writes.isFull() {
		return s.Write(now, w)
	}
	s.src.urgent.push(urgentByte{pos: s.src.produced + uint64(w.Len) - 1})
	return s.Write(now, w)
}

// Read gives a buffer for what arrives. The program must leave it alone until OutRead. After the end there may still be
// something: what arrived before, and then the end of the stream if the peer told it.
func (s *Socket) Read(now time.Time, r Read) error {
	switch {
	case s.state == StateClosed && !s.mayRead() || s.snk.cancel.wanted || s.end.closed:
		return fmt.Errorf("read %d: %w", r.ID, ErrState)
	case r.Len == 0:
		return fmt.Errorf("read %d of 0 bytes: %w", r.ID, ErrInvalid)
	case s.snk.reads.isFull():
		return fmt.Errorf("read %d: %w: %d reads", r.ID, ErrFull, MaxReads)
	}
	s.snk.reads.push(pendingRead{Read: r})
	if s.state == StateLinger || s.state == StateClosed {
		s.deliver() // what arrived before the end
	}
	s.flush(now)
	return nil
}

// mayRead reports whether there is something for a Read when the connection is over. What came before a reset or a loss is
// there to be read, as with TCP; a program that aborts gives it up.
func (s *Socket) mayRead() bool {
	if s.snk.held.isEmpty() {
		return s.snk.done && (s.err == nil || errors.Is(s.err, ErrLost))
	}
	return !errors.Is(s.err, ErrAborted)
}

// CancelWrites ends all Writes as soon as it is known which of their bytes the peer has, and reports whether there are Writes to end.
// Bytes that were not sent are not part of the stream: after Shutdown its end comes where the last byte that was sent is.
func (s *Socket) CancelWrites(now time.Time) bool {
	if s.state > StateOpen || s.src.writes.isEmpty() {
		return false
	}
	s.src.cancel.wanted = true
	s.flush(now)
	return true
}

// CancelReads ends all Reads as soon as it is sure that the peer writes into none of them, and reports whether there are Reads to end.
func (s *Socket) CancelReads(now time.Time) bool {
	if s.state > StateOpen || s.snk.reads.isEmpty() {
		return false
	}
	s.snk.cancel.wanted = true
	s.flush(now)
	return true
}

// PreferMode asks for a mode of our stream, which is entered as soon as that may be. What peers ask for, and do
// with adverts, changes it later.
func (s *Socket) PreferMode(now time.Time, m bsdh.Mode) {
	invariant.Must(m <= bsdh.Pipelined, "socket: mode that does not exist")
	s.src.want = m
	s.flush(now)
}

// Shutdown ends our stream behind all that was written (§8.2.1). Reads go on.
func (s *Socket) Shutdown(now time.Time) {
	s.end.shutdown = true
	s.flush(now)
}

// Close ends our stream as Shutdown does, and says that the program will read no more. If there are bytes that it has not read, or if
// bytes arrive later, the connection is aborted, as with TCP; and also if the peer does not end its stream within lingerTimeout.
func (s *Socket) Close(now time.Time) {
	if s.end.closed || s.state == StateClosed {
		return
	}
	s.end.closed, s.end.shutdown, s.end.closeBy = true, true, now.Add(lingerTimeout)
	if !s.snk.held.isEmpty() || !s.snk.srcs.isEmpty() || s.snk.owed > 0 {
		s.abort(now, ErrAborted)
	}
	s.snk.cancel.wanted = !s.snk.reads.isEmpty()
	s.flush(now)
}

// Abort ends the connection at once (§8.2.2).
func (s *Socket) Abort(now time.Time) {
	s.abort(now, ErrAborted)
	s.flush(now)
}

// Inputs.

// HandleSent says that the oldest message in the send queue completed.
func (s *Socket) HandleSent(now time.Time, ok bool) {
	if s.state == StateClosed || s.susp.away {
		return
	}
	s.sends.done++
	switch {
	case ok || s.state == StateLinger: // who ends the connection need not wait for what came behind DisConn
	case s.state == StateAbort:
		s.close(OutReset, s.err)
	default:
		s.abort(now, fmt.Errorf("%w: a message", ErrTransfer))
	}
	s.flush(now)
}

// HandleRead says that the oldest RDMA READ under way completed: its bytes are in the buffer.
func (s *Socket) HandleRead(now time.Time, ok bool) {
	k := &s.snk
	if s.state == StateClosed || k.flight.isEmpty() {
		return
	}
	if s.state == StateAbort || !ok {
		k.flight.pop()
		s.abort(now, fmt.Errorf("%w: RDMA READ", ErrTransfer))
		s.flush(now)
		return
	}
	k.arrived()
	s.credits.tell()
	s.deliver()
	s.flush(now)
}

// HandleWrite says that the oldest RDMA WRITE under way completed: its bytes are out of the program's memory.
func (s *Socket) HandleWrite(now time.Time, ok bool) {
	if s.state == StateClosed || s.src.flight.isEmpty() {
		return
	}
	s.src.flight.pop()
	if s.state == StateAbort || !ok {
		s.abort(now, fmt.Errorf("%w: RDMA WRITE", ErrTransfer))
		s.flush(now)
		return
	}
	s.settleWrites()
	s.flush(now)
}

// HandleDown says that the transport connection is gone, in order or not.
func (s *Socket) HandleDown(err error) {
	switch {
	case s.state == StateClosed || s.susp.away: // the old connection goes, as it should
	case s.state == StateOpen && s.susp.answered:
		s.suspend() // the peer was quicker than the completion of our answer
	default:
		s.down(err)
	}
}

// NextTimeout returns when HandleTimeout is due; false: not until another input came. A time at which a message is due does not count while
// no message can be sent: the credit, or the room in the send queue, that is missing comes with an input.
func (s *Socket) NextTimeout() (time.Time, bool) {
	at := s.end.limit(s.state, s.deadline)
	earlier := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	if s.state == StateOpen {
		earlier(s.src.stalls.at)
		earlier(s.snk.stalls.at)
	}
	if s.state == StateOpen && s.maySend(false) && !s.susp.isActive() {
		earlier(s.credits.updateAt)
		earlier(s.credits.prodAt)
		if s.src.awaitsSink(&s.cfg) {
			earlier(s.src.patience)
		}
		if t, ok := s.snk.deadlockAt(s.waits()); ok {
			earlier(t)
		}
	}
	return at, !at.IsZero()
}

// HandleTimeout does what is due at now.
func (s *Socket) HandleTimeout(now time.Time) {
	if d := s.end.limit(s.state, s.deadline); !d.IsZero() && !now.Before(d) {
		s.deadline = time.Time{}
		switch {
		case s.state == StateAbort:
			s.close(OutReset, s.err)
		case s.state == StateLinger:
			s.close(OutClose, nil)
		case d.Equal(s.end.closeBy):
			s.abort(now, ErrLinger)
		case s.state == StateHello:
			s.abort(now, ErrSetupTimeout)
		default:
			s.abort(now, ErrSuspend)
		}
	}
	if s.state == StateOpen && (s.src.stalls.isDue(now) || s.snk.stalls.isDue(now)) {
		s.abort(now, ErrStalled)
	}
	s.flush(now)
}
