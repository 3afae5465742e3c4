// SPDX-License-Identifier: Apache-2.0

package afsmc

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// The address family, and its protocols for the two kinds of addresses.
const (
	family = 43
	proto4 = 0
	proto6 = 1
)

const listenBacklog = 512 // of 300 connections at once none shall be refused

// open makes a socket with TCP_NODELAY, and buffers of that size unless it is 0.
func open(addr string, bufferBytes int) (_ int, _ unix.Sockaddr, err error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return 0, nil, err
	}
	proto, sa := proto4, unix.Sockaddr(nil)
	if to.Addr().Is6() {
		proto, sa = proto6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	} else {
		sa = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return 0, nil, fmt.Errorf("make a socket of AF_SMC (is the module smc loaded?): %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	for _, opt := range []int{unix.SO_SNDBUF, unix.SO_RCVBUF} {
		if bufferBytes == 0 {
			break
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, bufferBytes); err != nil {
			return 0, nil, fmt.Errorf("set buffer size: %w", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return 0, nil, fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return fd, sa, nil
}

// Dial connects with a blocking call, as most programs do; the kernel bounds
// it. bufferBytes is SO_SNDBUF and SO_RCVBUF, 0: as the system has it.
func Dial(to string, bufferBytes int) (*Conn, error) {
	fd, sa, err := open(to, bufferBytes)
	if err != nil {
		return nil, err
	}
	if err := connect(fd, sa); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	return newConn(fd)
}

// A Listener is a listening socket.
type Listener struct {
	f     *os.File
	local *net.TCPAddr
}

var _ net.Listener = (*Listener)(nil)

// Listen listens on an address. bufferBytes is as in Dial.
func Listen(addr string, bufferBytes int) (*Listener, error) {
	fd, sa, err := open(addr, bufferBytes)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sa), unix.Listen(fd, listenBacklog), unix.SetNonblock(fd, true),
	); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	local, err := socketAddr(unix.Getsockname(fd))
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Listener{f: os.NewFile(uintptr(fd), "smc listener"), local: local}, nil
}

// Addr implements [net.Listener].
func (l *Listener) Addr() net.Addr { return l.local }

// Close implements [net.Listener].
func (l *Listener) Close() error { return l.f.Close() }

// Accept implements [net.Listener].
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptSMC()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// AcceptSMC is Accept for whoever needs a Conn.
func (l *Listener) AcceptSMC() (*Conn, error) {
	rc, err := l.f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if e := rc.Read(func(lfd uintptr) bool {
		fd, _, err = unix.Accept4(int(lfd), unix.SOCK_CLOEXEC)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	}); e != nil {
		return nil, e
	}
	if err != nil {
		return nil, fmt.Errorf("accept: %w", err)
	}
	return newConn(fd)
}

// A Conn is a connected socket.
type Conn struct {
	*os.File
	local, remote *net.TCPAddr
}

var _ net.Conn = (*Conn)(nil)

func newConn(fd int) (*Conn, error) {
	local, err := socketAddr(unix.Getsockname(fd))
	remote, err2 := socketAddr(unix.Getpeername(fd))
	if err := errors.Join(err, err2, unix.SetNonblock(fd, true)); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Conn{File: os.NewFile(uintptr(fd), "smc"), local: local, remote: remote}, nil
}

// LocalAddr implements [net.Conn].
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements [net.Conn].
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// CloseWrite ends what is sent.
func (c *Conn) CloseWrite() error {
	return c.Control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// Control calls f with the descriptor.
func (c *Conn) Control(f func(fd int) error) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if e := rc.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

func socketAddr(sa unix.Sockaddr, err error) (*net.TCPAddr, error) {
	if err != nil {
		return nil, fmt.Errorf("ask for a socket's address: %w", err)
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}, nil
	case *unix.SockaddrInet6:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}, nil
	}
	return nil, fmt.Errorf("a socket of AF_SMC has an address of type %T", sa)
}
