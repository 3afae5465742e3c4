// SPDX-License-Identifier: Apache-2.0

package soft

import (
	cryptorand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// Device is a software RDMA device.
type Device struct {
	cfg     Config
	wire    Wire
	share   *share      // nil: the address is ours alone
	watcher LinkWatcher // nil: always up
	epoch   time.Time
	stats   counters
	done    chan struct{}
	wg      sync.WaitGroup
	batches chan *batch // free ones

	link atomic.Pointer[LinkState]

	qps   table[rdma.QPN, qp]
	lkeys table[rdma.LKey, mr]
	rkeys table[rdma.RKey, mr]

	alarm atomic.Int64 // when the timer fires, since epoch; 0: it does not

	recent atomic.Pointer[deviceContext] // whose completions were delivered last

	timerMu sync.Mutex
	timer   *time.Timer

	mu       sync.Mutex // guards the changes of the tables and what follows
	rng      *rand.Rand
	contexts map[*deviceContext]struct{}
	closed   bool
}

var _ rdma.Device = (*Device)(nil)

// Open opens a device. Its socket belongs to the network namespace of the
// calling thread.
func Open(cfg Config) (*Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open soft device %q: %w: %w", cfg.Name, rdma.ErrInvalid, err)
	}
	cfg = cfg.withDefaults()
	wire := cfg.Wire
	var sharing *share
	if wire == nil {
		u, err := openUDP(cfg)
		if err != nil {
			return nil, fmt.Errorf("open soft device %q: %w", cfg.Name, err)
		}
		wire, sharing = u, u.share
	}
	var seed [32]byte
	_, _ = cryptorand.Read(seed[:]) // never fails
	d := &Device{
		cfg:      cfg,
		wire:     wire,
		share:    sharing,
		epoch:    time.Now(),
		done:     make(chan struct{}),
		batches:  make(chan *batch, freeBatches),
		timer:    time.NewTimer(time.Hour),
		rng:      rand.New(rand.NewChaCha8(seed)),
		contexts: make(map[*deviceContext]struct{}),
	}
	d.timer.Stop()
	d.qps.init()
	d.lkeys.init()
	d.rkeys.init()
	d.watcher, _ = wire.(LinkWatcher)
	state := LinkState{Up: true, MTUBytes: rocev2.MaxMTUBytes + packetOverhead}
	if d.watcher != nil {
		state = d.watcher.Link()
	}
	d.link.Store(&state)
	d.wg.Add(2)
	go d.receiveLoop()
	go d.timerLoop()
	return d, nil
}

// Close ends the device with all its contexts and waits for its goroutines.
// Open contexts see EventDeviceFatal first; their memory stays mapped until
// they are closed.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
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
	err := d.wire.Close()
	d.wg.Wait()
	d.timer.Stop()
	if err != nil {
		return fmt.Errorf("close soft device %q: %w", d.cfg.Name, err)
	}
	return nil
}

// Name implements [rdma.Device].
func (d *Device) Name() string { return d.cfg.Name }

// Addr returns the address and port of the device.
func (d *Device) Addr() netip.AddrPort { return netip.AddrPortFrom(d.cfg.Addr, d.cfg.Port) }

// Attr implements [rdma.Device].
func (d *Device) Attr() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider:     "soft",
		MaxQP:        maxQP,
		MaxCQE:       maxCQE,
		MaxMRBytes:   maxMRBytes,
		MaxSGE:       rocev2.MaxSGE,
		MaxSendWR:    rocev2.MaxQueue,
		MaxRecvWR:    rocev2.MaxQueue,
		MaxInline:    maxInline,
		WriteWithImm: true,
		RDMARead:     true,
		GIDTypes:     []rdma.GIDType{rdma.GIDTypeRoCEv2},

		MaxReadsServed: rocev2.MaxReads, MaxReadsAsked: rocev2.MaxReads,
		PeerCompletes: true,

		WCDetails: true, LocalErrors: true, ResponderEvents: true, SolicitedErrors: true,
	}
}

// Port implements [rdma.Device].
func (d *Device) Port() rdma.PortAttr {
	l := d.link.Load()
	a := rdma.PortAttr{State: rdma.PortDown, MaxMTU: rdma.MTU4096, ActiveMTU: d.cfg.MTU}
	if l.Up {
		a.State = rdma.PortActive
	}
	if a.ActiveMTU == 0 {
		a.ActiveMTU = pathMTU(l.MTUBytes)
	}
	return a
}

// pathMTU returns the largest path MTU whose packets fit an interface MTU.
func pathMTU(bytes int) rdma.MTU {
	m := rdma.MTU4096
	for m > rdma.MTU256 && m.Bytes()+packetOverhead > bytes {
		m--
	}
	return m
}

// GIDs implements [rdma.Device].
func (d *Device) GIDs() []rdma.GIDEntry {
	l := d.link.Load()
	return []rdma.GIDEntry{{
		Index:  0,
		GID:    rdma.GIDFromAddr(d.cfg.Addr),
		Type:   rdma.GIDTypeRoCEv2,
		MAC:    l.MAC,
		NetDev: l.NetDev,

		PrefixBits: l.PrefixBits,
	}}
}

// Open implements [rdma.Device].
func (d *Device) Open() (rdma.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("open context of %q: %w", d.cfg.Name, rdma.ErrClosed)
	}
	c := newContext(d)
	d.contexts[c] = struct{}{}
	return c, nil
}

// inGeneration gives a queue pair number the generation of a device that
// shares its address.
func (d *Device) inGeneration(n rdma.QPN) rdma.QPN {
	if d.share == nil {
		return n
	}
	n &^= generationBit
	if d.share.generation == 1 {
		n |= generationBit
	}
	return n
}

// randomQPN draws a queue pair number. All bits but that of the generation are
// random, so that nobody guesses it, and a late packet for a closed queue pair does not
// meet its successor. Drawing is done with mu held.
func (d *Device) randomQPN() rdma.QPN {
	for {
		n := d.inGeneration(rdma.QPN(d.rng.Uint32()) & rdma.MaxQPN)
		if n >= firstQPN && n < rdma.MaxQPN { // the last one is for multicast
			return n
		}
	}
}

// randomLKey and randomRKey draw keys of regions: all their bits are random.
func (d *Device) randomLKey() rdma.LKey { return rdma.LKey(d.rng.Uint32()) }
func (d *Device) randomRKey() rdma.RKey { return rdma.RKey(d.rng.Uint32()) }

func (d *Device) since(t time.Time) int64 { return int64(t.Sub(d.epoch)) }

// schedule makes the timer fire at a time since the epoch, or earlier.
func (d *Device) schedule(at int64) {
	if a := d.alarm.Load(); a != 0 && a <= at {
		return
	}
	d.timerMu.Lock()
	defer d.timerMu.Unlock()
	if a := d.alarm.Load(); a != 0 && a <= at {
		return
	}
	d.alarm.Store(at)
	d.timer.Reset(time.Duration(at) - time.Since(d.epoch))
}

// timerLoop serves the timeouts of all queue pairs and the link's changes.
func (d *Device) timerLoop() {
	defer d.wg.Done()
	var changed <-chan struct{}
	if d.watcher != nil {
		changed = d.watcher.LinkChanged()
	}
	var all []*qp
	for {
		select {
		case <-d.done:
			return
		case <-changed:
			d.linkChanged()
		case <-d.timer.C:
			d.timerMu.Lock()
			d.alarm.Store(0)
			d.timerMu.Unlock()
			all = d.qps.all(all[:0])
			d.timeouts(all)
			clear(all)
		}
	}
}

// timeouts serves what is due; the timer's alarm is off.
func (d *Device) timeouts(all []*qp) {
	now := time.Now()
	limit, next := d.since(now), int64(0)
	for _, q := range all {
		at := q.deadline.Load()
		if at != 0 && at <= limit {
			q.own.lock()
			if !q.dead {
				q.m.HandleTimeout(now)
				q.step(now)
			}
			q.unlock()
			at = q.deadline.Load()
		}
		if at != 0 && (next == 0 || at < next) {
			next = at
		}
	}
	if next != 0 {
		d.schedule(next)
	}
}

func (d *Device) linkChanged() {
	now, before := d.watcher.Link(), d.link.Load()
	d.link.Store(&now)
	if now.Up == before.Up {
		return
	}
	kind := rdma.EventPortDown
	if now.Up {
		kind = rdma.EventPortActive
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.contexts {
		c.events.Post(rdma.AsyncEvent{Kind: kind})
	}
}
