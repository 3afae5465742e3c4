// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// receiver is the receiving half.
//
//	        r              w
//	[.......FPDU FPDU FPD..........]  buf: read from the stream, in part processed
//
// Also what has no CRC comes through buf: to read each header by itself, so that the payload behind it lands in its
// place, is a system call per FPDU, which costs more than to copy the FPDU.
type receiver struct {
	buf  []byte
	r, w int
	crc  bool

	filled bool // the last read took all the room there was

	ring       []recvWQE
	head, tail uint32

	msn [numQueues]uint32 // expected, RFC 5041 §4.3: from 1
	mo  uint32            // expected, of the SEND that is coming in
	op  Opcode            // of that, if it is not its first segment

	ird int
}

func (r *receiver) begin() {
	if r.buf == nil {
		r.buf = make([]byte, rxBufferLen)
	}
	r.stop()
	r.msn = [numQueues]uint32{1, 1, 1}
	r.mo, r.ird = 0, 0
}

// stop drops what was received and not processed.
func (r *receiver) stop() {
	r.r, r.w, r.filled = 0, 0, false
}

func (r *receiver) clear() {
	r.stop()
	r.head, r.tail = 0, 0
}

func (r *receiver) recv(i uint32) *recvWQE { return &r.ring[i&uint32(len(r.ring)-1)] }

// isBetween reports whether the stream stands between two FPDUs.
func (r *receiver) isBetween() bool { return r.r == r.w }

// RxBuffers appends to dst where the next bytes of the stream go, in order. It is
// followed by HandleRx, and by no other method but PostRecv in between. During start-up there is room for
// the peer's frame only, and none when that has failed: whoever goes on with the stream finds
// what comes next.
func (q *QP) RxBuffers(dst [][]byte) [][]byte {
	r := &q.rx
	switch {
	case q.phase == PhaseIdle || q.phase == PhaseFailed || r.buf == nil:
		return dst
	case q.phase == PhaseWaitReply || q.phase == PhaseWaitRequest:
		if n := r.frameLeft(q.phase == PhaseWaitReply); n > 0 {
			return append(dst, r.buf[r.w:r.w+n])
		}
	}
	if r.filled {
		r.grow()
	}
	if r.r == r.w {
		r.r, r.w = 0, 0
	} else if len(r.buf)-r.r < fpduLen(MaxULPDU) || r.w == len(r.buf) {
		r.w = copy(r.buf, r.buf[r.r:r.w])
		r.r = 0
	}
	if r.w == len(r.buf) {
		return dst // in ASKED, with a peer that does not wait for the Reply
	}
	return append(dst, r.buf[r.w:])
}

// grow makes room for more per read.
func (r *receiver) grow() {
	r.filled = false
	if n := min(2*len(r.buf), maxRxBufferLen); n > len(r.buf) {
		buf := make([]byte, n)
		r.w = copy(buf, r.buf[r.r:r.w])
		r.r, r.buf = 0, buf
	}
}

// frameLeft returns how many bytes of the peer's start-up frame are to come, as far as that is
// known. It is not positive if more than that was read before.
func (r *receiver) frameLeft(reply bool) int {
	b := r.buf[r.r:r.w]
	if len(b) < StartLen {
		return StartLen - len(b)
	}
	n, _ := FrameLen(b, reply) // an error ended start-up
	return n - len(b)
}

// HandleRx says that the next n bytes of the stream were put where RxBuffers said. An error
// says that the stream ended: there may be a Terminate to be sent.
func (q *QP) HandleRx(now time.Time, n int) error {
	q.rx.w += n
	invariant.Must(q.rx.w <= len(q.rx.buf), "iwarp: more bytes received than there was room for")
	q.rx.filled = q.phase == PhaseOpen && n > 0 && q.rx.w == len(q.rx.buf)
	before := q.phase
	q.process()
	if q.phase != before && (q.phase == PhaseFailed || q.phase == PhaseClosing) {
		q.setDeadline(now)
		return q.err
	}
	return nil
}

// process handles what was received.
func (q *QP) process() {
	for {
		switch q.phase {
		case PhaseWaitReply, PhaseWaitRequest:
			if !q.handleStart() {
				return
			}
		case PhaseOpen:
			if !q.handleFPDU() {
				return
			}
		case PhaseClosing, PhaseClosed:
			q.rx.stop()
			return
		default:
			return
		}
	}
}

// handleFPDU handles the next FPDU, and reports whether there was a whole one.
func (q *QP) handleFPDU() bool {
	r := &q.rx
	b := r.buf[r.r:r.w]
	if len(b) < lengthLen {
		return false
	}
	n := int(binary.BigEndian.Uint16(b))
	total := fpduLen(n)
	if n < taggedLen {
		q.terminate(CodeMarker, nil)
		return false
	}
	if len(b) < total {
		return false
	}
	if end := total - crcLen; r.crc && crc32c(b[:end]) != binary.LittleEndian.Uint32(b[end:]) {
		q.terminate(CodeCRC, nil)
		return false
	}
	ulpdu := b[lengthLen : lengthLen+n]
	var h Header
	err := h.Parse(ulpdu)
	if err == nil {
		err = q.handleSegment(&h, ulpdu[h.Len():])
	}
	if err != nil {
		q.refuseSegment(err, ulpdu)
		return false
	}
	r.r += total
	return true
}

// handleSegment places and delivers a segment that is there as a whole.
func (q *QP) handleSegment(h *Header, payload []byte) error {
	switch h.Op {
	case OpReadRequest:
		if err := q.handleReadRequest(h, payload); err != nil {
			return err
		}
		q.opened(0)
		return nil
	case OpTerminate:
		q.handleTerminate(payload)
		return nil
	default:
	}
	place, err := q.target(h, len(payload))
	if err != nil {
		return err
	}
	k := copy(place[0], payload)
	copy(place[1], payload[k:])
	return q.deliver(h, len(payload))
}

// errLocal says that a segment failed for a reason of ours, which a work request tells.
var errLocal = errors.New("local error")

// refuseSegment ends the queue pair because of a segment.
func (q *QP) refuseSegment(err error, seg []byte) {
	var code Code
	if errors.As(err, &code) {
		q.terminate(code, seg)
		return
	}
	q.fail(rdma.EventQPFatal, errLocalMemory)
	q.tx.sayTerminate(&Terminate{Code: CodeLocal})
}

// target finds where the payload of a segment goes, n bytes. Nothing is placed that was
// not checked here. The error is the Code to be told the peer, or errLocal.
func (q *QP) target(h *Header, n int) (place [2][]byte, err error) {
	switch h.Op {
	case OpWrite:
		place[0], err = q.targetWrite(h, n)
	case OpReadResponse:
		place[0], err = q.targetResponse(h, n)
	default:
		return q.targetSend(h, n)
	}
	return place, err
}

// targetWrite checks a segment of a WRITE (RFC 5041 §5.1, §7.1). An empty one is not
// checked (RFC 5040 §5.1).
func (q *QP) targetWrite(h *Header, n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	if h.TO+uint64(n)-1 < h.TO {
		return nil, CodeTaggedWrap
	}
	if q.access&rdma.RemoteWrite == 0 {
		return nil, CodeAccess
	}
	b, st := q.cfg.Memory.Remote(h.STag, h.TO, uint32(n), rdma.RemoteWrite)
	switch st {
	case rdma.StatusSuccess:
		return b, nil
	case rdma.StatusRemoteAccess:
		return nil, CodeAccess // DDP has no code for it, RDMAP has
	case rdma.StatusRemoteOp:
		return nil, CodeTaggedBounds
	default:
		return nil, CodeTaggedSTag
	}
}

// targetResponse checks a segment of a READ response: it must be the next of the oldest
// READ (RFC 5040 §5.2.2).
func (q *QP) targetResponse(h *Header, n int) ([]byte, error) {
	reads := &q.tx.reads
	if reads.requests.size() == 0 || reads.sent == reads.requests.head {
		return nil, CodeOpcode
	}
	e := reads.requests.at(0)
	switch end := uint64(e.got) + uint64(n); {
	case h.STag != e.sink:
		return nil, CodeTaggedSTag
	case h.TO != uint64(e.got), end > uint64(e.size), h.Last && end != uint64(e.size):
		return nil, CodeTaggedBounds
	case n == 0:
		return nil, nil
	}
	b, st := q.cfg.Memory.Local(q.tx.queue.at(e.index).sgl[0], true)
	if st != rdma.StatusSuccess {
		q.failSend(e.index, st, rdma.EventQPFatal, errLocalMemory)
		return nil, errLocal
	}
	return b[e.got : int(e.got)+n], nil
}

// targetSend checks a segment of a SEND (RFC 5041 §5.2, §7.1): the next of the message,
// or the first of the next message, in the next receive buffer.
func (q *QP) targetSend(h *Header, n int) (place [2][]byte, err error) {
	r := &q.rx
	switch {
	case h.MSN != r.msn[queueSend]:
		return place, CodeMSN
	case r.head == r.tail:
		return place, CodeNoBuffer
	case h.MO != r.mo:
		return place, CodeMO
	case r.mo > 0 && h.Op != r.op:
		return place, CodeOpcode
	}
	w := r.recv(r.head)
	if room := uint64(w.sge.Length) + uint64(w.spill.Length); uint64(r.mo)+uint64(n) > min(room, math.MaxUint32) {
		q.failRecv(rdma.StatusLocalLength)
		return place, CodeTooLong
	}
	if n == 0 {
		return place, nil
	}
	off, left := uint64(r.mo), uint64(n)
	for i, sge := range [2]rdma.SGE{w.sge, w.spill} {
		size := uint64(sge.Length)
		if left == 0 || off >= size {
			off -= min(off, size)
			continue
		}
		b, st := q.cfg.Memory.Local(sge, true)
		if st != rdma.StatusSuccess {
			q.failRecv(st)
			return place, errLocal
		}
		place[i] = b[off:min(off+left, size)]
		left -= uint64(len(place[i]))
		off = 0
	}
	return place, nil
}

// opened counts a segment that was valid. The first one lets a responder send (RFC 5044
// §7.1.2).
func (q *QP) opened(n int) {
	q.start.gated = false
	q.stats.RxFPDUs++
	q.stats.RxBytes += uint64(n)
}

// deliver ends a segment whose payload is placed and checked.
func (q *QP) deliver(h *Header, n int) error {
	q.opened(n)
	switch h.Op {
	case OpWrite:
	case OpReadResponse:
		e := q.tx.reads.requests.at(0)
		e.got += uint32(n)
		if h.Last {
			q.responded()
		}
	default:
		r := &q.rx
		r.mo += uint32(n)
		r.op = h.Op
		if h.Last {
			return q.deliverSend(h)
		}
	}
	return nil
}

// deliverSend completes a receive buffer.
func (q *QP) deliverSend(h *Header) error {
	r := &q.rx
	wc := rdma.WC{ID: r.recv(r.head).id, Op: rdma.OpRecv, Bytes: r.mo, Solicit: h.Op.solicited()}
	if h.Op.invalidates() {
		if !q.cfg.Memory.Invalidate(h.STag) {
			return CodeInvalidate
		}
		q.forgetSends() // HandleRx bounds what follows from it
		if q.state != rdma.QPRTS {
			return nil
		}
		wc.Invalidated, wc.InvKey = true, h.STag
	}
	q.completeRecv(wc)
	r.head++
	r.msn[queueSend]++
	r.mo = 0
	return nil
}

// handleReadRequest queues a READ of the peer. What it reads is checked now, and again when
// the response is made (RFC 5040 §5.2.1).
func (q *QP) handleReadRequest(h *Header, payload []byte) error {
	r := &q.rx
	switch {
	case h.MSN != r.msn[queueReadRequest]:
		return CodeMSN
	case h.MO != 0:
		return CodeMO
	case len(payload) > readRequestLen || !h.Last && len(payload) == readRequestLen:
		return CodeTooLong
	}
	req, err := ParseReadRequest(payload)
	if err != nil {
		return err
	}
	if q.tx.reads.served.size() >= r.ird {
		return CodeNoBuffer
	}
	if _, code := q.source(&req, rdma.RemoteRead); code != CodeLocal {
		return code
	}
	r.msn[queueReadRequest]++
	q.tx.reads.served.push(req)
	return nil
}

// handleTerminate ends the queue pair because the peer says so. A READ that is to blame, or
// that waits the longest, tells why; the rest is flushed.
func (q *QP) handleTerminate(payload []byte) {
	term, err := ParseTerminate(payload)
	if err != nil {
		term = Terminate{Code: CodeStream}
	}
	term.Header = append([]byte(nil), term.Header...)
	term.Request = append([]byte(nil), term.Request...)
	q.opened(0)
	reason := &TerminateError{Terminate: term}
	if e := q.tx.blamed(&term); e != nil {
		q.failSend(e.index, term.Code.status(), rdma.EventQPFatal, reason)
	} else {
		q.fail(rdma.EventQPFatal, reason)
	}
	q.tx.drop()
}

// blamed returns the READ that a Terminate is about, if any. The name of its sink says which,
// where it is there: Linux's siw has the size of the READ in place of its number.
func (t *sender) blamed(term *Terminate) *outstanding {
	reads := &t.reads.requests
	var h Header
	named := len(term.Header) > 0
	if named && (h.Parse(term.Header) != nil || h.Op != OpReadRequest) {
		return nil
	}
	request, err := ParseReadRequest(term.Request)
	for i := range reads.size() {
		e := reads.at(i)
		isIt := !named || e.msn == h.MSN
		if err == nil {
			isIt = e.sink == request.SinkSTag
		}
		if isIt && !e.rtr {
			return e
		}
	}
	return nil
}
