// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// requester is our messages: the send queue, cut into segments, and what the peer says of them.
type requester struct {
	queue      sendQueue
	offset     uint32      // of the message at cur: bytes in the segments before
	aborted    bool        // the message at cur ended with Transmit Error
	padded     rdma.Status // why a segment of the message at cur ends with padding; StatusSuccess: none does
	reads      int         // READs that wait for their answer
	read       uint32      // no message before this number is one of them, if there are any
	peerPosted uint16      // receives of the peer
	used       uint16      // those that our messages took
	acked      uint32      // the last message that the peer has; without Reliable, that TCP has
}

func (r *requester) start(t *Terms) {
	*r = requester{queue: r.queue.startAt(t.First + 1), peerPosted: t.PeerPosted, acked: t.First}
}

// mayBegin reports whether the first segment of a message may leave: not before the peer has a
// receive for it (§2.2.1, §3.1), and not more READs than agreed (§2.2.2.2.6).
func (r *requester) mayBegin(w *sendWQE, t *Terms) bool {
	switch {
	case w.op == rdma.OpRead:
		return r.reads < int(t.ReadWindow)
	case t.FlowControl && w.takesReceive():
		return int16(r.peerPosted-r.used) > 0
	}
	return true
}

// oldestRead returns the READ whose answer comes next, and its number; nil if none is due. It passes over those
// that are done, and is called while they still have their places.
func (r *requester) oldestRead() (*sendWQE, uint32) {
	for ; r.reads > 0; r.read++ {
		if w := r.queue.at(r.read); w.op == rdma.OpRead && !w.done {
			return w, r.read
		}
	}
	return nil, 0
}

// isAnswered reports whether a part of an answer has come.
func (r *requester) isAnswered() bool {
	w, _ := r.oldestRead()
	return w != nil && w.got > 0
}

// currentStatus is how the message at cur ends if nothing more is heard of the peer.
func (r *requester) currentStatus() rdma.Status {
	if s := &r.queue; !s.isSent() && s.at(s.cur).status != rdma.StatusSuccess {
		return s.at(s.cur).status
	}
	return rdma.StatusRetryExceeded
}

// source is where a payload comes from.
type source uint8

const (
	fromRequest  source = iota // the message at cur
	fromResponse               // the oldest READ of the peer
)

// transmitter is what leaves next: whole short segments and headers, copied, and then perhaps the
// payload of the last header, which stays in its memory.
type transmitter struct {
	stage        []byte
	from, to     int
	responseNext bool // if there is one

	src   source
	n     int  // bytes of the payload
	left  int  // those that TCP did not take yet
	last  bool // of its message
	pad   bool // the memory is gone: zeros
	ready bool // bufs is the memory of what is left
	bufs  [MaxSGE][]byte
	nbufs int
}

func (t *transmitter) isEmpty() bool { return t.from == t.to && t.left == 0 }

// hasRoom reports whether another header and a short payload can be staged.
func (t *transmitter) hasRoom() bool {
	return t.left == 0 && len(t.stage)-t.to >= HeaderLen+RDMALen+shortBytes
}

func (t *transmitter) add(b []byte) {
	t.bufs[t.nbufs] = b
	t.nbufs++
}

func (t *transmitter) forget() {
	t.bufs, t.nbufs, t.ready = [MaxSGE][]byte{}, 0, false
}

// stop drops the payload that is not taken yet; what is staged stays.
func (t *transmitter) stop() {
	t.left, t.pad = 0, false
	t.forget()
}

// take drops the first n bytes of the memory.
func (t *transmitter) take(n int) {
	for t.nbufs > 0 && n >= len(t.bufs[0]) {
		n -= len(t.bufs[0])
		copy(t.bufs[:], t.bufs[1:t.nbufs])
		t.nbufs--
		t.bufs[t.nbufs] = nil
	}
	if t.nbufs > 0 {
		t.bufs[0] = t.bufs[0][n:]
	}
}

// padding is what a segment ends with whose memory is gone.
var padding [4096]byte

// TxBuffers appends what to send now to dst: headers, and registered memory. It may fail requests
// whose memory is not registered. Call PollWC before it: messages whose completions were not
// polled are not acknowledged yet.
func (q *QP) TxBuffers(now time.Time, dst [][]byte) [][]byte {
	t := &q.tx
	q.fill(now)
	if t.left > 0 && !t.pad && !t.ready {
		if st := q.gatherLeft(); st != rdma.StatusSuccess {
			q.pad(now, st)
		}
	}
	if q.end.reset {
		return dst
	}
	if t.from < t.to {
		dst = append(dst, t.stage[t.from:t.to])
	}
	switch {
	case t.left > 0 && t.pad:
		dst = append(dst, padding[:min(t.left, len(padding))])
	case t.left > 0:
		dst = append(dst, t.bufs[:t.nbufs]...)
	}
	return dst
}

// HasTx reports whether TxBuffers may have something.
func (q *QP) HasTx() bool {
	t, r := &q.tx, &q.req
	if q.end.reset || !t.isEmpty() || q.attr.State != rdma.QPRTS {
		return !q.end.reset && (!t.isEmpty() || q.rsp.report.due)
	}
	return !r.queue.isSent() || !q.rsp.reads.isEmpty() || q.owesAck() || uint16(q.rsp.tail) != q.rsp.postedTold
}

// HandleTx says that TCP took the first n bytes of what TxBuffers returned.
func (q *QP) HandleTx(now time.Time, n int) {
	t := &q.tx
	k := min(n, t.to-t.from)
	t.from += k
	n -= k
	invariant.Must(n <= t.left, "vitcp: TCP took more than there was")
	if n > 0 {
		t.left -= n
		t.take(n)
		if t.left == 0 {
			q.segmentTaken(t.src, t.n, t.last)
			t.stop()
			if q.rsp.report.due {
				q.fail(now, rdma.EventQPFatal, q.rsp.report.err)
			}
		}
	}
	if q.attr.State == rdma.QPRTS && !q.terms.Reliable && t.isEmpty() {
		q.req.acked = q.req.queue.cur - 1
		q.retire(now)
	}
	q.endIfSaid(now)
}

// segmentTaken moves on behind a segment.
func (q *QP) segmentTaken(src source, n int, last bool) {
	q.stats.TxBytes += uint64(n)
	if src == fromResponse {
		q.rsp.reads.sent(uint32(n), last)
		return
	}
	r := &q.req
	r.offset += uint32(n)
	if last {
		r.offset = 0
		r.queue.cur++
		q.stats.TxMessages++
	}
}

// fill stages segments while there is room.
func (q *QP) fill(now time.Time) {
	t := &q.tx
	if t.from == t.to {
		t.from, t.to = 0, 0
	}
	if q.wcs.Recvs() == 0 {
		// §3.1: acknowledged is what the program was told of.
		q.rsp.ackable = q.rsp.delivered
	}
	q.retire(now)
	for q.attr.State == rdma.QPRTS && !q.rsp.report.due && t.hasRoom() {
		if !q.stageData(now) {
			break
		}
	}
	if !t.hasRoom() {
		return
	}
	switch {
	case q.attr.State == rdma.QPError && q.rsp.report.due:
		q.stageReport()
	case q.attr.State == rdma.QPRTS && !q.rsp.report.due:
		q.stageNews(now)
	}
}

// stageData stages a segment of a response or of a request. They alternate: a response may come
// between the segments of any message but another response (§2.2.2.2.3).
func (q *QP) stageData(now time.Time) bool {
	if q.tx.responseNext {
		q.tx.responseNext = false
		return q.stageResponse(now) || q.stageRequest(now)
	}
	q.tx.responseNext = true
	return q.stageRequest(now) || q.stageResponse(now)
}

// stageRequest stages the next segment of the message at cur.
func (q *QP) stageRequest(now time.Time) bool {
	r := &q.req
	if q.attr.State != rdma.QPRTS || r.queue.isSent() || r.aborted {
		return false
	}
	w := r.queue.at(r.queue.cur)
	if w.status != rdma.StatusSuccess || r.offset == 0 && !r.mayBegin(w, &q.terms) {
		return false
	}
	typ, room, n := TypeWrite, q.terms.MaxSegment-HeaderLen-RDMALen, w.length-r.offset
	switch w.op {
	case rdma.OpSend:
		typ, room = TypeSend, q.terms.MaxSegment-HeaderLen
	case rdma.OpRead:
		typ, n = TypeReadRequest, 0
	default:
	}
	size := min(int(n), room)
	st := r.padded
	if st == rdma.StatusSuccess {
		st = q.gather(w, int(r.offset), size)
	}
	if st != rdma.StatusSuccess {
		w.status = st
		if r.offset == 0 {
			q.retire(now)
			return false
		}
		q.abortRequest(now, typ, w)
		return true
	}
	if r.offset == 0 {
		if w.takesReceive() {
			r.used++
		}
		if w.op == rdma.OpRead {
			if r.reads == 0 {
				r.read = r.queue.cur
			}
			r.reads++
		}
	}
	flags := Flags(0)
	if size == int(n) {
		flags = FlagEnd
	}
	if w.hasImm() {
		flags |= FlagImmediate
	}
	q.stage(typ, flags, r.offset, w.imm, r.queue.cur, RDMA{Addr: w.addr, Handle: w.rkey, Length: w.length}, size)
	q.payload(fromRequest, size, flags&FlagEnd != 0)
	return true
}

// abortRequest ends a message whose memory went away when a part of it had left (§2.2.2.2.5). It fails
// when the peer has said how far it came, or says nothing.
func (q *QP) abortRequest(now time.Time, typ Type, w *sendWQE) {
	r := &q.req
	r.aborted = true
	q.stage(typ, FlagEnd|FlagTransmitError, r.offset, 0, r.queue.cur, RDMA{Addr: w.addr, Handle: w.rkey, Length: w.length}, 0)
	if !q.terms.Reliable {
		q.failUpTo(now, r.queue.cur, w.status, errMemory)
		return
	}
	q.end.deadline = now.Add(lastWords)
}

// stageResponse stages the next segment of the answer to the peer's oldest READ.
func (q *QP) stageResponse(now time.Time) bool {
	d := &q.rsp.reads
	if q.attr.State != rdma.QPRTS || d.isEmpty() {
		return false
	}
	p := d.front()
	n := p.rdma.Length - p.off
	size := min(int(n), q.terms.MaxSegment-HeaderLen-RDMALen)
	q.tx.forget()
	if st := q.gatherResponse(p, int(p.off), size); st != rdma.StatusSuccess {
		if p.off == 0 {
			_ = q.tell(now, p.number, ErrorMemory, causeOf(st), errGone) // the event says it
			return false
		}
		q.stage(TypeReadResponse, FlagEnd|FlagTransmitError, p.off, 0, p.number, p.rdma, 0)
		q.fail(now, rdma.EventQPFatal, errGone)
		return false
	}
	flags := Flags(0)
	if size == int(n) {
		flags = FlagEnd
	}
	q.stage(TypeReadResponse, flags, p.off, 0, p.number, p.rdma, size)
	q.payload(fromResponse, size, flags&FlagEnd != 0)
	return true
}

// stage puts headers into the stage, with the news of what we received.
func (q *QP) stage(typ Type, flags Flags, off, imm, number uint32, r RDMA, n int) {
	h := Header{Type: typ, Flags: flags, Offset: off, Message: number}
	if flags&FlagImmediate != 0 {
		h.Immediate = imm
	}
	h.Length = uint16(h.PayloadOffset() + n)
	h.Ack, h.Posted = q.rsp.tell(q.terms.Reliable)
	b := h.Append(q.tx.stage[:q.tx.to])
	if typ.hasRDMA() {
		b = r.Append(b)
	}
	q.tx.to = len(b)
	q.stats.TxSegments++
}

// payload puts the payload that was gathered behind its headers: copied if it is short.
func (q *QP) payload(src source, n int, last bool) {
	t := &q.tx
	if n > shortBytes {
		t.src, t.n, t.left, t.last, t.ready = src, n, n, last, true
		return
	}
	for _, b := range t.bufs[:t.nbufs] {
		t.to += copy(t.stage[t.to:], b)
	}
	t.forget()
	q.segmentTaken(src, n, last)
}

// gather finds the memory of n bytes at off of a message. Before the first segment it asks for all
// of the message's memory, and for that of a READ's answer.
func (q *QP) gather(w *sendWQE, off, n int) rdma.Status {
	t := &q.tx
	t.forget()
	if w.flags&rdma.SendInline != 0 {
		if n > 0 {
			t.add(q.req.queue.inlineOf(q.req.queue.cur)[off : off+n])
		}
		return rdma.StatusSuccess
	}
	skip := off
	for i := range w.sges {
		s := w.sgl[i]
		if s.Length == 0 || skip >= int(s.Length) || n == 0 && off > 0 {
			skip -= min(skip, int(s.Length))
			continue
		}
		b, st := q.cfg.Memory.Local(s, w.op == rdma.OpRead)
		if st != rdma.StatusSuccess {
			return st
		}
		b = b[skip:]
		skip = 0
		b = b[:min(len(b), n)]
		if len(b) > 0 {
			t.add(b)
		}
		n -= len(b)
	}
	return rdma.StatusSuccess
}

// gatherResponse finds the memory of n bytes at off of the answer to a READ.
func (q *QP) gatherResponse(p *readRequest, off, n int) rdma.Status {
	if p.rdma.Length == 0 {
		return rdma.StatusSuccess
	}
	b, st := q.cfg.Memory.Remote(p.rdma.Handle, p.rdma.Addr, p.rdma.Length, rdma.RemoteRead)
	if st == rdma.StatusSuccess {
		q.tx.add(b[off : off+n])
	}
	return st
}

// gatherLeft finds the memory again of what TCP did not take yet.
func (q *QP) gatherLeft() rdma.Status {
	t := &q.tx
	t.forget()
	done := t.n - t.left
	var st rdma.Status
	if t.src == fromRequest {
		st = q.gather(q.req.queue.at(q.req.queue.cur), int(q.req.offset)+done, t.left)
	} else {
		p := q.rsp.reads.front()
		st = q.gatherResponse(p, int(p.off)+done, t.left)
	}
	t.ready = st == rdma.StatusSuccess
	return st
}

// pad has the rest of a segment be zeros whose memory is gone, and the next segment say so (§2.2.2.2.5). That is noted of a
// request: what is left of the message may be in other regions, which are there. A READ's answer is of one region.
func (q *QP) pad(now time.Time, st rdma.Status) {
	t := &q.tx
	if t.last {
		q.cut(now)
		return
	}
	if t.src == fromRequest {
		q.req.padded = st
	}
	t.pad = true
	t.forget()
}

// cut ends a connection in the middle of the last segment of a message: its header has promised
// bytes that are not there any more, and the peer must not take others for them.
func (q *QP) cut(now time.Time) {
	if q.tx.src == fromRequest {
		q.failUpTo(now, q.req.queue.cur, rdma.StatusLocalProtect, errCut)
		return
	}
	q.fail(now, rdma.EventQPFatal, errCut)
}

// retire completes the requests at the head that are done, and the one that cannot be sent
// when its turn has come.
func (q *QP) retire(now time.Time) {
	if q.attr.State != rdma.QPRTS {
		return
	}
	q.completeDone()
	if s := &q.req.queue; s.head == s.cur && !s.isEmpty() && s.at(s.cur).status != rdma.StatusSuccess {
		q.stageLastACK()
		q.failSend(now, s.at(s.cur).status, errMemory)
	}
}

// completeDone completes the requests at the head that are done: a READ with its answer, the others
// when they are acknowledged (§3.1, Message ACK).
func (q *QP) completeDone() {
	r := &q.req
	for s := &r.queue; s.head != s.cur; s.head++ {
		w := s.at(s.head)
		if w.op == rdma.OpRead && !w.done || w.op != rdma.OpRead && after(r.acked, s.head) < 0 {
			return
		}
		if w.flags&rdma.SendSignaled != 0 {
			q.completeSend(w.id, w.op, w.got, rdma.StatusSuccess)
		}
	}
}
