// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	cryptorand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// Config says what a provider's device is.
type Config struct {
	// Device is the provider's device, as its contexts show it. Its attributes bound what
	// is made.
	Device rdma.Device
	// NewQP makes a queue pair. It is called with locks held and must not call the device.
	NewQP func(c QPConfig) (Carrier, error)
	// DrawQPN draws a queue pair number; nil: all of its bits are random. Numbers that are
	// reserved, or taken, are drawn again.
	DrawQPN func(r *rand.Rand) rdma.QPN
}

// QPConfig is what a provider needs to make the protocol of a queue pair. Numbers are
// within the device's attributes.
type QPConfig struct {
	Num                  rdma.QPN
	MaxSendWR, MaxRecvWR int
	MaxSGE               int // at least 1
	Memory               wq.Memory
}

// Device is a provider's device without its wire.
type Device struct {
	cfg    Config
	attr   rdma.DeviceAttr
	timers timers
	done   chan struct{}
	wg     sync.WaitGroup

	qps   table[rdma.QPN, QP]
	lkeys table[rdma.LKey, mr]
	rkeys table[rdma.RKey, mr]

	recent atomic.Pointer[deviceContext] // whose completions were delivered last

	mu       sync.Mutex // guards the changes of the tables and what follows
	rng      *rand.Rand
	contexts map[*deviceContext]struct{}
	closed   bool
}

// New makes a device, with a goroutine that serves the timeouts of its queue pairs.
func New(cfg Config) *Device {
	if cfg.DrawQPN == nil {
		cfg.DrawQPN = func(r *rand.Rand) rdma.QPN { return rdma.QPN(r.Uint32()) & rdma.MaxQPN }
	}
	var seed [32]byte
	_, _ = cryptorand.Read(seed[:]) // never fails
	d := &Device{
		cfg:      cfg,
		attr:     cfg.Device.Attr(),
		done:     make(chan struct{}),
		rng:      rand.New(rand.NewChaCha8(seed)),
		contexts: make(map[*deviceContext]struct{}),
	}
	d.timers.init()
	d.qps.init()
	d.lkeys.init()
	d.rkeys.init()
	d.wg.Go(func() { d.timers.loop(d.done) })
	return d
}

// Close ends all contexts, which see EventDeviceFatal first and keep their memory mapped
// until they are closed, and the timers. It reports false if that was done before. The
// provider closes its wire afterwards.
func (d *Device) Close() bool {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return false
	}
	d.closed = true
	open := make([]*deviceContext, 0, len(d.contexts))
	for c := range d.contexts {
		open = append(open, c)
	}
	d.mu.Unlock()

	for _, c := range open {
		c.events.Post(rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: rdma.ErrClosed})
		_ = c.shut()
	}
	close(d.done)
	d.wg.Wait()
	return true
}

// Open gives a context, as [rdma.Device] says.
func (d *Device) Open() (rdma.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("open context of %q: %w", d.cfg.Device.Name(), rdma.ErrClosed)
	}
	c := newContext(d)
	d.contexts[c] = struct{}{}
	return c, nil
}

// Tell posts an event of the port to all contexts.
func (d *Device) Tell(kind rdma.EventKind) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.contexts {
		c.events.Post(rdma.AsyncEvent{Kind: kind})
	}
}

// Find returns the queue pair of a number, nil if there is none. It takes no lock.
func (d *Device) Find(n rdma.QPN) Carrier {
	if q := d.qps.get(n); q != nil {
		return q.carrier
	}
	return nil
}

// drawQPN draws a queue pair number that nobody guesses, and under which a late packet for
// a closed queue pair does not meet its successor. Drawing is done with mu held.
func (d *Device) drawQPN() rdma.QPN {
	for {
		if n := d.cfg.DrawQPN(d.rng); n >= FirstQPN && n < rdma.MaxQPN { // the last one is for multicast
			return n
		}
	}
}

// randomLKey and randomRKey draw keys of regions: all their bits are random.
func (d *Device) randomLKey() rdma.LKey { return rdma.LKey(d.rng.Uint32()) }
func (d *Device) randomRKey() rdma.RKey { return rdma.RKey(d.rng.Uint32()) }

// Poller says whether a receiver of a device looks again at once, or waits. It belongs to
// the receiver's goroutine.
type Poller struct {
	dev   *Device
	since time.Time // polling since then without waiting; zero: it waited
}

// Poller returns a poller for a receiver.
func (d *Device) Poller() Poller { return Poller{dev: d} }

// Idle is called when a receiver has nothing left to do and owns no queue pair. It lets the
// context whose completions came last say whether to poll. A device may have a receiver for each
// connection: while one of them asks a context, the others wait.
func (p *Poller) Idle() bool {
	d := p.dev
	c := d.recent.Load()
	if c == nil {
		p.since = time.Time{}
		return false
	}
	again, asked := c.askIdle()
	if !asked {
		p.since = time.Time{}
		return false
	}
	if again {
		now := time.Now()
		if p.since.IsZero() {
			p.since = now
		}
		if now.Sub(p.since) < maxPoll {
			return true
		}
	}
	d.recent.CompareAndSwap(c, nil) // asked enough
	p.since = time.Time{}
	return false
}
