// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestLimitBuffers: what waits to be sent to a peer that does not read, and what there is room for to be received, are
// never more than both limits together, whatever the size of the writes.
func TestLimitBuffers(t *testing.T) {
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// fill writes until nothing moves any more.
	fill := func(c net.Conn, size int) {
		t.Helper()
		for b := make([]byte, size); ; {
			ok(c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond)))
			if _, err := c.Write(b); os.IsTimeout(err) {
				return
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	ok(err)
	defer func() { ok(l.Close()) }()
	for _, limit := range []int{128 << 10, 512 << 10} {
		for size := 1 << 10; size <= 1<<20; size = size*4/3 + 1 {
			c, err := net.Dial("tcp4", l.Addr().String())
			ok(err)
			peer, err := l.Accept()
			ok(err)
			ok(LimitBuffers(c.(*net.TCPConn), limit))
			ok(peer.(*net.TCPConn).SetReadBuffer(4 << 10))
			fill(c, size)
			raw, err := c.(*net.TCPConn).SyscallConn()
			ok(err)
			var room, out int
			ok(raw.Control(func(fd uintptr) {
				room, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
				ok(err)
				out, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
				ok(err)
			}))
			if room+out > 2*limit || out == 0 {
				t.Errorf("writes of %d bytes: %d wait to be sent, and there is room for %d to be read; want at most %d in all", size, out, room, 2*limit)
			}
			ok(c.Close())
			ok(peer.Close())
		}
	}
}
