// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// QPConfig describes a queue pair to be made.
type QPConfig struct {
	Num       rdma.QPN
	MaxSendWR int
	MaxRecvWR int // at most [MaxRecvWR]
	MaxSGE    int // per send, at most [MaxSGE]; 0: 1
	MaxInline int // at most [MaxInlineLimit]
	Memory    wq.Memory
	// ACKDelay is how long an acknowledgement, or the news of receives, may wait for a
	// segment to travel with; 0: [DefaultACKDelay].
	ACKDelay time.Duration
}

// Validate reports what is wrong with the configuration.
func (c *QPConfig) Validate() error {
	switch {
	case c.Num > rdma.MaxQPN:
		return fmt.Errorf("queue pair number %#x has more than 24 bits: %w", uint32(c.Num), rdma.ErrInvalid)
	case c.MaxSendWR < 1 || c.MaxSendWR > wq.MaxQueue:
		return fmt.Errorf("send queue of %d entries, want 1 to %d: %w", c.MaxSendWR, wq.MaxQueue, rdma.ErrInvalid)
	case c.MaxRecvWR < 1 || c.MaxRecvWR > MaxRecvWR:
		return fmt.Errorf("receive queue of %d entries, want 1 to %d: %w", c.MaxRecvWR, MaxRecvWR, rdma.ErrInvalid)
	case c.MaxSGE < 0 || c.MaxSGE > MaxSGE:
		return fmt.Errorf("%d SGEs, want at most %d: %w", c.MaxSGE, MaxSGE, rdma.ErrInvalid)
	case c.MaxInline < 0 || c.MaxInline > MaxInlineLimit:
		return fmt.Errorf("%d inline bytes, want at most %d: %w", c.MaxInline, MaxInlineLimit, rdma.ErrInvalid)
	case c.ACKDelay < 0:
		return fmt.Errorf("acknowledgements after %v: %w", c.ACKDelay, rdma.ErrInvalid)
	case c.Memory == nil:
		return fmt.Errorf("no memory: %w", rdma.ErrInvalid)
	}
	return nil
}

// Stats counts what happened since the queue pair was made.
type Stats struct {
	TxSegments, RxSegments uint64
	TxBytes, RxBytes       uint64 // of payload
	TxMessages, RxMessages uint64
	NOPs                   uint64 // sent
}

// End says what the shell must do with the TCP connection.
type End uint8

// What to do with the TCP connection.
const (
	EndNone  End = iota
	EndFIN       // send a FIN, once, and go on reading
	EndClose     // close it: both sides sent a FIN
	EndReset     // close it, whatever is under way
)

// QP is one VI: a reliable connection, or an unreliable one, on one TCP connection. It is not
// safe for concurrent use; whoever holds the device's queue pair owns the QP.
//
//	RESET  nothing
//	INIT   PostRecv; being connected
//	RTS    PostRecv, PostSend, both directions
//	ERR    posted requests complete as flushed; what is staged, and the report of the
//	       peer's error, still leave; all that arrives is dropped until the peer's FIN
type QP struct {
	cfg    QPConfig
	limits wq.Limits
	attr   rdma.QPAttr // attr.State is the state
	terms  Terms

	req requester
	rsp responder
	tx  transmitter
	rx  receiver
	end ending

	wcs    wq.Completions
	events wq.Events
	stats  Stats
}

// ending is how the connection ends.
type ending struct {
	started  bool // there is a TCP connection
	asked    bool // Disconnect was called
	fin      bool // all is said
	peerFIN  bool
	reset    bool
	deadline time.Time // of our last words, and the peer's
	err      error     // why it was not in order
}

// NewQP makes a queue pair in state RESET. It makes all the memory that the
// queue pair will use.
func NewQP(c QPConfig) (*QP, error) {
	if err := c.Validate(); err != nil {
		return nil, fmt.Errorf("make queue pair %v: %w", c.Num, err)
	}
	c.MaxSGE = cmp.Or(c.MaxSGE, 1)
	c.ACKDelay = cmp.Or(c.ACKDelay, DefaultACKDelay)
	q := &QP{cfg: c, limits: wq.Limits{
		SGEs: c.MaxSGE, Inline: c.MaxInline, Message: wq.MaxMessage, WriteImm: true, Read: true, SendImm: true,
	}}
	q.req.queue = newSendQueue(c.MaxSendWR, c.MaxInline)
	q.rsp.ring = make([]recvWQE, wq.RingSize(c.MaxRecvWR))
	q.rsp.reads.ring = make([]readRequest, MaxReadWindow)
	q.tx.stage = make([]byte, stageBytes)
	q.rx.ahead = make([]byte, rxBytes)
	q.wcs = wq.NewCompletions(c.MaxSendWR, c.MaxRecvWR)
	return q, nil
}

// Num returns the queue pair number.
func (q *QP) Num() rdma.QPN { return q.cfg.Num }

// State returns the state.
func (q *QP) State() rdma.QPState { return q.attr.State }

// Terms returns what the connection was established with.
func (q *QP) Terms() Terms { return q.terms }

// Err returns why the connection did not end in order, nil if it did, or goes on.
func (q *QP) Err() error { return q.end.err }

// Stats returns the counters.
func (q *QP) Stats() Stats { return q.stats }

// Limits returns what work requests may ask for.
func (q *QP) Limits() wq.Limits { return q.limits }

// Posted returns the number of receives posted since RESET, modulo 2^16: what the messages of
// connection establishment say.
func (q *QP) Posted() uint16 { return uint16(q.rsp.tail) }

// Modify moves the queue pair to a.State. RTS is reached by [QP.Start] only.
func (q *QP) Modify(now time.Time, a rdma.QPAttr) error {
	from := q.attr.State
	switch {
	case a.State == rdma.QPReset:
		q.becomeReset()
		return nil
	case a.State == rdma.QPError && from != rdma.QPReset:
		q.stageLastACK()
		q.becomeError(now)
		q.rsp.report = report{}
		if from == rdma.QPRTS {
			q.end.err = fmt.Errorf("queue pair %v was moved to %v: %w", q.cfg.Num, rdma.QPError, rdma.ErrState)
		}
		return nil
	case a.State == rdma.QPInit && (from == rdma.QPReset || from == rdma.QPInit):
		q.attr.State, q.attr.Access = rdma.QPInit, a.Access
		return nil
	case a.State == rdma.QPRTR || a.State == rdma.QPRTS:
		return fmt.Errorf("queue pair %v to %v: it is connected by its provider: %w", q.cfg.Num, a.State, rdma.ErrNotSupported)
	}
	return fmt.Errorf("queue pair %v from %v to %v: %w", q.cfg.Num, from, a.State, rdma.ErrState)
}

// becomeReset forgets everything; outstanding requests do not complete.
func (q *QP) becomeReset() {
	q.attr, q.terms = rdma.QPAttr{}, Terms{}
	q.req = requester{queue: q.req.queue.startAt(0)}
	q.rsp = responder{ring: q.rsp.ring, reads: readQueue{ring: q.rsp.reads.ring}}
	q.tx = transmitter{stage: q.tx.stage}
	q.rx = receiver{ahead: q.rx.ahead}
	q.end = ending{}
	q.wcs.Clear()
	q.events = wq.Events{}
}

// Start takes over a TCP connection whose messages of connection establishment are exchanged: INIT
// becomes RTS.
func (q *QP) Start(_ time.Time, t Terms) error {
	switch {
	case q.attr.State != rdma.QPInit:
		return fmt.Errorf("start queue pair %v in %v: %w", q.cfg.Num, q.attr.State, rdma.ErrState)
	case t.ReadWindow > MaxReadWindow || t.MaxTransfer == 0:
		return fmt.Errorf("start queue pair %v with %+v: %w", q.cfg.Num, t.Attr, rdma.ErrInvalid)
	}
	t.MaxSegment = cmp.Or(t.MaxSegment, MaxSegment)
	if t.MaxSegment < MinSegment || t.MaxSegment > MaxSegment {
		return fmt.Errorf("start queue pair %v with segments of %d bytes, want %d to %d: %w",
			q.cfg.Num, t.MaxSegment, MinSegment, MaxSegment, rdma.ErrInvalid)
	}
	q.attr.State, q.terms, q.end.started = rdma.QPRTS, t, true
	q.req.start(&t)
	q.rsp.start(&t)
	return nil
}

// Disconnect ends the connection in order: what is queued is sent, and acknowledged, and then
// comes the FIN. Nothing more can be posted. It has no timer of its own; Modify to ERR ends the wait.
func (q *QP) Disconnect(now time.Time) error {
	if q.attr.State != rdma.QPRTS {
		return fmt.Errorf("disconnect queue pair %v in %v: %w", q.cfg.Num, q.attr.State, rdma.ErrState)
	}
	q.end.asked = true
	q.endIfSaid(now)
	return nil
}

// End says what to do with the TCP connection now.
func (q *QP) End() End {
	switch {
	case q.end.reset:
		return EndReset
	case q.end.fin && q.end.peerFIN && q.attr.State == rdma.QPError:
		return EndClose
	case q.end.fin:
		return EndFIN
	}
	return EndNone
}

// TxEnded reports whether all is sent that ever will be: the stream can be half closed.
func (q *QP) TxEnded() bool { return q.End() != EndNone }

// Closed reports whether the stream is of no more use.
func (q *QP) Closed() bool { return q.End() == EndClose || q.End() == EndReset }

// Aborted reports whether the stream ends by a reset, whatever is under way.
func (q *QP) Aborted() bool { return q.End() == EndReset }

// endIfSaid half closes the stream once all is said.
func (q *QP) endIfSaid(now time.Time) {
	if !q.end.started {
		return
	}
	done := false
	switch q.attr.State {
	case rdma.QPError:
		done = !q.rsp.report.due
	case rdma.QPRTS:
		done = q.end.asked && q.req.queue.isEmpty() && q.rsp.reads.isEmpty() && !q.owesAck()
	case rdma.QPReset, rdma.QPInit, rdma.QPRTR:
	}
	if done && q.tx.isEmpty() && !q.end.fin {
		q.end.fin = true
		q.end.deadline = now.Add(lastWords)
	}
	if q.End() == EndClose {
		q.end.deadline = time.Time{}
	}
}

// HandleEnd says that the TCP connection will bring nothing more: the peer's FIN, or with an error
// that it is broken.
func (q *QP) HandleEnd(now time.Time, err error) {
	inOrder := q.end.asked && q.end.fin
	q.end.peerFIN = true
	if err != nil {
		q.end.reset = true
	}
	switch {
	case q.attr.State != rdma.QPRTS:
	case q.rsp.report.due:
		q.fail(now, rdma.EventQPFatal, q.rsp.report.err)
	case err != nil && inOrder:
		q.becomeError(now)
	case err != nil:
		q.failSend(now, rdma.StatusRetryExceeded, fmt.Errorf("%w: %w", errTCP, err))
	case q.rx.isInside() || q.rsp.msg.active || q.req.isAnswered():
		q.fail(now, rdma.EventQPFatal, fmt.Errorf("%w: FIN inside a message", ErrProtocol))
	case inOrder:
		q.becomeError(now)
	default:
		// §2.2.2.2.2: when TCP is closed, the VI connection is. This is the answer, too.
		q.fail(now, rdma.EventDisconnected, ErrPeerClosed)
	}
	q.endIfSaid(now)
}

// NextTimeout returns when HandleTimeout is due.
func (q *QP) NextTimeout() (time.Time, bool) {
	t := q.end.deadline
	if a := q.rsp.ackAt; !a.IsZero() && (t.IsZero() || a.Before(t)) {
		t = a
	}
	return t, !t.IsZero() && !q.end.reset
}

// HandleTimeout does what is due at now. TxBuffers may have something then.
func (q *QP) HandleTimeout(now time.Time) {
	if a := q.rsp.ackAt; !a.IsZero() && !now.Before(a) {
		q.rsp.ackAt, q.rsp.ackNow = time.Time{}, true
	}
	if d := q.end.deadline; !d.IsZero() && !now.Before(d) {
		q.end.deadline = time.Time{}
		if q.attr.State == rdma.QPRTS && q.rsp.report.due {
			q.fail(now, rdma.EventQPFatal, q.rsp.report.err)
		}
		if q.attr.State == rdma.QPRTS {
			q.failUpTo(now, q.req.queue.cur, q.req.currentStatus(), errLastWords)
		}
		q.end.reset = true
	}
}

// becomeError flushes everything outstanding. What is staged may still leave; a segment
// whose payload is not, cannot be ended without the memory that is its user's again.
func (q *QP) becomeError(now time.Time) {
	if q.attr.State == rdma.QPError {
		return
	}
	q.attr.State = rdma.QPError
	for s := &q.req.queue; !s.isEmpty(); s.head++ {
		w := s.at(s.head)
		q.completeSend(w.id, w.op, 0, rdma.StatusFlushed)
	}
	q.req.queue.cur, q.req.reads = q.req.queue.tail, 0
	for r := &q.rsp; r.head != r.tail; r.head++ {
		q.completeRecv(rdma.WC{ID: r.at(r.head).id, Status: rdma.StatusFlushed, Op: rdma.OpRecv})
	}
	q.rsp.stop()
	q.rx.stop()
	if q.tx.left > 0 {
		q.end.reset = true
	}
	q.tx.stop()
	if q.end.started {
		q.end.deadline = now.Add(lastWords)
	}
	q.endIfSaid(now)
}

// fail is becomeError for a reason of our own, or the peer's.
func (q *QP) fail(now time.Time, kind rdma.EventKind, err error) {
	if q.attr.State == rdma.QPError {
		return
	}
	q.becomeError(now)
	q.end.err = fmt.Errorf("queue pair %v: %w", q.cfg.Num, err)
	q.events.Push(rdma.AsyncEvent{Kind: kind, QPN: q.cfg.Num, Err: q.end.err})
}

// protocolError ends a connection whose stream means nothing any more, and returns err.
func (q *QP) protocolError(now time.Time, err error) error {
	q.end.reset = true
	q.fail(now, rdma.EventQPFatal, err)
	return err
}

// failSend completes the oldest send with a status, and fails.
func (q *QP) failSend(now time.Time, s rdma.Status, err error) {
	if q.attr.State == rdma.QPError {
		return
	}
	if r := &q.req.queue; !r.isEmpty() {
		w := r.at(r.head)
		q.completeSend(w.id, w.op, 0, s)
		if r.head == r.cur {
			r.cur++
		}
		r.head++
	}
	kind := rdma.EventQPFatal
	if s == rdma.StatusRetryExceeded {
		kind = rdma.EventPathDown
	}
	q.fail(now, kind, fmt.Errorf("%w: %v", err, s))
}

// failUpTo completes what is older than message n as flushed, and then fails with n.
func (q *QP) failUpTo(now time.Time, n uint32, s rdma.Status, err error) {
	for r := &q.req.queue; r.head != n && !r.isEmpty(); r.head++ {
		w := r.at(r.head)
		q.completeSend(w.id, w.op, 0, rdma.StatusFlushed)
		if r.head == r.cur {
			r.cur++
		}
	}
	q.failSend(now, s, err)
}

// ForgetMemory drops the memory that the machine has resolved. The owner of
// the memory calls ForgetMemory after a region is taken out of the table and before
// the region is unmapped; what was not done yet is resolved, and refused, anew.
func (q *QP) ForgetMemory(time.Time) {
	q.tx.forget()
	q.rx.forget()
}

// PollWC moves completions to dst, in order, and returns how many.
func (q *QP) PollWC(dst []wq.Completion) int { return q.wcs.Poll(dst) }

// PollEvent returns the next asynchronous event.
func (q *QP) PollEvent() (rdma.AsyncEvent, bool) { return q.events.Pop() }
