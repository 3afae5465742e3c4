// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Memory is mapped memory with the number of its regions.
type Memory struct {
	bytes   []byte
	regions atomic.Int32
}

// MapMemory maps zeroed bytes of a memfd, rounded up to whole pages, for one
// region. The mapping keeps the memory after the descriptor is closed.
func MapMemory(sizeBytes int) (*Memory, error) {
	page := os.Getpagesize()
	n := (sizeBytes + page - 1) / page * page
	fd, err := unix.MemfdCreate("kube-smcr-mr", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create memfd: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		return nil, fmt.Errorf("size memfd to %d bytes: %w", n, err)
	}
	b, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of a memfd: %w", n, err)
	}
	m := &Memory{bytes: b}
	m.regions.Store(1)
	return m, nil
}

// Bytes is the memory, until the last region drops it.
func (m *Memory) Bytes() []byte { return m.bytes }

// IOVA draws the address by which work requests and peers name the first byte of a
// region. It is random, so that no peer learns how the process's memory is laid out, or
// where one region is from where another one is. As whole pages, and with the 47 bits of
// the addresses of programs, it is what every device takes; a region stays below 2^48.
func IOVA() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	const top = 1 << 46
	return (binary.NativeEndian.Uint64(b[:])&(top-1) | top) &^ uint64(os.Getpagesize()-1)
}

// Part is bytes of mapped memory that a region has. It is a value; the region has a
// reference to the memory.
type Part struct {
	mem *Memory
	b   []byte
}

// All returns the part that is all of the memory.
func (m *Memory) All() Part { return Part{m, m.bytes} }

// Part returns length bytes at off of the part, or all of it if both are 0. It refers to
// the memory for one more region: ErrClosed if it is too late for that.
func (p Part) Part(off, length int) (Part, error) {
	if off == 0 && length == 0 {
		length = len(p.b)
	}
	if off < 0 || length <= 0 || off > len(p.b) || length > len(p.b)-off {
		return Part{}, fmt.Errorf("%d bytes at %d of a region of %d: %w", length, off, len(p.b), rdma.ErrInvalid)
	}
	if !p.mem.Retain() {
		return Part{}, rdma.ErrClosed
	}
	return Part{p.mem, p.b[off : off+length : off+length]}, nil
}

// Bytes is the memory of the part, until the last region drops it.
func (p Part) Bytes() []byte { return p.b }

// Addr is the address of the first byte in this process.
func (p Part) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p.b)))) }

// IOVA draws the address by which work requests and peers name the first byte: a page from
// [IOVA], and the place in it that the byte has, as devices want it.
func (p Part) IOVA() uint64 { return IOVA() | p.Addr()&uint64(os.Getpagesize()-1) }

// Discard makes the n bytes at off zero, and gives back the whole pages among them. For mapped
// memory of the process only: a device that has pinned a page goes on with that page.
func (p Part) Discard(off, n int) error {
	if off < 0 || n < 0 || off > len(p.b) || n > len(p.b)-off {
		return fmt.Errorf("discard %d bytes at %d of a region of %d: %w", n, off, len(p.b), rdma.ErrInvalid)
	}
	page := uint64(os.Getpagesize())
	first, end := p.Addr()+uint64(off), p.Addr()+uint64(off+n)
	skip := (page - first%page) % page
	if first+skip >= end-end%page {
		clear(p.b[off : off+n])
		return nil
	}
	from, to := off+int(skip), off+n-int(end%page)
	if err := unix.Madvise(p.b[from:to], unix.MADV_REMOVE); err != nil {
		return fmt.Errorf("discard %d bytes of a memory region: %w", n, err)
	}
	clear(p.b[off:from])
	clear(p.b[to : off+n])
	return nil
}

// Drop gives up the reference that the region has.
func (p Part) Drop() error { return p.mem.Drop() }

// Retain keeps the memory mapped for one more region. It reports false if the memory is unmapped already.
func (m *Memory) Retain() bool {
	for {
		n := m.regions.Load()
		if n == 0 {
			return false
		}
		if m.regions.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Drop gives up a reference of MapMemory or Retain; the last one unmaps the memory.
func (m *Memory) Drop() error {
	if m.regions.Add(-1) > 0 {
		return nil
	}
	if err := unix.Munmap(m.bytes); err != nil {
		return fmt.Errorf("unmap memory region: %w", err)
	}
	return nil
}

// AllocMR maps the memory of a region of at most so many bytes, for [rdma.PD]'s AllocMR.
func AllocMR(sizeBytes int, maxBytes uint64, access rdma.Access) (Part, error) {
	if sizeBytes <= 0 || uint64(sizeBytes) > maxBytes {
		return Part{}, fmt.Errorf("allocate memory region of %d bytes: %w", sizeBytes, rdma.ErrInvalid)
	}
	if !ValidAccess(access) {
		return Part{}, fmt.Errorf("allocate memory region with access %#x: %w", access, rdma.ErrInvalid)
	}
	mem, err := MapMemory(sizeBytes)
	if err != nil {
		return Part{}, fmt.Errorf("allocate memory region: %w: %w", rdma.ErrNoResources, err)
	}
	return mem.All(), nil
}

// RegMR refers to a range of the memory of a region, which may be closed, for [rdma.PD]'s RegMR.
func RegMR(of Part, closed bool, off, length int, access rdma.Access) (Part, error) {
	if !ValidAccess(access) {
		return Part{}, fmt.Errorf("register memory region with access %#x: %w", access, rdma.ErrInvalid)
	}
	if closed {
		return Part{}, fmt.Errorf("register memory region: %w", rdma.ErrClosed)
	}
	part, err := of.Part(off, length)
	if err != nil {
		return Part{}, fmt.Errorf("register memory region: %w", err)
	}
	return part, nil
}

// ValidAccess reports whether a region may have these rights: a peer may write
// only what is locally writable (IBTA 10.6.3.1), and what it reads is stable only if it may read.
func ValidAccess(a rdma.Access) bool {
	return a&^(rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.StableRead) == 0 &&
		a&(rdma.RemoteWrite|rdma.LocalWrite) != rdma.RemoteWrite &&
		a&(rdma.StableRead|rdma.RemoteRead) != rdma.StableRead
}
