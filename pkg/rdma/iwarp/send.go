// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/widecrc"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// segment is an FPDU, or a start-up frame, that is offered to TCP.
type segment struct {
	head    [lengthLen + untaggedLen + readRequestLen]byte
	tail    [4 + crcLen]byte // pad, CRC
	headLen int
	tailLen int
	data    [MaxSGE][]byte // all of it, if own
	pieces  int
	total   int // bytes

	own      bool // data is in the arena
	request  bool // of the work request of index
	response bool // of a READ response
	startup  bool // a frame that comes before the first FPDU
	last     bool // of its message
	index    uint32
	off, n   uint32 // the payload in its message
	end      int    // of the arena
	pos      int    // of markers, behind it
}

// message is what is being cut into segments: the work request at cur, or the oldest READ
// response.
type message struct {
	active   bool
	response bool
	resolved bool
	copied   bool   // before it is framed
	off      uint32 // what is framed
	length   uint32
	bufs     [MaxSGE][]byte
	nbufs    int
}

// sender is the sending half. What TCP has not taken is in segs, as registered memory or
// in the arena.
type sender struct {
	queue    sendQueue
	maxULPDU int
	framing  Framing
	msn      [numQueues]uint32 // next, RFC 5041 §4.3: from 1

	segs       [maxSegments]segment
	head, tail uint32
	off        int // taken of the segment at head
	offered    int // bytes of all segments
	arena      []byte
	owns       int // segments in the arena

	msg   message
	inRow int // responses since the last local request

	ord   int
	reads readRing
}

// begin prepares for a new stream.
func (t *sender) begin(maxULPDU int) {
	if t.arena == nil {
		t.arena = make([]byte, 0, arenaLen)
	}
	t.clear()
	t.maxULPDU = maxULPDU
	t.msn = [numQueues]uint32{1, 1, 1}
}

// clear forgets everything but memory of its own.
func (t *sender) clear() {
	t.drop()
	t.queue.head, t.queue.cur, t.queue.tail = 0, 0, 0
	t.framing = Framing{}
	t.reads.clear()
	t.ord, t.inRow = 0, 0
}

// drop takes back what TCP has not taken.
func (t *sender) drop() {
	for t.head != t.tail {
		t.at(t.head).data = [MaxSGE][]byte{}
		t.head++
	}
	t.off, t.offered, t.owns = 0, 0, 0
	t.arena = t.arena[:0]
	t.msg = message{}
}

// cut takes back what TCP has not taken but the rest of a segment that has begun, which is
// copied: its memory is the program's again.
func (t *sender) cut() {
	if t.isIdle() || t.off == 0 && !t.at(t.head).startup {
		t.rewind()
		t.drop()
		return
	}
	s := *t.at(t.head)
	if s.own {
		t.arena = t.arena[:s.end]
	} else {
		t.arena = t.arena[:0]
		t.arena = append(t.arena, s.head[:s.headLen]...)
		for _, p := range s.data[:s.pieces] {
			t.arena = append(t.arena, p...)
		}
		t.arena = append(t.arena, s.tail[:s.tailLen]...)
		s.data[0], s.pieces, s.headLen, s.tailLen = t.arena, 1, 0, 0
		s.own, s.end = true, len(t.arena)
	}
	off, arena := t.off, t.arena
	t.drop()
	t.arena = arena
	s.request, s.response = false, false
	*t.next() = s
	t.push()
	t.off = off
	t.framing.pos = s.pos
}

// rewind puts the position of markers back to before the oldest segment.
func (t *sender) rewind() {
	if t.framing.Markers && t.head != t.tail {
		s := t.at(t.head)
		t.framing.pos = (s.pos - s.total%markerSpacing + markerSpacing) % markerSpacing
	}
}

func (t *sender) at(i uint32) *segment { return &t.segs[i%maxSegments] }

// isIdle reports whether TCP has taken all that was framed.
func (t *sender) isIdle() bool { return t.head == t.tail }

// isDone reports whether nothing is left to be framed, taken or answered.
func (t *sender) isDone() bool {
	return t.isIdle() && t.queue.head == t.queue.tail && t.reads.requests.size() == 0 && t.reads.served.size() == 0
}

// next returns the place of the next segment, cleared.
func (t *sender) next() *segment {
	invariant.Must(t.tail-t.head < maxSegments, "iwarp: more segments than places")
	s := t.at(t.tail)
	*s = segment{}
	return s
}

// push offers the segment in the place that next returned.
func (t *sender) push() {
	s := t.at(t.tail)
	t.tail++
	t.offered += s.total
	if s.own {
		t.owns++
	}
}

// control offers an FPDU that was just appended to the arena.
func (t *sender) control(arena []byte) { t.pushOwn(t.next(), arena) }

// greet sends a start-up frame.
func (t *sender) greet(f *Frame) {
	s := t.next()
	s.startup = true
	t.pushOwn(s, f.Append(t.arena))
}

// pushOwn offers a segment whose bytes were just appended to the arena.
func (t *sender) pushOwn(s *segment, arena []byte) {
	invariant.Must(cap(arena) == cap(t.arena), "iwarp: arena overrun")
	b := arena[len(t.arena):]
	t.arena = arena
	s.own = true
	s.data[0], s.pieces = b, 1
	s.total, s.end, s.pos = len(b), len(arena), t.framing.pos
	t.push()
}

// emptyWrite sends an RTR (RFC 6581 §9.2): the STag means nothing.
func (t *sender) emptyWrite() {
	h := Header{Tagged: true, Last: true, Op: OpWrite, STag: 1}
	t.control(t.framing.Append(t.arena, h.Append(nil)))
}

// Nudge sends an empty WRITE, which means nothing to the peer (RFC 5040 §5.1), if nothing
// else is to be sent: a peer that missed that something came looks then.
func (q *QP) Nudge() {
	if q.phase == PhaseOpen && !q.start.gated && q.tx.isIdle() && !q.tx.msg.active {
		q.tx.emptyWrite()
	}
}

// sayTerminate sends a Terminate (RFC 5040 §4.8), the last FPDU of the stream.
func (t *sender) sayTerminate(term *Terminate) {
	h := Header{Last: true, Op: OpTerminate, QN: queueTerminate, MSN: 1}
	t.control(t.framing.Append(t.arena, h.Append(nil), term.Append(nil)))
}

// terminate fails the queue pair because of what the peer sent, and says so. seg is the
// segment to blame, if any.
func (q *QP) terminate(code Code, seg []byte) {
	term := Terminate{Code: code}
	if code.hasHeader() && len(seg) >= terminatedLen(seg) {
		term.HasLength, term.Length = true, uint16(len(seg))
		k := terminatedLen(seg)
		term.Header = append([]byte(nil), seg[:k]...)
		if Opcode(seg[1]&rdmapOpMask) == OpReadRequest && len(seg) >= k+readRequestLen {
			term.Request = append([]byte(nil), seg[k:k+readRequestLen]...)
		}
	}
	q.fail(rdma.EventQPFatal, &TerminateError{Terminate: term, Sent: true})
	q.tx.sayTerminate(&term)
}

// TxBuffers appends to dst the bytes to be sent now, in order: of FPDUs that begin and
// that were taken in part. They stay so until the next call of another method of the queue
// pair.
func (q *QP) TxBuffers(now time.Time, dst [][]byte) [][]byte {
	q.build()
	q.drained(now)
	if q.phase == PhaseClosing && q.deadline.IsZero() {
		q.setDeadline(now)
	}
	skip := q.tx.off
	for i := q.tx.head; i != q.tx.tail; i++ {
		s := q.tx.at(i)
		dst, skip = appendRest(dst, s.head[:s.headLen], skip)
		for _, p := range s.data[:s.pieces] {
			dst, skip = appendRest(dst, p, skip)
		}
		dst, skip = appendRest(dst, s.tail[:s.tailLen], skip)
	}
	return dst
}

// appendRest appends what is left of p without its first skip bytes, and returns what is
// left of skip.
func appendRest(dst [][]byte, p []byte, skip int) ([][]byte, int) {
	if skip >= len(p) {
		return dst, skip - len(p)
	}
	return append(dst, p[skip:]), 0
}

// HasTx reports whether TxBuffers may have something.
func (q *QP) HasTx() bool {
	if !q.tx.isIdle() || q.phase != PhaseOpen || q.start.gated {
		return !q.tx.isIdle()
	}
	local, response := q.tx.ready()
	return q.tx.msg.active || local || response || q.draining
}

// ready reports whether a local request, or a response to a READ, can begin. A READ waits for its
// turn, but to no purpose where the peer serves none: it fails.
func (t *sender) ready() (local, response bool) {
	local = t.queue.cur != t.queue.tail
	if local && t.queue.at(t.queue.cur).op == rdma.OpRead && t.ord > 0 && t.reads.requests.size() >= t.ord {
		local = false
	}
	return local, t.reads.requestsToServe() > 0
}

// HandleTx says that TCP took the next n bytes of those of TxBuffers. SENDs and WRITEs
// complete with their last byte.
func (q *QP) HandleTx(now time.Time, n int) {
	t := &q.tx
	for n > 0 {
		invariant.Must(t.head != t.tail, "iwarp: TCP took more than there was")
		s := t.at(t.head)
		if n < s.total-t.off {
			t.off += n
			return
		}
		n -= s.total - t.off
		q.taken(s)
	}
	q.retire()
	q.drained(now)
}

// taken takes the oldest segment, all of which TCP has, off.
func (q *QP) taken(s *segment) {
	t := &q.tx
	t.off = 0
	t.head++
	t.offered -= s.total
	s.data = [MaxSGE][]byte{}
	if s.own {
		if t.owns--; t.owns == 0 {
			t.arena = t.arena[:0]
		}
	}
	q.stats.TxFPDUs++
	q.stats.TxBytes += uint64(s.n)
	if !s.last {
		return
	}
	switch {
	case s.response:
		t.reads.served.pop()
	case s.request && t.queue.at(s.index).op == rdma.OpRead:
		t.reads.sent++
	case s.request:
		t.queue.at(s.index).done = true
	}
}

// build frames as much as is worth offering to TCP at a time.
func (q *QP) build() {
	enough := maxOffered
	if q.tx.framing.CRC {
		enough = maxSummed
	}
	for q.phase == PhaseOpen && !q.start.gated && q.tx.tail-q.tx.head < maxSegments && q.tx.offered < enough {
		if !q.buildNext() {
			return
		}
	}
}

// buildNext frames one segment. Messages are not mixed; READ responses and local requests
// take turns.
func (q *QP) buildNext() bool {
	t := &q.tx
	m := &t.msg
	if !m.active {
		switch local, response := t.ready(); {
		case response && (!local || t.inRow < maxResponses):
			*m = message{active: true, response: true, length: t.reads.toServe().Size}
			t.inRow++
		case local:
			*m = message{active: true, length: t.queue.at(t.queue.cur).length}
			t.inRow = 0
		default:
			return false
		}
	}
	if m.response {
		return q.buildResponse()
	}
	return q.buildRequest()
}

// buildRequest frames the next segment of the work request at cur.
func (q *QP) buildRequest() bool {
	t := &q.tx
	w := t.queue.at(t.queue.cur)
	if !t.msg.resolved {
		if st, err := q.resolve(w, t.queue.cur); st != rdma.StatusSuccess {
			if t.queue.head == t.queue.cur {
				q.sayLocal(t.queue.cur, st, err)
			}
			return false // those before it complete first
		}
	}
	if w.op == rdma.OpRead {
		return q.buildRead(w)
	}
	h := Header{Tagged: w.op == rdma.OpWrite, Op: OpWrite, STag: w.rkey, TO: w.addr + uint64(t.msg.off)}
	if w.op == rdma.OpSend {
		h = Header{Op: sendOpcode(w.flags), QN: queueSend, MSN: t.msn[queueSend], MO: t.msg.off}
		if h.Op.invalidates() {
			h.STag = w.inv
		}
	}
	s := t.next()
	s.request, s.index = true, t.queue.cur
	if !t.frame(s, &h) {
		return false
	}
	if s.last {
		if w.op == rdma.OpSend {
			t.msn[queueSend]++
		}
		t.msg = message{}
		t.queue.cur++
	}
	return true
}

// sayLocal fails the queue pair because of a work request of its program.
func (q *QP) sayLocal(index uint32, st rdma.Status, err error) {
	q.failSend(index, st, rdma.EventQPFatal, err)
	q.tx.sayTerminate(&Terminate{Code: CodeLocal})
}

// resolve finds the memory of the work request that is the message. Its status and the error are
// those that the work request fails with.
func (q *QP) resolve(w *sendWQE, index uint32) (rdma.Status, error) {
	if w.op == rdma.OpRead && q.tx.ord == 0 {
		return rdma.StatusLocalQP, errNoReads
	}
	m := &q.tx.msg
	m.nbufs = 0
	if w.flags&rdma.SendInline != 0 {
		m.bufs[0], m.nbufs = q.tx.queue.inlineOf(index)[:w.length], 1
	} else {
		for i := range w.sges {
			b, st := q.cfg.Memory.Local(w.sgl[i], w.op == rdma.OpRead)
			if st != rdma.StatusSuccess {
				return rdma.StatusLocalProtect, errLocalMemory
			}
			m.bufs[i] = b
			m.nbufs++
		}
	}
	m.resolved = true
	return rdma.StatusSuccess, nil
}

// frame makes the next segment of the message, with a header that says where it begins. It
// reports whether there was room.
func (t *sender) frame(s *segment, h *Header) bool {
	m := &t.msg
	s.off = m.off
	longest := t.maxULPDU
	if t.framing.Markers {
		longest = min(longest, MaxMarkedULPDU)
	}
	s.n = min(m.length-m.off, uint32(longest-h.Len()))
	s.last = s.off+s.n == m.length
	h.Last = s.last
	s.pieces = gather(&s.data, m.bufs[:m.nbufs], s.off, s.n)
	ulpdu := h.Len() + int(s.n)
	if m.copied || t.framing.Markers {
		if cap(t.arena) < copiedLen && t.owns == 0 {
			t.arena = make([]byte, 0, copiedLen)
		}
		if !t.hasRoom(ulpdu) {
			return false
		}
		var parts [1 + MaxSGE][]byte
		parts[0] = s.head[:h.Put(s.head[:])]
		n := 1 + copy(parts[1:], s.data[:s.pieces])
		arena := t.framing.Append(t.arena, parts[:n]...)
		s.data = [MaxSGE][]byte{}
		t.pushOwn(s, arena)
	} else {
		binary.BigEndian.PutUint16(s.head[:], uint16(ulpdu))
		s.headLen = lengthLen + h.Put(s.head[lengthLen:])
		t.seal(s, ulpdu)
	}
	m.off += s.n
	return true
}

// hasRoom reports whether the arena takes one more FPDU, and a Terminate behind it.
func (t *sender) hasRoom(ulpdu int) bool {
	n := fpduLen(ulpdu) + fpduLen(untaggedLen+maxTerminateLen)
	return cap(t.arena)-len(t.arena) >= n+markerLen*(n/markerSpacing+2)
}

// seal adds pad and CRC to a segment of registered memory, and offers it.
func (t *sender) seal(s *segment, ulpdu int) {
	pad := padLen(ulpdu)
	s.tailLen = pad + crcLen
	if t.framing.CRC {
		crc := crc32c(s.head[:s.headLen])
		for _, p := range s.data[:s.pieces] {
			crc = widecrc.Castagnoli.Update(crc, p)
		}
		crc = widecrc.Castagnoli.Update(crc, s.tail[:pad])
		binary.LittleEndian.PutUint32(s.tail[pad:], crc)
	}
	s.total = fpduLen(ulpdu)
	t.push()
}

// gather makes dst the n bytes at off of the bufs, and returns how many pieces they are.
func gather(dst *[MaxSGE][]byte, bufs [][]byte, off, n uint32) int {
	k, at, left := 0, uint64(off), uint64(n)
	for _, b := range bufs {
		if left == 0 {
			break
		}
		if at >= uint64(len(b)) {
			at -= uint64(len(b))
			continue
		}
		b = b[at:min(at+left, uint64(len(b)))]
		at = 0
		dst[k] = b
		k++
		left -= uint64(len(b))
	}
	return k
}

// forgetSends resolves what is offered to TCP anew. A queue pair that cannot keep what it
// began to send fails.
func (q *QP) forgetSends() {
	t := &q.tx
	if t.msg.active {
		t.msg.resolved, t.msg.nbufs = false, 0
		t.msg.bufs = [MaxSGE][]byte{}
	}
	for i := t.head; i != t.tail; i++ {
		s := t.at(i)
		if s.own || s.pieces == 0 {
			continue
		}
		var bufs [MaxSGE][]byte
		n := 0
		ok := false
		if s.request {
			n, ok = t.localAgain(q.cfg.Memory, s.index, &bufs)
		} else {
			n, ok = q.remoteAgain(s, &bufs)
		}
		if !ok {
			q.lose(s, i == t.head && t.off > 0)
			return
		}
		s.data = [MaxSGE][]byte{}
		s.pieces = gather(&s.data, bufs[:n], s.off, s.n)
	}
}

// localAgain resolves the memory of a work request.
func (t *sender) localAgain(m wq.Memory, index uint32, bufs *[MaxSGE][]byte) (int, bool) {
	w := t.queue.at(index)
	if w.flags&rdma.SendInline != 0 {
		bufs[0] = t.queue.inlineOf(index)[:w.length]
		return 1, true
	}
	for i := range w.sges {
		b, st := m.Local(w.sgl[i], false)
		if st != rdma.StatusSuccess {
			return 0, false
		}
		bufs[i] = b
	}
	return w.sges, true
}

// lose fails the queue pair whose memory for a segment is gone. If a part of that is sent,
// not even a Terminate can follow: the peer sees an FPDU that does not end.
func (q *QP) lose(s *segment, begun bool) {
	index, request := s.index, s.request
	if begun {
		q.tx.drop()
	}
	if request {
		q.failSend(index, rdma.StatusLocalProtect, rdma.EventQPFatal, errLocalMemory)
	} else {
		q.fail(rdma.EventQPFatal, &TerminateError{Terminate: Terminate{Code: CodeReadSTag}, Sent: true})
	}
	if !begun {
		q.tx.sayTerminate(&Terminate{Code: CodeLocal})
	}
}
