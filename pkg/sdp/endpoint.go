// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// work says what a work request was for: the upper part of its ID.
type work uint64

const (
	workRecv work = (iota + 1) << 32
	workSend
	workRead
	workWrite
)

// workBits are the upper part.
const workBits = ^uint64(1<<32 - 1)

// endpoint is what a connection has of the device: a domain and a queue pair of its own, and the memory of its
// messages. The connection's turn guards it.
//
//	arena   receive buffer 0 | receive buffer 1 | ... | slot 0 | slot 1 | ...
type endpoint struct {
	pd    rdma.PD
	cq    rdma.CQ
	qp    rdma.QP
	arena rdma.MR

	bufs, bufBytes int // receive buffers, and the size of one and of a slot
	slots          int
	sent           uint64 // messages; the slots are used in turn

	wrs   []rdma.SendWR // to be posted
	sges  []rdma.SGE    // of wrs
	recvs []rdma.RecvWR // to be posted

	keys    map[rdma.RKey]rdma.MR // advertised
	buffers map[*Buffer]struct{}  // that have a region in the domain
	dead    bool                  // the queue pair takes nothing more
}

// open makes it, with the queue pair in INIT and all receive buffers posted. After an error there is nothing.
func (e *endpoint) open(ctx rdma.Context, cfg *Config) (err error) {
	e.bufs, e.bufBytes, e.slots = cfg.RecvBuffers, cfg.RecvBufferSize, cfg.SendSlots
	e.keys, e.buffers = make(map[rdma.RKey]rdma.MR), make(map[*Buffer]struct{})
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make queue pair: %w", err), e.closeQP(), e.closeMemory(nil))
		}
	}()
	if e.pd, err = ctx.AllocPD(); err != nil {
		return err
	}
	if e.arena, err = e.pd.AllocMR((e.bufs+e.slots)*e.bufBytes, rdma.LocalWrite); err != nil {
		return err
	}
	sends := e.slots + readsAhead
	if e.cq, err = ctx.CreateCQ(e.bufs + sends); err != nil {
		return err
	}
	if e.qp, err = e.pd.CreateQP(rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: sends, MaxRecvWR: e.bufs, MaxSGE: 1}); err != nil {
		return err
	}
	if err = e.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.LocalWrite | rdma.RemoteRead | rdma.RemoteWrite}); err != nil {
		return err
	}
	e.wrs, e.sges = make([]rdma.SendWR, 0, sends), make([]rdma.SGE, 0, sends)
	e.recvs = make([]rdma.RecvWR, 0, e.bufs)
	for i := range e.bufs {
		e.recycle(i)
	}
	return e.flush()
}

// closeQP ends the queue pair: nothing of the peer reaches memory any more, and nothing completes. The endpoint is dead, and
// nobody else looks at the queue pair.
func (e *endpoint) closeQP() error {
	var errs []error
	if e.qp != nil {
		errs = append(errs, e.qp.Close())
	}
	if e.cq != nil {
		errs = append(errs, e.cq.Close())
	}
	return errors.Join(errs...)
}

// closeMemory gives the memory back, after closeQP. c is the connection that has Buffers.
func (e *endpoint) closeMemory(c *Conn) error {
	var errs []error
	for b := range e.buffers {
		errs = append(errs, b.forget(c))
	}
	if e.arena != nil {
		errs = append(errs, e.arena.Close())
		e.arena = nil
	}
	if e.pd != nil {
		errs = append(errs, e.pd.Close())
		e.pd = nil
	}
	return errors.Join(errs...)
}

// buffer is a receive buffer's memory.
func (e *endpoint) buffer(i int) []byte { return e.arena.Bytes()[i*e.bufBytes : (i+1)*e.bufBytes] }

// sge is a stretch of the arena.
func (e *endpoint) sge(off, n int) rdma.SGE {
	return rdma.SGE{Addr: e.arena.Addr() + uint64(off), Length: uint32(n), LKey: e.arena.LKey()}
}

// recycle posts a receive buffer, with the next flush.
func (e *endpoint) recycle(i int) {
	if !e.dead {
		e.recvs = append(e.recvs, rdma.RecvWR{ID: uint64(workRecv) | uint64(i), SGE: e.sge(i*e.bufBytes, e.bufBytes)})
	}
}

// slot returns the memory of the next message. The machine has no more of them under way than there are slots.
func (e *endpoint) slot() []byte {
	off := (e.bufs + int(e.sent%uint64(e.slots))) * e.bufBytes
	return e.arena.Bytes()[off : off : off+e.bufBytes]
}

// send posts the message in the next slot, with the next flush.
func (e *endpoint) send(n int, o *socket.Output, canInvalidate bool) {
	off := (e.bufs + int(e.sent%uint64(e.slots))) * e.bufBytes
	e.sent++
	wr := rdma.SendWR{ID: uint64(workSend), Op: rdma.OpSend, Flags: rdma.SendSignaled}
	if o.Message.Solicited() {
		wr.Flags |= rdma.SendSolicited
	}
	if o.Invalidate && canInvalidate {
		wr.Flags |= rdma.SendInvalidate
		wr.InvKey = o.Key
	}
	e.post(wr, e.sge(off, n))
}

// post posts a work request with one stretch of memory, with the next flush.
func (e *endpoint) post(wr rdma.SendWR, sge rdma.SGE) {
	if e.dead {
		return
	}
	n := len(e.sges)
	e.sges = append(e.sges, sge)
	wr.SGL = e.sges[n : n+1 : n+1]
	e.wrs = append(e.wrs, wr)
}

// flush posts what is to be posted: receives first, since messages tell the peer of them.
func (e *endpoint) flush() error {
	var err error
	if len(e.recvs) > 0 && !e.dead {
		_, err = e.qp.PostRecv(e.recvs)
	}
	if len(e.wrs) > 0 && !e.dead && err == nil {
		_, err = e.qp.PostSend(e.wrs)
	}
	e.recvs, e.wrs, e.sges = e.recvs[:0], e.wrs[:0], e.sges[:0]
	return err
}
