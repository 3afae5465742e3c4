// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// PostSend queues work requests in order and returns how many were taken,
// fewer than all only with an error: [rdma.ErrQueueFull] when completions
// have to be polled first. In ERR they complete as flushed.
func (q *QP) PostSend(_ time.Time, wrs []rdma.SendWR) (int, error) {
	st := q.attr.State
	if st != rdma.QPRTS && st != rdma.QPError {
		return 0, fmt.Errorf("post send to queue pair %v in %v: %w", q.cfg.Num, st, rdma.ErrState)
	}
	for i := range wrs {
		wr := &wrs[i]
		n, err := q.limits.Check(wr)
		if err != nil {
			return i, err
		}
		r := &q.req
		if r.queue.size()+q.wcs.Sends() >= q.cfg.MaxSendWR {
			return i, rdma.ErrQueueFull
		}
		if st == rdma.QPError {
			q.completeSend(wr.ID, wr.Op, 0, rdma.StatusFlushed)
			continue
		}
		w := r.queue.at(r.queue.tail)
		w.id, w.op, w.flags = wr.ID, wr.Op, wr.Flags
		w.imm, w.addr, w.rkey = wr.Imm, wr.RemoteAddr, wr.RKey
		w.length = n
		w.status = rdma.StatusSuccess
		w.sges = copy(w.sgl[:], wr.SGL)
		if wr.Flags&rdma.SendInline != 0 {
			w.sges = 0
			copy(r.queue.inlineOf(r.queue.tail), wr.Inline)
		}
		w.first, w.last = r.win.reserve(packets(n, q.mtu))
		r.queue.tail++
	}
	return len(wrs), nil
}

// PostRecv queues receive buffers in order and returns how many were taken,
// fewer than all only with an error. In ERR they complete as flushed.
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
		WC:   rdma.WC{ID: id, Status: s, Op: op, Bytes: n, QPN: q.cfg.Num, SrcQP: q.attr.DestQPN},
		Send: true,
		Wake: s != rdma.StatusSuccess,
	})
}

func (q *QP) completeRecv(wc rdma.WC) {
	wc.QPN, wc.SrcQP = q.cfg.Num, q.attr.DestQPN
	q.wcs.Push(wq.Completion{WC: wc, Wake: wc.Solicit || wc.Status != rdma.StatusSuccess})
}

// flushSends completes all outstanding sends as flushed.
func (q *QP) flushSends() {
	r := &q.req
	for ; !r.queue.isEmpty(); r.queue.head++ {
		w := r.queue.at(r.queue.head)
		q.completeSend(w.id, w.op, 0, rdma.StatusFlushed)
	}
	r.stop()
}

// flushRecvs completes all receive buffers as flushed.
func (q *QP) flushRecvs() {
	r := &q.rsp
	for ; r.head != r.tail; r.head++ {
		q.completeRecv(rdma.WC{ID: r.at(r.head).id, Status: rdma.StatusFlushed, Op: rdma.OpRecv})
	}
	r.stop()
}
