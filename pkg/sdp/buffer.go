// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"errors"
	"fmt"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrBusy says that a [Buffer] is in use by a transfer.
var ErrBusy = errors.New("sdp: buffer is in use")

// Buffer is memory outside of the Go heap that the device can reach: what [Conn.WriteBuffer] and
// [Conn.ReadBuffer] move goes straight from one Buffer to the other, and an RNIC needs no processor for it. A Buffer
// belongs to its stack, and any connections of the stack may use it, also several at a time.
//
// The part of a Buffer that a transfer moves is the connection's until the transfer is over: the program must not
// write to a part that is being sent, nor touch one that is being filled. On software iWARP a write into what is
// being sent can end the connection, by a wrong CRC ([rdma.StableRead]).
type Buffer struct {
	size int

	mu      sync.Mutex // guards what follows
	mr      rdma.MR    // in the stack's own domain
	busy    int        // transfers under way
	regions map[*Conn]rdma.MR
}

// AllocBuffer makes a Buffer of size bytes of zeroed memory. Without a positive size the error is [rdma.ErrInvalid].
func (s *Stack) AllocBuffer(size int) (*Buffer, error) {
	if size <= 0 {
		return nil, fmt.Errorf("allocate buffer of %d bytes: %w", size, rdma.ErrInvalid)
	}
	mr, err := s.pd.AllocMR(size, rdma.LocalWrite)
	if err != nil {
		return nil, fmt.Errorf("allocate buffer of %d bytes: %w", size, err)
	}
	return &Buffer{size: size, mr: mr, regions: make(map[*Conn]rdma.MR)}, nil
}

// Bytes is the memory, nil after Close.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mr == nil {
		return nil
	}
	return b.mr.Bytes()[:b.size:b.size]
}

// Close unmaps the memory. It fails with [ErrBusy], and does nothing, while a transfer has the buffer.
func (b *Buffer) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mr == nil:
		return fmt.Errorf("close buffer: %w", rdma.ErrClosed)
	case b.busy > 0:
		return fmt.Errorf("close buffer with %d transfers: %w", b.busy, ErrBusy)
	}
	var errs []error
	for c, r := range b.regions {
		errs = append(errs, r.Close())
		delete(b.regions, c)
	}
	errs = append(errs, b.mr.Close())
	b.mr = nil
	return errors.Join(errs...)
}

// isClosed reports whether Close was called.
func (b *Buffer) isClosed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mr == nil
}

// forgetClosed takes closed Buffers out of e.buffers, if these are many. Buffer.Close cannot: it does not hold the connection's turn.
func (e *endpoint) forgetClosed() {
	const few = 16
	if len(e.buffers) < max(e.tidyAt, few) {
		return
	}
	for b := range e.buffers {
		if b.isClosed() {
			delete(e.buffers, b)
		}
	}
	e.tidyAt = 2 * len(e.buffers)
}

// take begins a transfer of n bytes at off, and returns the buffer's region in a connection's domain. If the transfer has a region
// of its own, which Buffer.open makes later, take returns nil.
func (b *Buffer) take(c *Conn, off, n int, own bool) (rdma.MR, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mr == nil:
		return nil, fmt.Errorf("buffer: %w", rdma.ErrClosed)
	case off < 0 || n < 0 || off > b.size-n:
		return nil, fmt.Errorf("%d bytes at %d of a buffer of %d: %w", n, off, b.size, rdma.ErrInvalid)
	}
	r := b.regions[c]
	switch {
	case own:
		r = nil
	case r == nil:
		var err error
		if r, err = c.ep.pd.RegMR(b.mr, 0, 0, rdma.LocalWrite); err != nil {
			return nil, fmt.Errorf("register buffer: %w", err)
		}
		b.regions[c] = r
		c.ep.buffers[b] = struct{}{}
	}
	b.busy++
	return r, nil
}

// giveBack ends a transfer.
func (b *Buffer) giveBack() {
	b.mu.Lock()
	b.busy--
	b.mu.Unlock()
}

// forget takes the buffer's region out of a connection's domain.
func (b *Buffer) forget(c *Conn) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.regions[c]
	if r == nil {
		return nil
	}
	delete(b.regions, c)
	return r.Close()
}

// open makes a region of a stretch with one right for the peer.
func (b *Buffer) open(c *Conn, off, n int, a rdma.Access) (rdma.MR, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mr == nil {
		return nil, rdma.ErrClosed // cannot be: a transfer has the buffer
	}
	return c.ep.pd.RegMR(b.mr, off, n, a)
}
