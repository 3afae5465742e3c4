// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

// mr is a memory region.
type mr struct {
	pd     *pd
	mem    provider.Part
	handle ibvMR // nil: deregistered; guarded by the context's lock
	addr   uint64
	lkey   rdma.LKey
	rkey   rdma.RKey
	closed atomic.Bool
}

var _ rdma.MR = (*mr)(nil)

// AllocMR implements [rdma.PD].
func (p *pd) AllocMR(sizeBytes int, access rdma.Access) (rdma.MR, error) {
	part, err := provider.AllocMR(sizeBytes, p.ctx.dev.limits.mrBytes, access)
	if err != nil {
		return nil, err
	}
	return p.register(part, access)
}

// RegMR implements [rdma.PD].
func (p *pd) RegMR(of rdma.MR, off, length int, access rdma.Access) (rdma.MR, error) {
	o, ok := of.(*mr)
	if !ok {
		return nil, fmt.Errorf("register memory region of %T: %w", of, rdma.ErrInvalid)
	}
	part, err := provider.RegMR(o.mem, o.closed.Load(), off, length, access)
	if err != nil {
		return nil, err
	}
	return p.register(part, access)
}

// register makes a region; it takes over the caller's reference to the memory.
func (p *pd) register(mem provider.Part, access rdma.Access) (_ rdma.MR, err error) {
	c, n := p.ctx, len(mem.Bytes())
	m := &mr{pd: p, mem: mem, addr: mem.IOVA()}
	if c.dev.siw { // which knows memory by the address that it has in the process only
		m.addr = mem.Addr()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || c.closed {
		err = fmt.Errorf("register memory region: protection domain: %w", rdma.ErrClosed)
	} else if err = c.dev.before("reg_mr"); err == nil {
		m.handle, m.lkey, m.rkey, err = ibvRegMR(p.handle, mem.Addr(), n, m.addr, access)
	}
	if err != nil {
		_ = mem.Drop() // the region is not needed
		if errors.Is(err, syscall.ENOMEM) {
			if why := lockLimit(n); why != nil {
				return nil, fmt.Errorf("register %d bytes with %s: %w: %w: %w", n, c.dev.name, rdma.ErrNoResources, why, err)
			}
			return nil, fmt.Errorf("register %d bytes with %s (device limit: %d regions): %w", n, c.dev.name, c.dev.limits.mrs, verbError(err))
		}
		return nil, fmt.Errorf("register %d bytes with %s: %w", n, c.dev.name, verbError(err))
	}
	p.mrs[m] = struct{}{}
	return m, nil
}

// Bytes implements [rdma.MR].
func (m *mr) Bytes() []byte { return m.mem.Bytes() }

// Addr implements [rdma.MR].
func (m *mr) Addr() uint64 { return m.addr }

// LKey implements [rdma.MR].
func (m *mr) LKey() rdma.LKey { return m.lkey }

// RKey implements [rdma.MR].
func (m *mr) RKey() rdma.RKey { return m.rkey }

// Close implements [rdma.MR].
func (m *mr) Close() error {
	if !m.closed.CompareAndSwap(false, true) {
		return nil
	}
	if err := m.deregister(); err != nil {
		// The device may still write there: the memory stays mapped.
		m.closed.Store(false)
		return err
	}
	m.pd.ctx.mu.Lock()
	delete(m.pd.mrs, m)
	m.pd.ctx.mu.Unlock()
	return m.mem.Drop()
}

// deregister takes the region out of the device: afterwards no packet touches
// the memory.
func (m *mr) deregister() error {
	m.pd.ctx.mu.Lock()
	defer m.pd.ctx.mu.Unlock()
	if m.handle == nil {
		return nil
	}
	err := m.pd.ctx.dev.before("dereg_mr")
	if err == nil {
		err = ibvDeregMR(m.handle)
	}
	if err != nil && !isGone(err) {
		return fmt.Errorf("deregister memory region: %w", verbError(err))
	}
	m.handle = nil
	return nil
}
