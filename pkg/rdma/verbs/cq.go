// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// cq is a completion queue of the device and a queue in front of it: what was
// taken out of the device's queue for a reason other than Poll waits there. A
// queue pair that is closed leaves completions in the device's queue with some
// drivers, and its number may be another's soon; so closing it empties that
// queue.
type cq struct {
	ctx    *deviceContext
	id     uint64
	events *waiter
	notify chan struct{}
	call   atomic.Pointer[func()] // instead of notify
	over   atomic.Bool
	users  atomic.Int32  // queue pairs, one for each direction
	done   chan struct{} // wait ended
	freed  chan struct{} // the device's queue is gone

	closing bool // guarded by the context's mu

	// yields: the program that waits for a message runs where the queue's
	// goroutine does.
	yields bool

	mu      sync.Mutex
	ibv     *ibvCQ    // nil: closed
	depth   int       // that the device was asked for
	vector  int       // the same
	calling bool      // the user is being told; Arm waits for the end of that
	asked   arming    // by Arm meanwhile
	untaken bool      // there may be an event in the channel
	waiting []rdma.WC // before what the device has
	peeked  [8]rdma.WC
	broken  []failure // queue pairs whose failure a completion told, until flushed
}

// arming is what Arm asks for.
type arming uint8

const (
	armNot arming = iota
	armSolicited
	armAll
)

// failure is a queue pair that a completion found in ERR.
type failure struct {
	qp     *qp
	status rdma.Status
}

var _ rdma.CQ = (*cq)(nil)

// CreateCQ implements [rdma.Context].
func (c *deviceContext) CreateCQ(depth int) (rdma.CQ, error) {
	if depth <= 0 || depth > c.dev.limits.cqe {
		return nil, fmt.Errorf("create completion queue of %d entries (device limit %d): %w", depth, c.dev.limits.cqe, rdma.ErrInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("create completion queue: %w", rdma.ErrClosed)
	}
	q := &cq{ctx: c, yields: runtime.GOMAXPROCS(0) == 1, notify: make(chan struct{}, 1), done: make(chan struct{}), freed: make(chan struct{})}
	c.tabMu.Lock()
	c.nextCQ++
	q.id = c.nextCQ
	c.tabMu.Unlock()
	err := c.dev.before("create_cq")
	if err == nil {
		if c.vector < 0 {
			c.vector = c.dev.nextVector(ibvVectors(c.handle))
		}
		q.depth, q.vector = depth, c.vector
		q.ibv, err = ibvCreateCQ(c.handle, depth, q.id, q.vector)
	}
	if err != nil {
		return nil, fmt.Errorf("create completion queue (device limit %d): %w", c.dev.limits.cqs, verbError(err))
	}
	if q.events, err = newWaiter(q.ibv.fd(), c.dev.name); err != nil {
		_ = q.ibv.free()
		return nil, fmt.Errorf("create completion queue: %w", err)
	}
	c.tabMu.Lock()
	c.cqs[q.id] = q
	c.tabMu.Unlock()
	c.wg.Go(q.wait)
	return q, nil
}

// Poll implements [rdma.CQ].
func (c *cq) Poll(dst []rdma.WC) (int, error) {
	if c.over.Load() {
		return 0, rdma.ErrCQOverrun
	}
	c.mu.Lock()
	n := copy(dst, c.waiting)
	c.waiting = append(c.waiting[:0], c.waiting[n:]...)
	var err error
	for n < len(dst) && c.ibv != nil {
		var got int
		if got, err = c.take(dst[n:]); got == 0 || err != nil {
			break
		}
		n += got
	}
	if n == 0 && c.ibv == nil {
		err = fmt.Errorf("poll completion queue: %w", rdma.ErrClosed)
	}
	told(c.unlock())
	if n > 0 {
		return n, nil // an error comes again
	}
	return 0, err
}

// take moves completions of the device to dst. The caller has mu.
func (c *cq) take(dst []rdma.WC) (int, error) {
	n := c.ibv.poll(min(len(dst), batch))
	if n < 0 {
		return 0, fmt.Errorf("poll completion queue: %w", syscall.EIO)
	}
	c.convert(dst[:n])
	return n, nil
}

// convert gives what the last poll took in our terms.
func (c *cq) convert(dst []rdma.WC) {
	for i := range dst {
		dst[i] = c.ibv.wc(i)
		if s := dst[i].Status; s != rdma.StatusSuccess {
			// IBTA 10.3.1: such a completion means that the queue pair is in ERR.
			q := c.ctx.queuePair(dst[i].QPN)
			if q == nil || !q.mark() && !c.ctx.dev.attr.Stream {
				continue
			}
			// Of a connection that ended another event says why.
			if s != rdma.StatusFlushed || !c.ctx.dev.attr.Stream {
				c.broken = append(c.broken, failure{q, s})
			}
		}
	}
}

// unlock gives mu back and returns the queue pairs that failed, for told.
func (c *cq) unlock() []failure {
	broken := c.broken
	c.broken = nil
	c.mu.Unlock()
	return broken
}

// told deals with queue pairs that failed. The caller has no lock of a queue
// pair or of a completion queue.
func told(broken []failure) {
	for _, f := range broken {
		f.qp.died(f.status)
	}
}

// collect empties the device's queue into waiting, and drops there what keep
// does not want.
func (c *cq) collect(keep func(*rdma.WC) bool) []failure {
	c.mu.Lock()
	var wcs [batch]rdma.WC
	for c.ibv != nil {
		n, err := c.take(wcs[:])
		if n == 0 || err != nil {
			break // Poll will see the error too
		}
		c.waiting = append(c.waiting, wcs[:n]...)
	}
	c.waiting = slices.DeleteFunc(c.waiting, func(w rdma.WC) bool { return !keep(&w) })
	return c.unlock()
}

// put adds a completion of no device, unless the queue pair has so many waiting.
func (c *cq) put(w rdma.WC, most int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for i := range c.waiting {
		if c.waiting[i].QPN == w.QPN {
			n++
		}
	}
	if n >= most {
		return false
	}
	c.waiting = append(c.waiting, w)
	return true
}

// Arm implements [rdma.CQ].
func (c *cq) Arm(solicitedOnly bool) error {
	solicitedOnly = solicitedOnly && c.ctx.dev.attr.Solicited // siw would wake nobody
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ibv == nil {
		return fmt.Errorf("arm completion queue: %w", rdma.ErrClosed)
	}
	if c.over.Load() {
		c.token() // and OnNotify's function from the queue's goroutine
		return nil
	}
	if c.calling {
		c.asked = max(c.asked, armSolicited)
		if !solicitedOnly {
			c.asked = armAll
		}
		return nil
	}
	if err := c.ibv.arm(solicitedOnly); err != nil {
		return fmt.Errorf("arm completion queue: %w", verbError(err))
	}
	return nil
}

// Notify implements [rdma.CQ].
func (c *cq) Notify() <-chan struct{} { return c.notify }

// OnNotify implements [rdma.CQ].
func (c *cq) OnNotify(f func()) { c.call.Store(&f) }

// Resize implements [rdma.CQ].
func (c *cq) Resize(depth int) error {
	if depth <= 0 || depth > c.ctx.dev.limits.cqe {
		return fmt.Errorf("resize completion queue to %d entries (device limit %d): %w", depth, c.ctx.dev.limits.cqe, rdma.ErrInvalid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.ibv == nil:
		return fmt.Errorf("resize completion queue: %w", rdma.ErrClosed)
	case depth <= c.depth:
		return nil
	}
	err := c.ctx.dev.before("resize_cq")
	if err == nil {
		err = c.ibv.resize(depth)
	}
	if err != nil {
		return fmt.Errorf("resize completion queue to %d entries: %w", depth, verbError(err))
	}
	c.depth = depth
	return nil
}

func (c *cq) token() {
	select {
	case c.notify <- struct{}{}:
	default: // a token is there already
	}
}

// wait hands out notifications until the queue is closed, or its device gone.
//
// It takes one event each time the channel becomes readable, and does not look
// for another, which would be a system call for each notification. An event that
// came together with another is taken with the next: all of them say the same. The
// first time it looks unasked: Go's poller forgets what came before it was waited for.
func (c *cq) wait() {
	defer close(c.done)
	_ = c.events.wait(func(uintptr) bool { return !c.woken() })
}

// woken tells the user of the event that is in the channel; false ends wait.
//
// With OnNotify, everything that can wait comes after what the user does: a
// program that answers a message waits for neither the event to be taken nor the
// queue to be armed, each of which may be a system call. All of it is one call of
// C then.
func (c *cq) woken() bool {
	call := c.call.Load()
	if call == nil {
		err := c.ibv.event() // Close waits for us
		if err == nil {
			c.token()
		}
		return err == nil || isAgain(err)
	}
	c.mu.Lock()
	c.calling, c.untaken = true, true
	c.mu.Unlock()
	for {
		(*call)()
		c.lookOn(*call)
		if c.yields {
			runtime.Gosched() // to the program that was told
		}
		more, err := c.again()
		if err != nil {
			(*call)() // it finds out
		}
		if !more {
			return true
		}
	}
}

// again does what the user asked for while it was told, and reports whether
// there is more to tell.
func (c *cq) again() (more bool, err error) {
	c.mu.Lock()
	asked := c.asked
	c.asked = armNot
	if asked == armNot || c.ibv == nil {
		c.calling = false
		if c.ibv != nil && c.untaken {
			_ = c.ibv.event() // likewise: whoever arms the queue is told
		}
		c.mu.Unlock()
		return false, nil
	}
	n, armed, err := c.ibv.again(c.untaken, asked == armSolicited, len(c.peeked))
	c.convert(c.peeked[:n])
	c.waiting = append(c.waiting, c.peeked[:n]...)
	more = len(c.waiting) > 0 // collect may have put some there since the user looked
	c.calling = more
	c.untaken = armed && more // it may have called before it was polled
	told(c.unlock())
	return more, err
}

// notified tells the user.
func (c *cq) notified() {
	if call := c.call.Load(); call != nil {
		(*call)()
		return
	}
	c.token()
}

// lookOn looks for completions instead of waiting for their notification as
// long as the user asks for that. Each queue has a goroutine, and the user is asked
// by one of them at a time: another one waits for its queue meanwhile.
func (c *cq) lookOn(call func()) {
	idle := c.ctx.idle.Load()
	if idle == nil || !c.ctx.asking.CompareAndSwap(false, true) {
		return
	}
	defer c.ctx.asking.Store(false)
	for end := time.Now().Add(maxPoll); (*idle)() && time.Now().Before(end); {
		if c.peek() {
			call()
		} else {
			runtime.Gosched()
		}
	}
}

// peek reports whether there are completions, and takes some from the device.
func (c *cq) peek() bool {
	c.mu.Lock()
	if len(c.waiting) == 0 && c.ibv != nil {
		if n, err := c.take(c.peeked[:]); err == nil {
			c.waiting = append(c.waiting, c.peeked[:n]...)
		}
	}
	found := len(c.waiting) > 0
	told(c.unlock())
	return found
}

// overran is called when the device says so: completions are lost, and with
// them what became of the work requests of every queue pair of this queue.
func (c *cq) overran() {
	if c.over.Swap(true) {
		return
	}
	c.ctx.tabMu.Lock()
	var qps []*qp
	for _, q := range c.ctx.qps {
		if q.sendCQ == c || q.recvCQ == c {
			qps = append(qps, q)
		}
	}
	c.ctx.tabMu.Unlock()
	for _, q := range qps {
		q.fail(rdma.EventQPFatal, rdma.ErrCQOverrun)
	}
	c.notified()
}

// Close implements [rdma.CQ]. It must not be called by OnNotify's function.
func (c *cq) Close() error {
	x := c.ctx
	x.mu.Lock()
	if n := c.users.Load(); n != 0 {
		x.mu.Unlock()
		return fmt.Errorf("close completion queue with %d users: %w", n, rdma.ErrBusy)
	}
	c.closing = true // no queue pair joins it
	x.mu.Unlock()
	_ = c.events.close()
	<-c.done

	told(c.collect(func(*rdma.WC) bool { return true }))
	c.mu.Lock()
	ibv := c.ibv
	c.ibv = nil
	c.mu.Unlock()
	if ibv == nil {
		<-c.freed // somebody else's call does it
		return nil
	}
	c.token() // whoever waits sees the end
	err := ibv.free()
	// From now on the context may be closed: its end finds the queue until then, and waits.
	x.tabMu.Lock()
	delete(x.cqs, c.id)
	x.tabMu.Unlock()
	close(c.freed)
	if err != nil && !isGone(err) {
		return fmt.Errorf("close completion queue: %w", verbError(err))
	}
	return nil
}
