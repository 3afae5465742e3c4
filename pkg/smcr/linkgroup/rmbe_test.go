// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"
)

// The element that has been free for the longest time is given.
func TestRMB_take(t *testing.T) {
	r := keysOf(t, 1).rmbs[0]
	now := time.Unix(1, 0)
	for want := range 2 {
		if i, ok := r.take(); !ok || i != want {
			t.Fatalf("element %d, %t, want %d", i, ok, want)
		}
	}
	if _, ok := r.take(); ok {
		t.Error("a third one of two elements")
	}
	r.give(now, 1, false)
	r.give(now.Add(1), 0, false)
	if i, _ := r.take(); i != 1 {
		t.Errorf("element %d is given, which was used last", i)
	}
}

// RFC 7609 §4.6: after the loss of a link the elements that were in use of late, and those
// that are given back soon, go to nobody for a while, and are stale then.
func TestHoldBack(t *testing.T) {
	r := keysOf(t, 1).rmbs[0]
	now := time.Unix(1, 0)
	h := &holdBack{}
	first, _ := r.take()
	second, _ := r.take()
	r.give(now, first, h.holds(now))
	h.lost = true
	h.begin(now, []*rmb{r})
	r.give(now, second, h.holds(now))
	if r.usedCount != 2 || !r.elements[first].held || !r.elements[second].held {
		t.Errorf("%d elements are out of use: %+v", r.usedCount, r.elements)
	}
	if _, ok := r.take(); ok {
		t.Error("one that is held back is given")
	}
	if now = now.Add(RMBEHold); h.holds(now) || h.until.After(now) {
		t.Error("elements are held back for too long")
	}
	r.freeHeld()
	if r.usedCount != 0 || !r.elements[first].stale || !r.elements[second].stale {
		t.Errorf("%d elements are out of use: %+v", r.usedCount, r.elements)
	}
}

// An RMB that the peer has forgotten is written by nobody: nothing is held back.
func TestRMB_forgotten(t *testing.T) {
	r := keysOf(t, 1).rmbs[0]
	i, _ := r.take()
	r.becomeForgotten()
	if r.give(time.Unix(1, 0), i, true); r.usedCount != 0 {
		t.Errorf("%d elements are out of use", r.usedCount)
	}
	if _, ok := r.take(); ok {
		t.Error("an element of a forgotten RMB is given")
	}
}

// Nor is one held back that was given back shortly before the peer forgot the RMB, when a link is lost: the RMB would outlive its last
// connection, and go amid the look at all of them when the time is over.
func TestHoldBack_forgotten(t *testing.T) {
	now := time.Unix(1, 0)
	g, _ := formed(Server)
	g.keys = *keysOf(t, 2)
	r := g.keys.rmbs[0]
	first, _ := r.take()
	second, _ := r.take()
	r.give(now, first, false)
	r.becomeForgotten()
	g.afterLoss.begin(now, g.keys.rmbs)
	if r.usedCount != 1 {
		t.Errorf("%d elements are out of use", r.usedCount)
	}
	r.give(now, second, g.afterLoss.holds(now))
	g.keys.drop(g, r)
	if g.keys.rmb(r.id) != nil {
		t.Error("the RMB is still there")
	}
	g.afterLoss.expired(g, now.Add(RMBEHold))
}

// An RMB that was held back only goes when that is over, and those behind it stay.
func TestHoldBack_expired(t *testing.T) {
	now := time.Unix(1, 0)
	g, _ := formed(Server)
	g.keys = *keysOf(t, 3)
	for _, r := range g.keys.rmbs[:2] {
		i, _ := r.take()
		r.give(now, i, true)
		r.state = rmbForgotten
	}
	g.afterLoss.expired(g, now.Add(RMBEHold))
	if n := len(g.keys.rmbs); n != 1 || g.keys.rmbs[0].id != 3 {
		t.Errorf("%d RMBs are left, want the third one", n)
	}
}
