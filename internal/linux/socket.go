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

// OriginalDst returns the original destination of a connection that the outbound
// redirection diverted to the agent's listener. The error is [ErrNotRedirected] if a
// program connected to the listener itself, or to another address of its own machine: such
// connections are never diverted, and a dial to that address may lead back to the listener.
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

// TransparentDst returns the destination of a connection from the network that was
// diverted to the agent's transparent listener on port. The error is [ErrNotRedirected] if
// a program connected to the listener itself: no connection on loopback, or to that port,
// is ever diverted.
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

// sockName is the local address of a socket. An IPv4 address is not in its IPv6 form.
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

// ControlDelayACK lets the kernel acknowledge a SYN-ACK with the first data, for which it waits up to
// 200 ms. A connection that is reset before was never there for the server's application:
//
//	we      SYN
//	server  SYN-ACK
//	we      RST, as the SYN-ACK has no SMC-R option: nothing was accepted
func ControlDelayACK(_, _ string, c syscall.RawConn) error {
	return withFD(c, func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0); err != nil {
			return sockopt("TCP_QUICKACK", err)
		}
		return nil
	})
}

// ControlMark returns a Control that sets the socket mark.
func ControlMark(mark uint32) Control {
	return func(_, _ string, c syscall.RawConn) error {
		return withFD(c, func(fd int) error { return setMark(fd, mark) })
	}
}

// ControlSucceed lets the listeners of an earlier and a later agent have the same address
// and port. The later agent calls [Succeed].
func ControlSucceed(_, _ string, c syscall.RawConn) error {
	return withFD(c, func(fd int) error {
		return sockopt("SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	})
}

// Succeed makes a listener, prepared with [ControlSucceed], get all new connections to its
// address in place of the earlier listener, which keeps the connections in its queue.
// There must be no third listener.
//
// The kernel numbers the listeners of an address from 0 in the order in which they began
// to listen. When a listener is closed, the last one gets its number. The attached program
// returns 1, which is the younger of two listeners; if there is no number 1, the kernel
// takes the only listener. All agents attach the same program, so it is in force already
// when the younger one begins to listen:
//
//	old listens          0: old            all connections to old
//	new listens          0: old, 1: new    all connections to new
//	old is closed        0: new            all connections to new
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

// ListenInNS listens at addr inside ns. MPTCP is off, because its listeners refuse
// TCP_SAVE_SYN, which is needed to read the SMC-R option of a SYN.
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

func tcpNetwork(a netip.Addr) string {
	if a.Unmap().Is4() {
		return "tcp4"
	}
	return "tcp6"
}

// mostPacket is how many bytes the kernel puts into one packet at most, before the NIC divides it.
const mostPacket = 64 << 10

// LimitBuffers limits a connection's two kernel buffers to twice the given bytes in all, and so the
// memory that is charged to the process for a connection whose peer does not read. It ends
// the automatic growth of the buffers. The kernel doubles the value that it is told, to allow for its
// overhead per packet, and begins a packet as long as there is any room to send: both buffers are
// smaller by half a packet for that. With CAP_NET_ADMIN the kernel's own limits do not apply.
func LimitBuffers(c *net.TCPConn, bytes int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return withFD(raw, func(fd int) error {
		var errs []error
		told := max(bytes-mostPacket/2, bytes/2) / 2
		for _, opt := range [...]struct{ force, plain int }{{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}} {
			if unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt.force, told) != nil {
				errs = append(errs, os.NewSyscallError("setsockopt of a buffer's size", unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt.plain, told)))
			}
		}
		return errors.Join(errs...)
	})
}

// HungUp reports whether both streams of a connection are over and no error waits to be told: they have
// both ended, or somebody was told of a reset. The kernel tells of that once, and reads find the end of
// the stream from then on.
func HungUp(c *net.TCPConn) (over bool, err error) {
	ends, err := pollEnds(c)
	return ends&(unix.POLLHUP|unix.POLLERR) == unix.POLLHUP, err
}

// IsOver reports whether both streams of a connection are over: they have both ended, or the connection was reset, whether
// somebody was told or not.
func IsOver(c *net.TCPConn) (over bool, err error) {
	ends, err := pollEnds(c)
	return ends&unix.POLLHUP != 0, err
}

// pollEnds is what poll tells of a connection without being asked for anything: POLLHUP and POLLERR.
func pollEnds(c *net.TCPConn) (ends int16, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = withFD(raw, func(fd int) error {
		p := [...]unix.PollFd{{Fd: int32(fd)}}
		_, err := unix.Poll(p[:], 0)
		ends = p[0].Revents
		return os.NewSyscallError("poll", err)
	})
	return ends, err
}
