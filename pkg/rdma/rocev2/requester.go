// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// sendWQE is a send work request in the queue.
type sendWQE struct {
	id          uint64
	addr        uint64
	first, last uint64 // PSNs
	sgl         [MaxSGE]rdma.SGE
	length      uint32
	imm         uint32
	rkey        rdma.RKey
	sges        int
	op          rdma.Opcode
	flags       rdma.SendFlags
	status      rdma.Status // not success: cannot be sent, completes so when its turn comes
}

// span is the PSNs [start, end).
type span struct{ start, end uint64 }

// requester is the sending half of a queue pair.
//
//	head        cur         tail          work requests
//	 |           |           |
//	 una ------- nxt -- max -------- post    PSNs
//	 outstanding   ^ sent before a go-back, to be sent again
type requester struct {
	ring            []sendWQE
	inline          []byte
	head, cur, tail uint32

	una  uint64 // oldest PSN not acknowledged
	nxt  uint64 // next PSN to send
	max  uint64 // one after the highest PSN sent
	post uint64 // first PSN of the next work request posted

	// The message that is being sent: its memory, and the position of nxt.
	ready   bool
	bufs    [MaxSGE][]byte
	nbufs   int
	seg     int
	off     int
	sinceAR uint64 // packets since the peer was asked to answer
	forceAR bool   // ask with the next packet

	// The READ that is being answered.
	readBuf   []byte
	readReady bool
	reads     [MaxReads]span // requests sent and not answered, in order
	nreads    int

	window    int // configured
	cwnd      int // packets in flight now, see loss
	ssthresh  int
	cwndCount int

	timeout  time.Duration
	retries  int // timeouts left
	rnrTries int // RNR NAKs left
	retryMax int
	rnrMax   int

	deadline time.Time // of the ACK timer; zero: does not run
	rnrUntil time.Time // nothing is sent before; zero: no wait
	backAt   uint64    // una at the last go-back that was not a timeout; 0: none since progress

	// single is set after a timeout or probe: one packet goes out, and its
	// answer tells how much of what was in flight arrived.
	single  bool
	probing uint64 // PSN of the probe that may turn out to be needless; 0: none
	resent  uint64 // PSNs below were sent more than once, perhaps

	probe probeTimer
}

// rnrForever is the RNR retry count that means without end.
const rnrForever = 7

func (r *requester) at(i uint32) *sendWQE { return &r.ring[i&uint32(len(r.ring)-1)] }

func (r *requester) start(psn uint64, window int, a *rdma.QPAttr) {
	r.una, r.nxt, r.max, r.post = psn, psn, psn, psn
	r.window, r.cwnd, r.ssthresh = window, min(window, initialCwnd), window
	r.timeout = rdma.ACKTimeout(a.Timeout)
	r.retryMax, r.rnrMax = int(a.RetryCount), int(a.RNRRetry)
	r.retries, r.rnrTries = r.retryMax, r.rnrMax
}

// stop forgets what is outstanding.
func (r *requester) stop() {
	r.head, r.cur = r.tail, r.tail
	r.una, r.nxt, r.max = r.post, r.post, r.post
	r.nreads = 0
	r.deadline, r.rnrUntil = time.Time{}, time.Time{}
	r.probe.stop()
	r.forgetMemory()
}

func (r *requester) forgetMemory() {
	r.ready, r.readReady = false, false
	r.bufs = [MaxSGE][]byte{}
	r.readBuf = nil
}

// sendOps has, for SEND and WRITE, the operations First, Middle, Last, Only
// and the last two with immediate data. It is a constant table.
var sendOps = [2][6]OpCode{
	{SendFirst, SendMiddle, SendLast, SendOnly, SendLastImm, SendOnlyImm},
	{WriteFirst, WriteMiddle, WriteLast, WriteOnly, WriteLastImm, WriteOnlyImm},
}

// pollRequests fills dst with request packets.
func (q *QP) pollRequests(now time.Time, dst []TxPacket) int {
	r := &q.req
	if !r.rnrUntil.IsZero() {
		if now.Before(r.rnrUntil) {
			return 0
		}
		r.rnrUntil = time.Time{}
	}
	n := 0
	wnd := uint64(r.cwnd)
	if r.single {
		wnd = 1
	}
	for n < len(dst) && r.cur != r.tail && r.nxt-r.una < wnd {
		w := r.at(r.cur)
		if !r.ready && !q.prepare(w) {
			if q.attr.State != rdma.QPRTS || r.at(r.cur).status != rdma.StatusSuccess {
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
		if r.nxt > r.resent {
			r.probe.measure(now, r.nxt)
		}
		r.arm(now)
	}
	return n
}

// arm starts the timers if something is outstanding and they do not run.
func (r *requester) arm(now time.Time) {
	if r.una == r.nxt {
		return
	}
	if r.deadline.IsZero() && r.timeout != 0 {
		// From one retry to the next more patience, within the four times the
		// timeout that the standard allows: who does not answer may be a program
		// that gets no processor for a while, and eight tries in a row find it so.
		r.deadline = now.Add(r.timeout << min(r.retryMax-r.retries, maxTimeoutShift))
	}
	r.probe.run(now)
}

// prepare resolves the memory of the message that nxt is in, and takes the
// position of nxt in it. It reports false if the message cannot be sent.
func (q *QP) prepare(w *sendWQE) bool {
	r := &q.req
	if w.status == rdma.StatusSuccess {
		w.status = q.resolve(w)
	}
	if w.status == rdma.StatusSuccess {
		r.ready = true
		return true
	}
	// IBTA 10.7.3.1: requests before it complete first. The one that does
	// not, because its answer was not asked for, goes out once more. A message
	// that is partly acknowledged has none before it.
	switch {
	case r.una >= w.first:
		q.failSend(w.status, errMemory)
	case r.sinceAR != 0 && r.nxt == w.first:
		r.goBack(r.nxt - 1)
	}
	return false
}

func (q *QP) resolve(w *sendWQE) rdma.Status {
	r := &q.req
	r.nbufs, r.seg = 0, 0
	if w.flags&rdma.SendInline != 0 {
		r.bufs[0] = q.inlineOf(r.cur)[:w.length]
		r.nbufs = 1
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
		r.bufs[r.nbufs] = b
		r.nbufs++
	}
	r.off = int(r.nxt-w.first) * q.mtu
	for r.seg < r.nbufs && r.off >= len(r.bufs[r.seg]) {
		r.off -= len(r.bufs[r.seg])
		r.seg++
	}
	return rdma.StatusSuccess
}

// txData makes the packet of PSN nxt, of a SEND or WRITE.
func (q *QP) txData(t *TxPacket, w *sendWQE, wnd uint64) {
	r := &q.req
	isFirst, isLast := r.nxt == w.first, r.nxt == w.last
	var op int // index in sendOps
	var flags uint32
	size := q.mtu
	if isLast {
		op = 2
		size = int(w.length) - int(r.nxt-w.first)*q.mtu
		flags = bit(w.flags&rdma.SendSolicited != 0, bthSolicited) | uint32(padLen(size))<<20
		if isFirst {
			op = 3
		}
		if w.op == rdma.OpWriteImm {
			op = op + 2 // 4, 5
		}
	} else if !isFirst {
		op = 1
	}
	kind := 1
	if w.op == rdma.OpSend {
		kind = 0
	}
	// Ask for an answer where the program waits for one, before the window
	// closes, and often enough that it slides.
	r.sinceAR++
	var ack uint32
	if r.forceAR || r.nxt+1-r.una >= wnd || r.sinceAR >= max(1, wnd/4) ||
		isLast && (w.flags&rdma.SendSignaled != 0 || r.cur+1 == r.tail) {
		ack = bthAckReq
		r.sinceAR = 0
		r.forceAR = false
	}
	q.put(t, sendOps[kind][op], r.nxt, flags, ack)
	if isFirst && kind == 1 {
		t.putRETH(w.addr, w.rkey, w.length)
	}
	if isLast && w.op == rdma.OpWriteImm {
		t.put32(w.imm)
	}
	r.gather(t, size)
	q.stats.TxBytes += uint64(size)
	q.sent(r.nxt + 1)
	if isLast {
		r.cur++
		r.ready = false
	}
}

// gather takes the next n bytes of the message.
func (r *requester) gather(t *TxPacket, n int) {
	t.PayloadLen = n
	t.Pad = padLen(n)
	for n > 0 {
		b := r.bufs[r.seg][r.off:]
		if len(b) > n {
			b = b[:n:n]
			r.off += n
		} else {
			r.seg++
			r.off = 0
		}
		t.Payload[t.Segs] = b
		t.Segs++
		n -= len(b)
	}
}

// sent moves nxt.
func (q *QP) sent(nxt uint64) {
	r := &q.req
	if r.nxt < r.max {
		q.stats.Retransmits++
	}
	r.nxt = nxt
	if r.max < nxt {
		r.max = nxt
	}
}

// txRead makes a READ request. A long READ is cut into requests of a quarter
// of the window: their responses are what is in flight. The cuts are always
// at the same places, because a responder may refuse a repeated request that
// is not within one original request (IBTA 9.4.4, duplicate READ).
func (q *QP) txRead(t *TxPacket, w *sendWQE) bool {
	r := &q.req
	chunk := uint64(max(1, r.window/4))
	idx := r.nxt - w.first
	end := min(w.first+(idx/chunk+1)*chunk, w.last+1)
	if r.nreads == MaxReads || (r.nxt != r.una && end-r.una > uint64(r.cwnd)) {
		return false
	}
	from := idx * uint64(q.mtu)
	to := min((end-w.first)*uint64(q.mtu), uint64(w.length))
	q.put(t, ReadRequest, r.nxt, 0, bthAckReq)
	t.putRETH(w.addr+from, w.rkey, uint32(to-from))
	r.reads[r.nreads] = span{r.nxt, end}
	r.nreads++
	r.sinceAR, r.forceAR = 0, false
	q.sent(end)
	if end == w.last+1 {
		r.cur++
	}
	r.ready = false
	return true
}

// goBack makes psn the next to be sent.
func (r *requester) goBack(psn uint64) {
	invariant.Must(psn >= r.una && psn <= r.nxt, "rocev2: go back to where nothing is outstanding")
	r.nxt = psn
	for r.cur != r.head && (r.cur == r.tail || r.at(r.cur).first > psn) {
		r.cur--
	}
	if r.cur != r.tail && r.at(r.cur).last < psn {
		r.cur++
	}
	r.ready = false
	r.forceAR = true
	r.sinceAR = 0
	r.resent = r.max
	r.probing = 0
	r.probe.stop()
	for r.nreads > 0 && r.reads[r.nreads-1].end > psn {
		r.nreads--
	}
	r.deadline = time.Time{}
}

// failSend completes the oldest send with an error and ends the queue pair.
func (q *QP) failSend(s rdma.Status, err error) {
	r := &q.req
	if r.head != r.tail {
		w := r.at(r.head)
		q.completeSend(w.id, w.op, 0, s)
		r.head++
	}
	kind := rdma.EventQPFatal
	if s == rdma.StatusRetryExceeded {
		kind = rdma.EventPathDown
	}
	q.fail(kind, fmt.Errorf("queue pair %v to %v: %w: %v", q.cfg.Num, q.attr.DestQPN, err, s))
}

// ackTo takes everything before psn as acknowledged, up to the first READ
// that is not answered: responses do that. It reports whether it got to psn.
func (q *QP) ackTo(now time.Time, psn uint64) bool {
	r := &q.req
	whole := true
	for r.head != r.tail {
		w := r.at(r.head)
		if w.first >= psn {
			break
		}
		if w.op == rdma.OpRead {
			if done := max(r.una, w.first); done < psn {
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
	if r.cur == r.head {
		r.cur++
		r.ready = false
	}
	r.head++
}

// progress moves una.
func (q *QP) progress(now time.Time, psn uint64) {
	r := &q.req
	if psn <= r.una {
		return
	}
	r.grow(int(psn - r.una))
	r.una = psn
	if r.nxt < psn {
		// Acknowledged after a go-back and before it was sent again.
		r.nxt = psn
		if r.cur != r.tail && r.at(r.cur).last < psn {
			r.cur++
		}
		r.ready = false
	}
	drop := 0
	for drop < r.nreads && r.reads[drop].end <= psn {
		drop++
	}
	r.nreads = copy(r.reads[:], r.reads[drop:r.nreads])
	r.retries = r.retryMax
	r.rnrTries = r.rnrMax
	r.backAt = 0
	r.deadline = time.Time{}
	r.single = false
	if r.probing != 0 {
		r.probed(psn)
	}
	r.probe.acked(now, psn)
	r.arm(now)
}

// probed judges the answer to a probe. One that acknowledges the probe alone
// says that what came after it is lost. One that acknowledges more says that
// the peer was slow: what is in flight is not sent again.
func (r *requester) probed(una uint64) {
	if una == r.probing+1 {
		r.loss()
	} else {
		r.nxt = r.max
		for r.cur != r.tail && r.at(r.cur).last < r.nxt {
			r.cur++
		}
		r.ready = false
	}
	r.probing = 0
}

// grow opens the window again after loss shrank it: fast up to half of where
// the loss was, then by one packet per window.
func (r *requester) grow(acked int) {
	if r.cwnd >= r.window {
		return
	}
	if r.cwnd < r.ssthresh {
		r.cwnd = min(r.cwnd+acked, r.window)
		return
	}
	r.cwndCount += acked
	if r.cwndCount >= r.cwnd {
		r.cwndCount -= r.cwnd
		r.cwnd = min(r.cwnd+1, r.window)
	}
}

// minCwnd is the least number of packets in flight after losses.
const minCwnd = 8

// loss halves the window: what is lost between two hosts was mostly lost in
// a full socket buffer, and going back N packets fills it again.
func (r *requester) loss() {
	r.ssthresh = max(r.cwnd/2, min(minCwnd, r.window))
	r.cwnd = r.ssthresh
	r.cwndCount = 0
}

// handleResponse takes acknowledgements and READ responses.
func (q *QP) handleResponse(now time.Time, p *Packet, info opInfo) {
	r := &q.req
	psn := near(r.una, p.BTH.PSN)
	if psn < r.una || psn >= r.max {
		// IBTA 9.7.5.1: ghost acknowledgements are dropped. One means
		// something: a NAK for the packet after the last that was sent, of a
		// responder that found a gap closed before it could report it.
		if p.BTH.OpCode == Acknowledge && p.AETH.Syndrome == SyndromeNAK(NAKSequence) &&
			psn == r.max && psn > r.una {
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
// and if the repetition is lost too, the timer finds it.
func (q *QP) lost() {
	r := &q.req
	if r.backAt == r.una || r.una == r.nxt || !r.rnrUntil.IsZero() {
		return
	}
	r.backAt = r.una
	r.loss()
	r.goBack(r.una)
}

// handleRNR waits as long as the peer asks (IBTA 9.7.5.2.8).
func (q *QP) handleRNR(now time.Time, timer uint8) {
	r := &q.req
	q.stats.RNRReceived++
	if !r.rnrUntil.IsZero() {
		return // a duplicate
	}
	if r.rnrMax != rnrForever {
		if r.rnrTries == 0 {
			q.failSend(rdma.StatusRNRRetryExceeded, errRNR)
			return
		}
		r.rnrTries--
	}
	if r.nxt != r.una {
		r.goBack(r.una)
	}
	r.deadline = time.Time{}
	r.rnrUntil = now.Add(RNRTimer(timer))
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
	// IBTA 9.7.5.1: a response acknowledges the requests before it; one that
	// is not the next tells that responses were lost.
	if !q.ackTo(now, psn) {
		q.lost()
		return
	}
	if r.una != psn || r.head == r.tail {
		q.stats.Ghosts++
		return
	}
	w := r.at(r.head)
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
		if !r.readReady {
			b, st := q.cfg.Memory.Local(w.sgl[0], true)
			if st != rdma.StatusSuccess {
				q.failSend(st, errMemory)
				return
			}
			r.readBuf, r.readReady = b, true
		}
		copy(r.readBuf[off:], p.Payload)
	}
	if psn == w.last {
		r.readBuf, r.readReady = nil, false
		q.retire(w)
	}
	q.progress(now, psn+1)
}

// HandleTimeout does what is due at now.
func (q *QP) HandleTimeout(now time.Time) {
	r := &q.req
	if at := q.rsp.ackAt; !at.IsZero() && !now.Before(at) {
		q.rsp.ackAt = time.Time{}
		q.rsp.ackNow = true
		q.rsp.patience.expired(now, q.rsp.ackPkts)
	}
	if q.attr.State != rdma.QPRTS {
		return
	}
	if !r.rnrUntil.IsZero() && !now.Before(r.rnrUntil) {
		r.rnrUntil = time.Time{}
	}
	if !r.deadline.IsZero() && !now.Before(r.deadline) {
		r.deadline = time.Time{}
		q.stats.Timeouts++
		if r.retries == 0 {
			q.failSend(rdma.StatusRetryExceeded, errTimeout)
			return
		}
		r.retries--
		r.loss()
		r.goBack(r.una)
		r.single = true
		return
	}
	if r.probe.due(now) {
		q.stats.Probes++
		deadline := r.deadline // a probe is not a retry: the timer runs on
		skip := r.nreads == 0  // the count of READs would not survive a skip
		r.goBack(r.una)
		r.deadline = deadline
		r.single = true
		if skip {
			r.probing = r.una
		}
		r.probe.backOff()
	}
}

// NextTimeout returns when HandleTimeout is due next, if ever.
func (q *QP) NextTimeout() (time.Time, bool) {
	r := &q.req
	t := r.rnrUntil
	if t.IsZero() || !r.deadline.IsZero() && r.deadline.Before(t) {
		t = r.deadline
	}
	if p := r.probe.at; !p.IsZero() && (t.IsZero() || p.Before(t)) {
		t = p
	}
	if a := q.rsp.ackAt; !a.IsZero() && (t.IsZero() || a.Before(t)) {
		t = a
	}
	return t, !t.IsZero()
}
