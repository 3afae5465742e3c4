// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// With an eye catcher the stream begins behind it, and wraps to there.
func TestReceiver_spanEndsWhereTheRMBEWraps(t *testing.T) {
	for _, tc := range []struct {
		name   string
		ring   cdc.Ring
		pos, n uint64
		want   string
	}{
		{"all of it", cdc.Ring{Size: 16}, 0, 16, "0123456789abcdef"},
		{"the middle", cdc.Ring{Size: 16}, 20, 3, "456"},
		{"to the end", cdc.Ring{Size: 16}, 29, 5, "def"},
		{"behind the eye catcher", cdc.Ring{Size: 16, Origin: 4}, 0, 2, "45"},
		{"wrapped, behind the eye catcher", cdc.Ring{Size: 16, Origin: 4}, 12, 2, "45"},
		{"to the end, with an eye catcher", cdc.Ring{Size: 16, Origin: 4}, 11, 2, "f"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var r receiver
			r.init(&region{}, 0, []byte("0123456789abcdef"), tc.ring)
			if got := string(r.span(tc.pos, tc.n)); got != tc.want {
				t.Errorf("%d bytes at %d: %q, want %q", tc.n, tc.pos, got, tc.want)
			}
		})
	}
}

// RFC 7609 §4.4.1: an RMBE whose stream begins behind an eye catcher has it.
func TestReceiver_negotiated(t *testing.T) {
	for _, tc := range []struct {
		name   string
		origin uint32
		want   string
	}{
		{"RFC 7609", cdc.OriginRFC, "\xd9\xd4\xc2\xc5\x00\x00\x00\x00"},
		{"Linux", cdc.OriginLinux, "\x00\x00\x00\x00\x00\x00\x00\x00"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var r receiver
			r.init(&region{}, 0, make([]byte, 8), cdc.Ring{Size: 8})
			r.negotiated(cdc.Ring{Size: 8, Origin: tc.origin})
			if got := string(r.rmbe); got != tc.want {
				t.Errorf("RMBE %q, want %q", got, tc.want)
			}
		})
	}
}

// The eye catcher is wiped, too: without one the next user's stream begins there.
func TestReceiver_wipe(t *testing.T) {
	const zeros = "\x00\x00\x00\x00\x00\x00\x00\x00"
	for _, tc := range []struct {
		name string
		wipe func(r *receiver)
		left string
	}{
		{"a few bytes", func(r *receiver) { r.wipe(3) }, zeros[:7] + "7"},
		{"none", func(r *receiver) { r.wipe(0) }, zeros[:4] + "4567"},
		{"more than the RMBE has", func(r *receiver) { r.wipe(1 << 40) }, zeros},
		{"all", func(r *receiver) { r.wipeAll() }, zeros},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var r receiver
			r.init(&region{}, 0, []byte("01234567"), cdc.Ring{Size: 8, Origin: 4})
			tc.wipe(&r)
			if got := string(r.rmbe); got != tc.left {
				t.Errorf("left: %q, want %q", got, tc.left)
			}
		})
	}
}

// A waiter goes on with the token that was left before it came, and with the deadline.
func TestReceiver_await(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r receiver
		r.init(&region{}, 0, nil, cdc.Ring{})
		start := time.Now()
		r.wake()
		r.wake()
		r.await()
		if d := time.Since(start); d != 0 {
			t.Errorf("waited %v with a token", d)
		}
		r.deadline.Set(start.Add(time.Second))
		r.await()
		if d := time.Since(start); d != time.Second {
			t.Errorf("waited %v without a token, with a deadline after 1 s", d)
		}
	})
}
