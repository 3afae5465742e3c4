// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// receiver is the peer's stream: where in a segment it is.
//
//	HEADER -> (RDMA HEADER) -> PAYLOAD -> deliver -> HEADER
type receiver struct {
	hdr    [HeaderLen + RDMALen]byte
	have   int // bytes of the headers
	h      Header
	r      RDMA
	left   int  // bytes of the payload to come
	drop   bool // the rest of the stream means nothing
	direct int  // bytes of the last RxBuffers that are not ahead

	ready bool // to is the memory of the next left bytes
	to    [2][]byte
	ahead []byte // what comes before its place is known
}

// isInside reports whether a segment has begun.
func (r *receiver) isInside() bool { return r.have > 0 || r.left > 0 }

func (r *receiver) forget() { r.to, r.ready, r.direct = [2][]byte{}, false, 0 }

// stop drops all that comes.
func (r *receiver) stop() {
	r.drop, r.left, r.have = true, 0, 0
	r.forget()
}

// take drops the first n bytes of the memory.
func (r *receiver) take(n int) {
	k := min(n, len(r.to[0]))
	r.to[0], r.to[1] = r.to[0][k:], r.to[1][n-k:]
	r.left -= n
}

// RxBuffers appends to dst where the next bytes of the stream go: the memory of the payload that is due,
// and room for what follows. Nothing is to be read before Start.
func (q *QP) RxBuffers(dst [][]byte) [][]byte {
	r := &q.rx
	r.direct = 0
	if q.attr.State != rdma.QPRTS && q.attr.State != rdma.QPError || q.end.peerFIN {
		return dst
	}
	if r.left > 0 && q.target() == rdma.StatusSuccess {
		for _, b := range r.to {
			if len(b) > 0 {
				dst = append(dst, b)
				r.direct += len(b)
			}
		}
	}
	return append(dst, r.ahead)
}

// HandleRx says that n bytes were put into what RxBuffers returned. An error is the peer's
// mistake, or that of a region that is closed: the queue pair is in ERR, or will be, with an event
// that says the same.
func (q *QP) HandleRx(now time.Time, n int) error {
	r := &q.rx
	k := min(n, r.direct)
	invariant.Must(n-k <= len(r.ahead), "vitcp: more was read than there was room")
	r.direct = 0
	if k > 0 {
		r.take(k)
		if r.left == 0 {
			q.segmentDone(now)
		}
	}
	var err error
	for b := r.ahead[:n-k]; len(b) > 0 && !r.drop && err == nil; {
		b, err = q.consume(now, b)
	}
	q.endIfSaid(now)
	return err
}

// consume takes bytes of the stream, and returns those that are left.
func (q *QP) consume(now time.Time, b []byte) ([]byte, error) {
	r := &q.rx
	if r.left > 0 {
		if st := q.target(); st != rdma.StatusSuccess {
			return nil, q.targetGone(now, st)
		}
		k := copy(r.to[0], b)
		k += copy(r.to[1], b[k:])
		r.take(k)
		if r.left > 0 {
			return b[k:], nil
		}
		q.segmentDone(now)
		return b[k:], nil
	}
	want := HeaderLen
	if r.have >= HeaderLen {
		want += RDMALen
	}
	k := copy(r.hdr[r.have:want], b)
	r.have += k
	b = b[k:]
	if r.have < want {
		return b, nil
	}
	var err error
	if want == HeaderLen {
		if r.h, err = ParseHeader(r.hdr[:HeaderLen]); err != nil {
			return nil, q.protocolError(now, err)
		}
		if r.h.Type.hasRDMA() {
			return b, nil
		}
	} else {
		r.r, err = ParseRDMA(r.hdr[HeaderLen:])
		invariant.Must(err == nil, "vitcp: RDMA header of another length")
	}
	r.left = int(r.h.Length) - r.h.PayloadOffset()
	r.have = 0
	r.forget()
	q.stats.RxSegments++
	q.stats.RxBytes += uint64(r.left)
	if err = q.segmentBegins(now); err == nil && r.left == 0 && !r.drop {
		q.segmentDone(now)
	}
	return b, err
}

// segmentBegins checks the headers of a segment, before a byte of it is placed.
func (q *QP) segmentBegins(now time.Time) error {
	h := &q.rx.h
	if err := q.handleNews(now, h); err != nil || q.rx.drop {
		return err
	}
	switch h.Type {
	case TypeNOP:
		return nil
	case TypeReadResponse:
		return q.responseBegins(now)
	case TypeSend, TypeWrite, TypeReadRequest:
	default:
		return q.protocolError(now, fmt.Errorf("%w: %v on a connection", ErrProtocol, h.Type))
	}
	m := &q.rsp.msg
	if m.active {
		// §2.2.2.2.3: all segments of a message before the next one. §3.2.1: with the same header.
		if h.Type != m.typ || h.Message != m.number || h.Offset != m.got || h.Type == TypeWrite && q.rx.r != m.rdma {
			return q.protocolError(now, fmt.Errorf("%w: %v %d at offset %d inside %v %d at %d",
				ErrProtocol, h.Type, h.Message, h.Offset, m.typ, m.number, m.got))
		}
	} else if h.Message != q.rsp.delivered+1 || h.Offset != 0 {
		return q.protocolError(now, fmt.Errorf("%w: %v %d at offset %d, want message %d",
			ErrProtocol, h.Type, h.Message, h.Offset, q.rsp.delivered+1))
	}
	if h.Type == TypeReadRequest {
		return q.readBegins(now)
	}
	*m = message{active: true, typ: h.Type, number: h.Message, got: h.Offset, rdma: q.rx.r}
	if h.Flags&FlagTransmitError != 0 {
		return q.refuse(now, h.Message, ErrorDescriptor, CauseTransmit)
	}
	if h.Type == TypeSend {
		return q.sendBegins(now)
	}
	return q.writeBegins(now)
}

// sendBegins checks a segment of a Send: there is a receive, and it is large enough.
func (q *QP) sendBegins(now time.Time) error {
	h, r := &q.rx.h, &q.rsp
	end := uint64(h.Offset) + uint64(q.rx.left)
	if end > uint64(q.terms.MaxTransfer) {
		return q.refuse(now, h.Message, ErrorDescriptor, CauseTooLong)
	}
	if r.head == r.tail {
		return q.refuse(now, h.Message, ErrorDescriptor, CauseNoReceive)
	}
	w := r.at(r.head)
	if end > uint64(w.sge.Length)+uint64(w.spill.Length) {
		q.failRecv(rdma.StatusLocalLength)
		return q.refuse(now, h.Message, ErrorDescriptor, CauseTooSmall)
	}
	return nil
}

// writeBegins checks a segment of a Write: the handle and the whole range of the message, and that the
// segment is within it.
func (q *QP) writeBegins(now time.Time) error {
	h, r := &q.rx.h, &q.rx.r
	end := uint64(h.Offset) + uint64(q.rx.left)
	if end > uint64(r.Length) || (end == uint64(r.Length)) != (h.Flags&FlagEnd != 0) {
		return q.protocolError(now, fmt.Errorf("%w: bytes up to %d of %d with flags %#x", ErrProtocol, end, r.Length, h.Flags))
	}
	if r.Length > q.terms.MaxTransfer {
		return q.refuse(now, h.Message, ErrorDescriptor, CauseTooLong)
	}
	if !q.terms.RDMAWrite || q.attr.Access&rdma.RemoteWrite == 0 {
		return q.refuse(now, h.Message, ErrorMemory, CauseRight)
	}
	var st rdma.Status
	if h.Offset == 0 { // the first segment: the message is counted with it
		st = q.remote(r, rdma.RemoteWrite)
	} else {
		_, st = q.writable(r)
	}
	if st != rdma.StatusSuccess {
		return q.refuse(now, h.Message, ErrorMemory, causeOf(st))
	}
	if h.Flags&(FlagEnd|FlagImmediate) == FlagEnd|FlagImmediate && q.rsp.head == q.rsp.tail {
		return q.refuse(now, h.Message, ErrorDescriptor, CauseNoReceive)
	}
	return nil
}

// remote asks for the whole range of an RDMA message. Of no bytes nothing is asked.
func (q *QP) remote(r *RDMA, acc rdma.Access) rdma.Status {
	if r.Length == 0 {
		return rdma.StatusSuccess
	}
	_, st := q.cfg.Memory.Remote(r.Handle, r.Addr, r.Length, acc)
	return st
}

// writable is the memory of a Write that was counted before ([rdma.WriteCounter]). Of no bytes Remote counts nothing,
// and without the right to write neither: so the first call asks for the right, and the second for the range.
func (q *QP) writable(r *RDMA) ([]byte, rdma.Status) {
	if _, st := q.cfg.Memory.Remote(r.Handle, r.Addr, 0, rdma.RemoteWrite); st != rdma.StatusSuccess {
		return nil, st
	}
	return q.cfg.Memory.Remote(r.Handle, r.Addr, r.Length, 0)
}

// readBegins checks a Read Request and keeps it.
func (q *QP) readBegins(now time.Time) error {
	h, r := &q.rx.h, &q.rx.r
	if q.rsp.msg.active {
		return q.protocolError(now, fmt.Errorf("%w: %v %d inside a message", ErrProtocol, h.Type, h.Message))
	}
	switch {
	case !q.terms.RDMARead || q.attr.Access&rdma.RemoteRead == 0:
		return q.refuse(now, h.Message, ErrorMemory, CauseRight)
	case r.Length > q.terms.MaxTransfer:
		return q.refuse(now, h.Message, ErrorDescriptor, CauseTooLong)
	case q.rsp.reads.size() >= int(q.terms.ReadWindow):
		return q.refuse(now, h.Message, ErrorDescriptor, CauseReadWindow)
	}
	if st := q.remote(r, rdma.RemoteRead); st != rdma.StatusSuccess {
		return q.refuse(now, h.Message, ErrorMemory, causeOf(st))
	}
	q.rsp.reads.push(readRequest{number: h.Message, rdma: *r})
	return nil
}

// responseBegins checks a segment of a Read Response: it goes on with the oldest READ, and its memory
// is what our request named, not what the segment says.
func (q *QP) responseBegins(now time.Time) error {
	h, r := &q.rx.h, &q.rx.r
	w, number := q.req.oldestRead()
	if w == nil || number != h.Message || h.Offset != w.got || *r != (RDMA{Addr: w.addr, Handle: w.rkey, Length: w.length}) {
		return q.protocolError(now, fmt.Errorf("%w: %v %d at offset %d, which nothing waits for", ErrProtocol, h.Type, h.Message, h.Offset))
	}
	if h.Flags&FlagTransmitError != 0 {
		q.failUpTo(now, number, rdma.StatusRemoteAccess, errTransmit)
		return nil
	}
	end := uint64(h.Offset) + uint64(q.rx.left)
	if end > uint64(w.length) || (end == uint64(w.length)) != (h.Flags&FlagEnd != 0) {
		return q.protocolError(now, fmt.Errorf("%w: %v %d has bytes up to %d of %d with flags %#x",
			ErrProtocol, h.Type, h.Message, end, w.length, h.Flags))
	}
	return nil
}

// target finds the memory of the bytes that are due.
func (q *QP) target() rdma.Status {
	r := &q.rx
	if r.ready {
		return rdma.StatusSuccess
	}
	end := int(r.h.Offset) + int(r.h.Length) - r.h.PayloadOffset()
	off := end - r.left
	var st rdma.Status
	switch r.h.Type {
	case TypeSend:
		st = q.receiveMemory(off, end)
	case TypeWrite:
		var b []byte
		if b, st = q.writable(&r.r); st == rdma.StatusSuccess {
			r.to[0] = b[off:end]
		}
	case TypeReadResponse:
		w, _ := q.req.oldestRead()
		var b []byte
		if b, st = q.cfg.Memory.Local(w.sgl[0], true); st == rdma.StatusSuccess {
			r.to[0] = b[off:end]
		}
	default:
		invariant.Must(false, "vitcp: payload where there is none")
	}
	r.ready = st == rdma.StatusSuccess
	return st
}

// receiveMemory finds the memory of a Send: the receive's own, and then its spill.
func (q *QP) receiveMemory(off, end int) rdma.Status {
	w := q.rsp.at(q.rsp.head)
	n := int(w.sge.Length)
	if off < n {
		b, st := q.cfg.Memory.Local(w.sge, true)
		if st != rdma.StatusSuccess {
			return st
		}
		q.rx.to[0] = b[off:min(end, n)]
	}
	if end > n {
		b, st := q.cfg.Memory.Local(w.spill, true)
		if st != rdma.StatusSuccess {
			return st
		}
		q.rx.to[1] = b[max(off-n, 0) : end-n]
	}
	return rdma.StatusSuccess
}

// targetGone fails a message whose memory is not registered for it.
func (q *QP) targetGone(now time.Time, st rdma.Status) error {
	h := &q.rx.h
	switch h.Type {
	case TypeSend:
		q.failRecv(rdma.StatusLocalProtect)
		return q.refuse(now, h.Message, ErrorDescriptor, CauseReceive)
	case TypeWrite:
		return q.tell(now, h.Message, ErrorMemory, causeOf(st), errGone)
	default:
		q.failUpTo(now, h.Message, rdma.StatusLocalProtect, errMemory)
		return errMemory
	}
}

// segmentDone is called when the payload of a segment is placed.
func (q *QP) segmentDone(now time.Time) {
	h := &q.rx.h
	n := uint32(h.Length) - uint32(h.PayloadOffset())
	q.rx.forget()
	last := h.Flags&FlagEnd != 0
	switch h.Type {
	case TypeReadResponse:
		w, _ := q.req.oldestRead()
		w.got += n
		if last {
			w.done = true
			q.req.reads--
			q.req.oldestRead() // before the places of those in between have others
			q.retire(now)
		}
	case TypeReadRequest:
		q.rsp.delivered = h.Message
		q.stats.RxMessages++
	case TypeSend, TypeWrite:
		q.rsp.msg.got += n
		if last {
			q.deliver(h)
		}
	default:
	}
}

// deliver ends a message of the peer: the receive it took completes.
func (q *QP) deliver(h *Header) {
	r := &q.rsp
	imm := h.Flags&FlagImmediate != 0
	if h.Type == TypeSend || imm {
		wc := rdma.WC{ID: r.at(r.head).id, Op: rdma.OpRecv, Bytes: r.msg.got, HasImm: imm}
		if h.Type == TypeWrite {
			wc.Op = rdma.OpRecvWriteImm
		}
		if imm {
			wc.Imm = h.Immediate
		}
		r.head++
		q.completeRecv(wc)
	}
	r.msg = message{}
	r.delivered = h.Message
	q.stats.RxMessages++
}

// failRecv completes the oldest receive with a status.
func (q *QP) failRecv(s rdma.Status) {
	r := &q.rsp
	id := r.at(r.head).id
	r.head++
	q.completeRecv(rdma.WC{ID: id, Status: s, Op: rdma.OpRecv})
}
