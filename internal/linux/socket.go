// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// soOriginalDst is SO_ORIGINAL_DST of SOL_IP and IP6T_SO_ORIGINAL_DST of
// SOL_IPV6: the same number.
const soOriginalDst = 80

// Control prepares a socket before it is bound, as in [net.ListenConfig] and
// [net.Dialer].
type Control func(network, address string, c syscall.RawConn) error

// OriginalDst returns where a connection that the outbound redirection brought
// to the agent's listener was going. The error is [ErrNotRedirected] if it was
// made to the listener itself, or to another address of its own machine: those
// are never diverted, and the way there may lead back to the listener.
func OriginalDst(c syscall.Conn) (netip.AddrPort, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("original destination: %w", err)
	}
	var dst, local, peer netip.AddrPort
	cerr := rc.Control(func(fd uintptr) {
		if local, err = sockName(int(fd)); err != nil {
			return
		}
		if dst, err = originalDst(int(fd), local.Addr().Is4()); err == nil {
			peer, err = peerName(int(fd))
		}
	})
	if err = errors.Join(cerr, err); errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOPROTOOPT) {
		return netip.AddrPort{}, fmt.Errorf("original destination of a connection to %v: %w", local, ErrNotRedirected)
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("original destination of a connection to %v: %w", local, err)
	}
	if dst == local || dst.Addr().Unmap().IsLoopback() || dst.Addr() == peer.Addr() {
		return netip.AddrPort{}, fmt.Errorf("connection to %v, originally to %v: %w", local, dst, ErrNotRedirected)
	}
	return dst, nil
}

// TransparentDst returns where a connection from the network was going that came to
// the agent's transparent listener on port. The error is [ErrNotRedirected] if it
// was made to the listener itself: the redirection takes none on loopback, and
// none to that port.
func TransparentDst(c *net.TCPConn, port uint16) (netip.AddrPort, error) {
	dst := unmap(c.LocalAddr().(*net.TCPAddr).AddrPort())
	if dst.Addr().IsLoopback() || dst.Port() == port {
		return netip.AddrPort{}, fmt.Errorf("connection to %v: %w", dst, ErrNotRedirected)
	}
	return dst, nil
}

// originalDst reads the destination from connection tracking. The option
// returns a sockaddr, which x/sys can read as part of other structures of
// sufficient size.
func originalDst(fd int, is4 bool) (netip.AddrPort, error) {
	if is4 {
		m, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, soOriginalDst)
		if err != nil {
			return netip.AddrPort{}, err
		}
		sa := m.Multiaddr // struct sockaddr_in: family, port, address
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(sa[4:8])), binary.BigEndian.Uint16(sa[2:4])), nil
	}
	m, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, soOriginalDst)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var port [2]byte
	binary.NativeEndian.PutUint16(port[:], m.Addr.Port)
	return netip.AddrPortFrom(netip.AddrFrom16(m.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}

// sockName is the local address of a socket, an IPv4 address as such.
func sockName(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return addrPort(sa)
}

// peerName is the address of a socket's peer.
func peerName(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getpeername(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return addrPort(sa)
}

func addrPort(sa unix.Sockaddr) (netip.AddrPort, error) {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port)), nil
	default:
		return netip.AddrPort{}, fmt.Errorf("socket address is %T, not TCP", sa)
	}
}

// ControlTransparent lets the listener for diverted inbound connections accept
// connections to every address of the pod, and a dialer bind to foreign
// addresses. It is a [Control].
func ControlTransparent(network, _ string, c syscall.RawConn) error {
	return withFD(c, func(fd int) error { return setTransparent(fd, network != "tcp6") })
}

// ControlMark returns a Control that sets the socket mark.
func ControlMark(mark uint32) Control {
	return func(_, _ string, c syscall.RawConn) error {
		return withFD(c, func(fd int) error { return setMark(fd, mark) })
	}
}

// ControlSucceed lets listeners of an earlier and a later agent be on one port.
// The later one calls [Succeed].
func ControlSucceed(_, _ string, c syscall.RawConn) error {
	return withFD(c, func(fd int) error {
		return sockopt("SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	})
}

// Succeed makes a listener, prepared with [ControlSucceed], get all new
// connections to its address in place of the one that was there before; that
// one keeps what it has not accepted yet. There must not be a third one.
//
// The kernel numbers the listeners of an address from 0 in the order in which
// they came, and when one goes the last one takes its number. The program says
// 1: the younger of two. If there is no 1, the kernel takes the one that there
// is. All agents attach the same program, so it is in force already when the
// younger one begins to listen.
func Succeed(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return fmt.Errorf("succeed an earlier listener: %w", err)
	}
	filter := [...]unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 1}}
	err = withFD(raw, func(fd int) error {
		return sockopt("SO_ATTACH_REUSEPORT_CBPF", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}))
	})
	if err != nil {
		return fmt.Errorf("succeed an earlier listener at %v: %w", l.Addr(), err)
	}
	return nil
}

// Controls runs several in order; nil ones are left out.
func Controls(cs ...Control) Control {
	return func(network, address string, c syscall.RawConn) error {
		for _, f := range cs {
			if f == nil {
				continue
			}
			if err := f(network, address, c); err != nil {
				return err
			}
		}
		return nil
	}
}

func withFD(c syscall.RawConn, f func(fd int) error) error {
	var err error
	return errors.Join(c.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

func setTransparent(fd int, is4 bool) error {
	if is4 {
		return sockopt("IP_TRANSPARENT", unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1))
	}
	return sockopt("IPV6_TRANSPARENT", unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1))
}

func setMark(fd int, mark uint32) error {
	return sockopt("SO_MARK", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
}

func sockopt(name string, err error) error {
	if err == nil {
		return nil
	}
	return os.NewSyscallError("setsockopt "+name, err)
}

// ListenInNS listens at addr inside ns. MPTCP is off: its listeners refuse
// TCP_SAVE_SYN, from which the SMC-R option of a SYN is read.
func ListenInNS(ctx context.Context, ns *NetNS, control Control, addr netip.AddrPort) (*net.TCPListener, error) {
	lc := net.ListenConfig{Control: control}
	lc.SetMultipathTCP(false)
	var ln net.Listener
	err := ns.Do(func() (err error) {
		ln, err = lc.Listen(ctx, tcpNetwork(addr.Addr()), addr.String())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", ns, err)
	}
	return ln.(*net.TCPListener), nil
}

// ListenTransparent listens at addr inside ns for diverted inbound
// connections. The local address of an accepted connection is where the peer
// connected to.
func ListenTransparent(ctx context.Context, ns *NetNS, control Control, addr netip.AddrPort) (*net.TCPListener, error) {
	return ListenInNS(ctx, ns, Controls(ControlTransparent, control), addr)
}

func tcpNetwork(a netip.Addr) string {
	if a.Unmap().Is4() {
		return "tcp4"
	}
	return "tcp6"
}
