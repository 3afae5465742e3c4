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
	workBegin // see adapterLink
)

// workBits are the upper part.
const workBits = ^uint64(1<<32 - 1)

// endpoint is what a connection has of the device: a domain and a queue pair of its own, and the memory of its
// messages. The connection's turn guards it.
//
//	sets[0]   receive buffer 0 | receive buffer 1 | ...      as many again in sets[1] while their size changes
//	slots     message 0 | message 1 | ...                    used in turn
type endpoint struct {
	pd rdma.PD
	cq rdma.CQ
	qp rdma.QP

	bufs      int // receive buffers of a set
	sets      [2]recvSet
	slots     rdma.MR
	slotCount int
	slotBytes int
	sent      uint64 // messages

	begins beginning // on an adapter

	solicits    bool // the device sends messages with solicited events
	invalidates bool // a message can make a key of the peer worthless
	opensSinks  bool // a READ of ours needs memory that the peer may write, and tells the peer its key: DeviceAttr.ReadSinkWrite

	wrs   []rdma.SendWR // to be posted
	sges  []rdma.SGE    // of wrs
	recvs []rdma.RecvWR // to be posted

	keys    map[rdma.RKey]rdma.MR // advertised
	buffers map[*Buffer]struct{}  // that have a region in the domain, and some that are closed
	tidyAt  int                   // how many there are when those that are closed are forgotten
	dead    bool                  // the queue pair takes nothing more
}

// recvSet is memory of receive buffers of one size.
type recvSet struct {
	mr   rdma.MR
	size int // of each
	left int // that were not dropped
}

// open makes the endpoint, with the queue pair in INIT and all receive buffers posted. After an error nothing of it is left.
func (e *endpoint) open(ctx rdma.Context, cfg *Config) (err error) {
	e.bufs, e.slotCount, e.slotBytes = cfg.RecvBuffers, cfg.SendSlots, cfg.RecvBufferSize
	a := cfg.Device.Attr()
	e.solicits, e.invalidates, e.opensSinks = a.Solicited, a.SendWithInv, a.ReadSinkWrite
	e.keys, e.buffers = make(map[rdma.RKey]rdma.MR), make(map[*Buffer]struct{})
	defer func() {
		if err != nil {
			e.dead = true
			err = errors.Join(fmt.Errorf("make queue pair: %w", err), e.closeQP(), e.closeMemory(nil))
			e.qp, e.cq = nil, nil // their number may be another connection's soon
		}
	}()
	if e.pd, err = ctx.AllocPD(); err != nil {
		return err
	}
	if e.slots, err = e.pd.AllocMR(e.slotCount*e.slotBytes+beginBytes, rdma.LocalWrite); err != nil {
		return err
	}
	return e.openQP(ctx, cfg, cfg.RecvBufferSize)
}

// openQP makes the queue pair, with receive buffers of a size. After an error the caller closes what there is of it.
func (e *endpoint) openQP(ctx rdma.Context, cfg *Config, size int) (err error) {
	sends, recvs := e.slotCount+readsAhead, e.bufs
	if cfg.MaxRecvBufferSize > cfg.RecvBufferSize {
		recvs *= 2
	}
	switch e.begins {
	case beginsSending:
		sends += 1 + maxNudges
	case beginsWaiting:
		recvs++
	case beginsWithout:
	}
	if e.cq, err = ctx.CreateCQ(recvs + sends); err != nil {
		return err
	}
	if e.qp, err = e.pd.CreateQP(rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: sends, MaxRecvWR: recvs, MaxSGE: 1}); err != nil {
		return err
	}
	if err = e.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.LocalWrite | rdma.RemoteRead | rdma.RemoteWrite}); err != nil {
		return err
	}
	e.wrs, e.sges = make([]rdma.SendWR, 0, sends), make([]rdma.SGE, 0, sends)
	e.recvs = make([]rdma.RecvWR, 0, recvs)
	e.dead = false
	if e.begins == beginsWaiting {
		e.recvBegin()
	}
	if err = e.postSet(0, size); err != nil {
		return err
	}
	return e.flush()
}

// postSet makes receive buffers of a size, with the numbers from first on, and posts them with the next flush.
func (e *endpoint) postSet(first, size int) error {
	mr, err := e.pd.AllocMR(e.bufs*size, rdma.LocalWrite)
	if err != nil {
		return fmt.Errorf("receive buffers of %d bytes: %w", size, err)
	}
	e.sets[first/e.bufs] = recvSet{mr, size, e.bufs}
	for i := range e.bufs {
		e.recycle(first + i)
	}
	return nil
}

// drop gives the memory of a set back with its last receive buffer.
func (e *endpoint) drop(i int) error {
	s := &e.sets[i/e.bufs]
	if s.left--; s.left > 0 {
		return nil
	}
	mr := s.mr
	*s = recvSet{}
	return mr.Close()
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

// forgetQP makes room for another queue pair, after closeQP. Buffers and messages stay.
func (e *endpoint) forgetQP() error {
	var errs []error
	for i := range e.sets {
		if mr := e.sets[i].mr; mr != nil {
			errs = append(errs, mr.Close())
		}
	}
	e.qp, e.cq, e.sets = nil, nil, [2]recvSet{}
	return errors.Join(errs...)
}

// closeMemory gives the memory back, after closeQP. c is the connection that has Buffers.
func (e *endpoint) closeMemory(c *Conn) error {
	var errs []error
	for b := range e.buffers {
		errs = append(errs, b.forget(c))
	}
	for _, mr := range []rdma.MR{e.sets[0].mr, e.sets[1].mr, e.slots} {
		if mr != nil {
			errs = append(errs, mr.Close())
		}
	}
	e.sets, e.slots = [2]recvSet{}, nil
	if e.pd != nil {
		errs = append(errs, e.pd.Close())
		e.pd = nil
	}
	return errors.Join(errs...)
}

// buffer is a receive buffer's memory.
func (e *endpoint) buffer(i int) []byte {
	s := &e.sets[i/e.bufs]
	return s.mr.Bytes()[i%e.bufs*s.size:][:s.size]
}

// sge is a stretch of a region.
func sge(mr rdma.MR, off, n int) rdma.SGE {
	return rdma.SGE{Addr: mr.Addr() + uint64(off), Length: uint32(n), LKey: mr.LKey()}
}

// recycle posts a receive buffer, with the next flush.
func (e *endpoint) recycle(i int) {
	if !e.dead {
		s := &e.sets[i/e.bufs]
		e.recvs = append(e.recvs, rdma.RecvWR{ID: uint64(workRecv) | uint64(i), SGE: sge(s.mr, i%e.bufs*s.size, s.size)})
	}
}

// slotAt is where the next message lies. The machine has no more of them under way than there are slots.
func (e *endpoint) slotAt() int { return int(e.sent%uint64(e.slotCount)) * e.slotBytes }

// slot returns the memory of the next message.
func (e *endpoint) slot() []byte {
	off := e.slotAt()
	return e.slots.Bytes()[off : off : off+e.slotBytes]
}

// send posts the message in the next slot, with the next flush.
func (e *endpoint) send(n int, o *socket.Output) {
	wr := rdma.SendWR{ID: uint64(workSend), Op: rdma.OpSend, Flags: rdma.SendSignaled}
	if o.Message.Solicited() && e.solicits {
		wr.Flags |= rdma.SendSolicited
	}
	if o.Invalidate && e.invalidates {
		wr.Flags |= rdma.SendInvalidate
		wr.InvKey = o.Key
	}
	e.post(wr, sge(e.slots, e.slotAt(), n))
	e.sent++
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
	e.recvs = e.recvs[:0]
	if e.begins == beginsWaiting && !e.dead {
		return err // there is room for all that the machine sends until the peer has begun
	}
	if len(e.wrs) > 0 && !e.dead && err == nil {
		_, err = e.qp.PostSend(e.wrs)
	}
	e.wrs, e.sges = e.wrs[:0], e.sges[:0]
	return err
}
