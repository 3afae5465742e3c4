// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// sendWQE is a send work request in the queue.
type sendWQE struct {
	id     uint64
	addr   uint64
	sgl    [MaxSGE]rdma.SGE
	length uint32
	rkey   rdma.RKey
	inv    rdma.RKey
	sges   int
	op     rdma.Opcode
	flags  rdma.SendFlags
	done   bool // completes when those before it did
}

// sendQueue is the send queue: a ring of work requests, each with room for its inline
// bytes. The indexes only grow; their low bits are the place in the ring.
//
//	head ------ cur -------- tail
//	      framed     to be framed   the next work request posted
//
// The work request at cur may be framed in part. READs before cur wait for their
// responses, and what comes behind them completes after them.
type sendQueue struct {
	ring            []sendWQE
	inline          []byte
	inlineBytes     int // of each work request
	head, cur, tail uint32
}

// at returns the work request of index i.
func (s *sendQueue) at(i uint32) *sendWQE { return &s.ring[i&uint32(len(s.ring)-1)] }

// inlineOf returns the room for the inline bytes of the work request of index i.
func (s *sendQueue) inlineOf(i uint32) []byte {
	k := (int(i) & (len(s.ring) - 1)) * s.inlineBytes
	return s.inline[k : k+s.inlineBytes]
}

// size is the number of work requests that are not complete.
func (s *sendQueue) size() int { return int(s.tail - s.head) }

// PostSend queues work requests in order and returns how many were taken, fewer than all
// only with an error: [rdma.ErrQueueFull] when completions have to be polled first. In ERR
// they complete as flushed.
func (q *QP) PostSend(_ time.Time, wrs []rdma.SendWR) (int, error) {
	st := q.state
	if st != rdma.QPRTS && st != rdma.QPError {
		return 0, fmt.Errorf("post send to queue pair %v in %v: %w", q.cfg.Num, st, rdma.ErrState)
	}
	s := &q.tx.queue
	for i := range wrs {
		wr := &wrs[i]
		n, err := q.limits.Check(wr)
		if err != nil {
			return i, err
		}
		if s.size()+q.wcs.Sends() >= q.cfg.MaxSendWR {
			return i, rdma.ErrQueueFull
		}
		if st == rdma.QPError {
			q.completeSend(wr.ID, wr.Op, 0, rdma.StatusFlushed)
			continue
		}
		w := s.at(s.tail)
		w.id, w.op, w.flags, w.done = wr.ID, wr.Op, wr.Flags, false
		w.addr, w.rkey, w.inv = wr.RemoteAddr, wr.RKey, wr.InvKey
		w.length = n
		w.sges = copy(w.sgl[:], wr.SGL)
		if wr.Flags&rdma.SendInline != 0 {
			copy(s.inlineOf(s.tail), wr.Inline)
		}
		s.tail++
	}
	return len(wrs), nil
}

// recvWQE is a receive buffer in the queue.
type recvWQE struct {
	id         uint64
	sge, spill rdma.SGE
}

// PostRecv queues receive buffers in order and returns how many were taken, fewer than all
// only with an error. In ERR they complete as flushed.
func (q *QP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	if q.state == rdma.QPReset {
		return 0, fmt.Errorf("post receive to queue pair %v in %v: %w", q.cfg.Num, q.state, rdma.ErrState)
	}
	r := &q.rx
	for i := range wrs {
		if int(r.tail-r.head)+q.wcs.Recvs() >= q.cfg.MaxRecvWR {
			return i, rdma.ErrQueueFull
		}
		if q.state == rdma.QPError {
			q.completeRecv(rdma.WC{ID: wrs[i].ID, Status: rdma.StatusFlushed, Op: rdma.OpRecv})
			continue
		}
		*r.recv(r.tail) = recvWQE{id: wrs[i].ID, sge: wrs[i].SGE, spill: wrs[i].Spill}
		r.tail++
	}
	return len(wrs), nil
}

func (q *QP) completeSend(id uint64, op rdma.Opcode, n uint32, s rdma.Status) {
	q.wcs.Push(wq.Completion{
		WC:   rdma.WC{ID: id, Status: s, Op: op, Bytes: n, QPN: q.cfg.Num},
		Send: true,
		Wake: s != rdma.StatusSuccess,
	})
}

func (q *QP) completeRecv(wc rdma.WC) {
	wc.QPN = q.cfg.Num
	q.wcs.Push(wq.Completion{WC: wc, Wake: wc.Solicit || wc.Status != rdma.StatusSuccess})
}

// retire completes the sends that are done, in the order in which they were posted.
func (q *QP) retire() {
	s := &q.tx.queue
	for s.head != s.cur && s.at(s.head).done {
		w := s.at(s.head)
		if w.flags&rdma.SendSignaled != 0 {
			q.completeSend(w.id, w.op, w.length, rdma.StatusSuccess)
		}
		s.head++
	}
}

// failSend completes the send of index i with an error and fails the queue pair. Those
// before and behind it are flushed.
func (q *QP) failSend(i uint32, st rdma.Status, kind rdma.EventKind, err error) {
	s := &q.tx.queue
	for s.head != s.tail {
		w, is := s.at(s.head), s.head == i
		s.head++
		if is {
			q.completeSend(w.id, w.op, 0, st)
			break
		}
		q.completeSend(w.id, w.op, 0, rdma.StatusFlushed)
	}
	q.fail(kind, fmt.Errorf("queue pair %v: %w: %v", q.cfg.Num, err, st))
}

// failRecv completes the receive buffer in use with an error.
func (q *QP) failRecv(st rdma.Status) {
	r := &q.rx
	q.completeRecv(rdma.WC{ID: r.recv(r.head).id, Status: st, Op: rdma.OpRecv})
	r.head++
}

// flush completes everything that is posted as flushed.
func (q *QP) flush() {
	s, r := &q.tx.queue, &q.rx
	for ; s.head != s.tail; s.head++ {
		w := s.at(s.head)
		q.completeSend(w.id, w.op, 0, rdma.StatusFlushed)
	}
	s.cur = s.tail
	for ; r.head != r.tail; r.head++ {
		q.completeRecv(rdma.WC{ID: r.recv(r.head).id, Status: rdma.StatusFlushed, Op: rdma.OpRecv})
	}
}
