// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

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
// by the device cannot be its.
func CheckConn(c *net.TCPConn, device netip.Addr) error {
	if c == nil {
		return fmt.Errorf("no connection: %w", rdma.ErrInvalid)
	}
	local, ok := c.LocalAddr().(*net.TCPAddr)
	if !ok || c.RemoteAddr() == nil {
		return fmt.Errorf("connection is closed, or not of TCP: %w", rdma.ErrInvalid)
	}
	a := local.AddrPort().Addr().Unmap()
	if a.WithZone("") != device.WithZone("") {
		return fmt.Errorf("connection of %v, the device has %v: %w", a, device, rdma.ErrState)
	}
	return nil
}

// TakeOver makes a connection unusable for whoever has it, who could do nothing to it but
// harm, and returns it under another descriptor.
func TakeOver(c *net.TCPConn) (*net.TCPConn, error) {
	f, err := c.File()
	if err != nil {
		return nil, fmt.Errorf("take over connection: %w: %w", rdma.ErrInvalid, err)
	}
	defer func() { _ = f.Close() }()
	n, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("take over connection: %w: %w", rdma.ErrNoResources, err)
	}
	t, ok := n.(*net.TCPConn)
	if !ok {
		_ = n.Close()
		return nil, fmt.Errorf("take over connection, which is %T: %w", n, rdma.ErrInvalid)
	}
	_ = c.Close() // t is the same connection
	return t, nil
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
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		on = err == nil && info.Options&tcpiTimestamps != 0
	})
	return on
}
