// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

// closedLinks notes on which device each closed link was: its queue pair is given back.
type closedLinks []string

func (c *closedLinks) TakeQP(netip.Addr, string) error    { return nil }
func (c *closedLinks) GiveQP(_ netip.Addr, device string) { *c = append(*c, device) }

func (c *closedLinks) take() []string {
	got := *c
	*c = nil
	return got
}

func TestLingering_closesInOrder(t *testing.T) {
	var closed closedLinks
	s := &Stack{cfg: Config{QueuePairs: &closed}}
	g, other := &group{s: s}, &group{s: s}
	a, b := tableRNIC(0, "a", "192.0.2.1", 0), tableRNIC(1, "b", "192.0.2.2", 0)
	start := time.Unix(1000, 0)
	var l lingering
	l.init()
	add := func(g *group, r *rnic, stays time.Duration) {
		l.add(&link{g: g, rnic: r, charged: true, until: start.Add(stays)})
	}
	check := func(what string, left int, want ...string) {
		t.Helper()
		if got := closed.take(); !slices.Equal(got, want) || len(l.links) != left {
			t.Errorf("%s: closed %q, %d left, want %q, %d", what, got, len(l.links), want, left)
		}
	}
	if _, ok := l.nextDue(); ok {
		t.Error("something is due without links")
	}
	add(g, a, 3*time.Second)
	add(other, b, time.Second)
	add(g, a, 2*time.Second)
	add(g, b, 4*time.Second)
	if at, ok := l.nextDue(); !ok || !at.Equal(start.Add(time.Second)) {
		t.Errorf("the first is due at %v", at)
	}
	n := 0
	for x := range l.of(g) {
		if n++; x.g != g {
			t.Error("a link of another group")
		}
	}
	if n != 3 {
		t.Errorf("%d links of a group, want 3", n)
	}
	l.expire(start.Add(time.Second - 1))
	check("before the time", 4)
	l.expire(start.Add(time.Second))
	check("in time", 3, "b")
	if !l.makePlaceOn(a) {
		t.Error("no link on a")
	}
	check("the first on a", 2, "a")
	if until := l.links[0].until; !until.Equal(start.Add(3 * time.Second)) {
		t.Errorf("the one that is due first is left: the other one is due at %v", until)
	}
	l.closeOn(b)
	check("all on b", 1, "b")
	if l.makePlaceOn(b) {
		t.Error("closed a link on b, where none is")
	}
	for range maxLingering {
		add(g, b, time.Minute)
	}
	check("one too many", maxLingering, "a")
	victim := &group{s: s, contact: contact{addr: netip.MustParseAddr("192.0.2.9")}}
	add(victim, a, time.Second)
	check("one of those of which are most", maxLingering, "b")
	for range 2 * maxLingering {
		add(g, b, time.Hour)
	}
	closed.take()
	if n := 0; len(l.links) != maxLingering || !slices.ContainsFunc(l.links, func(x *link) bool { n++; return x.g == victim }) {
		t.Errorf("of %d links that linger the victim's is none: others took its place", n)
	}
	if l.closeAll(); len(closed.take()) != maxLingering {
		t.Error("not all were closed")
	}
	add(g, b, 2*time.Minute)
	add(g, a, time.Second)
	l.links[1].orderly = true // it carries last words
	for range maxLingering - 1 {
		add(g, b, time.Minute)
	}
	check("not the one with last words", maxLingering, "b")
	l.closeAll()
	if got := closed.take(); len(got) != maxLingering || len(l.links) != 0 {
		t.Errorf("the end: closed %d, %d left", len(got), len(l.links))
	}
}
