// SPDX-License-Identifier: Apache-2.0

package softiwarp

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
)

// Config describes a device to open.
type Config struct {
	// Name is the device's name.
	Name string
	// Addr is the local address of the device's connections, and its only GID. A link-local
	// one of IPv6 needs its zone: the interface, as in fe80::1%eth0.
	Addr netip.Addr
	// LongReplies allows Replies with more than [iwarp.PortablePrivateData] bytes of private data, up
	// to what MPA has. Such a Reply stops the kernel of a peer with Linux's siw, and nothing in its
	// Request tells that a peer has siw. So set LongReplies only if it is known that no peer has.
	LongReplies bool
}

// Validate reports all that is wrong with c.
func (c Config) Validate() error {
	err := tcpqp.CheckAddr(c.Addr)
	if c.Name == "" {
		err = errors.Join(errors.New("name is empty"), err)
	}
	return err
}

// Device is a software RDMA device that speaks iWARP.
type Device struct {
	cfg  Config
	attr rdma.DeviceAttr
	base *softdev.Device
	host *tcpqp.Host
	wg   sync.WaitGroup

	mu     sync.Mutex // guards what follows
	open   map[io.Closer]struct{}
	closed bool
}

var _ rdma.Device = (*Device)(nil)

// Open opens a device. It has no sockets yet, and needs no rights. The sockets that it makes
// later belong to the network namespace of the thread that calls [Device.Dial] or
// [Device.Listen].
func Open(cfg Config) (*Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open softiwarp device %q: %w: %w", cfg.Name, rdma.ErrInvalid, err)
	}
	d := &Device{cfg: cfg, attr: attributes(), open: make(map[io.Closer]struct{})}
	d.base = softdev.New(softdev.Config{Device: d, NewQP: d.newQP})
	d.host = tcpqp.NewHost(d.base)
	return d, nil
}

// Close ends the device with all its contexts, connections and listeners, and waits for its
// goroutines. Open contexts see EventDeviceFatal first; their memory stays mapped until they are
// closed.
func (d *Device) Close() error {
	d.mu.Lock()
	d.closed = true
	open := make([]io.Closer, 0, len(d.open))
	for c := range d.open {
		open = append(open, c)
	}
	d.mu.Unlock()
	for _, c := range open {
		_ = c.Close() // ends who waits for it
	}
	d.base.Close()
	d.host.Close()
	d.wg.Wait()
	return nil
}

// track has Close close c, and runs f, if any, in a goroutine of the device.
func (d *Device) track(c io.Closer, f func()) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("device %q: %w", d.cfg.Name, rdma.ErrClosed)
	case len(d.open) >= maxPending:
		return fmt.Errorf("device %q: %d connections wait: %w", d.cfg.Name, maxPending, rdma.ErrNoResources)
	}
	d.open[c] = struct{}{}
	if f != nil {
		d.wg.Go(f)
	}
	return nil
}

// untrack ends track; it reports false if the device is closed.
func (d *Device) untrack(c io.Closer) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, c)
	return !d.closed
}

// Name implements [rdma.Device].
func (d *Device) Name() string { return d.cfg.Name }

// Attr implements [rdma.Device].
func (d *Device) Attr() rdma.DeviceAttr { return d.attr }

// attributes returns what every device of this package can do.
func attributes() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider:    "softiwarp",
		MaxQP:       softdev.MaxQP,
		MaxCQE:      softdev.MaxCQE,
		MaxMRBytes:  softdev.MaxMRBytes,
		MaxSGE:      iwarp.MaxSGE,
		MaxSendWR:   wq.MaxQueue,
		MaxRecvWR:   wq.MaxQueue,
		MaxInline:   softdev.MaxInline,
		RDMARead:    true,
		SendWithInv: true,
		Solicited:   true,
		GIDTypes:    []rdma.GIDType{rdma.GIDTypeIWARP},

		MaxReadsServed: iwarp.MaxReads, MaxReadsAsked: iwarp.MaxReads,
		Stream: true, PartialWrites: true,

		LocalErrors: true, ResponderEvents: true, SolicitedErrors: true, RefusalsTold: true,
	}
}

// Port implements [rdma.Device]: TCP has no port that could be down.
func (d *Device) Port() rdma.PortAttr { return rdma.PortAttr{State: rdma.PortActive} }

// GIDs implements [rdma.Device].
func (d *Device) GIDs() []rdma.GIDEntry {
	return []rdma.GIDEntry{{GID: rdma.GIDFromAddr(d.cfg.Addr), Type: rdma.GIDTypeIWARP}}
}

// Open implements [rdma.Device].
func (d *Device) Open() (rdma.Context, error) { return d.base.Open() }
