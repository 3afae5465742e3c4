// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// Device is a software RDMA device.
type Device struct {
	cfg     Config
	attr    rdma.DeviceAttr
	wire    Wire
	share   *share      // nil: the address is ours alone
	watcher LinkWatcher // nil: always up
	base    *softdev.Device
	stats   counters
	done    chan struct{}
	wg      sync.WaitGroup
	batches chan *batch   // free ones
	refused chan TooLarge // to be told

	link atomic.Pointer[LinkState]
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
	d := &Device{
		cfg:     cfg,
		attr:    attributes(),
		wire:    wire,
		share:   sharing,
		done:    make(chan struct{}),
		batches: make(chan *batch, freeBatches),
		refused: make(chan TooLarge, 1),
	}
	d.watcher, _ = wire.(LinkWatcher)
	state := LinkState{Up: true, MTUBytes: rocev2.MaxMTUBytes + packetOverhead}
	if d.watcher != nil {
		state = d.watcher.Link()
	}
	d.link.Store(&state)
	d.base = softdev.New(softdev.Config{Device: d, NewQP: d.newQP, DrawQPN: d.drawQPN})
	d.startReceiver(wire.Receive)
	if s, ok := wire.(Spreader); ok {
		s.Spread(d.startReceiver)
	}
	if d.watcher != nil || cfg.TooLarge != nil {
		d.wg.Go(d.follow)
	}
	return d, nil
}

// Close ends the device with all its contexts and waits for its goroutines.
// Open contexts see EventDeviceFatal first; their memory stays mapped until
// they are closed.
func (d *Device) Close() error {
	if !d.base.Close() {
		return nil
	}
	close(d.done)
	err := d.wire.Close()
	d.wg.Wait()
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
func (d *Device) Attr() rdma.DeviceAttr { return d.attr }

// attributes returns what every device of this package can do.
func attributes() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider:     "soft",
		MaxQP:        softdev.MaxQP,
		MaxCQE:       softdev.MaxCQE,
		MaxMRBytes:   softdev.MaxMRBytes,
		MaxSGE:       rocev2.MaxSGE,
		MaxSendWR:    rocev2.MaxQueue,
		MaxRecvWR:    rocev2.MaxQueue,
		MaxInline:    softdev.MaxInline,
		WriteWithImm: true,
		RDMARead:     true,
		SendWithImm:  true,
		Solicited:    true,
		GIDTypes:     []rdma.GIDType{rdma.GIDTypeRoCEv2},

		MaxReadsServed: rocev2.MaxReads, MaxReadsAsked: rocev2.MaxReads,
		PeerCompletes: true, PartialWrites: true, HostRouted: true,

		WCDetails: true, LocalErrors: true, ResponderEvents: true, SolicitedErrors: true,
	}
}

// Port implements [rdma.Device].
func (d *Device) Port() rdma.PortAttr {
	l := d.link.Load()
	a := rdma.PortAttr{State: rdma.PortDown, MaxMTU: rdma.MTU4096, ActiveMTU: pathMTU(l.MTUBytes)}
	if l.Up {
		a.State = rdma.PortActive
	}
	if d.cfg.MTU != 0 {
		a.ActiveMTU = d.maxMTU()
	}
	return a
}

// maxMTU is the largest path MTU that a queue pair may have: with an address on loopback more than what fits each interface,
// which may have changed since the peer was told.
func (d *Device) maxMTU() rdma.MTU {
	l := d.link.Load()
	most := pathMTU(max(l.MTUBytes, l.MaxMTUBytes))
	if d.cfg.MTU != 0 {
		most = min(most, d.cfg.MTU)
	}
	return most
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
func (d *Device) Open() (rdma.Context, error) { return d.base.Open() }

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

// drawQPN draws a queue pair number: all bits but that of the generation are random.
func (d *Device) drawQPN(r *rand.Rand) rdma.QPN {
	return d.inGeneration(rdma.QPN(r.Uint32()) & rdma.MaxQPN)
}

// follow follows the link's changes, and tells of packets that are too large.
func (d *Device) follow() {
	var changed <-chan struct{} // nil: never
	if d.watcher != nil {
		changed = d.watcher.LinkChanged()
	}
	var told time.Time
	for {
		select {
		case <-d.done:
			return
		case <-changed:
			d.linkChanged()
		case p := <-d.refused:
			if now := time.Now(); d.cfg.TooLarge != nil && now.Sub(told) >= tellEvery {
				told = now
				d.cfg.TooLarge(p)
			}
		}
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
	d.base.Tell(kind)
}
