// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

// deviceContext is one user's open device.
type deviceContext struct {
	dev    *Device
	events *provider.Events
	idle   atomic.Pointer[func() bool]
	asking atomic.Bool // a receiver calls idle

	shutOnce sync.Once
	shutErr  error

	mu     sync.Mutex // guards what follows and the sets of the PDs
	pds    map[*pd]struct{}
	cqs    map[*cq]struct{}
	closed bool
}

var (
	_ rdma.Context    = (*deviceContext)(nil)
	_ rdma.IdlePoller = (*deviceContext)(nil)
)

func newContext(d *Device) *deviceContext {
	return &deviceContext{
		dev:    d,
		events: provider.NewEvents(),
		pds:    make(map[*pd]struct{}),
		cqs:    make(map[*cq]struct{}),
	}
}

// Device implements [rdma.Context].
func (c *deviceContext) Device() rdma.Device { return c.dev.cfg.Device }

// OnIdle implements [rdma.IdlePoller].
func (c *deviceContext) OnIdle(f func() bool) { c.idle.Store(&f) }

// askIdle asks the user whether to poll, unless another goroutine does.
func (c *deviceContext) askIdle() (again, asked bool) {
	f := c.idle.Load()
	if f == nil {
		return false, true
	}
	if !c.asking.CompareAndSwap(false, true) {
		return false, false
	}
	defer c.asking.Store(false)
	return (*f)(), true
}

// Events implements [rdma.Context].
func (c *deviceContext) Events() <-chan rdma.AsyncEvent { return c.events.Out() }

// AllocPD implements [rdma.Context].
func (c *deviceContext) AllocPD() (rdma.PD, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("allocate protection domain: %w", rdma.ErrClosed)
	}
	p := &pd{ctx: c, mrs: make(map[*mr]struct{}), qps: make(map[*QP]struct{})}
	c.pds[p] = struct{}{}
	return p, nil
}

// CreateCQ implements [rdma.Context].
func (c *deviceContext) CreateCQ(depth int) (rdma.CQ, error) {
	if depth <= 0 || depth > MaxCQE {
		return nil, fmt.Errorf("create completion queue of %d entries: %w", depth, rdma.ErrInvalid)
	}
	q := newCQ(c, depth)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("create completion queue: %w", rdma.ErrClosed)
	}
	c.cqs[q] = struct{}{}
	return q, nil
}

// Close implements [rdma.Context].
func (c *deviceContext) Close() error {
	first := c.shut()
	_, mrs, pds := c.owned()
	for _, m := range mrs {
		first = cmp.Or(first, m.Close())
	}
	for _, p := range pds {
		first = cmp.Or(first, p.Close())
	}
	return first
}

// owned returns what the context's domains have, and the domains.
func (c *deviceContext) owned() (qps []*QP, mrs []*mr, pds []*pd) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := range c.pds {
		pds = append(pds, p)
		for q := range p.qps {
			qps = append(qps, q)
		}
		for m := range p.mrs {
			mrs = append(mrs, m)
		}
	}
	return qps, mrs, pds
}

// shut ends everything but the mappings of the memory, which the context's
// user may be reading: they end with Close. Whoever comes second waits.
func (c *deviceContext) shut() error {
	c.shutOnce.Do(func() { c.shutErr = c.doShut() })
	return c.shutErr
}

func (c *deviceContext) doShut() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	qps, mrs, _ := c.owned()

	var first error
	keep := func(err error) { first = cmp.Or(first, err) }
	for _, q := range qps {
		keep(q.carrier.Close())
	}
	for _, m := range mrs {
		m.deregister()
	}
	c.mu.Lock()
	cqs := make([]*cq, 0, len(c.cqs))
	for q := range c.cqs {
		cqs = append(cqs, q)
	}
	c.mu.Unlock()
	for _, q := range cqs {
		keep(q.Close())
	}
	c.dev.mu.Lock()
	delete(c.dev.contexts, c)
	c.dev.mu.Unlock()
	c.events.Close()
	return first
}

// pd is a protection domain. Its sets are guarded by the context's lock.
type pd struct {
	ctx    *deviceContext
	mrs    map[*mr]struct{}
	qps    map[*QP]struct{}
	closed bool
}

var _ rdma.PD = (*pd)(nil)

// Close implements [rdma.PD].
func (p *pd) Close() error {
	p.ctx.mu.Lock()
	defer p.ctx.mu.Unlock()
	if len(p.qps)+len(p.mrs) != 0 {
		return fmt.Errorf("close protection domain with %d queue pairs and %d memory regions: %w",
			len(p.qps), len(p.mrs), rdma.ErrBusy)
	}
	p.closed = true
	delete(p.ctx.pds, p)
	return nil
}
