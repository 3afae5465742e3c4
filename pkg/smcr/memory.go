// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// sendBuffersPerArena is how many send buffers share one registered region:
// few regions, each an mmap and an entry in the device's table.
const sendBuffersPerArena = 8

// sendBuffer is one connection's send ring.
type sendBuffer struct {
	arena *arena
	addr  uint64
	mem   []byte
}

// arena is a registered region cut into send buffers.
type arena struct {
	mr   rdma.MR
	used int
}

// memory hands out registered memory within the stack's budget. It is guarded
// by the stack's turn.
type memory struct {
	pd     rdma.PD
	budget int
	bytes  int // registered now
	free   []*sendBuffer
	arenas []*arena
	size   int // of a send buffer
}

// errMemory means that the budget is used up.
type errMemory struct{ want, have, budget int }

func (e *errMemory) Error() string {
	return fmt.Sprintf("registered memory: %d more bytes would exceed the budget of %d (in use: %d)", e.want, e.budget, e.have)
}

// register maps and registers a region.
func (m *memory) register(size int, access rdma.Access) (rdma.MR, error) {
	if m.bytes+size > m.budget {
		return nil, &errMemory{want: size, have: m.bytes, budget: m.budget}
	}
	mr, err := m.pd.AllocMR(size, access)
	if err != nil {
		return nil, fmt.Errorf("register %d bytes: %w", size, err)
	}
	m.bytes += size
	return mr, nil
}

// unregister gives a region of size bytes back.
func (m *memory) unregister(mr rdma.MR, size int) error {
	m.bytes -= size
	return mr.Close()
}

// takeSend returns a send buffer.
func (m *memory) takeSend() (*sendBuffer, error) {
	if len(m.free) == 0 {
		size := m.size * sendBuffersPerArena
		mr, err := m.register(size, rdma.LocalWrite)
		if err != nil {
			return nil, err
		}
		a := &arena{mr: mr}
		m.arenas = append(m.arenas, a)
		for off := 0; off < size; off += m.size {
			m.free = append(m.free, &sendBuffer{arena: a, addr: mr.Addr() + uint64(off), mem: mr.Bytes()[off : off+m.size : off+m.size]})
		}
	}
	b := m.free[len(m.free)-1]
	m.free = m.free[:len(m.free)-1]
	b.arena.used++
	return b, nil
}

// giveSend takes a send buffer back and unmaps an arena that nobody uses if
// another one still has free buffers.
func (m *memory) giveSend(b *sendBuffer) error {
	b.arena.used--
	m.free = append(m.free, b)
	if b.arena.used > 0 || len(m.free) < 2*sendBuffersPerArena {
		return nil
	}
	gone := b.arena
	kept := m.free[:0]
	for _, f := range m.free {
		if f.arena != gone {
			kept = append(kept, f)
		}
	}
	clear(m.free[len(kept):])
	m.free = kept
	for i, a := range m.arenas {
		if a == gone {
			m.arenas = append(m.arenas[:i], m.arenas[i+1:]...)
			break
		}
	}
	return m.unregister(gone.mr, m.size*sendBuffersPerArena)
}

// close unmaps all arenas.
func (m *memory) close() {
	for _, a := range m.arenas {
		_ = m.unregister(a.mr, m.size*sendBuffersPerArena) // the stack ends; nothing is left to do about an error
	}
	m.arenas, m.free = nil, nil
}
