// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// cq is a completion queue: a ring with one consumer, which takes no lock,
// and the owners of its queue pairs as producers, which lock each other out.
//
// The ring begins small and doubles when it is full, until it has the depth that was
// asked for: then it overruns. It stays as it is when it is emptied, so that a queue that
// has seen its worst allocates no more. The consumer, which looks at the tail first,
// finds everything before that in whatever ring it sees then: growing copies, and the old
// ring changes no more.
type cq struct {
	ctx    *deviceContext
	slots  atomic.Pointer[[]rdma.WC] // a power of two
	depth  int                       // of the ring at most, likewise
	head   atomic.Uint32             // next to poll
	tail   atomic.Uint32             // next to fill
	armed  atomic.Uint32
	over   atomic.Bool
	closed atomic.Bool
	notify chan struct{}
	call   func()       // instead of notify
	due    atomic.Bool  // call is to be made by fire
	users  atomic.Int32 // queue pairs, one for each direction

	mu sync.Mutex // orders the producers
}

// newCQ makes a queue of at least depth entries.
func newCQ(ctx *deviceContext, depth int) *cq {
	c := &cq{ctx: ctx, depth: ringSize(depth), notify: make(chan struct{}, 1)}
	slots := make([]rdma.WC, min(c.depth, firstCQE))
	c.slots.Store(&slots)
	return c
}

const (
	armNone uint32 = iota
	armSolicited
	armAny
)

var _ rdma.CQ = (*cq)(nil)

// fire makes the call that is due. The caller owns no queue pair.
func (c *cq) fire() {
	if c.due.Load() && c.due.Swap(false) {
		c.ctx.dev.recent.Store(c.ctx)
		c.call()
	}
}

// Poll implements [rdma.CQ].
func (c *cq) Poll(dst []rdma.WC) (int, error) {
	head := c.head.Load()
	n := min(int(c.tail.Load()-head), len(dst))
	switch {
	case c.over.Load():
		return 0, rdma.ErrCQOverrun
	case n > 0:
	case c.closed.Load():
		return 0, fmt.Errorf("poll completion queue: %w", rdma.ErrClosed)
	default:
		return 0, nil
	}
	slots := *c.slots.Load() // after the tail
	for k := range n {
		dst[k] = slots[int(head+uint32(k))&(len(slots)-1)]
	}
	c.head.Store(head + uint32(n))
	return n, nil
}

// Arm implements [rdma.CQ].
func (c *cq) Arm(solicitedOnly bool) error {
	if c.closed.Load() {
		return fmt.Errorf("arm completion queue: %w", rdma.ErrClosed)
	}
	if !solicitedOnly {
		c.armed.Store(armAny)
	} else {
		c.armed.CompareAndSwap(armNone, armSolicited) // any stays any
	}
	if c.over.Load() {
		c.wake()
		c.fire()
	}
	return nil
}

// Notify implements [rdma.CQ].
func (c *cq) Notify() <-chan struct{} { return c.notify }

// OnNotify implements [rdma.CQ].
func (c *cq) OnNotify(f func()) { c.call = f }

// Resize implements [rdma.CQ]. The ring grows when it is full.
func (c *cq) Resize(depth int) error {
	if depth <= 0 || depth > MaxCQE {
		return fmt.Errorf("resize completion queue to %d entries: %w", depth, rdma.ErrInvalid)
	}
	if c.closed.Load() {
		return fmt.Errorf("resize completion queue: %w", rdma.ErrClosed)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.depth = max(c.depth, ringSize(depth))
	return nil
}

// Close implements [rdma.CQ].
func (c *cq) Close() error {
	c.ctx.mu.Lock()
	defer c.ctx.mu.Unlock()
	if c.closed.Load() {
		return nil
	}
	if n := c.users.Load(); n != 0 {
		return fmt.Errorf("close completion queue with %d users: %w", n, rdma.ErrBusy)
	}
	c.closed.Store(true)
	delete(c.ctx.cqs, c)
	return nil
}

// push adds a completion; false means that the queue overran.
//
// The consumer arms and then polls once more; we publish and then look at
// armed. Whatever the order, one of the two sees the other.
func (c *cq) push(w *wq.Completion) bool {
	c.mu.Lock()
	tail, slots := c.tail.Load(), *c.slots.Load()
	if int(tail-c.head.Load()) == len(slots) && len(slots) < c.depth {
		slots = c.grow()
	}
	if c.over.Load() || int(tail-c.head.Load()) == len(slots) {
		c.over.Store(true)
		c.mu.Unlock()
		c.armed.Store(armNone)
		c.wake()
		return false
	}
	slots[int(tail)&(len(slots)-1)] = w.WC
	c.tail.Store(tail + 1)
	c.mu.Unlock()
	if a := c.armed.Load(); a == armAny || a == armSolicited && w.Wake {
		if c.armed.CompareAndSwap(a, armNone) || c.armed.CompareAndSwap(armAny, armNone) {
			c.wake()
		}
	}
	return true
}

// grow doubles the full ring. The caller has mu.
func (c *cq) grow() []rdma.WC {
	old := *c.slots.Load()
	slots := make([]rdma.WC, min(2*len(old), c.depth))
	tail := c.tail.Load()
	for i := tail - uint32(len(old)); i != tail; i++ {
		slots[int(i)&(len(slots)-1)] = old[int(i)&(len(old)-1)]
	}
	c.slots.Store(&slots)
	return slots
}

// wake notifies, or leaves it to fire: wake runs while queue pairs are owned.
func (c *cq) wake() {
	if c.call != nil {
		c.due.Store(true)
		return
	}
	select {
	case c.notify <- struct{}{}:
	default: // a token is there already
	}
}
