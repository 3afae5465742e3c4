// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
)

// Host has the connections of a device's queue pairs, and their goroutines.
type Host struct {
	dev       *softdev.Device
	done      chan struct{}
	wg        sync.WaitGroup
	lingering atomic.Int64

	mu     sync.Mutex // guards what follows
	links  map[*link]struct{}
	closed bool
}

// NewHost makes the host of a device.
func NewHost(d *softdev.Device) *Host {
	return &Host{dev: d, done: make(chan struct{}), links: make(map[*link]struct{})}
}

// Close closes the connections that linger and waits for all goroutines. The device is closed,
// so that no queue pair has a connection.
func (h *Host) Close() {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return
	}
	h.closed = true
	close(h.done)
	for l := range h.links {
		if !l.kept.Load() {
			_ = l.conn.Close() // it lingers
		}
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// run starts a goroutine of a connection.
func (h *Host) run(l *link, f func()) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return fmt.Errorf("run connection %v: %w", l.conn.RemoteAddr(), rdma.ErrClosed)
	}
	h.links[l] = struct{}{}
	h.wg.Go(f)
	return nil
}

// forget drops a connection whose reader ends: afterwards the host has nothing of the connection.
func (h *Host) forget(l *link) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.links, l)
}
