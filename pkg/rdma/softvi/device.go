// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// Config describes a device to open.
type Config struct {
	// Name is the device's name.
	Name string
	// Addr is the local address of the device's connections, and its only GID. A link-local
	// one of IPv6 needs its zone: the interface, as in fe80::1%eth0.
	Addr netip.Addr
	// Port is the TCP port of VI/TCP, the same one on all hosts: the draft has none, so it is
	// yours to choose. 0: the kernel picks one for calls to this device, see [Device.Addr].
	Port uint16
	// RequestTimeout is how long a new TCP connection may go without a Connect Request, and
	// AcceptTimeout how long a request may wait for the program; 0:
	// vitcp.DefaultRequestTimeout, vitcp.DefaultAcceptTimeout.
	RequestTimeout, AcceptTimeout time.Duration
}

// Validate reports all that is wrong with c.
func (c Config) Validate() error {
	err := tcpqp.CheckAddr(c.Addr)
	if c.Name == "" {
		err = errors.Join(errors.New("name is empty"), err)
	}
	if c.RequestTimeout < 0 || c.AcceptTimeout < 0 {
		err = errors.Join(err, fmt.Errorf("timeouts %v and %v are negative", c.RequestTimeout, c.AcceptTimeout))
	}
	return err
}

// Device is a software RDMA device that speaks VI/TCP.
type Device struct {
	cfg  Config
	attr rdma.DeviceAttr
	base *softdev.Device
	host *tcpqp.Host
	tcp  *net.TCPListener
	done chan struct{}
	wg   sync.WaitGroup

	mu        sync.Mutex // guards what follows
	closed    bool
	pending   map[*Request]struct{} // whose goroutine runs
	sources   map[netip.Addr]int    // those of an address
	listeners map[vitcp.Discriminator]*Listener
	peers     map[crossing]*call // calls that meet the peer's own
}

var _ rdma.Device = (*Device)(nil)

// Open opens a device, and its TCP port. It needs no rights. The port belongs to the network
// namespace of the thread that calls it, and connections to that of the thread that calls
// [Device.Dial] or [Device.DialPeer].
func Open(cfg Config) (*Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open softvi device %q: %w: %w", cfg.Name, rdma.ErrInvalid, err)
	}
	tcp, err := plaintcp.Listen(context.Background(), net.JoinHostPort(cfg.Addr.String(), strconv.Itoa(int(cfg.Port))))
	if err != nil {
		return nil, fmt.Errorf("open softvi device %q: port of VI/TCP: %w", cfg.Name, err)
	}
	d := &Device{
		cfg:       cfg,
		attr:      attributes(),
		tcp:       tcp,
		done:      make(chan struct{}),
		pending:   make(map[*Request]struct{}),
		sources:   make(map[netip.Addr]int),
		listeners: make(map[vitcp.Discriminator]*Listener),
		peers:     make(map[crossing]*call),
	}
	d.base = softdev.New(softdev.Config{Device: d, NewQP: d.newQP})
	d.host = tcpqp.NewHost(d.base)
	d.wg.Go(d.accept)
	return d, nil
}

// Close ends the device with all its contexts, connections, calls and listeners, and waits for
// its goroutines. Open contexts see EventDeviceFatal first; their memory stays mapped until they
// are closed.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		d.wg.Wait()
		return nil
	}
	d.closed = true
	close(d.done)
	listeners := make([]*Listener, 0, len(d.listeners))
	for _, l := range d.listeners {
		listeners = append(listeners, l)
	}
	for r := range d.pending {
		_ = r.conn.Close() // ends who waits for it
	}
	d.mu.Unlock()
	_ = d.tcp.Close()
	for _, l := range listeners {
		_ = l.Close()
	}
	d.base.Close()
	d.host.Close()
	d.wg.Wait()
	return nil
}

// Name implements [rdma.Device].
func (d *Device) Name() string { return d.cfg.Name }

// Addr is where other hosts reach the device: its address and TCP port.
func (d *Device) Addr() netip.AddrPort {
	port := uint16(0)
	if a, ok := d.tcp.Addr().(*net.TCPAddr); ok {
		port = a.AddrPort().Port()
	}
	return netip.AddrPortFrom(d.cfg.Addr, port)
}

// Attr implements [rdma.Device]. PeerCompletes is what reliable connections keep: one that was
// made with Options.Unreliable does not.
func (d *Device) Attr() rdma.DeviceAttr { return d.attr }

// attributes returns what every device of this package can do.
func attributes() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider:     "softvi",
		MaxQP:        softdev.MaxQP,
		MaxCQE:       softdev.MaxCQE,
		MaxMRBytes:   softdev.MaxMRBytes,
		MaxSGE:       vitcp.MaxSGE,
		MaxSendWR:    wq.MaxQueue,
		MaxRecvWR:    vitcp.MaxRecvWR,
		MaxInline:    softdev.MaxInline,
		WriteWithImm: true,
		RDMARead:     true,
		SendWithImm:  true,
		GIDTypes:     []rdma.GIDType{rdma.GIDTypeUnknown},

		MaxReadsServed: vitcp.MaxReadWindow, MaxReadsAsked: vitcp.MaxReadWindow,
		Stream: true, PeerCompletes: true, PartialWrites: true,

		LocalErrors: true, ResponderEvents: true, SolicitedErrors: true, RefusalsTold: true,
	}
}

// Port implements [rdma.Device]: TCP has no port that could be down.
func (d *Device) Port() rdma.PortAttr { return rdma.PortAttr{State: rdma.PortActive} }

// GIDs implements [rdma.Device].
func (d *Device) GIDs() []rdma.GIDEntry {
	return []rdma.GIDEntry{{GID: rdma.GIDFromAddr(d.cfg.Addr), Type: rdma.GIDTypeUnknown}}
}

// Open implements [rdma.Device].
func (d *Device) Open() (rdma.Context, error) { return d.base.Open() }

// accept takes the connections of the device's port (§2.2.2.2.1: one for all programs).
func (d *Device) accept() {
	for {
		c, err := d.tcp.AcceptTCP()
		if err == nil {
			if err = d.admit(c); err != nil {
				_ = c.Close()
			}
			continue
		}
		select {
		case <-d.done:
			return
		case <-time.After(acceptPause):
		}
	}
}

// Serve takes over a connection that the program has accepted by itself, as if it had come in
// at the device's port: its Connect Request goes to whom it names. c is closed for whoever has it, and after
// ErrNoResources and ErrClosed for good; after ErrInvalid and ErrState it is as it was.
func (d *Device) Serve(c *net.TCPConn) error {
	err := tcpqp.CheckConn(c, d.cfg.Addr)
	var own tcpqp.Taken
	if err == nil {
		own, err = tcpqp.TakeOver(c)
	}
	if err == nil {
		if err = d.admit(own.TCPConn); err != nil {
			_ = own.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("serve connection: %w", err)
	}
	return nil
}

// admit has a connection be served, if there is room for one more of its source.
func (d *Device) admit(c *net.TCPConn) error {
	r := newRequest(d, c)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("device %q: %w", d.cfg.Name, rdma.ErrClosed)
	case len(d.pending) >= maxPending:
		return fmt.Errorf("device %q: %d connections are not answered: %w", d.cfg.Name, maxPending, rdma.ErrNoResources)
	case d.sources[r.source] >= maxPendingOfSource:
		return fmt.Errorf("device %q: %d connections of %v are not answered: %w", d.cfg.Name, maxPendingOfSource, r.source, rdma.ErrNoResources)
	}
	d.pending[r] = struct{}{}
	d.sources[r.source]++
	d.wg.Go(r.run)
	return nil
}

// release ends admit.
func (d *Device) release(r *Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.pending, r)
	if d.sources[r.source]--; d.sources[r.source] == 0 {
		delete(d.sources, r.source)
	}
}
