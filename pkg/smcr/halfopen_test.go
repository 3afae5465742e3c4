// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

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
