// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tcpConns returns both ends of a TCP connection.
func tcpConns(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// TestSocket_likeNet: more calls than quietCalls, more bytes than the kernel
// buffers, and the end of the stream.
func TestSocket_likeNet(t *testing.T) {
	a, b := tcpConns(t)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	go func() {
		if n, err := newSocket(a).Write(want); n != len(want) || err != nil {
			t.Errorf("wrote %d bytes, %v", n, err)
		}
		_ = a.CloseWrite()
	}()
	got, err := io.ReadAll(newSocket(b))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %d bytes of %d, %v", len(got), len(want), err)
	}
}

func TestSocket_errors(t *testing.T) {
	p := make([]byte, 16)
	a, b := tcpConns(t)
	if err := a.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := newSocket(a).Read(p); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
	s := newSocket(b)
	if err := a.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	_ = a.Close()
	if _, err := s.Read(p); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after a reset: %v", err)
	}
	if _, err := s.Write(p); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("write after a reset: %v", err)
	}
	_ = b.Close()
	if _, err := s.Read(p); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read of a closed socket: %v", err)
	}
}

// Linux says to a thread that has a signal to handle, as Go's scheduler sends them, that there is nothing to read where the next byte is
// an urgent one. Such a byte is read nevertheless, though nothing follows it.
func TestSocket_readsUrgentByteAmidSignals(t *testing.T) {
	a, b := tcpEnds(t)
	c := newTCPConn(nil, b, Info{}, nil, false)
	if err := errors.Join(c.SetUrgentInline(true), b.SetReadDeadline(time.Now().Add(20*time.Second))); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, reader := unix.Getpid(), unix.Gettid()
	var over atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for end := time.Now().Add(2 * time.Second); !over.Load() && time.Now().Before(end); { // not longer: the reader gets on slowly
			_ = unix.Tgkill(pid, reader, unix.SIGURG) // the thread is there until the test ends
		}
	}()
	for i := range 10_000 {
		sendUrgent(t, a)
		var p [2]byte
		if n, err := c.Read(p[:]); n != 1 || err != nil {
			t.Errorf("after %d bytes: read %d, %v", i, n, err)
			break
		}
	}
	over.Store(true)
	<-ended
}
