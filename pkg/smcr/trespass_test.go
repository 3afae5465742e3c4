// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

func testAddr(i uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 10<<24|i)))
}

func TestTrespassers(t *testing.T) {
	ts := trespassers{}
	now := time.Unix(1000, 0)
	bad := testAddr(1)
	for i := range trespassLimit - 1 {
		if ts.note(now, bad); ts.isBarred(now, bad) {
			t.Fatalf("barred after %d", i+1)
		}
	}
	late := now.Add(trespassWindow + 1)
	if ts.note(late, bad); ts.isBarred(late, bad) {
		t.Error("barred for what was long ago")
	}
	for range trespassLimit - 1 {
		ts.note(late, bad)
	}
	if !ts.isBarred(late, bad) || ts.isBarred(late, testAddr(2)) || ts.isBarred(late.Add(barTime), bad) {
		t.Error("want this address barred, no other one, and not for ever")
	}
	for i := range uint32(3 * maxTrespassers) {
		ts.note(late, testAddr(10+i))
	}
	if len(ts) > maxTrespassers {
		t.Errorf("%d addresses are remembered", len(ts))
	}
	ts.note(late.Add(2*trespassWindow), testAddr(5))
	if len(ts) > 1+maxTrespassers/2 {
		t.Errorf("%d addresses are remembered when their time is over", len(ts))
	}
}

func TestEndedLinks(t *testing.T) {
	var e endedLinks
	for i := range uint32(2 * len(e.list)) {
		e.add(5, testAddr(i))
	}
	e.add(6, testAddr(99))
	if a, ok := e.take(6); !ok || a != testAddr(99) {
		t.Errorf("got %v, %v", a, ok)
	}
	if a, ok := e.take(6); ok {
		t.Errorf("got %v twice", a)
	}
	if a, ok := e.take(0); ok {
		t.Errorf("got %v for a queue pair that was never there", a)
	}
}

// Those of one address have their share, others come in meanwhile, and who waits comes
// in when somebody leaves, or gives up.
func TestHalfOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h halfOpen
		h.init(8)
		a, b := testAddr(1), testAddr(2)
		enter := func(addr netip.Addr) chan error {
			done := make(chan error, 1)
			go func() {
				ctx, stop := context.WithTimeoutCause(t.Context(), time.Minute, errSlow)
				defer stop()
				done <- h.enter(ctx, addr)
			}()
			synctest.Wait()
			return done
		}
		in := func(what string, c chan error, want bool) {
			t.Helper()
			synctest.Wait()
			if got := len(c) == 1; got != want {
				t.Errorf("%s: in %v, want %v", what, got, want)
			}
		}
		in("first of a", enter(a), true)
		in("second of a", enter(a), true)
		third, fourth := enter(a), enter(a)
		in("third of a", third, false)
		in("first of b", enter(b), true)
		h.leave(b)
		in("third of a, when one of b has left", third, false)
		h.leave(a)
		in("third of a, when one of a has left", third, true)
		in("fourth of a", fourth, false)
		for i := range uint32(6) {
			in("others", enter(testAddr(10+i)), true)
		}
		full := enter(b)
		in("first of b, when there is no room", full, false)
		h.leave(testAddr(10))
		in("first of b, when another one has left", full, true)
		in("fourth of a", fourth, false)
		if err := <-fourth; !errors.Is(err, errSlow) {
			t.Errorf("fourth of a: %v", err)
		}
		if len(h.queue) != 0 || h.all != 8 {
			t.Errorf("%d wait, %d are in", len(h.queue), h.all)
		}
	})
}
