// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"time"
)

// lingering are the links of a stack that were given up and to which the peer may still speak
// (linger.go says why). They own their queue pairs until their time is over, others need
// the place, or the stack ends. They are guarded by the stack's turn.
type lingering struct {
	links []*link
	heard chan struct{} // has a token when Close shall look again whether it must wait for a peer
}

func (t *lingering) init() { t.heard = make(chan struct{}, 1) }

// add keeps a link until the time that it says. Another one makes place for it.
func (t *lingering) add(l *link) {
	t.links = append(t.links, l)
	if len(t.links) > maxLingering {
		t.makePlace(func(*link) bool { return true })
	}
}

// makePlace closes one of the links that may go, if there is one: of those to the address with most of them, so that no peer
// takes the place of others. Of these, one that carries its group's last words goes only if all do, as it has its place for less
// than a second; and then the one whose time is over first.
func (t *lingering) makePlace(mayGo func(l *link) bool) bool {
	of := map[netip.Addr]int{}
	for _, l := range t.links {
		if mayGo(l) {
			of[l.g.addr]++
		}
	}
	last := func(l *link) int {
		if l.orderly {
			return 1
		}
		return 0
	}
	at := -1
	for i, l := range t.links {
		if !mayGo(l) {
			continue
		}
		if at >= 0 {
			was := t.links[at]
			if cmp.Or(cmp.Compare(of[was.g.addr], of[l.g.addr]), cmp.Compare(last(l), last(was)), l.until.Compare(was.until)) >= 0 {
				continue
			}
		}
		at = i
	}
	if at < 0 {
		return false
	}
	t.links[at].close()
	t.links = slices.Delete(t.links, at, at+1)
	return true
}

// of are the links that a group gave up.
func (t *lingering) of(g *group) iter.Seq[*link] {
	return func(yield func(*link) bool) {
		for _, l := range t.links {
			if l.g == g && !yield(l) {
				return
			}
		}
	}
}

// expire closes the links whose time is over.
func (t *lingering) expire(now time.Time) {
	t.closeIf(func(l *link) bool { return !now.Before(l.until) })
}

// closeOn closes the links over a device that is gone.
func (t *lingering) closeOn(r *rnic) {
	t.closeIf(func(l *link) bool { return l.rnic == r })
}

// closeAll closes all links.
func (t *lingering) closeAll() {
	t.closeIf(func(*link) bool { return true })
}

func (t *lingering) closeIf(over func(l *link) bool) {
	t.links = slices.DeleteFunc(t.links, func(l *link) bool {
		if !over(l) {
			return false
		}
		l.close()
		return true
	})
}

// makePlaceOn closes a link on a device, if there is one.
func (t *lingering) makePlaceOn(r *rnic) bool {
	return t.makePlace(func(l *link) bool { return l.rnic == r })
}

// nextDue is when the time of the first link is over; false: there is none.
func (t *lingering) nextDue() (at time.Time, ok bool) {
	for _, l := range t.links {
		if !ok || l.until.Before(at) {
			at, ok = l.until, true
		}
	}
	return at, ok
}

// awaitsPeer reports whether the peer of a link can still say that it knows of the end.
func (t *lingering) awaitsPeer(now time.Time) bool {
	return slices.ContainsFunc(t.links, func(l *link) bool {
		return !l.broken && !l.g.lg.PeerKnows() || now.Before(l.unheard)
	})
}

// tellClose lets Close look again whether it must wait.
func (t *lingering) tellClose() { wakeUp(t.heard) }
