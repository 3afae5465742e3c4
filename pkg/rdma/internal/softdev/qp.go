// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// QP is what queue pairs of all providers have. A provider embeds it, see [Carrier], and
// does not copy it. CreateQP makes it ready, after NewQP of the configuration.
type QP struct {
	dev            *Device
	pd             *pd
	carrier        Carrier
	num            rdma.QPN
	sendCQ, recvCQ *cq
	limits         wq.Limits

	state   atomic.Uint32 // of the machine, as of the last step
	timeout timeout
	closed  atomic.Bool
	sends   sendRing
	recvs   recvRing

	own owner // guards what follows

	m       Machine
	wcs     [wcBatch]wq.Completion // for deliver, which must not allocate
	overrun bool                   // a completion queue overran
	dead    bool                   // Close was here
}

// CreateQP implements [rdma.PD].
func (p *pd) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	if cfg.MaxSGE == 0 {
		cfg.MaxSGE = 1
	}
	c, d := p.ctx, p.ctx.dev
	send, ok1 := cfg.SendCQ.(*cq)
	recv, ok2 := cfg.RecvCQ.(*cq)
	if !ok1 || !ok2 || send.ctx != c || recv.ctx != c {
		return nil, fmt.Errorf("create queue pair: completion queues of this context are needed: %w", rdma.ErrInvalid)
	}
	if cfg.MaxSendWR < 1 || cfg.MaxSendWR > d.attr.MaxSendWR || cfg.MaxRecvWR < 1 || cfg.MaxRecvWR > d.attr.MaxRecvWR ||
		cfg.MaxSGE < 1 || cfg.MaxSGE > d.attr.MaxSGE {
		return nil, fmt.Errorf("create queue pair with %d sends, %d receives, %d SGEs: %w",
			cfg.MaxSendWR, cfg.MaxRecvWR, cfg.MaxSGE, rdma.ErrInvalid)
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || c.closed || send.closed.Load() || recv.closed.Load() {
		return nil, fmt.Errorf("create queue pair: %w", rdma.ErrClosed)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.qps.used >= d.attr.MaxQP {
		return nil, fmt.Errorf("create queue pair: %d exist: %w", d.attr.MaxQP, rdma.ErrNoResources)
	}
	num := d.qps.free(d.drawQPN)
	carrier, err := d.cfg.NewQP(QPConfig{
		Num: num, MaxSendWR: cfg.MaxSendWR, MaxRecvWR: cfg.MaxRecvWR, MaxSGE: cfg.MaxSGE, Memory: pdMemory{p},
	})
	if err != nil {
		return nil, fmt.Errorf("create queue pair: %w", err)
	}
	q := carrier.base()
	q.dev, q.pd, q.carrier, q.num = d, p, carrier, num
	q.sendCQ, q.recvCQ = send, recv
	q.m = carrier.Machine()
	q.limits = q.m.Limits()
	q.own.init()
	q.sends.init(cfg.MaxSendWR, q.limits)
	q.recvs.init(cfg.MaxRecvWR)
	d.qps.set(num, q)
	p.qps[q] = struct{}{}
	send.users.Add(1)
	recv.users.Add(1)
	return carrier, nil
}

func (q *QP) base() *QP { return q }

// Num implements [rdma.QP].
func (q *QP) Num() rdma.QPN { return q.num }

// State implements [rdma.QP].
func (q *QP) State() rdma.QPState { return rdma.QPState(q.state.Load()) }

// Lock takes the ownership and waits for it if necessary.
func (q *QP) Lock() { q.own.lock() }

// Dead reports whether the queue pair is at its end: the owner does nothing with it any
// more but Unlock.
func (q *QP) Dead() bool { return q.dead }

// Modify implements [rdma.QP].
func (q *QP) Modify(a rdma.QPAttr) error {
	if err := q.carrier.CheckModify(a); err != nil {
		return fmt.Errorf("modify queue pair %v: %w", q.num, err)
	}
	q.Lock()
	defer q.Unlock()
	if q.dead {
		return fmt.Errorf("modify queue pair %v: %w", q.num, rdma.ErrClosed)
	}
	now := time.Now()
	q.drain(now)
	if a.State == rdma.QPReset {
		q.carrier.SayLast(now)
	}
	if err := q.m.Modify(now, a); err != nil {
		return fmt.Errorf("modify queue pair %v: %w", q.num, err)
	}
	if a.State == rdma.QPReset {
		q.carrier.Drop()
		q.overrun = false
	}
	q.carrier.Modified(a)
	q.Step(now)
	return nil
}

// PostSend implements [rdma.QP].
func (q *QP) PostSend(wrs []rdma.SendWR) (int, error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
	}
	if q.sends.empty() && q.own.tryLock() {
		if q.dead {
			q.Unlock()
			return 0, fmt.Errorf("post send: %w", rdma.ErrClosed)
		}
		now := time.Now()
		n, err := q.m.PostSend(now, wrs)
		q.Step(now)
		q.Unlock()
		return n, err
	}
	if s := q.State(); s != rdma.QPRTS && s != rdma.QPError {
		return 0, fmt.Errorf("post send in %v: %w", s, rdma.ErrState)
	}
	// The machine sees the requests later, when it is too late to refuse them.
	n, err := len(wrs), error(nil)
	for i := range wrs {
		if _, err = q.limits.Check(&wrs[i]); err != nil {
			n = i
			break
		}
	}
	if k := q.sends.push(wrs[:n]); k < n {
		n, err = k, rdma.ErrQueueFull
	}
	q.AskStep()
	return n, err
}

// PostRecv implements [rdma.QP].
func (q *QP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	if q.closed.Load() {
		return 0, fmt.Errorf("post receive: %w", rdma.ErrClosed)
	}
	if q.recvs.empty() && q.own.tryLock() {
		if q.dead {
			q.Unlock()
			return 0, fmt.Errorf("post receive: %w", rdma.ErrClosed)
		}
		n, err := q.m.PostRecv(wrs)
		q.deliver()
		q.Unlock()
		return n, err
	}
	if s := q.State(); s == rdma.QPReset {
		return 0, fmt.Errorf("post receive in %v: %w", s, rdma.ErrState)
	}
	n := q.recvs.push(wrs)
	q.AskStep()
	if n < len(wrs) {
		return n, rdma.ErrQueueFull
	}
	return n, nil
}

// AskStep sees that the owner steps, and with it that what is in the rings reaches the
// machine. It never waits. Posting receives does not transmit: a provider whose peer is to
// hear of them calls it then.
func (q *QP) AskStep() {
	if q.own.ask() {
		if !q.dead {
			q.Step(time.Now())
		}
		q.Unlock()
	}
}

// Close implements [rdma.QP].
func (q *QP) Close() error {
	first := q.closed.CompareAndSwap(false, true)
	// A second caller waits here, too, because it may unmap the memory next. For the same
	// reason the domain knows the queue pair until the queue pair is dead.
	q.Lock()
	if !q.dead {
		q.carrier.SayLast(time.Now())
		q.dead = true
		q.carrier.Drop()
		q.dev.timers.set(q, 0)
		q.dev.timers.remove(q)
	}
	q.Unlock()
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

// Unlock gives the ownership back, after it has served what was asked meanwhile, and
// makes the calls that completions ask for.
func (q *QP) Unlock() {
	for !q.own.unlock() {
		if !q.dead {
			q.Step(time.Now())
		}
	}
	q.recvCQ.fire()
	if q.sendCQ != q.recvCQ {
		q.sendCQ.fire()
	}
}

// Step moves everything that can move: work requests to the machine, completions and
// events to the user, what the machine has to send to the wire. The user has the completions of
// what came before anything is sent: a protocol may tell its peer only of those. The caller
// owns the queue pair, which is not dead.
func (q *QP) Step(now time.Time) {
	q.drain(now)
	for {
		came := q.complete()
		q.carrier.Transmit(now)
		left := q.deliver()
		if q.sends.empty() && q.recvs.empty() {
			break
		}
		// A send that is not signaled leaves its place in the machine without a completion.
		head := q.sends.head.Load()
		q.drain(now)
		if moved := q.sends.head.Load() != head; !moved && !came && !left {
			break
		}
	}
}

// TakeRecvs moves receives that were posted while the queue pair was owned into the machine. An
// owner that has read from a reliable wire does that before the machine sees what it read: that
// may be for a receive whose posting the peer was told of, and nobody sends it again.
//
//	program                      reader of this side           peer
//	                             Lock
//	PostRecv: into the ring
//	tells the peer ------------------------------------------> sends
//	                             reads, TakeRecvs, handles <---
func (q *QP) TakeRecvs() {
	for !q.recvs.empty() {
		w := q.recvs.front()
		n, err := q.m.PostRecv(w)
		if n < len(w) && err != nil && !errors.Is(err, rdma.ErrQueueFull) {
			n++ // reset meanwhile: gone like what was in the machine
		}
		q.recvs.pop(n)
		if n == 0 {
			break
		}
	}
}

// drain moves what the rings hold into the machine.
func (q *QP) drain(now time.Time) {
	q.TakeRecvs()
	for !q.sends.empty() {
		w := q.sends.front()
		n, err := q.m.PostSend(now, w)
		if n < len(w) && err != nil && !errors.Is(err, rdma.ErrQueueFull) {
			invariant.Must(errors.Is(err, rdma.ErrState), "softdev: a send that was checked is refused")
			if q.m.State() == rdma.QPRTS { // the connection ends, and flushes w behind the requests before it
				q.sends.pop(n)
				break
			}
			n++
		}
		q.sends.pop(n)
		if n == 0 {
			break
		}
	}
}

// Drained reports whether the machine has all that was posted to be sent.
func (q *QP) Drained() bool { return q.sends.empty() }

// complete hands out completions. It reports whether there was one, which may have made room
// in the queues.
func (q *QP) complete() (completed bool) {
	q.state.Store(uint32(q.m.State())) // before anybody can see why
	for {
		n := q.m.PollWC(q.wcs[:])
		for i := range n {
			w := &q.wcs[i]
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
		if n < len(q.wcs) {
			return completed
		}
	}
}

// deliver hands out completions and events and sets the timer. It reports what complete does.
func (q *QP) deliver() (completed bool) {
	completed = q.complete()
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
		at = q.dev.timers.since(t)
	}
	if t := q.carrier.Retry(); !t.IsZero() {
		if retry := q.dev.timers.since(t); at == 0 || retry < at {
			at = retry
		}
	}
	q.dev.timers.set(q, at)
	return completed
}

// forgetMemory drops every reference to registered memory. If the machine fails for want of it,
// the user is told: nobody else may come by to do so.
func (q *QP) forgetMemory(now time.Time) {
	if q.dead {
		return
	}
	q.carrier.ForgetMemory()
	before := q.m.State()
	if q.m.ForgetMemory(now); q.m.State() != before {
		q.Step(now)
	}
}
