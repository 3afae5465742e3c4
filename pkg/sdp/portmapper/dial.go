// SPDX-License-Identifier: Apache-2.0

package portmapper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
)

// Path says where a connection of [Client.Dial] leads to.
type Path struct {
	Addr   netip.AddrPort // the peer's
	Mapped bool           // it is the SDP address, and SDP is to be spoken
	Reason Reason         // if not, why
	Err    error          // what there is to say besides, of the socket
}

func (p Path) String() string {
	if p.Mapped {
		return fmt.Sprintf("SDP at %v", p.Addr)
	}
	return fmt.Sprintf("TCP to %v: %v", p.Addr, p.Reason)
}

// Dial connects to a service: to its SDP address, if the port mapper has one and somebody listens there,
// and otherwise to the service itself (§7.5.1). The error is that of the last connection that was tried, or the context's.
//
// d may be nil. Its LocalAddr says from where to connect, as always. Dial takes the port before it asks the port mapper, because
// the question names it.
//
// If the context has a deadline, the question gets half of the time that is left, and a connection to the SDP address half of
// what is left after that. So a host that answers neither does not keep Dial from reaching the service itself. A port mapper or an SDP
// address that had time to answer, and did not, is not tried again for ClientConfig.SilentFor, unless it answers somebody else.
func (c *Client) Dial(ctx context.Context, d *net.Dialer, service netip.AddrPort) (*net.TCPConn, Path, error) {
	service = unmap(service)
	if !isHost(service) {
		return nil, Path{}, fmt.Errorf("dial %v: %w", service, ErrAddress)
	}
	var dialer net.Dialer
	if d != nil {
		dialer = *d
	}
	cp, release, err := c.takePort(ctx, &dialer, service)
	if err != nil {
		return nil, Path{}, fmt.Errorf("dial %v: take a port: %w", service, err)
	}
	defer release()

	path := Path{Addr: service}
	sdp, err := c.lookupInTime(ctx, service, cp)
	var why *LookupError
	switch {
	case err == nil:
		conn, err := c.dialSDP(ctx, &dialer, sdp)
		if err == nil {
			return conn, Path{Addr: sdp, Mapped: true}, nil
		}
		if ctx.Err() != nil {
			return nil, path, err
		}
		// §7.5.1: a reset says what a PMDeny would have; so does an address that is out of reach. One that was not tried says nothing.
		if !errors.Is(err, errMute) {
			c.forget(question{service, cp.Addr()})
		}
		path.Reason, path.Err = Refused, err
	case errors.As(err, &why):
		path.Reason, path.Err = why.Reason, why.Err
	default:
		return nil, path, err
	}
	conn, err := dialTCP(ctx, &dialer, service)
	return conn, path, err
}

// errShare is the cause of a context that got only a part of the caller's time.
var errShare = errors.New("portmapper: no answer in half of the time that was left")

// half is half of the time that a context has left; ok is false if it has no deadline.
func half(ctx context.Context) (d time.Duration, ok bool) {
	at, ok := ctx.Deadline()
	return time.Until(at) / 2, ok
}

// lookupInTime is Lookup in half of the time that ctx has left. The port mapper counts as silent only if this half is one and a half
// times as long as the first question waits: then it has not answered a second one either.
func (c *Client) lookupInTime(ctx context.Context, service, cp netip.AddrPort) (netip.AddrPort, error) {
	share, ok := half(ctx)
	if !ok {
		return c.Lookup(ctx, service, cp)
	}
	soon, cancel := context.WithTimeoutCause(ctx, share, errShare)
	defer cancel()
	return c.lookup(soon, service, cp, share >= c.firstTimeout()*3/2)
}

// errMute says that an SDP address was not tried.
var errMute = errors.New("portmapper: nobody answered at the SDP address a moment ago")

// dialSDP connects to an SDP address. One at which nobody has answered is left alone for a while.
func (c *Client) dialSDP(ctx context.Context, d *net.Dialer, sdp netip.AddrPort) (*net.TCPConn, error) {
	if c.isMute(sdp) {
		return nil, fmt.Errorf("dial %v: %w", sdp, errMute)
	}
	share := connectTimeout
	if d, ok := half(ctx); ok {
		share = min(share, d)
	}
	soon, cancel := context.WithTimeout(ctx, share)
	defer cancel()
	begin := time.Now()
	conn, err := dialTCP(soon, d, sdp)
	var timeout net.Error
	mute := errors.As(err, &timeout) && timeout.Timeout() && time.Since(begin) >= muteAfter
	if err == nil || mute {
		c.note(c.tried, sdp, begin, mute)
	}
	return conn, err
}

// takePort takes a port of TCP for connections of a dialer to a service, which then begin there, until it
// is released: the port mapper is told where the connection comes from (§7.4, CpPort, CpIPAddr).
func (c *Client) takePort(ctx context.Context, d *net.Dialer, service netip.AddrPort) (cp netip.AddrPort, release func(), err error) {
	local, err := c.localAddr(ctx, d, service)
	if err != nil {
		return cp, nil, err
	}
	// A socket that is bound and does nothing shares its port with those that say so, too.
	family, sa := sockaddr(local)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return cp, nil, fmt.Errorf("socket: %w", err)
	}
	release = func() { _ = unix.Close(fd) }
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.Bind(fd, sa)
	}
	var bound unix.Sockaddr
	if err == nil {
		bound, err = unix.Getsockname(fd)
	}
	if err != nil {
		release()
		return cp, nil, fmt.Errorf("bind to %v: %w", local, err)
	}
	cp = netip.AddrPortFrom(local.Addr(), portOf(bound))
	d.LocalAddr = net.TCPAddrFromAddrPort(cp)
	shareAddress(d)
	return cp, release, nil
}

// localAddr is where a connection of a dialer begins; port 0 is any.
func (c *Client) localAddr(ctx context.Context, d *net.Dialer, service netip.AddrPort) (netip.AddrPort, error) {
	var from netip.AddrPort
	if d.LocalAddr != nil {
		a, ok := d.LocalAddr.(*net.TCPAddr)
		if !ok {
			return from, fmt.Errorf("local address %v is of %s: want one of TCP", d.LocalAddr, d.LocalAddr.Network())
		}
		if from = unmap(a.AddrPort()); from.Addr().IsValid() && !from.Addr().IsUnspecified() {
			return from, nil
		}
	}
	// The kernel chooses an address for a socket of UDP as for one of TCP, and sends nothing.
	u := net.Dialer{Control: c.cfg.Control}
	n, err := u.DialContext(ctx, "udp", service.String())
	if err != nil {
		return from, err
	}
	defer func() { _ = n.Close() }()
	chosen, err := netip.ParseAddrPort(n.LocalAddr().String())
	return netip.AddrPortFrom(chosen.Addr().Unmap(), from.Port()), err
}

// shareAddress has the sockets of a dialer share their port with the one that has taken it.
func shareAddress(d *net.Dialer) {
	if before := d.ControlContext; before != nil {
		d.ControlContext = func(ctx context.Context, network, address string, r syscall.RawConn) error {
			return errors.Join(plaintcp.ShareAddress(r), before(ctx, network, address, r))
		}
		return
	}
	before := d.Control
	d.Control = func(network, address string, r syscall.RawConn) error {
		if before != nil {
			if err := before(network, address, r); err != nil {
				return err
			}
		}
		return plaintcp.ShareAddress(r)
	}
}

// dialTCP opens a connection, unless it would be one of a port to itself.
func dialTCP(ctx context.Context, d *net.Dialer, to netip.AddrPort) (*net.TCPConn, error) {
	t, err := plaintcp.Dial(ctx, *d, to.String())
	if err != nil {
		return nil, err
	}
	if t.LocalAddr().String() == t.RemoteAddr().String() {
		// TCP connects a port to itself if nobody listens there, and ours may be just that.
		_ = t.Close()
		return nil, fmt.Errorf("dial %v: %w", to, syscall.ECONNREFUSED)
	}
	return t, nil
}

func sockaddr(a netip.AddrPort) (family int, sa unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16(), ZoneId: zoneID(a.Addr().Zone())}
}

func zoneID(zone string) uint32 {
	if zone == "" {
		return 0
	}
	i, err := net.InterfaceByName(zone)
	if err != nil {
		return 0
	}
	return uint32(i.Index)
}

func portOf(sa unix.Sockaddr) uint16 {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port)
	case *unix.SockaddrInet6:
		return uint16(a.Port)
	}
	return 0
}
