// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"iter"
	"slices"
	"time"
)

// lingering are the links of a stack that were given up and to which the peer may still speak
// (linger.go says why). They own their queue pairs until their time is over, others need
// the place, or the stack ends. They are guarded by the stack's turn.
type lingering struct {
	links []*link       // the oldest first
	heard chan struct{} // has a token when Close shall look again whether it must wait for a peer
}

func (t *lingering) init() { t.heard = make(chan struct{}, 1) }

// add keeps a link until the time that it says. The oldest one makes place for it.
func (t *lingering) add(l *link) {
	t.links = append(t.links, l)
	if len(t.links) > maxLingering {
		t.links[0].close()
		t.links = slices.Delete(t.links, 0, 1)
	}
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

// closeOldest closes the link on a device that lingers for the longest time, if there is
// one.
func (t *lingering) closeOldest(r *rnic) bool {
	i := slices.IndexFunc(t.links, func(l *link) bool { return l.rnic == r })
	if i < 0 {
		return false
	}
	t.links[i].close()
	t.links = slices.Delete(t.links, i, i+1)
	return true
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
