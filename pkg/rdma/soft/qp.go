// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// qp is a queue pair: the machine and what surrounds it.
type qp struct {
	dev            *Device
	pd             *pd
	num            rdma.QPN
	sendCQ, recvCQ *cq
	maxSGE         int

	state    atomic.Uint32 // of the machine, as of the last step
	deadline atomic.Int64  // of the machine, since the device's epoch; 0: none
	closed   atomic.Bool
	sends    sendRing
	recvs    recvRing

	own owner // guards what follows

	m       *rocev2.QP
	peer    netip.AddrPort
	flow    uint8 // of packets to the peer
	txICRC  rocev2.ICRC
	unsent  *batch // what the wire did not take
	overrun bool   // a completion queue overran
	dead    bool   // Close was here
}

var _ rdma.QP = (*qp)(nil)

// CreateQP implements [rdma.PD].
func (p *pd) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	if cfg.MaxSGE == 0 {
		cfg.MaxSGE = 1
	}
	send, ok1 := cfg.SendCQ.(*cq)
	recv, ok2 := cfg.RecvCQ.(*cq)
	if !ok1 || !ok2 || send.ctx != p.ctx || recv.ctx != p.ctx {
		return nil, fmt.Errorf("create queue pair: completion queues of this context are needed: %w", rdma.ErrInvalid)
	}
	if cfg.MaxSendWR < 1 || cfg.MaxSendWR > rocev2.MaxQueue || cfg.MaxRecvWR < 1 || cfg.MaxRecvWR > rocev2.MaxQueue ||
		cfg.MaxSGE < 1 || cfg.MaxSGE > rocev2.MaxSGE {
		return nil, fmt.Errorf("create queue pair with %d sends, %d receives, %d SGEs: %w",
			cfg.MaxSendWR, cfg.MaxRecvWR, cfg.MaxSGE, rdma.ErrInvalid)
	}
	q := &qp{dev: p.ctx.dev, pd: p, sendCQ: send, recvCQ: recv, maxSGE: cfg.MaxSGE}
	q.own.init()
	q.sends.init(cfg.MaxSendWR, cfg.MaxSGE)
	q.recvs.init(cfg.MaxRecvWR)

	c, d := p.ctx, p.ctx.dev
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || c.closed || send.closed.Load() || recv.closed.Load() {
		return nil, fmt.Errorf("create queue pair: %w", rdma.ErrClosed)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.qps.used == maxQP {
		return nil, fmt.Errorf("create queue pair: %d exist: %w", maxQP, rdma.ErrNoResources)
	}
	q.num = d.qps.free(d.randomQPN)
	m, err := rocev2.NewQP(rocev2.QPConfig{
		Num:       q.num,
		MaxSendWR: cfg.MaxSendWR,
		MaxRecvWR: cfg.MaxRecvWR,
		MaxSGE:    cfg.MaxSGE,
		MaxInline: maxInline,
		Memory:    pdMemory{p},
		Window:    d.cfg.WindowPackets,
		ACKDelay:  ackDelay,
	})
	if err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	q.m = m
	d.qps.set(q.num, q)
	p.qps[q] = struct{}{}
	send.users.Add(1)
	recv.users.Add(1)
	return q, nil
}

// Num implements [rdma.QP].
func (q *qp) Num() rdma.QPN { return q.num }

// State implements [rdma.QP].
func (q *qp) State() rdma.QPState { return rdma.QPState(q.state.Load()) }

// Modify implements [rdma.QP].
func (q *qp) Modify(a rdma.QPAttr) error {
	if a.State == rdma.QPRTR {
		if err := q.checkPath(a); err != nil {
			return fmt.Errorf("modify queue pair %v: %w", q.num, err)
		}
	}
	q.own.lock()
	defer q.unlock()
	if q.dead {
		return fmt.Errorf("modify queue pair %v: %w", q.num, rdma.ErrClosed)
	}
	now := time.Now()
	q.drain(now)
	if a.State == rdma.QPReset {
		q.sayLast(now)
	}
	if err := q.m.Modify(now, a); err != nil {
		return fmt.Errorf("modify queue pair %v: %w", q.num, err)
	}
	switch a.State {
	case rdma.QPRTR:
		local := q.dev.Addr()
		q.peer = netip.AddrPortFrom(a.Path.DGID.Addr(), local.Port())
		q.flow = flowOf(a.DestQPN)
		q.txICRC = rocev2.NewICRC(rocev2.Flow{
			Src: local.Addr(), SrcPort: q.dev.sourcePort(q.flow), Dst: q.peer.Addr(), DstPort: q.peer.Port(),
		})
	case rdma.QPReset:
		q.dropUnsent()
		q.overrun = false
	case rdma.QPInit, rdma.QPRTS, rdma.QPError:
	}
	q.step(now)
	return nil
}

var _ rdma.Refuser = (*qp)(nil)

// Hold implements [rdma.Refuser].
func (q *qp) Hold() {
	q.own.lock()
	defer q.unlock()
	q.m.Hold()
}

// Refuse implements [rdma.Refuser].
func (q *qp) Refuse() error {
	q.own.lock()
	defer q.unlock()
	if q.dead {
		return fmt.Errorf("refuse requests to queue pair %v: %w", q.num, rdma.ErrClosed)
	}
	if !q.m.Refuse() {
		return fmt.Errorf("refuse requests to queue pair %v in %v: %w", q.num, q.State(), rdma.ErrState)
	}
	q.transmit(time.Now())
	return nil
}

// checkPath checks what the machine does not know about.
func (q *qp) checkPath(a rdma.QPAttr) error {
	if a.Path.SGIDIndex != 0 {
		return fmt.Errorf("GID index %d: %w", a.Path.SGIDIndex, rdma.ErrInvalid)
	}
	to := a.Path.DGID.Addr()
	if to.Is4() != q.dev.cfg.Addr.Is4() || to.IsUnspecified() || to.IsMulticast() {
		return fmt.Errorf("destination %v cannot be reached from %v: %w", to, q.dev.cfg.Addr, rdma.ErrInvalid)
	}
	if active := q.dev.Port().ActiveMTU; a.MTU > active {
		return fmt.Errorf("path MTU %v is above the port's %v: %w", a.MTU, active, rdma.ErrInvalid)
	}
	return nil
}

// PostSend implements [rdma.QP].
func (q *qp) PostSend(wrs []rdma.SendWR) (int, error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
	}
	if q.sends.empty() && q.own.tryLock() {
		if q.dead {
			q.unlock()
			return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
		}
		now := time.Now()
		n, err := q.m.PostSend(now, wrs)
		q.step(now)
		q.unlock()
		return n, err
	}
	n, err := len(wrs), error(nil)
	if s := q.State(); s != rdma.QPRTS && s != rdma.QPError {
		return 0, fmt.Errorf("post send in %v: %w", s, rdma.ErrState)
	}
	for i := range wrs {
		if !q.valid(&wrs[i]) {
			n, err = i, rdma.ErrInvalid
			break
		}
	}
	if k := q.sends.push(wrs[:n]); k < n {
		n, err = k, rdma.ErrQueueFull
	}
	q.askStep()
	return n, err
}

// valid checks a send that the machine will see later, when it is too late to
// refuse it.
func (q *qp) valid(w *rdma.SendWR) bool {
	if len(w.SGL) > q.maxSGE || w.Op > rdma.OpRead {
		return false
	}
	if w.Flags&rdma.SendInline == 0 {
		return w.Op != rdma.OpRead || len(w.SGL) <= 1
	}
	n := uint64(len(w.Inline))
	for _, s := range w.SGL {
		n += uint64(s.Length)
	}
	return n <= maxInline && w.Op != rdma.OpRead
}

// PostRecv implements [rdma.QP].
func (q *qp) PostRecv(wrs []rdma.RecvWR) (int, error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("post receive: %w", rdma.ErrClosed)
	}
	if q.recvs.empty() && q.own.tryLock() {
		if q.dead {
			q.unlock()
			return 0, fmt.Errorf("post receive: %w", rdma.ErrClosed)
		}
		n, err := q.m.PostRecv(wrs)
		q.deliver()
		q.unlock()
		return n, err
	}
	if s := q.State(); s == rdma.QPReset {
		return 0, fmt.Errorf("post receive in %v: %w", s, rdma.ErrState)
	}
	n := q.recvs.push(wrs)
	q.askStep()
	if n < len(wrs) {
		return n, rdma.ErrQueueFull
	}
	return n, nil
}

// askStep sees that what is in the rings reaches the machine.
func (q *qp) askStep() {
	if q.own.ask() {
		if !q.dead {
			q.step(time.Now())
		}
		q.unlock()
	}
}

// Close implements [rdma.QP].
func (q *qp) Close() error {
	first := q.closed.CompareAndSwap(false, true)
	// Whoever comes second waits here too: it will unmap memory next. Until
	// the queue pair is dead its domain knows it, for the same reason.
	q.own.lock()
	if !q.dead {
		q.sayLast(time.Now())
		q.dead = true
		q.dropUnsent()
		q.deadline.Store(0)
	}
	q.unlock()
	if !first {
		return nil
	}
	c, d := q.pd.ctx, q.dev
	c.mu.Lock()
	delete(q.pd.qps, q)
	d.mu.Lock()
	d.qps.clear(q.num)
	d.mu.Unlock()
	c.mu.Unlock()
	q.sendCQ.users.Add(-1)
	q.recvCQ.users.Add(-1)
	c.events.Forget(q.num)
	return nil
}

// sayLast sends the acknowledgement that still waits for company, and refuses what had
// to wait for that: after this the peer would learn nothing.
func (q *qp) sayLast(now time.Time) {
	if s := q.m.State(); s == rdma.QPRTR || s == rdma.QPRTS {
		_ = q.m.Modify(now, rdma.QPAttr{State: rdma.QPError}) // allowed from there
		q.transmit(now)
	}
	if q.m.Refuse() {
		q.transmit(now)
	}
}

// unlock gives the ownership back, after it has served what was asked
// meanwhile.
func (q *qp) unlock() {
	for !q.own.unlock() {
		if !q.dead {
			q.step(time.Now())
		}
	}
	q.recvCQ.fire()
	if q.sendCQ != q.recvCQ {
		q.sendCQ.fire()
	}
}

// step moves everything that can move. The caller owns the queue pair.
func (q *qp) step(now time.Time) {
	for {
		q.drain(now)
		q.transmit(now)
		if !q.deliver() || q.sends.empty() && q.recvs.empty() {
			break
		}
	}
}

// drain moves what the rings hold into the machine.
func (q *qp) drain(now time.Time) {
	for !q.recvs.empty() {
		w := q.recvs.front()
		n, err := q.m.PostRecv(w)
		if n < len(w) && err != nil && !isQueueFull(err) {
			n++ // reset meanwhile: gone like what was in the machine
		}
		q.recvs.pop(n)
		if n == 0 {
			break
		}
	}
	for !q.sends.empty() {
		w := q.sends.front()
		n, err := q.m.PostSend(now, w)
		if n < len(w) && err != nil && !isQueueFull(err) {
			n++
		}
		q.sends.pop(n)
		if n == 0 {
			break
		}
	}
}

// deliver hands out completions and events and sets the timer. It reports
// whether there was a completion, which may have made room in the queues.
func (q *qp) deliver() (completed bool) {
	q.state.Store(uint32(q.m.State())) // before anybody can see why
	var wcs [8]wq.Completion
	for {
		n := q.m.PollWC(wcs[:])
		for i := range n {
			w := &wcs[i]
			to := q.recvCQ
			if w.Send {
				to = q.sendCQ
			}
			if !to.push(w) && !q.overrun {
				q.overrun = true
				_ = q.m.Modify(time.Now(), rdma.QPAttr{State: rdma.QPError})
				q.state.Store(uint32(rdma.QPError))
				q.pd.ctx.events.Post(rdma.AsyncEvent{Kind: rdma.EventQPFatal, QPN: q.num, Err: rdma.ErrCQOverrun})
			}
		}
		completed = completed || n > 0
		if n < len(wcs) {
			break
		}
	}
	for {
		e, ok := q.m.PollEvent()
		if !ok {
			break
		}
		e.QPN = q.num
		q.pd.ctx.events.Post(e)
	}
	var at int64
	if t, ok := q.m.NextTimeout(); ok {
		at = max(q.dev.since(t), 1)
	}
	if q.unsent != nil {
		if retry := q.dev.since(time.Now()) + int64(sendRetry); at == 0 || retry < at {
			at = retry
		}
	}
	q.deadline.Store(at)
	if at != 0 {
		q.dev.schedule(at)
	}
	return completed
}

// forgetMemory drops every reference to registered memory.
func (q *qp) forgetMemory() {
	if !q.dead {
		if q.unsent != nil {
			q.unsent.forgetMemory()
		}
		q.m.ForgetMemory()
	}
}
