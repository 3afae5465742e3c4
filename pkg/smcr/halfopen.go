// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"net/netip"
	"slices"
	"sync"
)

// defaultHalfOpen is the default of Config.MaxHalfOpen.
const defaultHalfOpen = 256

// halfOpenShare is the part of Config.MaxHalfOpen that clients of one address may have:
// a large part, because all pods behind a source NAT have one address, but not all of it.
const halfOpenShare = 4

// halfOpen bounds the rendezvous of a server whose clients owe their Confirm. Each of them has
// buffers, and a client that says nothing keeps its buffers until its time is over. Clients
// beyond the bounds wait: in a burst of good clients each one gets a place soon.
type halfOpen struct {
	max int

	mu    sync.Mutex // guards what is below
	all   int
	by    map[netip.Addr]int
	queue []halfOpenWaiter
}

type halfOpenWaiter struct {
	addr    netip.Addr
	entered chan struct{} // closed when the client has a place
}

func (h *halfOpen) init(limit int) { h.max, h.by = limit, map[netip.Addr]int{} }

// enter waits for a place for a client. leave gives the place back.
func (h *halfOpen) enter(ctx context.Context, addr netip.Addr) error {
	h.mu.Lock()
	if h.fits(addr) {
		h.take(addr)
		h.mu.Unlock()
		return nil
	}
	w := halfOpenWaiter{addr, make(chan struct{})}
	h.queue = append(h.queue, w)
	h.mu.Unlock()
	select {
	case <-w.entered:
		return nil
	case <-ctx.Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.queue, w); i >= 0 {
		h.queue = slices.Delete(h.queue, i, i+1)
		return context.Cause(ctx)
	}
	return nil // the client got its place at the same moment
}

func (h *halfOpen) leave(addr netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all--
	if h.by[addr]--; h.by[addr] == 0 {
		delete(h.by, addr)
	}
	if i := slices.IndexFunc(h.queue, func(w halfOpenWaiter) bool { return h.fits(w.addr) }); i >= 0 {
		h.take(h.queue[i].addr)
		close(h.queue[i].entered)
		h.queue = slices.Delete(h.queue, i, i+1)
	}
}

func (h *halfOpen) fits(addr netip.Addr) bool {
	return h.all < h.max && h.by[addr] < max(h.max/halfOpenShare, 1)
}

func (h *halfOpen) take(addr netip.Addr) {
	h.all++
	h.by[addr]++
}
