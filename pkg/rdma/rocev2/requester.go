// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// requester is the sending half of a queue pair: a send queue whose messages are cut into
// packets, and what sends these once, and again until the peer has acknowledged them.
type requester struct {
	queue sendQueue
	win   sendWindow
	cwnd  congestionWindow
	data  gatherList // the message that is being sent
	ask   ackRequest
	reads readState

	ack      ackTimer
	rnr      rnrWait
	probe    probeTimer
	recovery recovery
}

// cleared returns a requester that has not started, with the memory of this one.
func (r *requester) cleared() requester { return requester{queue: r.queue.cleared()} }

func (r *requester) start(psn uint64, window int, a *rdma.QPAttr) {
	r.win.start(psn)
	r.cwnd.start(window)
	r.ack.start(a)
	r.rnr.start(a)
}

// stop forgets what is outstanding.
func (r *requester) stop() {
	r.queue.stop()
	r.win.stop()
	r.reads.n = 0
	r.ack.stop()
	r.rnr.stop()
	r.probe.stop()
	r.forgetMemory()
}

func (r *requester) forgetMemory() {
	r.data.forget()
	r.reads.forgetMemory()
}

// sendOps has, for SEND and for WRITE with immediate data, the operations First, Middle, Last
// and Only, and the last two with immediate data. It is a constant table.
var sendOps = [2][6]OpCode{
	{SendFirst, SendMiddle, SendLast, SendOnly, SendLastImm, SendOnlyImm},
	{WriteFirst, WriteMiddle, WriteLast, WriteOnly, WriteLastImm, WriteOnlyImm},
}

// sendOpOf returns the operation of a packet of a message.
func sendOpOf(op rdma.Opcode, isFirst, isLast, hasImm bool) OpCode {
	ops := &sendOps[0]
	if op != rdma.OpSend {
		ops = &sendOps[1]
	}
	i := 0
	switch {
	case isFirst && isLast:
		i = 3
	case isLast:
		i = 2
	case !isFirst:
		i = 1
	}
	if isLast && hasImm {
		i += 2
	}
	return ops[i]
}

// pollRequests fills dst with request packets.
func (q *QP) pollRequests(now time.Time, dst []TxPacket) int {
	r := &q.req
	if !r.rnr.ended(now) {
		return 0
	}
	n := 0
	wnd := r.recovery.window(r.cwnd.size)
	for n < len(dst) && !r.queue.isSent() && r.win.outstanding() < wnd {
		w := r.queue.at(r.queue.cur)
		if !r.data.ready && !q.prepare(w) {
			if q.attr.State != rdma.QPRTS || r.queue.at(r.queue.cur).status != rdma.StatusSuccess {
				break
			}
			continue // went back to the one before
		}
		if w.op == rdma.OpRead {
			if !q.txRead(&dst[n], w) {
				break
			}
		} else {
			q.txData(&dst[n], w, wnd)
		}
		n++
	}
	if n > 0 {
		if r.win.nxt > r.recovery.resent {
			r.probe.measure(now, r.win.nxt)
		}
		r.arm(now)
	}
	return n
}

// arm starts the timers if something is outstanding and they do not run.
func (r *requester) arm(now time.Time) {
	if r.win.outstanding() == 0 {
		return
	}
	r.ack.run(now)
	r.probe.run(now)
}

// prepare resolves the memory of the message that nxt is in, and takes the
// position of nxt in that message. It reports false if the message cannot be sent.
func (q *QP) prepare(w *sendWQE) bool {
	r := &q.req
	if w.status == rdma.StatusSuccess {
		w.status = q.resolve(w)
	}
	if w.status == rdma.StatusSuccess {
		r.data.ready = true
		return true
	}
	// IBTA 10.7.3.1: the requests before a failed one complete first. The last
	// packet before the failed request goes out once more if the peer was not asked
	// to answer that packet. A failed message that is partly acknowledged has no
	// request before it.
	switch {
	case r.win.una >= w.first:
		q.failSend(w.status, errMemory)
	case r.ask.since != 0 && r.win.nxt == w.first:
		r.goBack(r.win.nxt - 1)
	}
	return false
}

func (q *QP) resolve(w *sendWQE) rdma.Status {
	r := &q.req
	r.data.reset()
	if w.flags&rdma.SendInline != 0 {
		r.data.add(r.queue.inlineOf(r.queue.cur)[:w.length])
	}
	for i := range w.sges {
		if w.sgl[i].Length == 0 {
			continue
		}
		b, st := q.cfg.Memory.Local(w.sgl[i], w.op == rdma.OpRead)
		if st != rdma.StatusSuccess {
			return st
		}
		invariant.Must(len(b) == int(w.sgl[i].Length), "rocev2: memory of another length than its SGE")
		r.data.add(b)
	}
	r.data.seek(int(r.win.nxt-w.first) * q.mtu)
	return rdma.StatusSuccess
}

// txData makes the packet of PSN nxt, of a SEND or WRITE.
//
// A WRITE goes as one WRITE Only for each packet, which are the same bytes in the same order
// and one completion. So all its packets but the last have one length, as the wire
// wants them that sends many at a time; the RETH of a WRITE First would make that one longer:
//
//	WRITE First, Middle, Last     RETH|mtu        mtu        rest
//	three of WRITE Only           RETH|mtu   RETH|mtu   RETH|rest
//
// A WRITE with immediate data stays one message, whose length the receiver is told.
func (q *QP) txData(t *TxPacket, w *sendWQE, wnd uint64) {
	r := &q.req
	isFirst, isLast := r.win.nxt == w.first, r.win.nxt == w.last
	hasImm := w.op == rdma.OpWriteImm || w.flags&rdma.SendImm != 0
	off := int(r.win.nxt-w.first) * q.mtu
	size := q.mtu
	var flags uint32
	if isLast {
		size = int(w.length) - off
		flags = bit(w.flags&rdma.SendSolicited != 0, bthSolicited) | uint32(padLen(size))<<20
	}
	// Ask for an answer where the program waits for one, before the window
	// closes, and often enough that the window slides.
	var ack uint32
	if r.ask.next(wnd) || r.win.outstanding()+1 >= wnd ||
		isLast && (w.flags&rdma.SendSignaled != 0 || r.queue.cur+1 == r.queue.tail) {
		ack = bthAckReq
		r.ask.asked()
	}
	if w.op == rdma.OpWrite {
		q.put(t, WriteOnly, r.win.nxt, flags, ack)
		t.putRETH(w.addr+uint64(off), w.rkey, uint32(size))
	} else {
		q.put(t, sendOpOf(w.op, isFirst, isLast, hasImm), r.win.nxt, flags, ack)
		if isFirst && w.op == rdma.OpWriteImm {
			t.putRETH(w.addr, w.rkey, w.length)
		}
	}
	if isLast && hasImm {
		t.put32(w.imm)
	}
	r.data.take(t, size)
	q.stats.TxBytes += uint64(size)
	q.sent(r.win.nxt + 1)
	if isLast {
		r.queue.cur++
		r.data.leave()
	}
}

// sent moves nxt.
func (q *QP) sent(nxt uint64) {
	if q.req.win.sent(nxt) {
		q.stats.Retransmits++
	}
}

// txRead makes a READ request. A long READ is cut into requests of a quarter
// of the window: their responses are what is in flight. The cuts are always
// at the same places, because a responder may refuse a repeated request that
// is not within one original request (IBTA 9.4.4, duplicate READ).
func (q *QP) txRead(t *TxPacket, w *sendWQE) bool {
	r := &q.req
	chunk := uint64(max(1, r.cwnd.limit/4))
	idx := r.win.nxt - w.first
	end := min(w.first+(idx/chunk+1)*chunk, w.last+1)
	if r.reads.isFull(q.attr.ReadsAsked) || (r.win.outstanding() != 0 && end-r.win.una > uint64(r.cwnd.size)) {
		return false
	}
	from := idx * uint64(q.mtu)
	to := min((end-w.first)*uint64(q.mtu), uint64(w.length))
	q.put(t, ReadRequest, r.win.nxt, 0, bthAckReq)
	t.putRETH(w.addr+from, w.rkey, uint32(to-from))
	r.reads.add(span{r.win.nxt, end})
	r.ask.asked()
	q.sent(end)
	if end == w.last+1 {
		r.queue.cur++
	}
	r.data.leave()
	return true
}

// goBack makes psn the next to be sent.
func (r *requester) goBack(psn uint64) {
	invariant.Must(psn >= r.win.una && psn <= r.win.nxt, "rocev2: go back to where nothing is outstanding")
	r.win.nxt = psn
	r.queue.seek(psn)
	r.data.leave()
	r.ask.again()
	r.recovery.begin(r.win.max)
	r.probe.stop()
	r.reads.goBack(psn)
	r.ack.stop()
}

// failSend completes the oldest send with an error and ends the queue pair.
func (q *QP) failSend(s rdma.Status, err error) {
	r := &q.req
	if !r.queue.isEmpty() {
		w := r.queue.at(r.queue.head)
		q.completeSend(w.id, w.op, 0, s)
		r.queue.head++
	}
	kind := rdma.EventQPFatal
	if s == rdma.StatusRetryExceeded {
		kind = rdma.EventPathDown
	}
	q.fail(kind, fmt.Errorf("queue pair %v to %v: %w: %v", q.cfg.Num, q.attr.DestQPN, err, s))
}

// ackTo takes everything before psn as acknowledged, up to the first READ
// that is not answered, because only responses acknowledge a READ. It reports whether
// everything before psn is acknowledged now.
func (q *QP) ackTo(now time.Time, psn uint64) bool {
	r := &q.req
	whole := true
	for !r.queue.isEmpty() {
		w := r.queue.at(r.queue.head)
		if w.first >= psn {
			break
		}
		if w.op == rdma.OpRead {
			if done := max(r.win.una, w.first); done < psn {
				psn, whole = done, false
			}
			break
		}
		if w.last >= psn {
			break
		}
		q.retire(w)
	}
	q.progress(now, psn)
	return whole
}

// retire completes the oldest send.
func (q *QP) retire(w *sendWQE) {
	r := &q.req
	q.stats.TxMessages++
	if w.flags&rdma.SendSignaled != 0 {
		q.completeSend(w.id, w.op, w.length, rdma.StatusSuccess)
	}
	if r.queue.retire() {
		r.data.leave()
	}
}

// progress moves una.
func (q *QP) progress(now time.Time, psn uint64) {
	r := &q.req
	if psn <= r.win.una {
		return
	}
	r.cwnd.grow(int(psn - r.win.una))
	if r.win.acked(psn) {
		r.queue.skip(psn)
		r.data.leave()
	}
	r.reads.acked(psn)
	r.ack.progress()
	r.rnr.progress()
	r.recovery.progress()
	if r.recovery.probing != 0 {
		r.probed(psn)
	}
	r.probe.acked(now, psn)
	r.arm(now)
}

// probed judges the answer to a probe. One that acknowledges the probe alone
// says that what came after the probe is lost. One that acknowledges more says that
// the peer was slow: what is in flight is not sent again.
func (r *requester) probed(una uint64) {
	if una == r.recovery.probing+1 {
		r.cwnd.loss()
	} else {
		r.win.nxt = r.win.max
		r.queue.skip(r.win.nxt)
		r.data.leave()
	}
	r.recovery.probing = 0
}

// handleResponse takes acknowledgements and READ responses.
func (q *QP) handleResponse(now time.Time, p *Packet, info opInfo) {
	r := &q.req
	psn := near(r.win.una, p.BTH.PSN)
	if !r.win.awaits(psn) {
		// IBTA 9.7.5.1: ghost acknowledgements are dropped. One ghost means
		// something: a NAK for the packet after the last that was sent, of a
		// responder whose gap was closed before the responder could report the gap.
		if p.BTH.OpCode == Acknowledge && p.AETH.Syndrome == SyndromeNAK(NAKSequence) &&
			psn == r.win.max && psn > r.win.una {
			if !q.ackTo(now, psn) {
				q.lost()
			}
			return
		}
		q.stats.Ghosts++
		return
	}
	if info&opReadResp != 0 {
		q.handleReadResponse(now, p, info, psn)
		return
	}
	if p.BTH.OpCode != Acknowledge {
		q.stats.Bad++
		return
	}
	s := p.AETH.Syndrome
	if _, ok := s.ACK(); ok {
		if !q.ackTo(now, psn+1) {
			q.lost()
		}
		return
	}
	timer, rnr := s.RNR()
	code, nak := s.NAK()
	if !rnr && !nak {
		q.stats.Bad++
		return
	}
	if !q.ackTo(now, psn) {
		q.lost()
		return
	}
	switch {
	case rnr:
		q.handleRNR(now, timer)
	case code == NAKSequence:
		q.stats.NAKSeqReceived++
		q.lost()
	default:
		q.handleNAK(code)
	}
}

// lost goes back to the oldest PSN that is not acknowledged, once until there
// is progress: further signs of the same loss come from what was in flight,
// and if the repetition is lost too, the ACK timer finds that out.
//
//	sent 5 6 7 8, and 5 is lost
//	6 arrives: NAK "sequence" -> lost: sends 5 6 7 8 again
//	a second NAK for 5        -> nothing: una is 5 as at the last go-back
func (q *QP) lost() {
	r := &q.req
	if r.recovery.at == r.win.una || r.win.outstanding() == 0 || r.rnr.isRunning() {
		return
	}
	r.recovery.at = r.win.una
	r.cwnd.loss()
	r.goBack(r.win.una)
}

// handleRNR waits as long as the peer asks (IBTA 9.7.5.2.8).
func (q *QP) handleRNR(now time.Time, timer uint8) {
	r := &q.req
	q.stats.RNRReceived++
	if r.rnr.isRunning() {
		return // a duplicate
	}
	if !r.rnr.retry() {
		q.failSend(rdma.StatusRNRRetryExceeded, errRNR)
		return
	}
	if r.win.outstanding() != 0 {
		r.goBack(r.win.una)
	}
	r.ack.stop()
	r.rnr.until = now.Add(RNRTimer(timer))
}

// handleNAK ends the queue pair for what the peer says about the oldest
// request.
func (q *QP) handleNAK(c NAKCode) {
	q.stats.NAKErrReceived++
	switch c {
	case NAKInvalidRequest:
		q.failSend(rdma.StatusRemoteInvalid, errNAK)
	case NAKRemoteAccess:
		q.failSend(rdma.StatusRemoteAccess, errNAK)
	case NAKRemoteOp:
		q.failSend(rdma.StatusRemoteOp, errNAK)
	case NAKSequence:
		invariant.Must(false, "rocev2: sequence NAK is no error")
	default:
		q.stats.NAKErrReceived--
		q.stats.Bad++ // reserved
	}
}

// handleReadResponse takes the response packet of PSN psn, which is
// outstanding.
func (q *QP) handleReadResponse(now time.Time, p *Packet, info opInfo, psn uint64) {
	r := &q.req
	if info&opAETH != 0 {
		if _, ok := p.AETH.Syndrome.ACK(); !ok {
			q.stats.Bad++
			return
		}
	}
	// IBTA 9.7.5.1: a response acknowledges the requests before its own; a
	// response that is not the next one tells that responses were lost.
	if !q.ackTo(now, psn) {
		q.lost()
		return
	}
	if r.win.una != psn || r.queue.isEmpty() {
		q.stats.Ghosts++
		return
	}
	w := r.queue.at(r.queue.head)
	if w.op != rdma.OpRead || psn < w.first {
		q.stats.Ghosts++
		return
	}
	off := int(psn-w.first) * q.mtu
	if len(p.Payload) != min(q.mtu, int(w.length)-off) {
		q.stats.Bad++
		return
	}
	if len(p.Payload) > 0 {
		if !r.reads.ready {
			b, st := q.cfg.Memory.Local(w.sgl[0], true)
			if st != rdma.StatusSuccess {
				q.failSend(st, errMemory)
				return
			}
			r.reads.buf, r.reads.ready = b, true
		}
		copy(r.reads.buf[off:], p.Payload)
	}
	if psn == w.last {
		r.reads.forgetMemory()
		q.retire(w)
	}
	q.progress(now, psn+1)
}

// HandleTimeout does what is due at now.
func (q *QP) HandleTimeout(now time.Time) {
	r := &q.req
	q.rsp.ack.expire(now)
	if q.attr.State != rdma.QPRTS {
		return
	}
	r.rnr.ended(now)
	if r.ack.due(now) {
		q.stats.Timeouts++
		if !r.ack.retry() {
			q.failSend(rdma.StatusRetryExceeded, errTimeout)
			return
		}
		r.cwnd.loss()
		r.goBack(r.win.una)
		r.recovery.single = true
		return
	}
	if r.probe.due(now) {
		q.stats.Probes++
		at := r.ack.at // a probe is not a retry: the ACK timer runs on
		// The count of READs would not survive a skip, and what is being sent again, but for a probe, is lost.
		skip := r.reads.n == 0 && (r.win.nxt == r.win.max || r.recovery.probing != 0)
		r.goBack(r.win.una)
		r.ack.at = at
		r.recovery.single = true
		if skip {
			r.recovery.probing = r.win.una
		}
		r.probe.backOff()
	}
}

// NextTimeout returns when HandleTimeout is due next, if ever.
func (q *QP) NextTimeout() (time.Time, bool) {
	r := &q.req
	t := r.rnr.until
	if a := r.ack.at; t.IsZero() || !a.IsZero() && a.Before(t) {
		t = a
	}
	if p := r.probe.at; !p.IsZero() && (t.IsZero() || p.Before(t)) {
		t = p
	}
	if a := q.rsp.ack.at; !a.IsZero() && (t.IsZero() || a.Before(t)) {
		t = a
	}
	return t, !t.IsZero()
}
