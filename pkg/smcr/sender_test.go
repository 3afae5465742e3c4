// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"
	"testing/synctest"
	"time"
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
