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

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// errNoSDP says why a dialer that requires SDP has no connection.
var errNoSDP = errors.New("sdp: peer has no SDP")

// Dialer connects to SDP services.
type Dialer struct {
	Stack *Stack
	// Dialer opens the connections of TCP.
	Dialer net.Dialer
	// Mapper asks the peer's host where a service listens for SDP. nil: the address is the SDP address.
	Mapper *portmapper.Client
	// Require makes a service without SDP an error. Without it the connection is plain TCP.
	Require bool
}

// Dial connects to a service: an address as in [net.Dial], of a host and a port. With a Mapper the connection may be plain TCP to that very
// address; then it is a *net.TCPConn, and the path says why. Else it is a *Conn.
func (d *Dialer) Dial(ctx context.Context, address string) (net.Conn, portmapper.Path, error) {
	if d.Mapper == nil {
		dialer := d.Dialer
		dialer.SetMultipathTCP(false)
		n, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, portmapper.Path{}, err
		}
		tcp, ok := n.(*net.TCPConn)
		if !ok {
			_ = n.Close()
			return nil, portmapper.Path{}, fmt.Errorf("dial %s: connection is %T: %w", address, n, rdma.ErrInvalid)
		}
		to, _ := netip.ParseAddrPort(tcp.RemoteAddr().String()) // it is one
		return d.client(ctx, tcp, portmapper.Path{Addr: to, Mapped: true})
	}
	service, err := d.resolve(ctx, address)
	if err != nil {
		return nil, portmapper.Path{}, fmt.Errorf("dial %s: %w", address, err)
	}
	tcp, path, err := d.Mapper.Dial(ctx, &d.Dialer, service)
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

func (d *Dialer) client(ctx context.Context, tcp *net.TCPConn, path portmapper.Path) (net.Conn, portmapper.Path, error) {
	c, err := d.Stack.Client(ctx, tcp)
	if err != nil {
		return nil, path, err
	}
	return c, path, nil
}

// resolve finds the address of a service: the first that the name has.
func (d *Dialer) resolve(ctx context.Context, address string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	r := d.Dialer.Resolver
	if r == nil {
		r = net.DefaultResolver
	}
	p, err := r.LookupPort(ctx, "tcp", port)
	if err != nil {
		return netip.AddrPort{}, err
	}
	addrs, err := r.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.AddrPortFrom(addrs[0].Unmap(), uint16(p)), nil
}

// Listener listens for SDP connections. It implements net.Listener.
type Listener struct {
	stack  *Stack
	tcp    *net.TCPListener
	conns  chan *Conn
	ctx    context.Context //nolint:containedctx // of the goroutines that set connections up, until Close
	cancel context.CancelFunc
	places chan struct{}
	wg     sync.WaitGroup

	mu    sync.Mutex // guards what follows
	peers map[netip.Addr]int
}

var _ net.Listener = (*Listener)(nil)

// Listen listens on an address as in [net.Listen], with networks tcp, tcp4 and tcp6.
func Listen(ctx context.Context, s *Stack, network, address string) (*Listener, error) {
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
	l := &Listener{
		stack: s, tcp: tcp, conns: make(chan *Conn, backlog), places: make(chan struct{}, maxSettingUp), peers: make(map[netip.Addr]int),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(l.loop)
	return l, nil
}

// Addr is the SDP address.
func (l *Listener) Addr() net.Addr { return l.tcp.Addr() }

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
	err := l.tcp.Close()
	l.cancel()
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
	for {
		select {
		case l.places <- struct{}{}:
		case <-l.ctx.Done():
			return
		}
		tcp, err := l.tcp.AcceptTCP()
		if err != nil {
			<-l.places
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(acceptPause): // no descriptors, perhaps
			}
			continue
		}
		peer := addrOf(tcp)
		if !l.admit(peer) {
			l.refused(tcp, fmt.Errorf("%w: %d connections of %v are being set up", rdma.ErrNoResources, maxSettingUpPerPeer, peer))
			_ = tcp.Close()
			<-l.places
			continue
		}
		l.wg.Go(func() { l.serve(tcp, peer) })
	}
}

// admit takes a place for a peer, of which one has a part only.
func (l *Listener) admit(peer netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.peers[peer] >= maxSettingUpPerPeer {
		return false
	}
	l.peers[peer]++
	return true
}

func (l *Listener) done(peer netip.Addr) {
	l.mu.Lock()
	if l.peers[peer]--; l.peers[peer] == 0 {
		delete(l.peers, peer)
	}
	l.mu.Unlock()
	<-l.places
}

// serve sets a connection up.
func (l *Listener) serve(tcp *net.TCPConn, peer netip.Addr) {
	defer l.done(peer)
	c, err := l.stack.Server(l.ctx, tcp)
	if err != nil {
		l.refused(tcp, err)
		return
	}
	select {
	case l.conns <- c:
	case <-l.ctx.Done():
		_ = c.Abort() // it may have ended
	}
}

func (l *Listener) refused(tcp *net.TCPConn, err error) {
	if f := l.stack.cfg.Hooks.Refused; f != nil && l.ctx.Err() == nil {
		f(tcp.RemoteAddr(), err)
	}
}

func addrOf(tcp *net.TCPConn) netip.Addr {
	a, _ := netip.ParseAddrPort(tcp.RemoteAddr().String()) // it is one
	return a.Addr().Unmap().WithZone("")
}
