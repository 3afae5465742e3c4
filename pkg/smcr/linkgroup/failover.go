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
	g.loseLink(now, &g.links.at[index], llc.DeleteLostPath, FaultLink, fmt.Errorf("%w: %w", ErrLink, err))
}

// HandlePort takes a port event of one of our RNICs. The links of one that is
// down have failed, but the last one, which the port may come back for before
// its queue pair gives up. One that comes up may carry another link, also if an
// operator has deleted one.
func (g *Group) HandlePort(now time.Time, rnic uint8, up bool) {
	if !up {
		for i := range g.links.at {
			if l := &g.links.at[i]; l.state > linkWanted && l.local.RNIC == rnic && g.links.other(l) != nil {
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
	case g.side.spareIn(l.place()):
		g.side.dropSpare(g)
		return
	case g.adding.isAbout(l.index):
		g.adding.abandon(g, now, why, false)
		return
	case g.state == Forming, g.links.other(l) == nil, g.ending.byPeer && l.place() == g.ending.via:
		g.fail(f, err)
		return
	}
	m := llc.DeleteLink{Link: l.id, Reason: why}
	if l.state == linkDraining && l.deletion.Response {
		m = l.deletion // the answer that a client owes the server, who knows that the link goes
	}
	g.leaveLink(now, l, err)
	switch {
	case g.state != Active:
	case m.Response:
		g.side.dropped(g, m)
	default:
		g.requests.tellDeleted(g, m)
		g.side.addIfUseful(g)
	}
}

// doubt is what the missing answer to an exchange says of the link that carried it: the link has
// failed. But Linux drops some messages, and gives some exchanges up without a word; and with the last
// link all connections end. So that one is asked by TEST LINK first, and fails if it does not answer
// in [LastLinkTimeout]. doubt reports whether the link is kept.
func (g *Group) doubt(now time.Time, l *link, err error) (kept bool) {
	if g.dialect != llc.DialectLinux || g.links.other(l) != nil {
		g.loseLink(now, l, llc.DeleteLostPath, FaultLink, err)
		return false
	}
	if l.testSent.IsZero() {
		g.tester(now).test(l)
	}
	return true
}

// leaveLink is dropLink, with the end of the exchange that the link carried, if
// that adds another one.
func (g *Group) leaveLink(now time.Time, l *link, err error) {
	exchange := g.adding.isUnderWay() && g.adding.via == l.place()
	g.dropLink(l, err)
	if exchange {
		g.adding.abandon(g, now, llc.DeleteLostPath, false)
	}
	g.side.lost(g, now)
}

// dropLink closes one of several links and moves what used it elsewhere. LLC
// requests that it carried are sent again over another link (§2.3).
func (g *Group) dropLink(l *link, err error) {
	g.closeLink(l)
	g.adding.linkLost(l, g.links.other(l))
	g.requests.linkLost(l)
	g.undrain()
	g.links.classify()
	for _, c := range g.conns.list {
		if c == nil {
			continue
		}
		c.cameTo &^= 1 << l.index
		if c.peerLink == l.place() {
			c.peerLink = noPlace
		}
		switch {
		case c.link == l.place() && c.target != noPlace:
			c.failover(c.at(c.target))
		case c.link == l.place():
			c.failover(g.links.best(c, l, g.state == Forming))
		case c.target == l.place(): // it was about to come here
			c.stay()
		}
	}
	g.out.link(l, err)
}

// balance moves connections from the fullest links to the emptiest one until
// they differ by no more than one. An asymmetric link gets none: it is there
// for bad times. Neither does a client's new link before the server has
// acknowledged anything on it: it may work in one direction only.
func (t *linkTable) balance(conns *connTable) {
	for {
		var least, most *link
		for i := range t.at {
			l := &t.at[i]
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
		if least == nil || most.conns-least.conns < 2 || !conns.moveOne(most, least) {
			return
		}
	}
}

// moveOne moves one connection in order.
func (t *connTable) moveOne(from, to *link) bool {
	for _, c := range t.list {
		if c != nil && !c.done && c.link == from.place() && c.target == noPlace && c.canUse(to) {
			c.moveTo(to)
			return true
		}
	}
	return false
}

// isUnproved reports whether the peer has acknowledged nothing yet of what we sent.
func (l *link) isUnproved() bool { return l.pace.done == 0 && l.inflight+len(l.queue) > 0 }

// canUse reports whether we know how to write to the peer's buffer over a
// link; before we know the buffer, any link will do.
func (c *Conn) canUse(l *link) bool { return c.peerRMB == nil || c.peerRMB.knows(l.index) }

// at is a link of the group.
func (c *Conn) at(p place) *link { return c.g.links.in(p) }

// dest is the link that the connection uses or is about to.
func (c *Conn) dest() *link {
	if c.target != noPlace {
		return c.at(c.target)
	}
	return c.at(c.link)
}

// moveTo moves the connection to another link once nothing is under way on its
// own, so that nothing need be validated or repeated.
func (c *Conn) moveTo(l *link) {
	c.dest().conns--
	l.conns++
	c.target = l.place()
	if c.target == c.link {
		c.target = noPlace
	}
	c.enqueue()
}

// stay cancels a move to a link that is gone.
func (c *Conn) stay() {
	c.at(c.target).conns--
	c.target = noPlace
	l := c.at(c.link)
	l.conns++
	if l.state == linkDraining {
		c.moveTo(c.g.links.best(c, l, c.g.state == Forming))
		return
	}
	c.enqueue()
}

// arrive finishes a move in order. A connection that cannot write over the new link, because the
// peer has not told its buffer's key there, is reset.
func (c *Conn) arrive() {
	old := c.at(c.link)
	c.link, c.target = c.target, noPlace
	c.rename()
	if !c.canUse(c.at(c.link)) {
		c.raise(c.data.Abort())
	}
	c.g.drained(old)
}

// rename makes an Accept that is still to be sent name the link to which the
// connection has moved: the client may not know our RMB on the old one.
func (c *Conn) rename() {
	if c.peerRMB == nil && c.g.side.namesLinks() {
		c.named, c.endpoint = c.link, c.at(c.link).local
	}
}

// failover moves the connection off a link that is lost (§4.6): what was under
// way is validated and said again over the new one. A connection that cannot
// write over the new link is reset.
func (c *Conn) failover(l *link) {
	c.dest().conns--
	c.link, c.target = l.place(), noPlace
	c.rename()
	l.conns++
	c.raise(c.data.Failover())
	if !c.canUse(l) {
		c.raise(c.data.Abort())
	}
	c.enqueue()
}

// peerSpoke notes the link that a message of the peer came over, if nothing newer came
// before. After a failover validation message over another link it says that the peer has
// lost the link that it used before, and writes the same anew here, and then what comes
// after that (§4.6.2). What a device held up on the old link must not go over it later:
//
//	the peer, old link                 the peer, new link               we
//	  WRITE of bytes 0 to 9  -->|
//	  the link is lost          |        F, WRITE of 0 to 9     -->       read, and announced
//	                            |        WRITE of 10 to 19      -->       in the place of 0 to 9
//	                            +------------------------------->       0 to 9, in place of 10 to 19
//
// So the old link is lost for us, too, and nothing arrives over it any more, before we
// announce that anything was read. The peer's DELETE LINK says the same, but it may
// wait behind another exchange, at Linux for 2 s. A peer that moves a connection in order
// does so without validation, when nothing of it is under way.
//
// The validation message alone does not tell: it has no number, and one that was held up
// itself may come when the peer has lost that link, too, and gone on over a third one. If
// nothing was under way nothing follows the validation message, and the next number may come over
// a link that the connection has moved to in order: then the validation messages before are settled. But not one over the
// link that the peer used before, as far as we know: it has moved there in order, lost that link, and come back.
//
// A message that leaves others out without a validation message says the same: the peer, a Linux that closes the
// connection, has moved with something under way.
func (c *Conn) peerSpoke(now time.Time, l *link, validation, skips bool) {
	set := uint8(1) << l.index
	switch {
	case !l.isUp():
		return
	case validation:
		c.cameTo |= set
		return
	}
	g, old := c.g, c.at(c.peerLink)
	failedOver := c.cameTo&set != 0 || skips
	c.cameTo &^= set
	if !failedOver && old != l {
		c.cameTo &= bitOf(old)
	}
	c.peerLink = l.place()
	if !failedOver || g.state != Active || old == nil || old == l || !old.isUp() {
		return
	}
	g.loseLink(now, old, llc.DeleteLostPath, FaultLink, ErrLinkLeft)
}

// bitOf is the bit of a link in cameTo; 0: there is no link.
func bitOf(l *link) uint8 {
	if l == nil {
		return 0
	}
	return 1 << l.index
}
