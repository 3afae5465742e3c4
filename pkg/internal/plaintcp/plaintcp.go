// SPDX-License-Identifier: Apache-2.0

package plaintcp

import (
	"context"
	"net"
	"syscall"
)

// Dial opens a TCP connection to an address as in [net.Dial], with all that d says otherwise. Errors are those of [net.Dialer].
func Dial(ctx context.Context, d net.Dialer, address string) (*net.TCPConn, error) {
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil // "tcp" gives no other
}

// Listen listens on an address as in [net.Listen], with network tcp. Errors are those of [net.ListenConfig].
func Listen(ctx context.Context, address string) (*net.TCPListener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil // "tcp" gives no other
}

// ShareAddress lets a socket share its address and port with others that say so, too, and do not listen (SO_REUSEADDR). It comes
// before the socket is bound: call it from [net.Dialer.Control].
func ShareAddress(c syscall.RawConn) error {
	var err error
	if e := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) }); e != nil {
		return e
	}
	return err
}
