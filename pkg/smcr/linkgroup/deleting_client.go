// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// deleteInOrder asks the server to do it (§3.5.5.1.4).
func (c *client) deleteInOrder(g *Group, _ time.Time, _ *link, m llc.DeleteLink) {
	g.requests.tellDeleted(g, m)
}

func (c *client) deletion() exchangeKind { return exchangeAskDelete }

// drained answers the server.
func (c *client) drained(g *Group, l *link, m llc.DeleteLink) {
	g.links.other(l).send(m)
	g.dropLink(l, nil)
}

func (c *client) dropped(g *Group, m llc.DeleteLink) { g.links.other(nil).send(m) }

// handleDeleteLink takes the server's order.
func (c *client) handleDeleteLink(g *Group, now time.Time, from *link, m llc.DeleteLink) {
	l := g.links.byID(m.Link)
	switch {
	case g.adding.hasNumber(g, m.Link):
		c.addDeleted(g, now, from, m)
	case l == nil && g.isDeleting(m.Link):
		// The server does what we asked for. If it was adding that link until now, it has kept
		// or lost what else we asked for, however long ago we gave the link up.
		m.Response = true
		from.send(m)
		g.requests.endDelete(g, now, m.Link)
		g.requests.keptUntil(now)
	case l == nil:
		answerUnknown(from, m)
	case l.state == linkForming: // our own wish for a link; it has no number yet
		g.Discarded++
	case g.links.other(l) == nil:
		g.ending.handleDeleteAll(g, now, from, m)
	default:
		c.obey(g, now, l, m)
	}
}

// obey is the client's part of the deletion: it cannot decline
// (§3.5.5.1.3).
func (c *client) obey(g *Group, now time.Time, l *link, m llc.DeleteLink) {
	m.Response = true
	g.requests.endDelete(g, now, l.id) // we may have asked for it
	switch {
	case isUrgent(m): // also while connections leave it: what they wait for does not arrive
		g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
		g.links.other(l).send(m)
	case l.state == linkDraining:
		l.deletion = m
	default:
		g.drain(now, l, m)
	}
}

// addDeleted: the server has given the new link up, and is answered.
func (c *client) addDeleted(g *Group, now time.Time, from *link, m llc.DeleteLink) {
	g.closeLink(&g.links.at[g.adding.link])
	m.Response = true
	from.send(m)
	g.adding.end(g, now, false)
	if g.growth.at.IsZero() {
		g.growth.schedule(g, now) // a Linux server does not try again by itself
	}
}

// handleDeleteSecond: both sides agree that there is no second link.
func (c *client) handleDeleteSecond(g *Group, now time.Time, from *link, m llc.DeleteLink) {
	m.Response = true
	from.send(m)
	g.becomeActive(now)
}

// deleted: the link was closed before the server was told.
func (c *client) deleted(*Group, llc.LinkID) {}

// lost: a Linux server adds another link by itself when the last but one is lost, and otherwise
// only if the client asks for it. What the client has asked for before may have been lost with the
// link, and the RNIC that the spare link is on may be that of the link that is left: the answer
// finds a better one.
func (c *client) lost(g *Group, now time.Time) {
	c.dropSpare(g)
	g.growth.schedule(g, now)
}

// answersOrders: a client answers all that the server wants.
func (c *client) answersOrders() bool { return true }

// endsByAnswer: the server has answered.
func (c *client) endsByAnswer(llc.DeleteLink) bool { return true }

// endsWhenDelivered: the server's answer ends the group.
func (c *client) endsWhenDelivered() bool { return false }

// sendDelete: a client asks with exchangeAskDelete.
func (c *client) sendDelete(g *Group, _ time.Time) { g.requests.send(g) }
