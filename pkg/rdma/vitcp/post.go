// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// PostSend queues work requests in order and returns how many were taken,
// fewer than all only with an error: [rdma.ErrQueueFull] when completions
// have to be polled first. In ERR they complete as flushed. What the terms of the
// connection do not allow is taken, and fails.
func (q *QP) PostSend(_ time.Time, wrs []rdma.SendWR) (int, error) {
	st := q.attr.State
	if st != rdma.QPRTS && st != rdma.QPError || q.end.asked && st == rdma.QPRTS {
		return 0, fmt.Errorf("post send to queue pair %v in %v: %w", q.cfg.Num, st, rdma.ErrState)
	}
	s := &q.req.queue
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
		w.id, w.op, w.flags = wr.ID, wr.Op, wr.Flags
		w.imm, w.addr, w.rkey, w.length = wr.Imm, wr.RemoteAddr, wr.RKey, n
		w.got, w.done = 0, false
		w.status = q.terms.allow(wr.Op, n)
		w.sges = copy(w.sgl[:], wr.SGL)
		if wr.Flags&rdma.SendInline != 0 {
			w.sges = 0
			copy(s.inlineOf(s.tail), wr.Inline)
		}
		s.tail++
	}
	return len(wrs), nil
}

// allow returns how a request fails that was not agreed on.
func (t *Terms) allow(op rdma.Opcode, n uint32) rdma.Status {
	switch {
	case n > t.MaxTransfer:
		return rdma.StatusLocalLength
	case op == rdma.OpRead && (!t.RDMARead || t.ReadWindow == 0),
		(op == rdma.OpWrite || op == rdma.OpWriteImm) && !t.RDMAWrite:
		return rdma.StatusLocalQP
	}
	return rdma.StatusSuccess
}

// PostRecv queues receive buffers in order and returns how many were taken,
// fewer than all only with an error. In ERR they complete as flushed. TxBuffers may have
// something then: the peer may wait for a receive.
func (q *QP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	st := q.attr.State
	if st == rdma.QPReset {
		return 0, fmt.Errorf("post receive to queue pair %v in %v: %w", q.cfg.Num, st, rdma.ErrState)
	}
	r := &q.rsp
	for i := range wrs {
		if int(r.tail-r.head)+q.wcs.Recvs() >= q.cfg.MaxRecvWR {
			return i, rdma.ErrQueueFull
		}
		if st == rdma.QPError {
			q.completeRecv(rdma.WC{ID: wrs[i].ID, Status: rdma.StatusFlushed, Op: rdma.OpRecv})
			continue
		}
		*r.at(r.tail) = recvWQE{id: wrs[i].ID, sge: wrs[i].SGE, spill: wrs[i].Spill}
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

// completeRecv wakes also who waits for solicited messages only: VI/TCP has no bit for them.
func (q *QP) completeRecv(wc rdma.WC) {
	wc.QPN = q.cfg.Num
	q.wcs.Push(wq.Completion{WC: wc, Wake: true})
}
