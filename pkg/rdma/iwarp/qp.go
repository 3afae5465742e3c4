// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	Num       rdma.QPN
	MaxSendWR int
	MaxRecvWR int
	MaxSGE    int // per send, at most [MaxSGE]; 0: 1
	MaxInline int // at most [MaxInlineLimit]
	Memory    wq.Memory
	Rand      *rand.Rand // names the sinks of READs
}

// Validate reports what is wrong with the configuration.
func (c *QPConfig) Validate() error {
	switch {
	case c.Num > rdma.MaxQPN:
		return fmt.Errorf("queue pair number %#x has more than 24 bits: %w", uint32(c.Num), rdma.ErrInvalid)
	case c.MaxSendWR < 1 || c.MaxSendWR > wq.MaxQueue:
		return fmt.Errorf("send queue of %d entries, want 1 to %d: %w", c.MaxSendWR, wq.MaxQueue, rdma.ErrInvalid)
	case c.MaxRecvWR < 1 || c.MaxRecvWR > wq.MaxQueue:
		return fmt.Errorf("receive queue of %d entries, want 1 to %d: %w", c.MaxRecvWR, wq.MaxQueue, rdma.ErrInvalid)
	case c.MaxSGE < 0 || c.MaxSGE > MaxSGE:
		return fmt.Errorf("%d SGEs, want at most %d: %w", c.MaxSGE, MaxSGE, rdma.ErrInvalid)
	case c.MaxInline < 0 || c.MaxInline > MaxInlineLimit:
		return fmt.Errorf("%d inline bytes, want at most %d: %w", c.MaxInline, MaxInlineLimit, rdma.ErrInvalid)
	case c.Memory == nil || c.Rand == nil:
		return fmt.Errorf("no memory, or no random numbers: %w", rdma.ErrInvalid)
	}
	return nil
}

// Phase is how far the stream of a queue pair has come.
//
//	initiator  IDLE --Start--> WAIT_REPLY --Reply--> OPEN     in OPEN the queue pair is in RTS
//	responder  IDLE --Start--> WAIT_REQUEST --Request--> ASKED --Reply--> OPEN
//	start-up fails, or one side refuses: FAILED; the queue pair stays in INIT
//	OPEN --any end--> CLOSING --the peer ends its half, or time is up--> CLOSED
type Phase uint8

// Phases.
const (
	PhaseIdle Phase = iota
	PhaseWaitReply
	PhaseWaitRequest
	PhaseAsked
	PhaseOpen
	PhaseFailed
	PhaseClosing
	PhaseClosed
)

func (p Phase) String() string {
	names := [...]string{"IDLE", "WAIT_REPLY", "WAIT_REQUEST", "ASKED", "OPEN", "FAILED", "CLOSING", "CLOSED"}
	if int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("Phase(%d)", uint8(p))
}

// Stats counts what happened since the queue pair was made.
type Stats struct {
	TxFPDUs, TxBytes uint64 // bytes: payload
	RxFPDUs, RxBytes uint64
}

// QP is one queue pair on one stream. It is not safe for concurrent use; whoever holds the
// device's queue pair owns the QP.
type QP struct {
	cfg    QPConfig
	limits wq.Limits
	state  rdma.QPState
	access rdma.Access

	phase    Phase
	err      error     // why start-up failed, or the stream ended
	deadline time.Time // of start-up or of CLOSING; zero: none
	draining bool      // Disconnect was called
	rxEnded  bool      // the peer ended its half

	start startup
	tx    sender
	rx    receiver

	wcs    wq.Completions
	events wq.Events
	stats  Stats
}

// NewQP makes a queue pair in state RESET. The buffers for the stream are made by Start.
func NewQP(c QPConfig) (*QP, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("make queue pair %v: %w", c.Num, err)
	}
	c.MaxSGE = max(c.MaxSGE, 1)
	q := &QP{cfg: c, limits: wq.Limits{
		SGEs: c.MaxSGE, Inline: c.MaxInline, Message: wq.MaxMessage, Read: true, Invalidate: true, Solicited: true,
	}}
	places := wq.RingSize(c.MaxSendWR)
	q.tx.queue.ring = make([]sendWQE, places)
	q.tx.queue.inline = make([]byte, places*c.MaxInline)
	q.tx.queue.inlineBytes = c.MaxInline
	q.rx.ring = make([]recvWQE, wq.RingSize(c.MaxRecvWR))
	q.wcs = wq.NewCompletions(c.MaxSendWR, c.MaxRecvWR)
	return q, nil
}

// Num returns the queue pair number.
func (q *QP) Num() rdma.QPN { return q.cfg.Num }

// Limits returns what PostSend takes. They are constant.
func (q *QP) Limits() wq.Limits { return q.limits }

// State returns the state. It is RTS while the phase is OPEN.
func (q *QP) State() rdma.QPState { return q.state }

// Phase returns how far the stream has come.
func (q *QP) Phase() Phase { return q.phase }

// Err returns why start-up failed or the stream ended, nil if neither did.
func (q *QP) Err() error { return q.err }

// Stats returns the counters.
func (q *QP) Stats() Stats { return q.stats }

// Modify moves the queue pair to RESET, INIT or ERR. Start and what follows moves it to
// RTS. What had not been sent when it goes to ERR makes a Terminate that tells the peer
// so, unless nothing may be sent yet.
func (q *QP) Modify(now time.Time, a rdma.QPAttr) error {
	from := q.state
	switch {
	case a.State == rdma.QPReset:
		q.becomeReset()
		return nil
	case a.State == rdma.QPError && from != rdma.QPReset:
		lost := q.phase == PhaseOpen && !q.start.gated && !q.tx.isDone()
		q.becomeError()
		if lost {
			q.tx.sayTerminate(&Terminate{Code: CodeLocal})
		}
		q.setDeadline(now)
		return nil
	case a.State == rdma.QPInit && (from == rdma.QPReset || from == rdma.QPInit):
		q.state, q.access = rdma.QPInit, a.Access
		return nil
	case a.State == rdma.QPRTR || a.State == rdma.QPRTS:
		return fmt.Errorf("queue pair %v to %v, which its stream does: %w", q.cfg.Num, a.State, rdma.ErrNotSupported)
	}
	return fmt.Errorf("queue pair %v from %v to %v: %w", q.cfg.Num, from, a.State, rdma.ErrState)
}

// becomeReset forgets everything; outstanding requests do not complete.
func (q *QP) becomeReset() {
	q.state, q.access = rdma.QPReset, 0
	q.phase, q.err, q.deadline = PhaseIdle, nil, time.Time{}
	q.draining, q.rxEnded = false, false
	q.start = startup{}
	q.tx.clear()
	q.rx.clear()
	q.wcs.Clear()
	q.events = wq.Events{}
}

// becomeError flushes everything outstanding. Of what is to be sent only the rest of an
// FPDU stays that has begun.
func (q *QP) becomeError() {
	if q.state == rdma.QPError {
		return
	}
	q.state = rdma.QPError
	if q.phase == PhaseOpen {
		q.tx.cut()
	} else {
		q.tx.drop()
	}
	q.phase = PhaseClosing
	q.rx.stop()
	q.flush()
}

// fail is becomeError for a reason that the program did not give.
func (q *QP) fail(kind rdma.EventKind, err error) {
	if q.state == rdma.QPError {
		return
	}
	q.becomeError()
	q.err = err
	q.events.Push(rdma.AsyncEvent{Kind: kind, QPN: q.cfg.Num, Err: err})
}

// setDeadline bounds how long the queue pair waits for the peer in CLOSING.
func (q *QP) setDeadline(now time.Time) {
	if q.phase == PhaseClosing {
		q.deadline = now.Add(CloseTimeout)
	}
}

// Disconnect ends the stream in order: when all that was posted is done and the peer's
// READs are answered, our half ends and the queue pair goes to ERR. What is posted before
// that is done, too.
func (q *QP) Disconnect(now time.Time) error {
	if q.state != rdma.QPRTS {
		return fmt.Errorf("disconnect queue pair %v in %v: %w", q.cfg.Num, q.state, rdma.ErrState)
	}
	q.draining = true
	q.drained(now)
	return nil
}

// drained ends our half if that is asked for and nothing is left to be sent.
func (q *QP) drained(now time.Time) {
	if q.draining && q.phase == PhaseOpen && q.tx.isDone() {
		q.becomeError()
		q.setDeadline(now)
	}
}

// HandleEnd says that the peer ended its half of the stream, or, with an error of TCP, that
// the stream is lost.
func (q *QP) HandleEnd(now time.Time, err error) {
	q.rxEnded = true
	switch q.phase {
	case PhaseWaitReply, PhaseWaitRequest, PhaseAsked:
		if err == nil {
			err = ErrEnded
		}
		q.failStart(fmt.Errorf("queue pair %v in %v: %w", q.cfg.Num, q.phase, err))
	case PhaseOpen:
		q.endOpen(now, err)
	case PhaseClosing:
		if err != nil {
			q.becomeClosed()
		}
	default:
	}
}

// endOpen is HandleEnd in OPEN. A stream that ends between two FPDUs ends in order
// (RFC 5044 §7.2).
func (q *QP) endOpen(now time.Time, err error) {
	switch {
	case err != nil:
		err = fmt.Errorf("TCP connection lost: %w", err)
		q.failSend(q.tx.queue.head, rdma.StatusRetryExceeded, rdma.EventPathDown, err)
		q.becomeClosed()
	case q.rx.isBetween():
		q.fail(rdma.EventDisconnected, ErrEnded)
		q.setDeadline(now)
	default:
		q.terminate(CodeMarker, nil)
		q.setDeadline(now)
	}
}

// becomeClosed has nothing more sent or received.
func (q *QP) becomeClosed() {
	q.phase = PhaseClosed
	q.deadline = time.Time{}
	q.tx.drop()
}

// TxEnded reports whether all is sent that ever will be: the stream can be half closed.
func (q *QP) TxEnded() bool {
	return q.phase == PhaseClosed || q.phase == PhaseClosing && q.tx.isIdle()
}

// Closed reports whether the stream is of no more use: after TxEnded, when the peer ended
// its half, too, or did not in time.
func (q *QP) Closed() bool {
	return q.phase == PhaseClosed || q.rxEnded && q.TxEnded()
}

// Unread returns what was received behind the peer's frame, when start-up has failed: it
// belongs to whoever goes on with the stream.
func (q *QP) Unread() []byte {
	if q.phase != PhaseFailed {
		return nil
	}
	return q.rx.buf[q.rx.r:q.rx.w]
}

// NextTimeout says when HandleTimeout is due.
func (q *QP) NextTimeout() (time.Time, bool) { return q.deadline, !q.deadline.IsZero() }

// HandleTimeout ends a start-up, or a wait for the end of the stream, that takes too long.
func (q *QP) HandleTimeout(now time.Time) {
	if q.deadline.IsZero() || now.Before(q.deadline) {
		return
	}
	q.deadline = time.Time{}
	if q.phase == PhaseClosing {
		q.becomeClosed()
		return
	}
	q.failStart(fmt.Errorf("queue pair %v in %v: %w", q.cfg.Num, q.phase, ErrTimeout))
}

// ForgetMemory drops the memory that the machine has resolved. Whoever owns the memory
// calls it after a region is taken out of the table and before the region is unmapped. What
// was not done yet is resolved anew; a queue pair that has promised the peer bytes that it
// has not any more fails.
func (q *QP) ForgetMemory(now time.Time) {
	if q.forgetSends(); q.deadline.IsZero() {
		q.setDeadline(now)
	}
}

// PollWC moves completions to dst, in order, and returns how many.
func (q *QP) PollWC(dst []wq.Completion) int { return q.wcs.Poll(dst) }

// PollEvent returns the next asynchronous event.
func (q *QP) PollEvent() (rdma.AsyncEvent, bool) { return q.events.Pop() }
