// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An epoll tells once of each socket that has something, by its id, also if it was asked too late,
// and no more after the socket was closed.
func TestEpoll(t *testing.T) {
	e, err := newEpoll()
	if err != nil {
		t.Fatal(err)
	}
	var events [4]unix.EpollEvent
	// next waits for so many events, or for none.
	next := func(want ...uint64) {
		t.Helper()
		wait := 10 * time.Second
		if len(want) == 0 {
			wait = 20 * time.Millisecond
		}
		if err := e.file.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		n, err := e.wait(events[:])
		if len(want) == 0 {
			if n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%d events, %v, want none", n, err)
			}
			return
		}
		if err != nil || n != len(want) {
			t.Fatalf("%d events, %v, want %d", n, err, len(want))
		}
		for i, id := range want {
			if got := idOf(&events[i]); got != id {
				t.Errorf("event of %#x, want %#x", got, id)
			}
		}
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	near := c.(*net.TCPConn)
	const id = 0xfedcba9876543210
	arm := func(op int) {
		t.Helper()
		if err := e.arm(near, op, unix.EPOLLIN, id); err != nil {
			t.Fatal(err)
		}
	}
	arm(unix.EPOLL_CTL_ADD)
	next()
	if _, err := far.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	next(id)
	next() // not armed
	arm(unix.EPOLL_CTL_MOD)
	next(id)
	arm(unix.EPOLL_CTL_MOD)
	if err := near.Close(); err != nil {
		t.Fatal(err)
	}
	next()
	if err := e.arm(near, unix.EPOLL_CTL_MOD, unix.EPOLLIN, id); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed socket is armed: %v", err)
	}
	if err := e.close(); err != nil {
		t.Error(err)
	}
	if _, err := e.wait(events[:]); err == nil {
		t.Error("wait after close goes on")
	}
}
