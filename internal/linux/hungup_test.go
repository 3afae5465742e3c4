// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"
)

// TestHungUp: of a connection that was reset HungUp tells after somebody was told, and else when both streams have
// ended. IsOver tells of each reset.
func TestHungUp(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// atEnd reads the end of the stream.
	atEnd := func(c *net.TCPConn) {
		t.Helper()
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("read %d bytes, %v, want the end", n, err)
		}
	}
	for _, tt := range []struct {
		name string
		do   func(c, far *net.TCPConn)
		want bool
		over bool
	}{
		{"open", func(_, _ *net.TCPConn) {}, false, false},
		{"the peer has ended its stream", func(c, far *net.TCPConn) { ok(far.CloseWrite()); atEnd(c) }, false, false},
		{"we have ended ours", func(c, _ *net.TCPConn) { ok(c.CloseWrite()) }, false, false},
		{"both have ended", func(c, far *net.TCPConn) { ok(far.CloseWrite()); ok(c.CloseWrite()); atEnd(c) }, true, true},
		{"the peer has reset it, and nobody was told", func(_, far *net.TCPConn) { ok(far.SetLinger(0)); ok(far.Close()) }, false, true},
		{"the peer has ended its stream and then reset it", func(c, far *net.TCPConn) {
			ok(far.CloseWrite())
			ok(far.SetLinger(0))
			ok(far.Close())
			atEnd(c)
		}, false, true},
		{"a write was told of the reset", func(c, far *net.TCPConn) {
			ok(far.SetLinger(0))
			ok(far.Close())
			for {
				if _, err := c.Write([]byte("x")); err != nil {
					if !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("the write was told: %v", err)
					}
					break
				}
			}
			atEnd(c)
		}, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
			ok(err)
			defer func() { ok(l.Close()) }()
			far, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
			ok(err)
			defer func() { _ = far.Close() }() // some are closed
			c, err := l.AcceptTCP()
			ok(err)
			defer func() { ok(c.Close()) }()
			ok(c.SetDeadline(time.Now().Add(10 * time.Second)))
			tt.do(c, far)
			if got, err := HungUp(c); err != nil || got != tt.want {
				t.Errorf("HungUp = %t, %v, want %t", got, err, tt.want)
			}
			if got, err := IsOver(c); err != nil || got != tt.over {
				t.Errorf("IsOver = %t, %v, want %t", got, err, tt.over)
			}
		})
	}
}
