// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"fmt"
	"net/netip"
	"testing"
	"time"
)

func TestSourceOf(t *testing.T) {
	for _, tt := range []struct{ remote, want string }{
		{"192.0.2.1:40000", "192.0.2.1/32"},
		{"[::ffff:192.0.2.1]:40000", "192.0.2.1/32"},
		{"[2001:db8::1:2:3:4]:1", "2001:db8::/64"},
		{"[fe80::1%eth0]:1", "fe80::1/128"}, // all of a link share the network
		{"@", "invalid Prefix"},
		{"", "invalid Prefix"},
	} {
		if got := sourceOf(tt.remote).String(); got != tt.want {
			t.Errorf("sourceOf(%q) = %s, want %s", tt.remote, got, tt.want)
		}
	}
}

func TestRate(t *testing.T) {
	r, now := rate{interval: time.Second, burst: 3}, time.Now()
	var due time.Time
	takes := func(n int) (taken int) {
		for range n {
			next, ok := r.take(due, now)
			if due = next; ok {
				taken++
			}
		}
		return taken
	}
	for _, tt := range []struct {
		later       time.Duration
		want, tries int
	}{{0, 3, 10}, {999 * time.Millisecond, 0, 10}, {time.Millisecond, 1, 10}, {2 * time.Second, 2, 10}, {time.Hour, 3, 10}, {3 * time.Second, 2, 2}, {0, 1, 2}} {
		now = now.Add(tt.later)
		if got := takes(tt.tries); got != tt.want {
			t.Errorf("after %v: %d, want %d", tt.later, got, tt.want)
		}
	}
}

// TestSources_forget: who has a place is forgotten last if he tries most.
func TestSources_forget(t *testing.T) {
	s, now := newSources(), time.Now()
	greedy := netip.MustParsePrefix("192.0.2.1/32")
	for range sourceReviews.burst {
		s.take(greedy, true, now)
	}
	for i := range 4 * maxSources {
		s.take(netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.1/32", i/256, i%256)), true, now)
		if len(s.each) > maxSources {
			t.Fatalf("%d sources, want %d at most", len(s.each), maxSources)
		}
	}
	if s.take(greedy, true, now) {
		t.Error("the one that tried most was forgotten, and tries again")
	}
}
