// SPDX-License-Identifier: Apache-2.0

package softtest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// Faults says what a fabric does to datagrams. Probabilities are 0 to 1.
type Faults struct {
	Loss      float64
	Duplicate float64
	Reorder   float64       // held back by up to ReorderBy
	Corrupt   float64       // one to three bytes changed
	Delay     time.Duration // of every datagram
	Jitter    time.Duration // up to that much more for a run of datagrams
	ReorderBy time.Duration // 0: a millisecond
	MaxBytes  int           // longer datagrams are lost; 0: none

	// KeepFatalNAKs spares the NAKs that end a queue pair. They are sent
	// once; without them the requester ends with StatusRetryExceeded, and a
	// test that wants to see the real reason could not tell.
	KeepFatalNAKs bool
}

// fatalNAK reports whether b is an acknowledge packet with a NAK other than
// the one for a PSN sequence error.
func fatalNAK(b []byte) bool {
	const acknowledge, aeth, kind, kindNAK, value = 17, 12, 0xe0, 0x60, 0x1f
	return len(b) > aeth && b[0] == acknowledge && b[aeth]&kind == kindNAK && b[aeth]&value != 0
}

// fabricQueue bounds the datagrams that wait for a receiver, as a socket's
// buffer does.
const fabricQueue = 8192

// Fabric is a network in memory.
type Fabric struct {
	seed uint64

	mu     sync.Mutex
	faults Faults
	wires  map[netip.AddrPort]*fabricWire
	cuts   map[[2]netip.Addr]bool
	tap    func(from, to netip.AddrPort, b []byte)
}

// NewFabric returns a network without faults; t logs the seed if it fails.
func NewFabric(t interface {
	Cleanup(func())
	Failed() bool
	Logf(string, ...any)
}, seed uint64,
) *Fabric {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("fabric seed: %d", seed)
		}
	})
	return &Fabric{
		seed:  seed,
		wires: make(map[netip.AddrPort]*fabricWire),
		cuts:  make(map[[2]netip.Addr]bool),
	}
}

// SetFaults changes the faults from now on.
func (f *Fabric) SetFaults(x Faults) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = x
}

// Cut stops or restores what goes from one address to another; the other way
// is another cut.
func (f *Fabric) Cut(from, to netip.Addr, cut bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cuts[[2]netip.Addr{from, to}] = cut
}

// Tap calls fn for every datagram that is sent, before any fault. fn must not
// keep the bytes and must not call the fabric.
func (f *Fabric) Tap(fn func(from, to netip.AddrPort, b []byte)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tap = fn
}

// SetLink changes the state of the link under an address.
func (f *Fabric) SetLink(addr netip.Addr, up bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for at, w := range f.wires {
		if at.Addr() != addr {
			continue
		}
		w.up = up
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

// Inject sends a datagram as if from an address that nobody needs to have.
func (f *Fabric) Inject(from, to netip.AddrPort, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if w := f.wires[to]; w != nil {
		w.put(from, slices.Clone(b))
	}
}

// Wire attaches an address. Two wires with one address are a mistake of the
// test, which panics.
func (f *Fabric) Wire(at netip.AddrPort) soft.Wire {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.wires[at] != nil {
		panic(fmt.Sprintf("softtest: address %v is in use", at))
	}
	w := &fabricWire{
		f:       f,
		at:      at,
		up:      true,
		rng:     rand.New(rand.NewPCG(f.seed, uint64(len(f.wires)))),
		in:      make(chan datagram, fabricQueue),
		changed: make(chan struct{}, 1),
		done:    make(chan struct{}),
	}
	f.wires[at] = w
	return w
}

// Open opens a software device on the fabric and closes it with the test.
func (f *Fabric) Open(t interface {
	Cleanup(func())
	Fatalf(string, ...any)
}, cfg soft.Config,
) *soft.Device {
	port := cfg.Port
	if port == 0 {
		port = 4791
	}
	cfg.Wire = f.Wire(netip.AddrPortFrom(cfg.Addr, port))
	d, err := soft.Open(cfg)
	if err != nil {
		t.Fatalf("open device on the fabric: %v", err)
		return nil
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

type datagram struct {
	from netip.AddrPort
	data []byte
}

// fabricWire is one address. Its rng and up are guarded by the fabric's lock.
type fabricWire struct {
	f       *Fabric
	at      netip.AddrPort
	up      bool
	rng     *rand.Rand
	in      chan datagram
	changed chan struct{}
	done    chan struct{}
	once    sync.Once
	last    time.Time // when the previous datagram in order arrives
}

var (
	_ soft.Wire        = (*fabricWire)(nil)
	_ soft.LinkWatcher = (*fabricWire)(nil)
)

// MaxSegments implements [soft.Wire].
func (w *fabricWire) MaxSegments() int { return 1 }

// Link implements [soft.LinkWatcher].
func (w *fabricWire) Link() soft.LinkState {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	return soft.LinkState{Up: w.up, MTUBytes: 9000, NetDev: "fabric", MAC: rdma.MAC{2, 0, 0, 0, 0, 1}}
}

// LinkChanged implements [soft.LinkWatcher].
func (w *fabricWire) LinkChanged() <-chan struct{} { return w.changed }

// Send implements [soft.Wire].
func (w *fabricWire) Send(msgs []soft.Message) (int, error) {
	f := w.f
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range msgs {
		b := slices.Concat(msgs[i].Bufs...)
		if f.tap != nil {
			f.tap(w.at, msgs[i].Peer, b)
		}
		w.deliver(msgs[i].Peer, b)
	}
	return len(msgs), nil
}

func (w *fabricWire) chance(p float64) bool { return p > 0 && w.rng.Float64() < p }

// deliver passes one datagram through the faults.
func (w *fabricWire) deliver(to netip.AddrPort, b []byte) {
	f := w.f
	dst := f.wires[to]
	if dst == nil || !w.up || !dst.up || f.cuts[[2]netip.Addr{w.at.Addr(), to.Addr()}] {
		return
	}
	if f.faults.KeepFatalNAKs && fatalNAK(b) {
		w.schedule(dst, datagram{w.at, b})
		return
	}
	if m := f.faults.MaxBytes; m > 0 && len(b) > m {
		return
	}
	if w.chance(f.faults.Loss) {
		return
	}
	if w.chance(f.faults.Corrupt) && len(b) > 0 {
		for range 1 + w.rng.IntN(3) {
			b[w.rng.IntN(len(b))] ^= byte(1 + w.rng.IntN(255))
		}
	}
	copies := 1
	if w.chance(f.faults.Duplicate) {
		copies = 2
	}
	for range copies {
		w.schedule(dst, datagram{w.at, slices.Clone(b)})
	}
}

// schedule delivers now or later; datagrams stay in order unless the faults
// reorder them.
func (w *fabricWire) schedule(dst *fabricWire, d datagram) {
	x := w.f.faults
	if x.Delay == 0 && x.Jitter == 0 && x.Reorder == 0 {
		dst.put(d.from, d.data)
		return
	}
	now := time.Now()
	at := now.Add(x.Delay)
	if x.Jitter > 0 && w.chance(0.1) {
		at = at.Add(time.Duration(w.rng.Int64N(int64(x.Jitter))))
	}
	if w.chance(x.Reorder) {
		by := x.ReorderBy
		if by == 0 {
			by = time.Millisecond
		}
		at = at.Add(time.Duration(1 + w.rng.Int64N(int64(by))))
	} else {
		// One nanosecond apart: timers of one instant fire in any order.
		if !at.After(w.last) {
			at = w.last.Add(1)
		}
		w.last = at
	}
	time.AfterFunc(at.Sub(now), func() { dst.put(d.from, d.data) })
}

// put gives a datagram to the receiver, if it has room.
func (w *fabricWire) put(from netip.AddrPort, b []byte) {
	select {
	case w.in <- datagram{from, b}:
	default:
	}
}

// Receive implements [soft.Wire].
func (w *fabricWire) Receive(take func([]soft.Message), idle func() bool) error {
	var msgs [32]soft.Message
	for {
		for len(w.in) == 0 && idle() {
			time.Sleep(time.Microsecond) // a virtual clock has to go on
		}
		select {
		case d := <-w.in:
			msgs[0] = soft.Message{Peer: d.from, Data: d.data}
		case <-w.done:
			return net.ErrClosed
		}
		n := 1
		for n < len(msgs) && len(w.in) > 0 { // nobody else takes them
			d := <-w.in
			msgs[n] = soft.Message{Peer: d.from, Data: d.data}
			n++
		}
		take(msgs[:n])
	}
}

// Close implements [soft.Wire].
func (w *fabricWire) Close() error {
	w.once.Do(func() { close(w.done) })
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	if w.f.wires[w.at] == w {
		delete(w.f.wires, w.at)
	}
	return nil
}
