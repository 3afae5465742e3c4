// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// sendBuffersPerArena is how many send buffers share one registered region:
// few regions, each an mmap and an entry in the device's table.
const sendBuffersPerArena = 8

// region is memory registered with the stack's devices, or with one of them.
type region struct {
	mem    []byte
	access rdma.Access
	mrs    []rdma.MR // by number of the device; nil where it is not registered
}

// sge addresses the region from an offset on, as a device does.
func (r *region) sge(n *rnic, off int) rdma.SGE {
	mr := r.mrs[n.index]
	return rdma.SGE{Addr: mr.Addr() + uint64(off), LKey: mr.LKey()}
}

// tokens name the region to the peer, by number of the device that it writes
// through.
func (r *region) tokens() []linkgroup.RToken {
	ts := make([]linkgroup.RToken, len(r.mrs))
	for i, mr := range r.mrs {
		if mr != nil {
			ts[i] = linkgroup.RToken{RKey: mr.RKey(), VAddr: mr.Addr()}
		}
	}
	return ts
}

// sendBuffer is one connection's send ring.
type sendBuffer struct {
	*arena
	off int // in the arena's region
	mem []byte
}

// arena is a region cut into send buffers.
type arena struct {
	region *region
	bufs   [sendBuffersPerArena]sendBuffer
	free   uint8 // bit set of bufs
	place  int   // in memory.arenas
	roomy  int   // place in memory.roomy, -1: it is full
}

const allFree = 1<<sendBuffersPerArena - 1

// memory hands out registered memory within the stack's budget. It is guarded
// by the stack's turn.
type memory struct {
	rnics  []*rnic
	budget int
	bytes  int // registered now
	arenas []*arena
	roomy  []*arena // those with free buffers
	nfree  int      // buffers
	size   int      // of a send buffer
}

// errMemory means that the budget is used up.
type errMemory struct{ want, have, budget int }

func (e *errMemory) Error() string {
	return fmt.Sprintf("registered memory: %d more bytes would exceed the budget of %d (in use: %d)", e.want, e.budget, e.have)
}

// register maps a region and registers it with every device that lives: any
// of them may carry the links of tomorrow.
func (m *memory) register(size int, access rdma.Access) (*region, error) {
	return m.registerOn(size, access, m.rnics...)
}

func (m *memory) registerOn(size int, access rdma.Access, on ...*rnic) (_ *region, err error) {
	if m.bytes+size > m.budget {
		return nil, &errMemory{want: size, have: m.bytes, budget: m.budget}
	}
	r := &region{access: access, mrs: make([]rdma.MR, len(m.rnics))}
	var first rdma.MR
	for _, n := range on {
		if n.dead {
			continue
		}
		var mr rdma.MR
		if first == nil {
			mr, err = n.pd.AllocMR(size, access)
		} else {
			mr, err = n.pd.RegMR(first, access)
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("register %d bytes with %s: %w", size, n.dev.Name(), err), r.close())
		}
		r.mrs[n.index] = mr
		if first == nil {
			first = mr
		}
	}
	if first == nil {
		return nil, fmt.Errorf("register %d bytes: no device is left: %w", size, rdma.ErrNoResources)
	}
	r.mem = first.Bytes()[:size:size]
	m.bytes += size
	return r, nil
}

// unregister gives a region back.
func (m *memory) unregister(r *region) error {
	m.bytes -= len(r.mem)
	return r.close()
}

func (r *region) close() error {
	var err error
	for _, mr := range r.mrs {
		if mr != nil {
			err = errors.Join(err, mr.Close())
		}
	}
	return err
}

// takeSend returns a send buffer.
func (m *memory) takeSend() (*sendBuffer, error) {
	if len(m.roomy) == 0 {
		if err := m.addArena(); err != nil {
			return nil, err
		}
	}
	a := m.roomy[len(m.roomy)-1]
	i := bits.TrailingZeros8(a.free)
	a.free &^= 1 << i
	m.nfree--
	if a.free == 0 {
		m.roomy = dropPlace(m.roomy, a.roomy, func(o *arena, to int) { o.roomy = to })
		a.roomy = -1
	}
	return &a.bufs[i], nil
}

func (m *memory) addArena() error {
	r, err := m.register(m.size*sendBuffersPerArena, rdma.LocalWrite)
	if err != nil {
		return err
	}
	a := &arena{region: r, free: allFree, place: len(m.arenas), roomy: len(m.roomy)}
	for i := range a.bufs {
		off := i * m.size
		a.bufs[i] = sendBuffer{arena: a, off: off, mem: r.mem[off : off+m.size : off+m.size]}
	}
	m.arenas = append(m.arenas, a)
	m.roomy = append(m.roomy, a)
	m.nfree += sendBuffersPerArena
	return nil
}

// giveSend takes a send buffer back and unmaps an arena that nobody uses if
// others have as many free buffers.
func (m *memory) giveSend(b *sendBuffer) error {
	a := b.arena
	a.free |= 1 << (b.off / m.size)
	m.nfree++
	if a.roomy < 0 {
		a.roomy = len(m.roomy)
		m.roomy = append(m.roomy, a)
	}
	if a.free != allFree || m.nfree < 2*sendBuffersPerArena {
		return nil
	}
	m.nfree -= sendBuffersPerArena
	m.roomy = dropPlace(m.roomy, a.roomy, func(o *arena, to int) { o.roomy = to })
	m.arenas = dropPlace(m.arenas, a.place, func(o *arena, to int) { o.place = to })
	return m.unregister(a.region)
}

// dropPlace removes the arena at a place of a list, to which the last one
// moves.
func dropPlace(list []*arena, place int, move func(*arena, int)) []*arena {
	last := len(list) - 1
	list[place] = list[last]
	move(list[place], place)
	list[last] = nil
	return list[:last]
}

// close unmaps all arenas.
func (m *memory) close() {
	for _, a := range m.arenas {
		_ = m.unregister(a.region) // the stack ends; nothing is left to do about an error
	}
	m.arenas, m.roomy, m.nfree = nil, nil, 0
}
