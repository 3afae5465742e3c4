// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// CheckAddr reports what is wrong with the address of a device whose connections are its own.
func CheckAddr(a netip.Addr) error {
	switch {
	case !a.IsValid() || a.IsUnspecified() || a.IsMulticast():
		return fmt.Errorf("address %v is not a unicast address", a)
	case a.Is4In6():
		return fmt.Errorf("address %v: write it as IPv4", a)
	case a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "":
		return fmt.Errorf("address %v is link-local and may be on any interface: say on which one, as in %v%%eth0", a, a)
	}
	return nil
}

// CheckConn refuses a connection that is not one of the device's address: what is not routed
// by the device cannot be its. Whether there is a peer still is not looked at.
func CheckConn(c *net.TCPConn, device netip.Addr) error {
	if c == nil {
		return fmt.Errorf("no connection: %w", rdma.ErrInvalid)
	}
	if err := OnDescriptor(c, func(int) error { return nil }); err != nil {
		return fmt.Errorf("%w: %w", rdma.ErrInvalid, err)
	}
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("connection is not of TCP: %w", rdma.ErrInvalid)
	}
	a := local.AddrPort().Addr().Unmap()
	if a.WithZone("") != device.WithZone("") {
		return fmt.Errorf("connection of %v, the device has %v: %w", a, device, rdma.ErrState)
	}
	return nil
}

// A Taken is a connection that was taken over from whoever had it, with what has to be put back
// if it returns.
type Taken struct {
	*net.TCPConn
	NoDelay bool
}

// TakeOver returns a connection under another descriptor, with the options of TCP as they
// were. The descriptor of whoever had the connection becomes useless: its holder could only
// disturb the stream.
func TakeOver(c *net.TCPConn) (Taken, error) {
	kept, err := keptOptions(c)
	if err != nil {
		return Taken{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	f, err := c.File()
	if err != nil {
		return Taken{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrNoResources, err)
	}
	defer func() { _ = f.Close() }()
	n, err := net.FileConn(f)
	if err != nil {
		return Taken{}, fmt.Errorf("take over connection: %w: %w", rdma.ErrNoResources, err)
	}
	t, ok := n.(*net.TCPConn)
	if ok {
		err = kept.restore(t)
	} else {
		err = fmt.Errorf("it is %T: %w", n, rdma.ErrInvalid)
	}
	if err != nil {
		_ = n.Close()
		return Taken{}, fmt.Errorf("take over connection: %w", err)
	}
	_ = c.Close() // t is the same connection
	return Taken{t, kept[0] != 0}, nil
}

// GiveBack readies the connection for whom it was taken over from.
func (t Taken) GiveBack() *net.TCPConn {
	_ = t.SetDeadline(time.Time{})
	_ = t.SetNoDelay(t.NoDelay) // errors are those of the connection, which who has it will see
	return t.TCPConn
}

// options are the socket options that package net sets anew on a connection that it makes of a descriptor.
// The first one is what RDMA has to have its own way.
var options = [...]struct{ level, name int }{
	{unix.IPPROTO_TCP, unix.TCP_NODELAY},
	{unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
	{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL},
	{unix.IPPROTO_TCP, unix.TCP_KEEPCNT},
}

type optionValues [len(options)]int

func keptOptions(c syscall.Conn) (v optionValues, err error) {
	err = OnDescriptor(c, func(fd int) error {
		for i, o := range options {
			if v[i], err = unix.GetsockoptInt(fd, o.level, o.name); err != nil {
				return err
			}
		}
		return nil
	})
	return v, err
}

func (v *optionValues) restore(c syscall.Conn) error {
	return OnDescriptor(c, func(fd int) error {
		for i, o := range options {
			if err := unix.SetsockoptInt(fd, o.level, o.name, v[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// OnDescriptor calls f with the descriptor of a connection.
func OnDescriptor(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) { inner = f(int(fd)) })
	return errors.Join(err, inner)
}

// AwaitInput waits until there is something to be read, the end of the stream included, and reads
// nothing. The connection's read deadline ends it with an error.
func AwaitInput(c *net.TCPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var b [1]byte
	return raw.Read(func(fd uintptr) bool {
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN)
	})
}

// tcpiTimestamps is the flag TCPI_OPT_TIMESTAMPS of tcpi_options (tcp(7)), which x/sys lacks.
const tcpiTimestamps = 1

// Timestamps reports whether TCP uses timestamps on a connection (RFC 7323).
func Timestamps(c *net.TCPConn) (on bool) {
	_ = OnDescriptor(c, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		on = err == nil && info.Options&tcpiTimestamps != 0
		return err
	})
	return on
}
