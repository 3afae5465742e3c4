// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// recvWQE is a receive in the queue.
type recvWQE struct {
	id         uint64
	sge, spill rdma.SGE
}

// message is a Send or Write of the peer that is coming in.
type message struct {
	active bool
	typ    Type
	number uint32
	got    uint32 // bytes in whole segments
	rdma   RDMA
}

// report is what the peer is told of its message that failed.
type report struct {
	due    bool
	said   uint32 // number of our last message
	number uint32
	typ    ErrorType
	cause  Cause
	err    error // the same, for our own user
}

// responder is the peer's messages: our receives, and what we say of them.
type responder struct {
	ring       []recvWQE // indexes only grow: the tail is the number of receives posted
	head, tail uint32
	msg        message
	reads      readQueue

	delivered  uint32 // the last message that is complete
	ackable    uint32 // the last one whose completion was polled, too
	ackTold    uint32
	postedTold uint16
	ackAt      time.Time // when the news are told in a segment of their own
	ackNow     bool
	report     report
}

func (r *responder) start(t *Terms) {
	r.delivered, r.ackable, r.ackTold = t.PeerFirst, t.PeerFirst, t.PeerFirst
	r.postedTold = t.Posted
}

func (r *responder) at(i uint32) *recvWQE { return &r.ring[i&uint32(len(r.ring)-1)] }

// stop forgets what is under way, but for the report.
func (r *responder) stop() {
	r.msg = message{}
	r.reads = readQueue{ring: r.reads.ring}
	r.ackAt, r.ackNow = time.Time{}, false
}

// tell returns what a segment says of our receiving side.
func (r *responder) tell(reliable bool) (ack uint32, posted uint16) {
	if reliable {
		r.ackTold = r.ackable
		ack = r.ackable
	}
	r.postedTold = uint16(r.tail)
	r.ackAt, r.ackNow = time.Time{}, false
	return ack, r.postedTold
}

// unused is the number of receives that the peer knows of and has not taken.
func (r *responder) unused() int { return int(int16(r.postedTold - uint16(r.head))) }

// owesAck reports whether a message of the peer is not acknowledged.
func (q *QP) owesAck() bool { return q.terms.Reliable && q.rsp.delivered != q.rsp.ackTold }

// stageNews stages a NOP if there are news that wait no longer for company: acknowledgements, and
// receives for a peer that has few left (§3.1, Notes on NOP).
func (q *QP) stageNews(now time.Time) {
	r := &q.rsp
	posted := uint16(r.tail) != r.postedTold
	if !q.owesAck() && !posted {
		r.ackAt, r.ackNow = time.Time{}, false
		return
	}
	acks := q.terms.Reliable && r.ackable != r.ackTold
	few := r.unused() < max(1, q.cfg.MaxRecvWR/creditFraction)
	switch {
	case acks && (r.ackNow || q.end.asked || after(r.ackable, r.ackTold) >= ackAfter), posted && (r.ackNow || few):
		q.stageNOP()
	case r.ackAt.IsZero() && !r.ackNow:
		r.ackAt = now.Add(q.cfg.ACKDelay)
	}
}

// stageLastACK stages the acknowledgement that still waits for company when our program, or a request of
// its own, ends the connection: the peer would not learn any more that its messages were received. What was
// not ackable when something was sent last does not become so: its completion may be lost in an overrun.
func (q *QP) stageLastACK() {
	r := &q.rsp
	due := q.attr.State == rdma.QPRTS && q.terms.Reliable && r.ackable != r.ackTold
	if due && !r.report.due && !q.end.fin && q.tx.hasRoom() {
		q.stageNOP()
	}
}

func (q *QP) stageNOP() {
	q.stage(TypeNOP, FlagEnd, 0, 0, q.req.queue.cur-1, RDMA{}, 0)
	q.stats.NOPs++
}

// stageReport stages the last thing that the peer hears of us.
func (q *QP) stageReport() {
	p := &q.rsp.report
	h := Header{
		Type: TypeNOP, Flags: FlagEnd, Length: HeaderLen, Message: p.said,
		Ack: p.number, Posted: q.rsp.postedTold, Error: p.typ, Cause: p.cause,
	}
	q.tx.to = len(h.Append(q.tx.stage[:q.tx.to]))
	q.stats.TxSegments++
	q.stats.NOPs++
	p.due = false
}

// refuse ends the connection because of a message of the peer, and returns the reason.
func (q *QP) refuse(now time.Time, number uint32, typ ErrorType, cause Cause) error {
	err := fmt.Errorf("message %d of the peer: %v, %v", number, typ, cause)
	if typ == ErrorMemory {
		err = fmt.Errorf("%w: message %d: %v", rdma.ErrPeerAccess, number, cause)
	}
	return q.tell(now, number, typ, cause, err)
}

// tell ends the connection because of a message of the peer, which is told why (§3.1, Remote Error
// Code). A segment that is half sent leaves first. It returns the reason of our own event.
func (q *QP) tell(now time.Time, number uint32, typ ErrorType, cause Cause, err error) error {
	if q.terms.Reliable {
		q.rsp.report = report{due: true, said: q.req.queue.cur - 1, number: number, typ: typ, cause: cause, err: err}
	}
	if q.terms.Reliable && q.tx.left > 0 {
		q.rx.stop()
		q.end.deadline = now.Add(lastWords)
		return err
	}
	q.fail(now, rdma.EventQPFatal, err)
	return err
}

// causeOf translates what wq.Memory says of a range.
func causeOf(st rdma.Status) Cause {
	switch st {
	case rdma.StatusRemoteInvalid:
		return CauseHandle
	case rdma.StatusRemoteOp:
		return CauseBounds
	default:
		return CauseRight
	}
}

// handleNews takes what a segment says of our messages: how far they came, what became of
// one, and how many receives there are.
func (q *QP) handleNews(now time.Time, h *Header) error {
	r := &q.req
	if int16(h.Posted-r.peerPosted) > 0 {
		r.peerPosted = h.Posted
	}
	if !q.terms.Reliable {
		return nil
	}
	last := r.queue.cur - 1
	if r.offset > 0 || q.tx.left > 0 && q.tx.src == fromRequest {
		last++ // on its way
	}
	failed := h.Error != ErrorNone || h.Cause != CauseNone
	switch {
	case failed && (after(h.Ack, r.queue.head) < 0 || after(h.Ack, last) > 0),
		!failed && (after(h.Ack, r.acked) < 0 || after(h.Ack, r.queue.cur) >= 0):
		return q.protocolError(now, fmt.Errorf("%w: acknowledges message %d of %d to %d", ErrProtocol, h.Ack, r.acked, last))
	case !failed:
		r.acked = h.Ack
		q.retire(now)
		return nil
	}
	// §3.1: the messages before the one in error were received; after it nothing is told.
	if after(h.Ack-1, r.acked) > 0 {
		r.acked = h.Ack - 1
	}
	err := &RemoteError{Message: h.Ack, Type: h.Error, Cause: h.Cause}
	st := err.status()
	if own := r.queue.at(h.Ack).status; own != rdma.StatusSuccess {
		st = own // we know better: Transmit Error
	}
	q.completeDone()
	q.failUpTo(now, h.Ack, st, err)
	return err
}

// readRequest is an RDMA READ of the peer.
type readRequest struct {
	number uint32
	rdma   RDMA
	off    uint32 // bytes that were sent
}

// readQueue holds the READs of the peer that are not answered, as many as agreed.
type readQueue struct {
	ring       []readRequest // of MaxReadWindow places
	head, tail uint32
}

func (r *readQueue) isEmpty() bool { return r.head == r.tail }

func (r *readQueue) size() int { return int(r.tail - r.head) }

func (r *readQueue) front() *readRequest { return &r.ring[r.head%MaxReadWindow] }

func (r *readQueue) push(p readRequest) {
	r.ring[r.tail%MaxReadWindow] = p
	r.tail++
}

// sent moves on behind a segment of the oldest.
func (r *readQueue) sent(n uint32, last bool) {
	r.front().off += n
	if last {
		r.head++
	}
}
