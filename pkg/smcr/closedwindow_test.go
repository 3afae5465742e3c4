// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	requestBytes = 32
	replyBytes   = 5
)

// segmentsOf1448 makes loopback cut like a network of 1500 bytes: there the kernel's memory
// for small segments ends before the window does.
func segmentsOf1448(_, _ string, c syscall.RawConn) error {
	var serr error
	err := c.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, 1448)
	})
	if err == nil {
		err = serr
	}
	return err
}

// replying is a program like a cache: it reads requests as they come, and sends at once what
// its socket takes of the replies. It never stops reading because replies do not leave.
func replying(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	buf, replies := make([]byte, 1000), make([]byte, 64<<10)
	owed := 0
	for rest := 0; ; {
		n, err := c.Read(buf)
		if err != nil {
			break
		}
		rest += n
		owed += rest / requestBytes * replyBytes
		rest %= requestBytes
		_ = raw.Write(func(fd uintptr) bool {
			if n, err := unix.Write(int(fd), replies[:min(owed, len(replies))]); err == nil {
				owed -= n
			}
			return true
		})
	}
	_, _ = c.Write(make([]byte, owed)) // the client counts what comes
	_ = c.Close()
}

// TestRelay_pipelines: 16 MiB of requests are sent to a program before a client reads the first
// reply. The replies fill all buffers on their way to the client; the requests go on.
func TestRelay_pipelines(t *testing.T) {
	l, err := (&net.ListenConfig{Control: segmentsOf1448}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			replying(c.(*net.TCPConn))
		}
	}()
	d := net.Dialer{Control: segmentsOf1448}
	c, err := d.DialContext(context.Background(), "tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	app := c.(*net.TCPConn) // the relay's connection to the program
	defer app.Close()
	far, client := tcpConns(t)
	for _, c := range []*net.TCPConn{app, far, client} {
		if err := errors.Join(c.SetReadBuffer(64<<10), c.SetWriteBuffer(64<<10)); err != nil {
			t.Fatal(err)
		}
	}
	relayed := make(chan error, 1)
	go func() {
		_, err := RelayTCP(far, app)
		relayed <- errors.Join(err, far.CloseWrite())
	}()
	const requests = 16 << 20 / requestBytes
	if err := app.SetWriteDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := app.Write(make([]byte, requests*requestBytes)); err != nil {
		t.Errorf("the program has not taken all requests: %d bytes sent, %v", n, err)
	}
	if err := app.CloseWrite(); err != nil {
		t.Error(err)
	}
	if n, err := io.Copy(io.Discard, client); n != requests*replyBytes || err != nil {
		t.Errorf("%d bytes of replies, %v; want %d", n, err, requests*replyBytes)
	}
	if err := <-relayed; err != nil {
		t.Error(err)
	}
}

// TestReopener: the receive buffer grows when nothing was acknowledged for closedAfter, then
// for twice as long, maxStill times, and maxReopens times in all.
func TestReopener(t *testing.T) {
	a, b := tcpConns(t)
	if err := a.SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	// The other side does not read, so that something stays unacknowledged: what a has beyond
	// what b's buffer takes.
	if err := errors.Join(b.SetReadBuffer(4<<10), a.SetWriteBuffer(1<<20), a.SetWriteDeadline(time.Now().Add(time.Second))); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Write(make([]byte, 64<<20)); n < 256<<10 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("wrote %d bytes, %v", n, err)
	}
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	size := func(fd uintptr) int {
		n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
		if err != nil {
			t.Error(err)
		}
		return n
	}
	_ = raw.Control(func(fd uintptr) {
		var r reopener
		now := time.Unix(0, 0)
		first := size(fd)
		for _, look := range []struct {
			after time.Duration
			moved bool
			times int
		}{
			{after: 0},
			{after: closedAfter - 1},
			{after: 1, times: 1},
			{after: closedAfter - 1, times: 1},
			{after: 1, times: 2},
			{after: 2*closedAfter - 1, times: 2},
			{after: 1, times: maxStill},
			{after: time.Hour, times: maxStill},
			{moved: true, times: 3},
			{after: closedAfter - 1, times: 3},
			{after: 1, times: 4},
			{moved: true, times: 4},
			{after: closedAfter, times: 5},
			{moved: true, times: 5},
			{after: closedAfter, times: 6},
			{moved: true, times: 6},
			{after: closedAfter, times: 7},
			{moved: true, times: 7},
			{after: closedAfter, times: 8},
			{moved: true, times: 8},
			{after: closedAfter, times: maxReopens},
		} {
			now = now.Add(look.after)
			if look.moved {
				r.unacked-- // as if something was acknowledged since
			}
			before := size(fd)
			was := r.times
			r.look(int(fd), now)
			if r.times != look.times {
				t.Fatalf("%+v: helped %d times", look, r.times)
			}
			if grew := size(fd) > before; grew != (r.times > was) {
				t.Fatalf("%+v: buffer of %d bytes, before %d", look, size(fd), before)
			}
		}
		if size(fd) != 2*first {
			t.Errorf("grew from %d to %d bytes, want twice as many", first, size(fd))
		}
	})
}
