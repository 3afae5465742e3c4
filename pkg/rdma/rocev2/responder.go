// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// recvWQE is a receive buffer in the queue.
type recvWQE struct {
	id         uint64
	sge, spill rdma.SGE
}

// room returns the rest of the buffer's element that has the byte at an offset
// below the buffer's length.
func (w *recvWQE) room(m wq.Memory, off uint32) ([]byte, rdma.Status) {
	sge := w.sge
	if off >= sge.Length {
		off -= sge.Length
		sge = w.spill
	}
	b, st := m.Local(sge, true)
	if st != rdma.StatusSuccess {
		return nil, st
	}
	invariant.Must(len(b) == int(sge.Length), "rocev2: memory of another length than its SGE")
	return b[off:], st
}

// message is what the responder is in the middle of.
type message uint8

const (
	msgNone message = iota
	msgSend
	msgWrite
)

// nakState is the responder's NAK that is not resolved.
//
//	none --gap, no receive buffer--> pending --sent by PollTx--> sent
//	 ^                                                            |
//	 +---------- the expected packet arrives ---------------------+
type nakState uint8

const (
	nakNone nakState = iota
	nakPending
	nakSent
)

// readOp is a READ request that is being answered.
type readOp struct {
	psn    uint64 // of the first response
	n      uint64 // responses
	next   uint64 // responses sent
	addr   uint64
	length uint32
	msn    uint32
	key    rdma.RKey
	buf    []byte
	ready  bool
	again  bool // a request that was served, and came once more
}

// responder is the receiving half of a queue pair.
type responder struct {
	ring       []recvWQE
	head, tail uint32

	psn uint64 // expected next
	msn uint32 // messages done

	msg   message
	total uint32 // bytes of the message so far (SEND) or announced (WRITE)
	buf   []byte // room of the message that is not filled yet
	ready bool   // buf is resolved
	// The rest of a WRITE, of the length that its RETH announced.
	left uint32
	addr uint64
	key  rdma.RKey

	ack    delayedACK
	nak    nakState
	nakSyn Syndrome
	// In ERR: requests go without an answer; one did.
	silent, unanswered bool

	refusal refusal // waits for the responses to the READs before it

	gap    uint64           // highest PSN that came too early
	reads  [MaxReads]readOp // by PSN
	nreads int
}

// refusal is a NAK that ends the queue pair, with the reason.
type refusal struct {
	code NAKCode
	err  error       // nil: there is none
	recv rdma.Status // of the receive that fails with it; StatusSuccess: none
}

func (r *responder) at(i uint32) *recvWQE { return &r.ring[i&uint32(len(r.ring)-1)] }

// stop forgets what is going on, but an answer that is still to be sent: a peer
// whose message was taken would repeat it to nobody and report a broken path.
func (r *responder) stop() {
	r.msg = msgNone
	r.ack.stop()
	r.forgetMemory()
	r.nreads, r.refusal = 0, refusal{}
}

func (r *responder) forgetMemory() {
	r.buf, r.ready = nil, false
	for i := range r.reads {
		r.reads[i].buf, r.reads[i].ready = nil, false
	}
}

// handleRequest takes a request packet.
func (q *QP) handleRequest(p *Packet, info opInfo) {
	r := &q.rsp
	psn := near(r.psn, p.BTH.PSN)
	switch {
	case psn >= r.psn && r.refusal.err != nil:
		return // behind what ends the queue pair
	case psn > r.psn:
		// IBTA 9.7.5.2.6: one NAK until the expected packet comes; behind an
		// RNR NAK none at all.
		r.gap = max(r.gap, psn)
		if r.nak == nakNone {
			r.nak, r.nakSyn = nakPending, SyndromeNAK(NAKSequence)
		}
		return
	case psn < r.psn:
		q.stats.Duplicates++
		q.handleDuplicate(p, psn)
		return
	}
	var ok bool
	switch {
	case info&opIETH != 0:
		q.refuse(NAKInvalidRequest, errRequest) // no memory windows here
	case info&opSend != 0:
		ok = q.handleSend(p, info)
	case info&opWrite != 0:
		ok = q.handleWrite(p, info)
	case p.BTH.OpCode == ReadRequest:
		ok = q.handleRead(p)
	default:
		q.refuse(NAKInvalidRequest, errRequest) // atomics
	}
	if !ok {
		return
	}
	if p.BTH.OpCode != ReadRequest {
		r.psn++
		if p.BTH.AckReq {
			r.ack.due = true
		}
	}
	if info&(opLast|opOnly) != 0 {
		r.msg = msgNone
		r.countMessage()
		q.stats.RxMessages++
	}
	switch {
	case r.nak == nakSent:
		r.nak = nakNone
	case r.nak == nakPending && r.psn > r.gap:
		// Reordered, and complete again before we complained.
		r.nak = nakNone
		r.ack.becomeUrgent()
	case r.nak == nakPending:
		// What came early was dropped: ask for it, even if the NAK would
		// have said that no receive buffer was there.
		r.nakSyn = SyndromeNAK(NAKSequence)
	}
}

func (r *responder) countMessage() { r.msn = (r.msn + 1) & msnMask }

// refuse answers a request with a NAK that ends the queue pair, behind the responses to the READs
// that came before:
//
//	peer                              responder
//	  READ, WRITE with a wrong key -->
//	                                <-- response, NAK
//
// Without the response the peer would repeat the READ, to a queue pair in ERR, until it gives up.
func (q *QP) refuse(c NAKCode, err error) {
	q.refuseWith(refusal{code: c, err: err})
}

func (q *QP) refuseWith(x refusal) {
	r := &q.rsp
	if r.nreads > 0 {
		r.refusal = x
		return
	}
	if x.recv != rdma.StatusSuccess {
		q.completeRecv(rdma.WC{ID: r.at(r.head).id, Status: x.recv, Op: rdma.OpRecv})
		r.head++
	}
	q.refuseNow(x.code, x.err)
}

func (q *QP) refuseNow(c NAKCode, err error) {
	q.rsp.nak, q.rsp.nakSyn = nakPending, SyndromeNAK(c)
	q.fail(rdma.EventQPFatal, fmt.Errorf("queue pair %v from %v, NAK %v: %w", q.cfg.Num, q.attr.DestQPN, c, err))
}

// Silence has requests that come in ERR go without an answer until [QP.Refuse] is called
// or the queue pair is reset.
func (q *QP) Silence() { q.rsp.silent = true }

// Refuse ends Silence: requests are refused, and what came meanwhile at once. It reports
// false in another state than ERR.
func (q *QP) Refuse() bool {
	r := &q.rsp
	r.silent = false
	if q.attr.State != rdma.QPError {
		return false
	}
	if r.unanswered {
		q.refuseInError()
	}
	return true
}

// requestInError takes a request to a queue pair in ERR. IBTA 10.3.1.6 has it
// dropped, since the peer gives up after some retries. But not all peers do:
// Linux's soft RoCE takes the largest retry count for infinity, and net/smc,
// which sets that, waits for the end with a lock held. So what was done before is
// acknowledged again, what a lost NAK has said is said again, and the rest is
// refused, but not after [QP.Silence].
func (q *QP) requestInError(p *Packet) {
	r := &q.rsp
	if psn := near(r.psn, p.BTH.PSN); psn < r.psn {
		if p.BTH.OpCode != ReadRequest { // nothing is read any more
			q.stats.Duplicates++
			r.ack.becomeUrgent() // it was done before the end
		}
		return
	}
	if r.saidFatal() || !r.silent {
		q.refuseInError()
	} else {
		r.unanswered = true
	}
}

// saidFatal reports whether the last NAK was one that ends a queue pair.
func (r *responder) saidFatal() bool {
	switch r.nakSyn {
	case SyndromeNAK(NAKInvalidRequest), SyndromeNAK(NAKRemoteAccess), SyndromeNAK(NAKRemoteOp):
		return true
	}
	return false
}

// refuseInError has the last such NAK sent again, or the first one.
func (q *QP) refuseInError() {
	r := &q.rsp
	if !r.saidFatal() {
		r.nakSyn = SyndromeNAK(NAKRemoteOp)
	}
	r.nak, r.unanswered = nakPending, false
}

// rnr answers a request for which no receive buffer is there.
func (q *QP) rnr() {
	q.rsp.nak, q.rsp.nakSyn = nakPending, SyndromeRNR(q.attr.MinRNRTimer)
}

// sizeOK checks the payload length against the position of the packet in its
// message (IBTA 9.7.4.1.6).
func (q *QP) sizeOK(n int, info opInfo) bool {
	switch {
	case info&(opFirst|opMiddle) != 0:
		return n == q.mtu
	case info&opLast != 0:
		return n > 0 && n <= q.mtu
	}
	return n <= q.mtu
}

// handleSend takes the expected packet, of a SEND.
func (q *QP) handleSend(p *Packet, info opInfo) bool {
	r := &q.rsp
	starts := info&(opFirst|opOnly) != 0
	if starts != (r.msg == msgNone) || !starts && r.msg != msgSend || !q.sizeOK(len(p.Payload), info) {
		q.refuse(NAKInvalidRequest, errRequest)
		return false
	}
	if starts {
		if r.head == r.tail {
			q.rnr()
			return false
		}
		r.msg = msgSend
		r.total = 0
		r.ready = false
	}
	wr := r.at(r.head)
	if uint64(r.total)+uint64(len(p.Payload)) > uint64(wr.sge.Length)+uint64(wr.spill.Length) {
		// IBTA 9.9.3.1.1: the peer sees an invalid request, we a length error.
		q.failRecv(rdma.StatusLocalLength, NAKInvalidRequest, errTooLong)
		return false
	}
	for b := p.Payload; len(b) > 0; {
		if !r.ready || len(r.buf) == 0 {
			var st rdma.Status
			if r.buf, st = wr.room(q.cfg.Memory, r.total); st != rdma.StatusSuccess {
				q.failRecv(st, NAKRemoteOp, errRecvSpace)
				return false
			}
			r.ready = true
		}
		n := copy(r.buf, b)
		r.buf, b = r.buf[n:], b[n:]
		r.total += uint32(n)
	}
	if info&(opLast|opOnly) != 0 {
		q.received(p, info, rdma.OpRecv)
	}
	return true
}

// received completes the receive buffer of a message.
func (q *QP) received(p *Packet, info opInfo, op rdma.Opcode) {
	r := &q.rsp
	wc := rdma.WC{ID: r.at(r.head).id, Op: op, Bytes: r.total, Solicit: p.BTH.Solicited}
	if info&opImm != 0 {
		wc.Imm, wc.HasImm = p.Imm, true
	}
	q.completeRecv(wc)
	r.head++
	r.buf, r.ready = nil, false
}

// failRecv completes the receive buffer of the SEND with an error and ends
// the queue pair.
func (q *QP) failRecv(s rdma.Status, c NAKCode, err error) {
	q.refuseWith(refusal{c, err, s})
}

// handleWrite takes the expected packet, of an RDMA WRITE. Nothing is written
// before all that can be checked is: the whole region at the first packet,
// and of each packet that it stays within the length announced.
func (q *QP) handleWrite(p *Packet, info opInfo) bool {
	r := &q.rsp
	starts := info&(opFirst|opOnly) != 0
	if starts != (r.msg == msgNone) || !starts && r.msg != msgWrite || !q.sizeOK(len(p.Payload), info) {
		q.refuse(NAKInvalidRequest, errRequest)
		return false
	}
	n := uint32(len(p.Payload))
	key, addr, left := r.key, r.addr, r.left
	if starts {
		key, addr, left = p.RETH.RKey, p.RETH.Addr, p.RETH.Length
	}
	ends := info&(opLast|opOnly) != 0
	if left > MaxMessage || ends && left != n || !ends && left <= n {
		q.refuse(NAKInvalidRequest, errRequest)
		return false
	}
	if q.attr.Access&rdma.RemoteWrite == 0 {
		q.refuse(NAKRemoteAccess, rdma.ErrPeerAccess)
		return false
	}
	// The same request comes again when there is a receive buffer.
	waits := info&opImm != 0 && r.head == r.tail
	// IBTA 9.4.3: a WRITE of no bytes needs no valid key.
	if left > 0 && (starts || !r.ready) {
		b, st := q.writable(key, addr, left, starts && !waits)
		if st != rdma.StatusSuccess {
			why := errGone
			if starts {
				why = rdma.ErrPeerAccess
			}
			q.refuse(NAKRemoteAccess, why)
			return false
		}
		invariant.Must(len(b) == int(left), "rocev2: region of another length than asked for")
		r.buf, r.ready = b, true
	}
	if waits {
		if starts {
			r.buf, r.ready = nil, false
		}
		q.rnr()
		return false
	}
	if starts {
		r.msg = msgWrite
		r.total = left
	}
	r.buf = r.buf[copy(r.buf, p.Payload):]
	r.key, r.addr, r.left = key, addr+uint64(n), left-n
	if ends {
		if info&opImm != 0 {
			q.received(p, info, rdma.OpRecvWriteImm)
		}
		r.buf, r.ready = nil, false
	}
	return true
}

// writable is the memory of a WRITE, which [rdma.WriteCounter] counts once: when its first packet is taken. Of no bytes Remote
// counts nothing, and without the right to write neither: so, not to count, one call asks for the right and one for the range.
func (q *QP) writable(key rdma.RKey, addr uint64, n uint32, count bool) ([]byte, rdma.Status) {
	if count {
		return q.cfg.Memory.Remote(key, addr, n, rdma.RemoteWrite)
	}
	if _, st := q.cfg.Memory.Remote(key, addr, 0, rdma.RemoteWrite); st != rdma.StatusSuccess {
		return nil, st
	}
	return q.cfg.Memory.Remote(key, addr, n, 0)
}

// handleRead takes the expected packet, a READ request.
func (q *QP) handleRead(p *Packet) bool {
	r := &q.rsp
	n := p.RETH.Length
	if r.msg != msgNone || n > MaxMessage || r.outstanding() >= int(q.attr.ReadsServed) {
		q.refuse(NAKInvalidRequest, errRequest)
		return false
	}
	op, ok := q.readOpOf(p, r.psn)
	if !ok {
		q.refuse(NAKRemoteAccess, rdma.ErrPeerAccess)
		return false
	}
	// IBTA 9.7.7.2: the message counts when the request is taken.
	r.countMessage()
	q.stats.RxMessages++
	op.msn = r.msn
	r.makeRoom()
	r.reads[r.nreads] = op
	r.nreads++
	r.psn += op.n
	return true
}

// outstanding is the number of READs whose response the peer awaits. It may have had that to a request that came
// again.
func (r *responder) outstanding() (n int) {
	for i := range r.reads[:r.nreads] {
		if !r.reads[i].again {
			n++
		}
	}
	return n
}

// makeRoom drops the response to a request that came again if there are too many. The peer asks for it once
// more if it needs it.
func (r *responder) makeRoom() {
	for i := 0; r.nreads == MaxReads; i++ {
		if r.reads[i].again {
			r.remove(i)
		}
	}
}

// remove takes a READ out of those that are being answered.
func (r *responder) remove(i int) {
	copy(r.reads[i:], r.reads[i+1:r.nreads])
	r.nreads--
	r.reads[r.nreads] = readOp{}
}

// readOpOf resolves a READ request.
func (q *QP) readOpOf(p *Packet, psn uint64) (readOp, bool) {
	op := readOp{
		psn: psn, n: packets(p.RETH.Length, q.mtu),
		addr: p.RETH.Addr, key: p.RETH.RKey, length: p.RETH.Length,
		msn: q.rsp.msn,
	}
	if q.attr.Access&rdma.RemoteRead == 0 {
		return op, false
	}
	return op, q.resolveRead(&op)
}

func (q *QP) resolveRead(op *readOp) bool {
	if op.length > 0 {
		b, st := q.cfg.Memory.Remote(op.key, op.addr, op.length, rdma.RemoteRead)
		if st != rdma.StatusSuccess {
			return false
		}
		invariant.Must(len(b) == int(op.length), "rocev2: region of another length than asked for")
		op.buf = b
	}
	op.ready = true
	return true
}

// handleDuplicate takes a request that was executed before (IBTA 9.7.4.1.2):
// SEND and WRITE are acknowledged again, READ is executed again.
func (q *QP) handleDuplicate(p *Packet, psn uint64) {
	r := &q.rsp
	if p.BTH.OpCode != ReadRequest {
		r.ack.becomeUrgent() // the peer's timer runs
		return
	}
	n := packets(p.RETH.Length, q.mtu)
	if p.RETH.Length > MaxMessage || psn+n > r.psn {
		q.stats.Bad++
		return
	}
	op, ok := q.readOpOf(p, psn)
	if !ok {
		q.stats.Bad++
		return
	}
	// It takes the place of what is still to be sent of the same PSNs; what
	// comes later stays, as the duplicate may be the network's.
	i := 0
	for i < r.nreads && r.reads[i].psn+r.reads[i].n <= psn {
		i++
	}
	if i < r.nreads && r.reads[i].psn < psn+n {
		op.again = r.reads[i].again
		r.reads[i] = op
		return
	}
	op.again = true
	if r.nreads == MaxReads {
		q.stats.Bad++
		return
	}
	copy(r.reads[i+1:], r.reads[i:r.nreads])
	r.reads[i] = op
	r.nreads++
}

// Answers reports whether PollTx begins with responses to READs.
func (q *QP) Answers() bool { return q.rsp.nreads > 0 }

// pollResponses fills dst with READ responses, ACK and NAK, in the order of
// the requests.
func (q *QP) pollResponses(dst []TxPacket) int {
	r := &q.rsp
	n := 0
	for r.nreads > 0 {
		op := &r.reads[0]
		if !op.ready && !q.resolveRead(op) {
			if op.again {
				// The peer had its response, and the region may have gone because the peer said so.
				q.stats.Bad++
				r.remove(0)
				continue
			}
			// The region went away after the request was accepted.
			r.psn = op.psn + op.next
			q.refuseNow(NAKRemoteAccess, errGone)
			break
		}
		for n < len(dst) && op.next < op.n {
			q.txReadResponse(&dst[n], op)
			n++
		}
		if op.next < op.n {
			return n
		}
		r.remove(0)
	}
	if x := r.refusal; x.err != nil {
		q.refuseWith(x)
	}
	if n == len(dst) {
		return n
	}
	switch {
	case r.nak == nakPending:
		q.put(&dst[n], Acknowledge, r.psn, 0, 0)
		dst[n].putAETH(r.nakSyn, r.msn)
		q.countNAK(r.nakSyn)
		r.nak = nakSent
		r.ack.sent()
		n++
	case r.ack.isUrgent():
		q.putACK(&dst[n])
		n++
	}
	return n
}

func (q *QP) putACK(t *TxPacket) {
	r := &q.rsp
	q.put(t, Acknowledge, r.psn-1, 0, 0)
	t.putAETH(SyndromeACK(creditsInvalid), r.msn)
	r.ack.sent()
}

func (q *QP) countNAK(s Syndrome) {
	if _, ok := s.RNR(); ok {
		q.stats.RNRSent++
	} else if s == SyndromeNAK(NAKSequence) {
		q.stats.NAKSeqSent++
	} else {
		q.stats.NAKErrSent++
	}
}

// txReadResponse makes the next response packet of op.
func (q *QP) txReadResponse(t *TxPacket, op *readOp) {
	isFirst, isLast := op.next == 0, op.next == op.n-1
	code := ReadRespMiddle
	size := q.mtu
	off := int(op.next) * q.mtu
	if isLast {
		code = ReadRespLast
		size = int(op.length) - off
	}
	if isFirst {
		code = ReadRespFirst
		if isLast {
			code = ReadRespOnly
		}
	}
	q.put(t, code, op.psn+op.next, uint32(padLen(size))<<20, 0)
	if code != ReadRespMiddle {
		t.putAETH(SyndromeACK(creditsInvalid), op.msn)
	}
	if size > 0 {
		t.Payload[0] = op.buf[off : off+size : off+size]
		t.Segs = 1
	}
	t.PayloadLen = size
	t.Pad = padLen(size)
	q.stats.TxBytes += uint64(size)
	op.next++
}
