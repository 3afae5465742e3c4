// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/peers"
	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// errNoSDP says why a dialer that requires SDP has no connection.
var errNoSDP = errors.New("sdp: peer has no SDP")

// Dialer connects to SDP services.
type Dialer struct {
	Stack *Stack
	// Dialer opens the TCP connections. An adapter that opens its connections itself does so from its own address; only
	// Dialer.Resolver is used then.
	Dialer net.Dialer
	// Mapper asks the peer's host where a service listens for SDP; nil: the address is the SDP address. It must be nil on an
	// adapter that opens its connections itself: the question names the connection's own port, which the adapter chooses later. For
	// such adapters the kernel has iwpmd ask, where that runs.
	Mapper *portmapper.Client
	// Require makes it an error if the Mapper finds no SDP address. Without Require the connection is plain TCP then.
	Require bool
}

// Dial connects to a service, whose address is a host and a port as in [net.Dial]. If the host has several addresses, Dial tries one after
// the other, those of the family of Dialer.LocalAddr or of the adapter's address. The connection is a *Conn, and the path says its SDP
// address. With a Mapper it can also be a *net.TCPConn to the service's own address; then the path says why.
func (d *Dialer) Dial(ctx context.Context, address string) (net.Conn, portmapper.Path, error) {
	if d.Stack.adapter != nil {
		return d.dialAdapter(ctx, address)
	}
	if d.Mapper == nil {
		tcp, err := plaintcp.Dial(ctx, d.Dialer, address)
		if err != nil {
			return nil, portmapper.Path{}, err
		}
		to, _ := netip.ParseAddrPort(tcp.RemoteAddr().String()) // it is one
		return d.client(ctx, tcp, portmapper.Path{Addr: to, Mapped: true})
	}
	var from netip.Addr
	if a, ok := d.Dialer.LocalAddr.(*net.TCPAddr); ok {
		from = a.AddrPort().Addr()
	}
	services, err := d.resolve(ctx, address, from)
	if err != nil {
		return nil, portmapper.Path{}, fmt.Errorf("dial %s: %w", address, err)
	}
	tcp, path, err := tryEach(ctx, services, func(to netip.AddrPort) (*net.TCPConn, portmapper.Path, error) {
		return d.Mapper.Dial(ctx, &d.Dialer, to)
	})
	switch {
	case err != nil:
		return nil, path, err
	case path.Mapped:
		return d.client(ctx, tcp, path)
	case d.Require:
		_ = tcp.Close()
		return nil, path, fmt.Errorf("dial %s: %w: %v", address, errNoSDP, path)
	}
	return tcp, path, nil
}

// dialAdapter connects by an adapter, which opens the connection of TCP itself.
func (d *Dialer) dialAdapter(ctx context.Context, address string) (net.Conn, portmapper.Path, error) {
	if d.Mapper != nil {
		return nil, portmapper.Path{}, fmt.Errorf("dial %s: the adapter chooses the port that a Mapper would have to name: %w", address, rdma.ErrNotSupported)
	}
	services, err := d.resolve(ctx, address, d.Stack.deviceAddr())
	if err != nil {
		return nil, portmapper.Path{}, fmt.Errorf("dial %s: %w", address, err)
	}
	c, path, err := tryEach(ctx, services, func(to netip.AddrPort) (*Conn, portmapper.Path, error) {
		c, err := d.Stack.dialAdapter(ctx, to)
		return c, portmapper.Path{Addr: to, Mapped: true}, err
	})
	if err != nil {
		return nil, path, err
	}
	return c, path, nil
}

// tryEach connects to the first of the addresses of a service that can be reached.
func tryEach[C any](ctx context.Context, services []netip.AddrPort, dial func(netip.AddrPort) (C, portmapper.Path, error)) (c C, path portmapper.Path, err error) {
	var errs []error
	for _, to := range services {
		if c, path, err = dial(to); err == nil {
			return c, path, nil
		}
		if errs = append(errs, err); ctx.Err() != nil {
			break
		}
	}
	if len(errs) == 1 {
		return c, path, errs[0] // as it is: callers look for a net.Error
	}
	return c, path, errors.Join(errs...)
}

func (d *Dialer) client(ctx context.Context, tcp *net.TCPConn, path portmapper.Path) (net.Conn, portmapper.Path, error) {
	c, err := d.Stack.Client(ctx, tcp)
	if err != nil {
		return nil, path, err
	}
	return c, path, nil
}

// resolve finds the addresses of a service that have the family of from: the others cannot be reached from there. If from is the
// zero Addr or unspecified, as 0.0.0.0 is, all addresses count.
func (d *Dialer) resolve(ctx context.Context, address string, from netip.Addr) ([]netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	r := d.Dialer.Resolver
	if r == nil {
		r = net.DefaultResolver
	}
	p, err := r.LookupPort(ctx, "tcp", port)
	if err != nil {
		return nil, err
	}
	addrs, err := r.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	from = from.Unmap()
	var services []netip.AddrPort
	for _, a := range addrs {
		if a = a.Unmap(); !from.IsValid() || from.IsUnspecified() || a.Is4() == from.Is4() {
			services = append(services, netip.AddrPortFrom(a, uint16(p)))
		}
	}
	if len(services) == 0 {
		return nil, fmt.Errorf("no address of %s can be reached from %v, only %v: %w", host, from, addrs, rdma.ErrInvalid)
	}
	return services, nil
}

// Listener listens for SDP connections. It implements net.Listener.
type Listener struct {
	stack  *Stack
	tcp    *net.TCPListener // nil on an adapter, which has requests
	cm     cm.Listener
	addr   net.Addr
	conns  chan *Conn
	ctx    context.Context //nolint:containedctx // of the goroutines that set connections up, until Close
	cancel context.CancelFunc
	places chan struct{}
	peers  *peers.Places
	wg     sync.WaitGroup
}

var _ net.Listener = (*Listener)(nil)

// Listen listens on an address as in [net.Listen], with networks tcp, tcp4 and tcp6. On an adapter that opens its connections
// itself the address is one of the device, or only a port.
func Listen(ctx context.Context, s *Stack, network, address string) (*Listener, error) {
	if s.adapter != nil {
		return s.listenAdapter(address)
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	n, err := lc.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := n.(*net.TCPListener)
	if !ok {
		_ = n.Close()
		return nil, fmt.Errorf("listen on %s %s: %w", network, address, rdma.ErrInvalid)
	}
	l := s.newListener(tcp.Addr())
	l.tcp = tcp
	l.wg.Go(l.loop)
	return l, nil
}

func (s *Stack) newListener(addr net.Addr) *Listener {
	l := &Listener{
		stack: s, addr: addr, conns: make(chan *Conn, backlog), places: make(chan struct{}, maxSettingUp), peers: peers.New(maxSettingUpPerPeer),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

func (s *Stack) listenAdapter(address string) (*Listener, error) {
	host, port, err := net.SplitHostPort(address)
	if err == nil && host == "" {
		host = s.deviceAddr().String()
	}
	var at netip.AddrPort
	if err == nil {
		at, err = netip.ParseAddrPort(net.JoinHostPort(host, port))
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %q: %w: %w", address, rdma.ErrInvalid, err)
	}
	requests, err := s.adapter.Listen(at)
	if err != nil {
		return nil, err
	}
	l := s.newListener(requests.Addr())
	l.cm = requests
	l.wg.Go(l.loopAdapter)
	return l, nil
}

// Addr is the SDP address.
func (l *Listener) Addr() net.Addr { return l.addr }

// Accept waits for the next connection, which is established.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.ctx.Done():
		return nil, &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Close ends the listener, and resets connections that nobody has accepted.
func (l *Listener) Close() error {
	var err error
	l.cancel()
	if l.cm != nil {
		err = l.cm.Close()
	} else {
		err = l.tcp.Close()
	}
	l.wg.Wait()
	for {
		select {
		case c := <-l.conns:
			_ = c.Abort() // it may have ended
		default:
			return err
		}
	}
}

func (l *Listener) loop() {
	for l.place() {
		tcp, err := l.tcp.AcceptTCP()
		if err != nil {
			l.pause()
			continue
		}
		l.begin(tcp.RemoteAddr(), func() { _ = tcp.Close() }, func() (*Conn, error) { return l.stack.Server(l.ctx, tcp) })
	}
}

func (l *Listener) loopAdapter() {
	for l.place() {
		r, err := l.cm.Accept(l.ctx)
		if err != nil {
			l.pause()
			continue
		}
		l.begin(r.RemoteAddr(), func() { _ = r.Reject(nil) }, func() (*Conn, error) { return l.stack.answerAdapter(l.ctx, r) })
	}
}

// place waits for a place for the next connection; false is the end.
func (l *Listener) place() bool {
	select {
	case l.places <- struct{}{}:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// pause gives a place back, and waits after an error.
func (l *Listener) pause() {
	<-l.places
	select {
	case <-l.ctx.Done():
	case <-time.After(acceptPause): // no descriptors, perhaps
	}
}

// begin has a connection set up, or refuses it.
func (l *Listener) begin(remote net.Addr, refuse func(), setUp func() (*Conn, error)) {
	peer := peers.Of(remote)
	if l.peers.Take(peer) {
		l.wg.Go(func() { l.serve(remote, peer, setUp) })
		return
	}
	l.refused(remote, fmt.Errorf("%w: %d connections of %v are being set up", rdma.ErrNoResources, maxSettingUpPerPeer, peer))
	refuse()
	<-l.places
}

// serve sets a connection up.
func (l *Listener) serve(remote net.Addr, peer netip.Addr, setUp func() (*Conn, error)) {
	defer func() {
		l.peers.GiveBack(peer)
		<-l.places
	}()
	c, err := setUp()
	if err != nil {
		l.refused(remote, err)
		return
	}
	select {
	case l.conns <- c:
	case <-l.ctx.Done():
		_ = c.Abort() // it may have ended
	}
}

func (l *Listener) refused(remote net.Addr, err error) {
	if f := l.stack.cfg.Hooks.Refused; f != nil && l.ctx.Err() == nil {
		f(remote, err)
	}
}
