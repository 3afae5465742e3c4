// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DialInNS connects to dst from inside ns. control prepares the socket; local
// is the address to connect from, or the zero Addr for the kernel's choice. Only the
// socket is made in the namespace (see stock): no thread waits there for the peer. The error is
// [ErrUnsent] if it does not come from the network.
func DialInNS(ctx context.Context, ns *NetNS, control Control, local netip.Addr, dst netip.AddrPort) (*net.TCPConn, error) {
	dst = unmap(dst)
	s, err := ns.socket(dst.Addr())
	if err == nil {
		err = s.prepare(control, local, dst)
	}
	var c *net.TCPConn
	if err == nil {
		c, err = s.connect(ctx, dst)
	} else {
		err = errors.Join(err, ErrUnsent)
	}
	if err != nil {
		return nil, fmt.Errorf("dial in %s: %w", ns, &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(dst), Err: err})
	}
	return c, nil
}

// DialFrom connects to an application at dst, a local address of ns, with
// client as the source address, so that the application sees who its client
// is. mark is the redirection's AppMark. The source port differs from the client's, which
// the connection from the network has, and is one that the client does not choose, see freePort:
//
//	client 10.0.0.1:40000  ->  10.0.0.2:6379 agent   from the network
//	agent  10.0.0.1:61001  ->  10.0.0.2:6379 redis   DialFrom
func DialFrom(ctx context.Context, ns *NetNS, client netip.Addr, mark uint32, dst netip.AddrPort) (*net.TCPConn, error) {
	dst, client = unmap(dst), client.Unmap()
	c, err := dialFrom(ctx, ns, client, mark, dst)
	if err != nil {
		return nil, fmt.Errorf("dial in %s: %w", ns, &net.OpError{
			Op: "dial", Net: "tcp",
			Source: net.TCPAddrFromAddrPort(netip.AddrPortFrom(client, 0)), Addr: net.TCPAddrFromAddrPort(dst), Err: err,
		})
	}
	return c, nil
}

func dialFrom(ctx context.Context, ns *NetNS, client netip.Addr, mark uint32, dst netip.AddrPort) (*net.TCPConn, error) {
	if client.Is4() != dst.Addr().Is4() {
		return nil, fmt.Errorf("client %v and application %v are of different address families", client, dst)
	}
	if client.Is6() && client.IsLinkLocalUnicast() { // of IPv4 it can, like any other
		return nil, fmt.Errorf("client address %v is link-local: it cannot be taken on loopback", client)
	}
	for range portTries {
		s, err := ns.freePort(client, mark, dst)
		if err != nil {
			return nil, err
		}
		c, err := s.connect(ctx, dst)
		if errors.Is(err, unix.EADDRNOTAVAIL) {
			continue // a connection between the same two ends is in TIME_WAIT
		}
		return c, err
	}
	return nil, ErrNoPort
}

// rawSocket is a TCP socket that is not connected yet, known to the network
// poller. It is owned by one dial.
type rawSocket struct {
	f   *os.File
	raw syscall.RawConn
}

// rawSocketOf takes over a socket.
func rawSocketOf(fd int) (*rawSocket, error) {
	f := os.NewFile(uintptr(fd), "tcp")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &rawSocket{f: f, raw: raw}, nil
}

func (s *rawSocket) close() { _ = s.f.Close() } // no data can be lost: the socket is not connected

// prepare runs control and binds the socket. The port is chosen when the
// socket connects, so that one port serves many destinations.
func (s *rawSocket) prepare(control Control, local netip.Addr, dst netip.AddrPort) error {
	err := Controls(control)(tcpNetwork(dst.Addr()), dst.String(), s.raw)
	if err == nil && local.IsValid() {
		err = withFD(s.raw, func(fd int) error {
			if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
				return sockopt("IP_BIND_ADDRESS_NO_PORT", err)
			}
			return os.NewSyscallError("bind", unix.Bind(fd, sockaddr(netip.AddrPortFrom(local.Unmap(), 0))))
		})
	}
	if err != nil {
		s.close()
	}
	return err
}

// connect connects and gives the socket to the net package.
func (s *rawSocket) connect(ctx context.Context, dst netip.AddrPort) (*net.TCPConn, error) {
	defer s.close() // FileConn works on a duplicate
	stop := context.AfterFunc(ctx, func() { _ = s.f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	err := withFD(s.raw, func(fd int) error { return unix.Connect(fd, sockaddr(dst)) })
	begun := errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EINTR)
	if begun {
		err = s.waitConnected()
	}
	if cerr := ctx.Err(); err != nil && cerr != nil {
		return nil, cerr
	}
	if err != nil && !begun {
		return nil, errors.Join(os.NewSyscallError("connect", err), ErrUnsent)
	}
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("connect", err), s.byWhom(err))
	}
	if err := withFD(s.raw, func(fd int) error { return setRecvErr(fd, 0) }); err != nil {
		return nil, err
	}
	c, err := net.FileConn(s.f)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// ErrUnsent comes with the error of a dial that failed before a packet was sent: the kernel has no route
// for this socket, or a program that it asks, as one of a cgroup, does not let it connect. It says nothing about
// the destination, nor about a socket of another user or with another mark.
var ErrUnsent = errors.New("no packet was sent")

// ErrByReset comes with ECONNREFUSED if the destination itself refused, by a reset: no ICMP error
// came.
var ErrByReset = errors.New("by a reset")

// ControlRecvErr makes a dial tell a reset from an ICMP error, see [ErrByReset]: both are ECONNREFUSED.
func ControlRecvErr(_, _ string, c syscall.RawConn) error {
	return withFD(c, func(fd int) error { return setRecvErr(fd, 1) })
}

// setRecvErr sets IP_RECVERR. It is taken back once the socket is connected: with it, each ICMP error
// would end the connection.
func setRecvErr(fd, on int) error {
	level, option := recvErr(fd)
	if err := unix.SetsockoptInt(fd, level, option, on); err != nil {
		return sockopt("IP_RECVERR", err)
	}
	return nil
}

func recvErr(fd int) (level, option int) {
	if domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && domain == unix.AF_INET6 {
		return unix.SOL_IPV6, unix.IPV6_RECVERR
	}
	return unix.SOL_IP, unix.IP_RECVERR
}

// byWhom is ErrByReset if a dial with ControlRecvErr was refused with err, and no ICMP error is in the
// socket's queue.
func (s *rawSocket) byWhom(err error) (by error) {
	if !errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	_ = withFD(s.raw, func(fd int) error {
		level, option := recvErr(fd)
		on, err := unix.GetsockoptInt(fd, level, option)
		if err != nil || on == 0 {
			return err
		}
		if _, _, _, _, err := unix.Recvmsg(fd, nil, make([]byte, 128), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT); errors.Is(err, unix.EAGAIN) {
			by = ErrByReset
		}
		return nil
	})
	return by
}

// waitConnected waits for the end of the handshake. The poller may wake up without
// reason, so waitConnected looks at the socket's state each time.
func (s *rawSocket) waitConnected() error {
	var err error
	werr := s.raw.Write(func(fd uintptr) bool {
		code, gerr := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case gerr != nil:
			err = os.NewSyscallError("getsockopt SO_ERROR", gerr)
			return true
		case code != 0:
			err = unix.Errno(code)
			return true
		}
		_, perr := unix.Getpeername(int(fd))
		return perr == nil
	})
	return errors.Join(err, werr)
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// sockaddr is a in the kernel's form. A zone is the number or the name of an interface of
// the namespace.
func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
