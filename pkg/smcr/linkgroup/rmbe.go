// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// element is an RMBE of one of our RMBs.
//
//	free --OpenConn--> used --Release--> free
//	  |                  |                ^
//	  +--link lost--> held <--link lost   |
//	                     +---RMBEHold-----+
type element struct {
	used  bool
	held  bool      // no connection has it, but the peer may still write to it
	stale bool      // it was held since it was used last
	freed time.Time // when it was used last; zero: never
}

// isFree reports whether a connection can have the element.
func (e *element) isFree() bool { return !e.used && !e.held }

// becomeUsed: a connection has the element.
func (e *element) becomeUsed() { e.used = true }

// becomeFree: the connection has given the element back.
func (e *element) becomeFree(now time.Time) { *e = element{freed: now} }

// becomeHeld: the element is held back.
func (e *element) becomeHeld() { e.held = true }

// becomeStale: the element is free, and what it was held back for may have been written.
func (e *element) becomeStale() { e.held, e.stale = false, true }

// take finds the element that has been free for the longest time: the less
// likely is a write of the peer that is still on its way there.
func (r *rmb) take() (int, bool) {
	if r.state >= rmbDeleting {
		return 0, false
	}
	best := -1
	for i := range r.elements {
		e := &r.elements[i]
		if e.isFree() && (best < 0 || e.freed.Before(r.elements[best].freed)) {
			best = i
		}
	}
	if best < 0 {
		return 0, false
	}
	r.elements[best].becomeUsed()
	r.usedCount++
	return best, true
}

// give takes an element back, to be held back if the group has just lost a
// link.
func (r *rmb) give(now time.Time, i int, hold bool) {
	e := &r.elements[i]
	invariant.Must(e.used, "RMBE released twice")
	e.becomeFree(now)
	if hold && r.state != rmbForgotten {
		e.becomeHeld()
	} else {
		r.usedCount--
	}
}

// holdBack keeps the RMBEs of connections that have just ended, or will soon,
// from others for a while: the peer may have missed our last acknowledgements
// on a link that is lost, and then it writes once more, over another link, what
// we took long ago (§4.6).
type holdBack struct {
	lost  bool      // a link was lost: begin
	until time.Time // RMBEs that are not in use
}

// holds reports whether an RMBE that is given back now is held back.
func (h *holdBack) holds(now time.Time) bool { return h.lost || now.Before(h.until) }

// linkLost has what is free held back from the next Poll on.
func (h *holdBack) linkLost() { h.lost = true }

// begin holds back the RMBEs that were given back of late.
func (h *holdBack) begin(now time.Time, rmbs []*rmb) {
	h.lost = false
	h.until = now.Add(RMBEHold)
	for _, r := range rmbs {
		r.holdFreed(now)
	}
}

// heard begins anew while something is held back: the peer may have heard only now of a link
// that is gone.
func (h *holdBack) heard(now time.Time, rmbs []*rmb) {
	if !h.until.IsZero() {
		h.begin(now, rmbs)
	}
}

func (r *rmb) holdFreed(now time.Time) {
	if r.state == rmbForgotten {
		return // the peer does not write there any more
	}
	for i := range r.elements {
		e := &r.elements[i]
		if e.isFree() && !e.freed.IsZero() && now.Before(e.freed.Add(RMBEHold)) {
			e.becomeHeld()
			r.usedCount++
		}
	}
}

// expired frees what is held back, or not yet if the peer cannot have heard of the link: it
// is still to be told, or what it was told is not acknowledged.
func (h *holdBack) expired(g *Group, now time.Time) {
	if g.requests.hasUntold() || g.links.areStuck(now) {
		h.until = now.Add(RMBEHold)
		return
	}
	h.until = time.Time{}
	for _, r := range slices.Clone(g.keys.rmbs) { // drop may take them out of it
		r.freeHeld()
		g.keys.drop(g, r)
	}
}

func (r *rmb) freeHeld() {
	for i := range r.elements {
		if e := &r.elements[i]; e.held {
			e.becomeStale()
			r.usedCount--
		}
	}
}

// Stale reports whether bytes may have arrived in the RMBE since it was zeroed
// last.
func (c *Conn) Stale() bool { return c.rmb.elements[c.element].stale }

// FreeRMBEs counts the elements of a size that a connection can have without
// another RMB, those of RMBs included that the peer is just being told of.
func (g *Group) FreeRMBEs(size uint32) int { return g.keys.free(size) }

// UnconfirmedRMB finds an RMB with free elements of a size that the peer does
// not know.
func (g *Group) UnconfirmedRMB(size uint32) (RMBID, bool) {
	for _, r := range g.keys.rmbs {
		if r.elementSize == size && r.state == rmbNew && r.usedCount < len(r.elements) {
			return r.id, true
		}
	}
	return 0, false
}

// isKnown reports whether the peer knows the RMB or is being told of it, and
// its elements are given to connections.
func (r *rmb) isKnown() bool { return r.state == rmbConfirmed || r.state == rmbConfirming }

// drop gives an RMB back if it has no use any more.
func (k *keyTable) drop(g *Group, r *rmb) {
	switch {
	case r.state == rmbForgotten && r.usedCount == 0:
		k.unlist(r)
	case g.state == Active && k.isSurplus(r):
		k.takeBack(g, r)
	}
}

// takeBack makes the peer forget an RMB.
func (k *keyTable) takeBack(g *Group, r *rmb) {
	r.becomeDeleting()
	g.requests.add(exchange{kind: exchangeDeleteRKey, rmbs: []RMBID{r.id}})
}

// isReleasable reports whether the RMB has no use but for connections to come.
func (r *rmb) isReleasable() bool {
	return r.usedCount == 0 && (r.state == rmbNew || r.state == rmbConfirmed)
}

// release gives the RMBs of a group without connections back. The next connection
// gets a new one, of which the peer has to be told first. The peer may know one that it
// did not confirm: its answer got lost.
func (k *keyTable) release(g *Group) {
	for _, r := range k.rmbs {
		if r.isReleasable() {
			k.takeBack(g, r)
		}
	}
}

// forgotten says that the peer has forgotten an RMB: it cannot write there any more.
func (k *keyTable) forgotten(g *Group, id RMBID) {
	r := k.rmb(id)
	if r == nil {
		return
	}
	r.becomeForgotten()
	if r.zombies > 0 {
		for _, c := range g.conns.list {
			if c != nil && c.rmb == r && c.zombie {
				c.finish()
			}
		}
	}
	k.drop(g, r)
}

// becomeZombie keeps the RMBE out of use until the peer says that it writes
// no more, or has forgotten the RMB, or the group ends. The peer may just be
// late: only ZombieGrace later other connections get elements of other RMBs as far as there
// are any, so that the RMB can be taken back when those that have one now are gone.
func (c *Conn) becomeZombie(now time.Time) {
	if c.zombie || c.done {
		return
	}
	g := c.g
	c.zombie = true
	c.since = now
	g.conns.zombies++
	c.rmb.zombies++
	if heard := c.at(c.link).heard; heard.After(g.idleSince) {
		g.idleSince = heard
	}
	if g.conns.retireAt.IsZero() {
		g.conns.retireAt = now.Add(ZombieGrace)
	}
}

func (c *Conn) endZombie() {
	if !c.zombie {
		return
	}
	c.zombie = false
	c.g.conns.zombies--
	if c.rmb.zombies--; c.rmb.zombies == 0 {
		c.rmb.retired = false
	}
}

// retireRMBs has the RMBs used last that have old zombies, or takes them back.
func (t *connTable) retireRMBs(g *Group, now time.Time) {
	t.retireAt = time.Time{}
	for _, c := range t.list {
		if c == nil || !c.zombie {
			continue
		}
		at := c.since.Add(ZombieGrace)
		switch {
		case now.Before(at):
			if t.retireAt.IsZero() || at.Before(t.retireAt) {
				t.retireAt = at
			}
		case !c.rmb.retired:
			c.rmb.retired = true
			g.keys.drop(g, c.rmb)
		}
	}
}
