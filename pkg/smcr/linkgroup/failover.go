// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// HandleLinkFailure takes the error of a link's queue pair. Its connections
// move to another link (RFC 7609 §4.6); with the last link the group ends, and
// all connections are reset.
func (g *Group) HandleLinkFailure(now time.Time, index LinkIndex, err error) {
	g.loseLink(now, &g.links[index], llc.DeleteLostPath, FaultLink, fmt.Errorf("%w: %w", ErrLink, err))
}

// HandlePort takes a port event of one of our RNICs. The links of one that is
// down have failed, but the last one, which the port may come back for before
// its queue pair gives up. One that comes up may carry another link, also if an
// operator has deleted one.
func (g *Group) HandlePort(now time.Time, rnic uint8, up bool) {
	if !up {
		for i := range g.links {
			if l := &g.links[i]; l.state > linkWanted && l.local.RNIC == rnic && g.otherLink(l) != nil {
				g.loseLink(now, l, llc.DeleteLostPath, FaultLink, fmt.Errorf("%w: port of RNIC %d is down", ErrLink, rnic))
			}
		}
		return
	}
	g.AllowLinks()
}

// loseLink is what a link that is of no use any more means for the group: the
// end of the set-up it belongs to, the end of the group, or less redundancy.
func (g *Group) loseLink(now time.Time, l *link, why llc.DeleteReason, f SetupFault, err error) {
	switch {
	case g.state == Dead || l.state <= linkWanted:
		return
	case l == g.spare:
		g.spare = nil
		g.closeLink(l)
		return
	case g.adding.step != addNone && g.adding.link == l.index:
		g.abandonAdd(now, why, false)
		return
	case g.state == Forming, g.otherLink(l) == nil, g.deleted && l == g.lastWord:
		g.fail(f, err)
		return
	}
	id := l.id
	g.leaveLink(now, l, err)
	if g.state == Active {
		g.tellDeleted(llc.DeleteLink{Link: id, Reason: why})
		g.addIfUseful()
	}
}

// leaveLink is dropLink, with the end of the exchange that the link carried, if
// that adds another one.
func (g *Group) leaveLink(now time.Time, l *link, err error) {
	exchange := g.adding.step != addNone && g.adding.via == l
	g.dropLink(l, err)
	if exchange {
		g.abandonAdd(now, llc.DeleteLostPath, false)
	}
	if g.cfg.Role == Client {
		// A Linux server adds a link in the place of the last but one, and else
		// only if it is asked to.
		g.scheduleRetry(now)
	}
}

// dropLink closes one of several links and moves what used it elsewhere. LLC
// requests that it carried are sent again over another link (§2.3).
func (g *Group) dropLink(l *link, err error) {
	g.closeLink(l)
	if g.adding.via == l {
		g.adding.via = g.otherLink(l) // for what must still be said; the rest times out
	}
	g.undrain()
	g.classify()
	if g.flowVia == l && g.flowSent && g.flows[0].kind != flowAddLink {
		g.flowSent = false
	}
	for _, c := range g.conns {
		if c == nil {
			continue
		}
		switch {
		case c.link == l && c.target != nil:
			c.failover(c.target)
		case c.link == l:
			c.failover(g.bestLink(c, l))
		case c.target == l: // it was about to come here
			c.stay()
		}
	}
	g.linkEvent(l, err)
}

// linkEvent tells displays and hooks that a link went ACTIVE or down.
func (g *Group) linkEvent(l *link, err error) {
	g.out = append(g.out, Output{Kind: OutEvent, Event: EventLink, Link: l.index, Err: err})
}

// bestLink chooses the link for a connection that must leave one: where it can
// write at all, symmetric before asymmetric, then the least loaded.
func (g *Group) bestLink(c *Conn, not *link) *link {
	var best *link
	cost := func(l *link) int {
		n := l.conns
		if l.asymmetric {
			n += maxSlots
		}
		if l.state == linkDraining {
			n += 2 * maxSlots
		}
		if !c.canUse(l) {
			n += 4 * maxSlots
		}
		return n
	}
	for i := range g.links {
		if l := &g.links[i]; l != not && (l.isUp() || (g.state == Forming && l == g.firstLink())) && (best == nil || cost(l) < cost(best)) {
			best = l
		}
	}
	return best
}

// balance moves connections from the fullest links to the emptiest one until
// they differ by no more than one. An asymmetric link gets none: it is there
// for bad times. Neither does a client's new link before the server has
// acknowledged anything on it: it may work in one direction only.
func (g *Group) balance() {
	for {
		var least, most *link
		for i := range g.links {
			l := &g.links[i]
			if l.state != linkActive {
				continue
			}
			if !l.asymmetric && !l.isUnproved() && (least == nil || l.conns < least.conns) {
				least = l
			}
			if most == nil || l.conns > most.conns {
				most = l
			}
		}
		if least == nil || most.conns-least.conns < 2 || !g.moveOne(most, least) {
			return
		}
	}
}

// isUnproved reports whether the peer has acknowledged nothing yet of what we sent.
func (l *link) isUnproved() bool { return l.pace.done == 0 && l.inflight+len(l.queue) > 0 }

// moveOne moves one connection in order.
func (g *Group) moveOne(from, to *link) bool {
	for _, c := range g.conns {
		if c != nil && !c.done && c.link == from && c.target == nil && c.canUse(to) {
			c.moveTo(to)
			return true
		}
	}
	return false
}

// canUse reports whether we know how to write to the peer's buffer over a
// link; before we know the buffer, any link will do.
func (c *Conn) canUse(l *link) bool { return c.peerRMB == nil || c.peerRMB.knows(l.index) }

// dest is the link that the connection uses or is about to.
func (c *Conn) dest() *link {
	if c.target != nil {
		return c.target
	}
	return c.link
}

// moveTo moves the connection to another link once nothing is under way on its
// own, so that nothing need be validated or repeated.
func (c *Conn) moveTo(l *link) {
	c.dest().conns--
	l.conns++
	c.target = l
	if l == c.link {
		c.target = nil
	}
	c.enqueue()
}

// stay cancels a move to a link that is gone.
func (c *Conn) stay() {
	c.target.conns--
	c.target = nil
	c.link.conns++
	if c.link.state == linkDraining {
		c.moveTo(c.g.bestLink(c, c.link))
		return
	}
	c.enqueue()
}

// arrive finishes a move in order.
func (c *Conn) arrive() {
	old := c.link
	c.link, c.target = c.target, nil
	c.rename()
	c.g.drained(old)
}

// rename makes an Accept that is still to be sent name the link to which the
// connection has moved: the client may not know our RMB on the old one.
func (c *Conn) rename() {
	if c.peerRMB == nil && c.g.cfg.Role == Server {
		c.named, c.endpoint = c.link, c.link.local
	}
}

// failover moves the connection off a link that is lost (§4.6): what was under
// way is validated and said again over the new one. A connection that cannot
// write over the new link is reset.
func (c *Conn) failover(l *link) {
	c.dest().conns--
	c.link, c.target = l, nil
	c.rename()
	l.conns++
	c.raise(c.data.Failover())
	if !c.canUse(l) {
		c.raise(c.data.Abort())
	}
	c.enqueue()
}
