// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

// deviceContext is one user's open device: a context of libibverbs.
type deviceContext struct {
	dev    *Device
	handle ibvContext
	async  *waiter
	events *provider.Events
	idle   atomic.Pointer[func() bool]
	asking atomic.Bool    // a goroutine calls idle
	wg     sync.WaitGroup // watch, and the goroutines of the completion queues

	shutOnce sync.Once
	shutErr  error

	// mu guards what follows and the sets of the PDs. It is held while something
	// is made or destroyed. Locks are taken in the order mu, qp.mu, cq.mu, tabMu.
	mu     sync.Mutex
	pds    map[*pd]struct{}
	vector int // the interrupt of its completion queues; -1: it has had none
	closed bool

	tabMu  sync.Mutex // guards the tables, and nothing is called with it held
	cqs    map[uint64]*cq
	nextCQ uint64
	qps    map[rdma.QPN]*qp
}

var (
	_ rdma.Context      = (*deviceContext)(nil)
	_ rdma.IdlePoller   = (*deviceContext)(nil)
	_ rdma.PathResolver = (*deviceContext)(nil)
)

func newContext(d *Device) (*deviceContext, error) {
	if err := d.before("open"); err != nil {
		return nil, verbError(err)
	}
	h, err := ibvOpen(d.node.Name()) // whatever the device is called now
	if err != nil {
		return nil, verbError(openError(err))
	}
	c := &deviceContext{
		dev: d, handle: h, vector: -1,
		pds: make(map[*pd]struct{}), cqs: make(map[uint64]*cq), qps: make(map[rdma.QPN]*qp),
	}
	// It may be another device that has the node now.
	node, err := os.Stat(nodePath(h))
	if err == nil && !os.SameFile(node, d.node) {
		err = rdma.ErrClosed
	}
	if err == nil {
		c.async, err = newWaiter(ibvAsyncFD(h), d.name)
	}
	if err != nil {
		_ = ibvClose(h)
		return nil, err
	}
	c.events = provider.NewEvents()
	c.wg.Go(c.watch)
	return c, nil
}

// Device implements [rdma.Context].
func (c *deviceContext) Device() rdma.Device { return c.dev.self() }

// OnIdle implements [rdma.IdlePoller].
func (c *deviceContext) OnIdle(f func() bool) { c.idle.Store(&f) }

// Events implements [rdma.Context].
func (c *deviceContext) Events() <-chan rdma.AsyncEvent { return c.events.Out() }

// watch acts on the events of the context's queues until it is closed. Those of
// the port and of the device come from the device.
func (c *deviceContext) watch() {
	for {
		var ev asyncEvent
		var err error
		if c.async.wait(func(uintptr) bool {
			ev, err = ibvAsync(c.handle)
			return !isAgain(err)
		}) != nil || err != nil {
			return // closed, or the device is gone and says so to its own handle
		}
		switch ev.kind {
		case asyncQP:
			if q := c.queuePair(ev.qpn); q != nil {
				q.fail(rdma.EventQPFatal, errors.New(ev.name))
			}
		case asyncAccess:
			if q := c.queuePair(ev.qpn); q != nil {
				q.accuse(ev.name)
			}
		case asyncCQ:
			c.tabMu.Lock()
			q := c.cqs[ev.cq]
			c.tabMu.Unlock()
			if q != nil {
				q.overran()
			}
		case asyncPort, asyncGone, asyncOther:
		}
	}
}

// queuePair returns the queue pair of a number, nil if it is closed.
func (c *deviceContext) queuePair(n rdma.QPN) *qp {
	c.tabMu.Lock()
	defer c.tabMu.Unlock()
	return c.qps[n]
}

// AllocPD implements [rdma.Context].
func (c *deviceContext) AllocPD() (rdma.PD, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("allocate protection domain: %w", rdma.ErrClosed)
	}
	p := &pd{ctx: c, mrs: make(map[*mr]struct{}), qps: make(map[*qp]struct{})}
	err := c.dev.before("alloc_pd")
	if err == nil {
		p.handle, err = ibvAllocPD(c.handle)
	}
	if err != nil {
		return nil, fmt.Errorf("allocate protection domain (device limit %d): %w", c.dev.limits.pds, verbError(err))
	}
	c.pds[p] = struct{}{}
	return p, nil
}

// ResolvePath implements [rdma.PathResolver].
func (c *deviceContext) ResolvePath(p rdma.Path) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("resolve path: %w", rdma.ErrClosed)
	}
	c.wg.Add(1)
	c.mu.Unlock()
	defer c.wg.Done()
	p = c.dev.classed(p)
	err := c.dev.checkPath(&p)
	if err == nil {
		err = pathError(p.DGID, c.resolve(&p))
	}
	if err != nil {
		return fmt.Errorf("resolve path to %v with %s: %w", p.DGID.Addr(), c.dev.name, err)
	}
	return nil
}

// resolve has an address handle made, for which the kernel asks for the MAC address. Some devices, or their
// provider libraries, make none: with these the transition to RTR asks.
func (c *deviceContext) resolve(p *rdma.Path) error {
	err := c.dev.before("create_ah")
	if err == nil {
		err = ibvResolve(c.handle, c.dev.port, p)
	}
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) {
		return nil
	}
	return err
}

// Close implements [rdma.Context]. It must not be called by OnNotify's function.
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
func (c *deviceContext) owned() (qps []*qp, mrs []*mr, pds []*pd) {
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

	var first error
	keep := func(err error) { first = cmp.Or(first, err) }
	qps, mrs, pds := c.owned()
	for _, q := range qps {
		keep(q.Close())
	}
	for _, m := range mrs {
		keep(m.deregister())
	}
	c.tabMu.Lock()
	cqs := make([]*cq, 0, len(c.cqs))
	for _, q := range c.cqs {
		cqs = append(cqs, q)
	}
	c.tabMu.Unlock()
	for _, q := range cqs {
		keep(q.Close())
	}
	for _, p := range pds {
		keep(p.release())
	}
	_ = c.async.close()
	c.wg.Wait()
	if err := c.closeHandle(); err != nil {
		keep(fmt.Errorf("close context of %q: %w", c.dev.name, verbError(err)))
	}
	c.dev.mu.Lock()
	delete(c.dev.contexts, c)
	c.dev.mu.Unlock()
	c.events.Close()
	return first
}

// closeHandle closes the context of libibverbs. The regions that could not be deregistered go with
// it: the kernel ends them, and libibverbs would look for the context in its freed memory.
func (c *deviceContext) closeHandle() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.dev.before("close")
	if err == nil {
		err = ibvClose(c.handle)
	}
	for p := range c.pds {
		for m := range p.mrs {
			m.handle = nil
		}
	}
	return err
}

// pd is a protection domain. Its sets are guarded by the context's lock.
type pd struct {
	ctx    *deviceContext
	handle ibvPD // nil: given back
	mrs    map[*mr]struct{}
	qps    map[*qp]struct{}
	closed bool
}

var _ rdma.PD = (*pd)(nil)

// Close implements [rdma.PD].
func (p *pd) Close() error {
	p.ctx.mu.Lock()
	defer p.ctx.mu.Unlock()
	if p.closed {
		return nil
	}
	if len(p.qps)+len(p.mrs) != 0 {
		return fmt.Errorf("close protection domain with %d queue pairs and %d memory regions: %w",
			len(p.qps), len(p.mrs), rdma.ErrBusy)
	}
	p.closed = true
	delete(p.ctx.pds, p)
	return p.giveBack()
}

// release gives the domain back to the device, when everything in it was: the
// regions only keep their memory.
func (p *pd) release() error {
	p.ctx.mu.Lock()
	defer p.ctx.mu.Unlock()
	return p.giveBack()
}

func (p *pd) giveBack() error {
	h := p.handle
	if p.handle = nil; h == nil {
		return nil
	}
	if err := ibvDeallocPD(h); err != nil && !isGone(err) {
		return fmt.Errorf("close protection domain: %w", verbError(err))
	}
	return nil
}
