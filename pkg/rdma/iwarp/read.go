// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// outstanding is a READ of ours that waits for its response. Its sink on the wire is a
// name for the READ, not a key of a region: the peer gets no right to write, and the name
// is dead when the READ ends.
type outstanding struct {
	sink  rdma.RKey
	size  uint32
	got   uint32
	msn   uint32
	index uint32 // of the work request
	rtr   bool   // it has none
}

// ring is a queue of at most MaxReads entries.
type ring[T any] struct {
	entries    [MaxReads]T
	head, tail uint32
}

func (r *ring[T]) size() int { return int(r.tail - r.head) }

func (r *ring[T]) at(i int) *T { return &r.entries[(r.head+uint32(i))%MaxReads] }

func (r *ring[T]) push(e T) {
	invariant.Must(r.size() < MaxReads, "iwarp: more READs than agreed")
	r.entries[r.tail%MaxReads] = e
	r.tail++
}

func (r *ring[T]) pop() { r.head++ }

// readRing holds the READs in both directions.
type readRing struct {
	requests ring[outstanding] // ours, in the order of their responses
	sent     uint32            // how many of ours TCP has taken, ever
	served   ring[ReadRequest] // the peer's, until TCP has taken the response
	framed   uint32            // how many of the peer's are framed, ever
}

func (r *readRing) clear() { *r = readRing{} }

// requestsToServe is the number of the peer's READs whose response is not framed.
func (r *readRing) requestsToServe() int { return int(r.served.tail - r.framed) }

// toServe is the oldest of them.
func (r *readRing) toServe() *ReadRequest { return &r.served.entries[r.framed%MaxReads] }

// buildRead frames a READ request, and reports whether there was room.
func (q *QP) buildRead(w *sendWQE) bool {
	t := &q.tx
	if t.framing.Markers && !t.hasRoom(untaggedLen+readRequestLen) {
		return false
	}
	r := ReadRequest{SinkSTag: q.tx.newSink(q.cfg.Rand), Size: w.length, SourceSTag: w.rkey, SourceTO: w.addr}
	t.reads.requests.push(outstanding{sink: r.SinkSTag, size: r.Size, msn: t.msn[queueReadRequest], index: t.queue.cur})
	s := t.next()
	s.request, s.last, s.index = true, true, t.queue.cur
	q.tx.pushRead(&r, s)
	t.msg = message{}
	t.queue.cur++
	return true
}

// emptyRead sends an RTR (RFC 6581 §9.2): a READ of nothing.
func (t *sender) emptyRead(r *rand.Rand) {
	req := ReadRequest{SinkSTag: t.newSink(r), SourceSTag: 1}
	t.reads.requests.push(outstanding{sink: req.SinkSTag, msn: t.msn[queueReadRequest], rtr: true})
	t.reads.sent++
	t.pushRead(&req, t.next())
}

// pushRead frames a READ request.
func (t *sender) pushRead(r *ReadRequest, s *segment) {
	h := Header{Last: true, Op: OpReadRequest, QN: queueReadRequest, MSN: t.msn[queueReadRequest]}
	t.msn[queueReadRequest]++
	const ulpdu = untaggedLen + readRequestLen
	binary.BigEndian.PutUint16(s.head[:], ulpdu)
	h.Put(s.head[lengthLen:])
	r.Put(s.head[lengthLen+untaggedLen:])
	s.headLen = lengthLen + ulpdu
	if t.framing.Markers {
		b := s.head[lengthLen:s.headLen]
		s.headLen = 0
		t.pushOwn(s, t.framing.Append(t.arena, b))
		return
	}
	t.seal(s, ulpdu)
}

// newSink names a READ. No two that wait have the same name.
func (t *sender) newSink(r *rand.Rand) rdma.RKey {
	for {
		key := rdma.RKey(r.Uint32())
		used := key == 0
		for i := range t.reads.requests.size() {
			used = used || t.reads.requests.at(i).sink == key
		}
		if !used {
			return key
		}
	}
}

// buildResponse frames the next segment of the oldest READ response. With CRC its bytes
// are copied, unless their owner promised not to change them meanwhile.
func (q *QP) buildResponse() bool {
	t := &q.tx
	r := t.reads.toServe()
	if !t.msg.resolved {
		b, code := q.source(r, rdma.RemoteRead|rdma.StableRead)
		t.msg.copied = t.framing.CRC && r.Size > 0 && code == CodeAccess
		if code == CodeAccess {
			b, code = q.source(r, rdma.RemoteRead)
		}
		if code != CodeLocal {
			q.terminate(code, nil)
			return false
		}
		t.msg.bufs[0], t.msg.nbufs, t.msg.resolved = b, 1, true
	}
	h := Header{Tagged: true, Op: OpReadResponse, STag: r.SinkSTag, TO: r.SinkTO + uint64(t.msg.off)}
	s := t.next()
	s.response, s.index = true, t.reads.framed
	if !t.frame(s, &h) {
		return false
	}
	if s.last {
		t.msg = message{}
		t.reads.framed++
	}
	return true
}

// source finds what a READ of the peer reads, in a region with these rights; the code is CodeLocal if nothing is
// wrong. A READ of nothing is not checked (RFC 5040 §5.2.1).
func (q *QP) source(r *ReadRequest, access rdma.Access) ([]byte, Code) {
	if r.Size == 0 {
		return nil, CodeLocal
	}
	if r.SourceTO+uint64(r.Size)-1 < r.SourceTO || r.SinkTO+uint64(r.Size)-1 < r.SinkTO {
		return nil, CodeReadWrap
	}
	if q.access&rdma.RemoteRead == 0 {
		return nil, CodeAccess
	}
	b, st := q.cfg.Memory.Remote(r.SourceSTag, r.SourceTO, r.Size, access)
	switch st {
	case rdma.StatusSuccess:
		return b, CodeLocal
	case rdma.StatusRemoteAccess:
		return nil, CodeAccess
	case rdma.StatusRemoteOp:
		return nil, CodeReadBounds
	default:
		return nil, CodeReadSTag
	}
}

// remoteAgain resolves the memory of a response that is offered to TCP.
func (q *QP) remoteAgain(s *segment, bufs *[MaxSGE][]byte) (int, bool) {
	b, code := q.source(&q.tx.reads.served.entries[s.index%MaxReads], rdma.RemoteRead)
	bufs[0] = b
	return 1, code == CodeLocal
}

// responded takes the oldest READ, which has all its bytes, off.
func (q *QP) responded() {
	r := &q.tx.reads.requests
	if e := r.at(0); !e.rtr {
		q.tx.queue.at(e.index).done = true
	}
	r.pop()
	q.retire()
}
