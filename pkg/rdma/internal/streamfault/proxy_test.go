// SPDX-License-Identifier: Apache-2.0

package streamfault_test

import (
	"bytes"
	"errors"
	"io"
	"math/bits"
	"net"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/streamfault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const at = "127.0.0.1:0"

// through sends b through a proxy, and returns what arrives and how that ends.
func through(t *testing.T, seed uint64, f streamfault.Faults, b []byte) ([]byte, error) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	p := streamfault.Listen(t, seed, at, l.Addr().String(), f)
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if err := s.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = c.Write(b) // a reset may come in between
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	return io.ReadAll(s)
}

func message() []byte {
	b := make([]byte, 20_000)
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8)
	}
	return b
}

func TestProxy_handsOn(t *testing.T) {
	for _, f := range []streamfault.Faults{{}, {Piece: 100}, {Piece: 3000, Stall: time.Millisecond}} {
		got, err := through(t, 1, f, message())
		if err != nil || !bytes.Equal(got, message()) {
			t.Errorf("%+v: %d bytes, equal %t, %v", f, len(got), bytes.Equal(got, message()), err)
		}
	}
}

// diff returns how many bits differ, and the first byte that does.
func diff(a, b []byte) (n, first int) {
	for i := range a {
		if x := a[i] ^ b[i]; x != 0 {
			if n == 0 {
				first = i
			}
			n += bits.OnesCount8(x)
		}
	}
	return n, first
}

func TestProxy_flip(t *testing.T) {
	f := streamfault.Faults{Piece: 700, Damage: streamfault.Flip, From: 5000, Within: 10_000}
	where := map[int]bool{}
	for seed := range uint64(10) {
		got, err := through(t, seed, f, message())
		if err != nil || len(got) != len(message()) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		n, first := diff(got, message())
		if n != 1 || first < 5000 || first >= 15_000 {
			t.Errorf("seed %d: %d bits turned, the first in byte %d", seed, n, first)
		}
		again, err := through(t, seed, f, message())
		if err != nil || !bytes.Equal(got, again) {
			t.Errorf("seed %d: another damage the second time, %v", seed, err)
		}
		where[first] = true
	}
	if len(where) < 5 {
		t.Errorf("bits turned in %v, want different bytes for different seeds", where)
	}
}

func TestProxy_cut(t *testing.T) {
	got, err := through(t, 3, streamfault.Faults{Damage: streamfault.Cut, From: 777}, message())
	if err != nil || !bytes.Equal(got, message()[:777]) {
		t.Errorf("%d bytes, %v; want 777 and an end in order", len(got), err)
	}
}

func TestProxy_reset(t *testing.T) {
	_, err := through(t, 3, streamfault.Faults{Damage: streamfault.Reset, From: 777}, message())
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
}
