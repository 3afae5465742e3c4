// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// In the midst of a stream the receiver looks for more before it sleeps: whoever it asks then is asked more than once.
func TestUDPWire_looksForMore(t *testing.T) {
	cfg := Config{Addr: netip.MustParseAddr("127.93.0.1"), Port: 14793, SocketBufferBytes: 1 << 20}
	w, err := openUDP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var asked, most atomic.Int32 // since the last arrival, and the most ever
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = w.Receive(func([]Message) { asked.Store(0) }, func() bool {
			if n := asked.Add(1); n > most.Load() {
				most.Store(n)
			}
			return false
		})
	}()
	defer func() { _ = w.Close(); <-done }()
	from, err := net.Dial("udp4", netip.AddrPortFrom(cfg.Addr, cfg.Port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = from.Close() }()
	const patience = 10 * time.Second // on a machine that is slow at each step
	for end := time.Now().Add(patience); most.Load() < 5; {
		if time.Now().After(end) {
			t.Fatalf("it looked %d times", most.Load())
		}
		if _, err := from.Write(make([]byte, streamBytes)); err != nil {
			t.Fatal(err)
		}
	}
}

// control is a control message of four bytes.
func control(level, kind int32, value uint32, length int) []byte {
	b := make([]byte, cmsgRoom)
	c := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	c.Level, c.Type = level, kind
	c.SetLen(unix.CmsgLen(4))
	binary.NativeEndian.PutUint32(b[unix.SizeofCmsghdr:], value)
	return b[:length]
}

func TestSegmentSize(t *testing.T) {
	for name, c := range map[string]struct {
		ctl  []byte
		want int
	}{
		"none":            {nil, 0},
		"cut":             {control(unix.SOL_UDP, unix.UDP_GRO, 1000, unix.SizeofCmsghdr+3), 0},
		"of another kind": {control(unix.SOL_UDP, unix.UDP_SEGMENT, 1000, cmsgRoom), 0},
		"of another one":  {control(unix.SOL_IP, unix.UDP_GRO, 1000, cmsgRoom), 0},
		"segments":        {control(unix.SOL_UDP, unix.UDP_GRO, 1000, cmsgRoom), 1000},
		"just so long":    {control(unix.SOL_UDP, unix.UDP_GRO, 65507, unix.SizeofCmsghdr+4), 65507},
	} {
		if got := segmentSize(c.ctl); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

// A receiver that always finds more ends when its wire is closed.
func TestUDPWire_closesInAFlood(t *testing.T) {
	w, err := openUDP(Config{Addr: netip.MustParseAddr("127.93.0.1"), Port: 14794, SocketBufferBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	looking, ended, closed := make(chan struct{}), make(chan error, 1), make(chan error, 1)
	var once sync.Once
	go func() {
		ended <- w.Receive(func([]Message) {}, func() bool {
			once.Do(func() { close(looking) })
			return true
		})
	}()
	<-looking
	go func() { closed <- w.Close() }()
	for _, c := range []chan error{closed, ended} {
		select {
		case err := <-c:
			if c == closed && err != nil || c == ended && !errors.Is(err, net.ErrClosed) {
				t.Errorf("%v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the receiver goes on")
		}
	}
}

// noSocket has another descriptor where the socket's is to be.
type noSocket struct{ syscall.RawConn }

func (noSocket) Read(f func(uintptr) bool) error {
	f(^uintptr(0))
	return nil
}

// The buffers are unmapped when receiving fails, since the device may be closed before it tries again, and are there when it does.
func TestInSocket_failsWithoutBuffers(t *testing.T) {
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 93, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in, err := newInSocket(conn, false)
	if err != nil {
		t.Fatal(err)
	}
	raw := in.raw
	in.raw = noSocket{raw}
	err = in.receive(func([]Message) {}, in.closed.Load)
	if !errors.Is(err, unix.EBADF) || in.ring != nil {
		t.Errorf("error %v, %d bytes are mapped; want EBADF, and none", err, len(in.ring))
	}
	in.raw = raw
	if _, err := conn.WriteTo([]byte("a packet"), conn.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	var got string
	err = in.receive(func(msgs []Message) {
		got = string(msgs[0].Data)
		in.closed.Store(true)
	}, in.closed.Load)
	if got != "a packet" || !errors.Is(err, net.ErrClosed) || in.ring != nil {
		t.Errorf("received %q, then error %v with %d bytes mapped", got, err, len(in.ring))
	}
}
