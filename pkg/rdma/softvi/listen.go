// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// Listener waits for calls of one discriminator.
type Listener struct {
	dev  *Device
	disc vitcp.Discriminator
	wake chan struct{} // has a token when there may be a request
	done chan struct{}

	mu      sync.Mutex // guards what follows
	closed  bool
	waiting []*Request // the oldest first
}

// Listen listens for calls of a discriminator of at most vitcp.MaxDiscriminator bytes, which
// nobody else listens for on this device. Calls of others are answered with Connect No Match.
func (d *Device) Listen(discriminator string) (*Listener, error) {
	disc, err := vitcp.NewDiscriminator(discriminator)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	l := &Listener{dev: d, disc: disc, wake: make(chan struct{}, 1), done: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		err = rdma.ErrClosed
	case d.listeners[disc] != nil:
		err = fmt.Errorf("another listener has it: %w", rdma.ErrBusy)
	case len(d.listeners) >= maxListeners:
		err = fmt.Errorf("the device has %d listeners: %w", maxListeners, rdma.ErrNoResources)
	default:
		d.listeners[disc] = l
		return l, nil
	}
	return nil, fmt.Errorf("listen for %q on %q: %w", discriminator, d.cfg.Name, err)
}

// Accept waits for the next call.
func (l *Listener) Accept(ctx context.Context) (*Request, error) {
	for {
		if r := l.take(); r != nil {
			return r, nil
		}
		select {
		case <-l.wake:
		case <-l.done:
			return nil, fmt.Errorf("accept calls of %q: %w", l.disc, net.ErrClosed)
		case <-ctx.Done():
			return nil, fmt.Errorf("accept calls of %q: %w", l.disc, context.Cause(ctx))
		}
	}
}

// Close ends the listener. The TCP connections of calls that nobody has are closed; requests that
// were given away stay.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	waiting := l.waiting
	l.waiting = nil
	close(l.done)
	l.mu.Unlock()
	for _, r := range waiting {
		_ = r.conn.Close() // ends who waits for it
	}
	d := l.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.listeners, l.disc)
	return nil
}

// put leaves a request for Accept, and reports whether there is room.
func (l *Listener) put(r *Request) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.waiting) >= maxBacklog {
		return false
	}
	l.waiting = append(l.waiting, r)
	l.rouse()
	return true
}

// take returns the oldest request, nil if there is none.
func (l *Listener) take() *Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		return nil
	}
	r := l.waiting[0]
	l.waiting = slices.Delete(l.waiting, 0, 1)
	if len(l.waiting) > 0 {
		l.rouse() // somebody else may wait
	}
	return r
}

// drop forgets a request that has ended.
func (l *Listener) drop(r *Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.waiting, r); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
	}
}

// rouse wakes one who waits in Accept; mu is held.
func (l *Listener) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}
