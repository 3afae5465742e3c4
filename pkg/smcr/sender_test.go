// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"bytes"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

func TestSender_spanEndsWhereTheBufferWraps(t *testing.T) {
	for _, tc := range []struct {
		name   string
		pos, n uint64
		want   string
	}{
		{"all of it", 0, 16, "0123456789abcdef"},
		{"the middle", 20, 3, "456"},
		{"to the end", 29, 5, "def"},
		{"wrapped", 32, 2, "01"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s sender
			s.init(&sendBuffer{mem: []byte("0123456789abcdef")})
			if got := string(s.span(tc.pos, tc.n)); got != tc.want {
				t.Errorf("%d bytes at %d: %q, want %q", tc.n, tc.pos, got, tc.want)
			}
		})
	}
}

func TestSender_wipe(t *testing.T) {
	var s sender
	s.init(&sendBuffer{mem: []byte("01234567")})
	s.wipe(3)
	if got := string(s.buf.mem); got != "\x00\x00\x0034567" {
		t.Errorf("3 bytes written and wiped: %q", got)
	}
	s.wipe(1 << 40)
	if got := string(s.buf.mem); got != "\x00\x00\x00\x00\x00\x00\x00\x00" {
		t.Errorf("more written than the buffer has, and wiped: %q", got)
	}
}

// A waiter goes on with the token that was left before it came, and with the deadline.
func TestSender_await(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s sender
		s.init(nil)
		start := time.Now()
		s.wake()
		s.wake()
		s.await()
		if d := time.Since(start); d != 0 {
			t.Errorf("waited %v with a token", d)
		}
		s.deadline.Set(start.Add(time.Second))
		s.await()
		if d := time.Since(start); d != time.Second {
			t.Errorf("waited %v without a token, with a deadline after 1 s", d)
		}
	})
}

// A writer gets no piece of the send buffer that is smaller than what it has to write, and than a
// quarter of the buffer.
func TestConn_reserve(t *testing.T) {
	for _, c := range []struct {
		name                string
		produced, completed uint64
		n, want             int
	}{
		{"all is free", 0, 0, anyLength, 64},
		{"to where the buffer wraps", 8, 8, anyLength, 56},
		{"beyond the wrap", 64, 8, anyLength, 0},
		{"a quarter", 64, 16, anyLength, 16},
		{"less, for a byte", 64, 1, 1, 1},
		{"for as much as there is", 64, 8, 8, 8},
		{"for more", 64, 8, 9, 0},
		{"for nothing", 64, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var conn Conn
			conn.send.init(&sendBuffer{mem: make([]byte, 64)})
			conn.streams.produced.Store(c.produced)
			conn.streams.completed.Store(c.completed)
			b, err := conn.reserve(c.n, false)
			if err != nil || len(b) != c.want {
				t.Errorf("%d bytes, %v, want %d", len(b), err, c.want)
			}
		})
	}
}

// stubborn is memory of which a device gives no page back.
type stubborn struct {
	rdma.MR
	err error // nil: it does give them back
	mem []byte
}

func (m *stubborn) Discard(off, n int) error {
	if m.err == nil {
		clear(m.mem[off : off+n])
	}
	return m.err
}

func (m *stubborn) CountWrites(int)    {}
func (m *stubborn) Written(int) uint64 { return 8 } // what was announced

// Of an idle connection's buffers nothing is left for the next user, also where the pages could not be given back.
func TestConn_wipesPagesThatStayed(t *testing.T) {
	for _, err := range []error{nil, errors.New("pinned")} {
		mem := make([]byte, 16)
		r := &region{mem: mem, block: 8}
		r.at[0] = registration{&stubborn{err: err, mem: mem}, &domain{}}
		var c Conn
		c.recv.init(r, 0, mem[:8], cdc.Ring{Size: 8})
		c.recv.before = 0
		c.send.init(&sendBuffer{arena: &arena{region: r}, off: 8, mem: mem[8:]})
		copy(mem, "received    sent")
		if !c.send.settle(8, 8) {
			t.Error("what is completed is not")
		}
		c.coolRMBE(8)
		if gone := len(bytes.Trim(mem, "\x00")) == 0; gone != (err == nil) {
			t.Errorf("with error %v the buffers are %q", err, mem)
		}
		c.recv.wipe(8)
		c.send.wipe(8)
		if len(bytes.Trim(mem, "\x00")) > 0 {
			t.Errorf("with error %v there is left: %q", err, mem)
		}
	}
}
