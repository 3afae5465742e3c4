// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

// mr is a memory region. All its fields but closed are constant while it is
// in the table.
type mr struct {
	pd     *pd
	mem    provider.Part
	addr   uint64 // of its first byte, for work requests and peers
	lkey   rdma.LKey
	rkey   rdma.RKey
	access rdma.Access
	writes atomic.Pointer[writeCounts] // nil: nobody wants to know
	closed atomic.Bool
}

var (
	_ rdma.MR           = (*mr)(nil)
	_ rdma.Discarder    = (*mr)(nil)
	_ rdma.WriteCounter = (*mr)(nil)
)

// writeCounts is how many bytes peers wrote into each block of a region. Owners of several queue
// pairs may count at once.
type writeCounts struct {
	shift  uint8 // a block has 1<<shift bytes
	blocks []atomic.Uint64
}

// add counts n bytes at off, which are in the region.
func (c *writeCounts) add(off uint64, n uint32) {
	for n > 0 {
		rest := uint64(1)<<c.shift - off&(1<<c.shift-1) // of the block
		here := min(rest, uint64(n))
		c.blocks[off>>c.shift].Add(here)
		off, n = off+here, n-uint32(here)
	}
}

// AllocMR implements [rdma.PD].
func (p *pd) AllocMR(sizeBytes int, access rdma.Access) (rdma.MR, error) {
	part, err := provider.AllocMR(sizeBytes, p.ctx.dev.attr.MaxMRBytes, access)
	if err != nil {
		return nil, err
	}
	return p.newMR(part, access)
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
	return p.newMR(part, access)
}

// newMR makes a region; it takes over the caller's reference to the memory.
func (p *pd) newMR(mem provider.Part, access rdma.Access) (rdma.MR, error) {
	m := &mr{pd: p, mem: mem, addr: mem.IOVA(), access: access}
	if err := p.addMR(m); err != nil {
		_ = mem.Drop() // the region is not needed
		return nil, err
	}
	return m, nil
}

func (p *pd) addMR(m *mr) error {
	c, d := p.ctx, p.ctx.dev
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.closed || c.closed {
		return fmt.Errorf("allocate memory region: protection domain: %w", rdma.ErrClosed)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lkeys.used == maxMR {
		return fmt.Errorf("allocate memory region: %d exist: %w", maxMR, rdma.ErrNoResources)
	}
	m.lkey, m.rkey = d.lkeys.free(d.randomLKey), d.rkeys.free(d.randomRKey)
	d.lkeys.set(m.lkey, m)
	d.rkeys.set(m.rkey, m)
	p.mrs[m] = struct{}{}
	return nil
}

// Bytes implements [rdma.MR].
func (m *mr) Bytes() []byte { return m.mem.Bytes() }

// Addr implements [rdma.MR].
func (m *mr) Addr() uint64 { return m.addr }

// LKey implements [rdma.MR].
func (m *mr) LKey() rdma.LKey { return m.lkey }

// RKey implements [rdma.MR].
func (m *mr) RKey() rdma.RKey { return m.rkey }

// Discard implements [rdma.Discarder].
func (m *mr) Discard(off, n int) error {
	if m.closed.Load() {
		return fmt.Errorf("discard memory: %w", rdma.ErrClosed)
	}
	return m.mem.Discard(off, n)
}

// CountWrites implements [rdma.WriteCounter].
func (m *mr) CountWrites(blockBytes int) {
	invariant.Must(blockBytes > 0 && blockBytes&(blockBytes-1) == 0, "softdev: writes are counted by blocks of a power of two")
	n := (len(m.mem.Bytes()) + blockBytes - 1) / blockBytes
	m.writes.Store(&writeCounts{uint8(bits.TrailingZeros(uint(blockBytes))), make([]atomic.Uint64, n)})
}

// Written implements [rdma.WriteCounter].
func (m *mr) Written(block int) uint64 { return m.writes.Load().blocks[block].Load() }

// Close implements [rdma.MR].
func (m *mr) Close() error {
	if !m.closed.CompareAndSwap(false, true) {
		return nil
	}
	m.deregister()
	m.pd.ctx.mu.Lock()
	delete(m.pd.mrs, m)
	m.pd.ctx.mu.Unlock()
	return m.mem.Drop()
}

// deregister takes the region out of the device: afterwards no packet touches
// the memory.
func (m *mr) deregister() {
	p, d := m.pd, m.pd.ctx.dev
	p.ctx.mu.Lock()
	d.mu.Lock()
	if d.lkeys.get(m.lkey) == m { // the first time
		d.lkeys.clear(m.lkey)
	}
	if d.rkeys.get(m.rkey) == m { // nor was it invalidated
		d.rkeys.clear(m.rkey)
	}
	d.mu.Unlock()
	p.ctx.mu.Unlock()

	// Nobody who looks from now on finds the region. Whoever found it before, or was
	// looking, did so while it owned a queue pair of the domain; own each of them
	// once. A queue pair made since then starts after the region was gone.
	for _, q := range p.queuePairs() {
		q.Lock()
		q.forgetMemory(time.Now())
		q.Unlock()
	}
}

// queuePairs returns the queue pairs of the domain, in the order of their numbers.
func (p *pd) queuePairs() []*QP {
	p.ctx.mu.Lock()
	qps := make([]*QP, 0, len(p.qps))
	for q := range p.qps {
		qps = append(qps, q)
	}
	p.ctx.mu.Unlock()
	slices.SortFunc(qps, func(a, b *QP) int { return cmp.Compare(a.num, b.num) })
	return qps
}

// Hold implements [rdma.Holder]: packets are handled by whoever owns their queue pair. One that is made
// meanwhile has no peer yet. All who own several queue pairs take them in the same order.
func (p *pd) Hold(f func()) {
	qps := p.queuePairs()
	for _, q := range qps {
		q.Lock()
	}
	f()
	for _, q := range qps {
		q.Unlock()
	}
}

// span returns the n bytes at addr if the region holds them all.
func (m *mr) span(addr uint64, n uint32) ([]byte, bool) {
	off := addr - m.addr
	b := m.mem.Bytes()
	if addr < m.addr || off > uint64(len(b)) || uint64(n) > uint64(len(b))-off {
		return nil, false
	}
	return b[off : off+uint64(n) : off+uint64(n)], true
}

// pdMemory is the memory of a protection domain as the machine sees it.
type pdMemory struct{ pd *pd }

// Local implements [wq.Memory].
func (v pdMemory) Local(s rdma.SGE, write bool) ([]byte, rdma.Status) {
	m := v.pd.ctx.dev.lkeys.get(s.LKey)
	if m == nil || m.pd != v.pd || write && m.access&rdma.LocalWrite == 0 {
		return nil, rdma.StatusLocalProtect
	}
	b, ok := m.span(s.Addr, s.Length)
	if !ok {
		return nil, rdma.StatusLocalProtect
	}
	return b, rdma.StatusSuccess
}

// Remote implements [wq.Memory].
func (v pdMemory) Remote(rkey rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, rdma.Status) {
	m := v.pd.ctx.dev.rkeys.get(rkey)
	switch {
	case m == nil || m.pd != v.pd:
		return nil, rdma.StatusRemoteInvalid
	case m.access&acc != acc:
		return nil, rdma.StatusRemoteAccess
	}
	b, ok := m.span(addr, n)
	if !ok {
		return nil, rdma.StatusRemoteOp
	}
	if c := m.writes.Load(); c != nil && acc&rdma.RemoteWrite != 0 {
		c.add(addr-m.addr, n)
	}
	return b, rdma.StatusSuccess
}

// Invalidate implements [wq.Memory].
func (v pdMemory) Invalidate(rkey rdma.RKey) bool {
	d := v.pd.ctx.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.rkeys.get(rkey)
	if m == nil || m.pd != v.pd {
		return false
	}
	d.rkeys.clear(rkey)
	return true
}
