// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// DeleteLink takes a link out of service in order, for an operator: its
// connections move to another link first (RFC 7609 §3.5.5.1.3). The client asks
// the server to do it (§3.5.5.1.4). With the last link the group ends. After
// llc.DeleteOperator no other link takes its place before AllowLinks, or before
// a port comes up.
func (g *Group) DeleteLink(now time.Time, index LinkIndex, why llc.DeleteReason) {
	l := &g.links.at[index]
	if g.state != Active || l.state != linkActive {
		return
	}
	other := g.links.other(l)
	g.growth.forbid(why, ourOperator)
	if other == nil {
		g.Terminate(now, why)
		return
	}
	g.side.deleteInOrder(g, now, l, llc.DeleteLink{Link: l.id, Orderly: true, Reason: why})
}

// tellDeleted tells the peer that a link goes or is gone: the server with the
// exchange that deletes it, the client by asking the server for that.
func (q *requests) tellDeleted(g *Group, m llc.DeleteLink) {
	if !g.isDeleting(m.Link) {
		q.add(exchange{kind: g.side.deletion(), deletion: m})
	}
}

// isDeleting reports whether a link is being cleaned up.
func (g *Group) isDeleting(id llc.LinkID) bool {
	return g.requests.deletes(id) || g.setup.failed == id && id != 0
}

// drain moves connections off a link as soon as nothing of theirs is under way
// on it, and then tells the peer: m is the server's request, or the client's
// answer to it.
func (g *Group) drain(now time.Time, l *link, m llc.DeleteLink) {
	g.links.becomeDraining(now, l, m)
	for _, c := range g.conns.list {
		if c != nil && c.dest() == l {
			c.moveTo(g.links.best(c, l, g.state == Forming))
		}
	}
	g.drained(l)
}

// drained goes on with the deletion of a link once no connection uses it.
func (g *Group) drained(l *link) {
	if l.state != linkDraining || l.drainBy.IsZero() {
		return
	}
	for _, c := range g.conns.list {
		if c != nil && c.link == l.place() {
			return
		}
	}
	l.drainBy = time.Time{}
	m := l.deletion
	g.side.drained(g, l, m)
}

// drainExpired stops waiting for connections that do not leave the link.
func (g *Group) drainExpired(now time.Time, l *link) {
	m := l.deletion
	g.leaveLink(now, l, nil)
	g.side.dropped(g, m)
}

// undrain keeps a link that was to be deleted in order, because it is the last one now: what the
// operator wanted has not come about. The peer may have been told over the link that was lost, and
// then closes the link that is kept: TEST LINK, or the queue pair, tells.
func (g *Group) undrain() {
	if l := g.links.other(nil); l != nil && g.links.other(l) == nil && l.state == linkActive {
		if g.requests.cancelDeletion(l.id) {
			g.growth.allow()
		}
		return
	}
	for i := range g.links.at {
		if g.links.at[i].state == linkActive {
			return
		}
	}
	for i := range g.links.at {
		l := &g.links.at[i]
		if l.state != linkDraining {
			continue
		}
		g.links.becomeKept(l)
		g.growth.allow()
		g.requests.cancelDeletion(l.id)
	}
}

// handleDeleteLink takes DELETE LINK of either side (A.3.4).
func (g *Group) handleDeleteLink(now time.Time, from *link, m llc.DeleteLink) error {
	switch {
	case m.Response:
		g.requests.handleDeleteReply(g, now, m)
		return nil
	case g.state == Forming:
		return g.setup.handleDeleteLink(g, now, from, m)
	case m.All:
		g.ending.handleDeleteAll(g, now, from, m)
		return nil
	case g.state != Active:
		if g.requests.is(exchangeDeleteAll) && g.links.byID(m.Link) != nil && g.links.other(g.links.byID(m.Link)) == nil {
			g.last.heardEnd()
			g.becomeDead(nil) // both sides end the group
			return nil
		}
		g.Discarded++
		return nil
	}
	g.side.handleDeleteLink(g, now, from, m)
	return nil
}

// isUrgent reports whether the link is of no use any more. A lost path is,
// although Linux calls the deletion orderly.
func isUrgent(m llc.DeleteLink) bool { return !m.Orderly || m.Reason == llc.DeleteLostPath }

// isWaitingFor reports whether the exchange that adds a link waits for a message over another
// link, which will not come if that link goes.
func (a *adding) isWaitingFor(l *link) bool {
	return a.via == l.place() && (a.step == addWaitReply || a.step == addWaitCont)
}

// answerUnknown refuses the deletion of a link that there is not.
func answerUnknown(from *link, m llc.DeleteLink) {
	m.Response = true
	m.Reason = llc.DeleteUnknownLink
	from.send(m)
}

// endDelete finishes the deletion of a link, at the server with the client's
// answer.
func (q *requests) endDelete(g *Group, now time.Time, id llc.LinkID) {
	if q.endDeletion(id) {
		g.afterLoss.heard(now, g.keys.rmbs)
	}
	g.side.deleted(g, id)
}

// changing reports whether the server changes the configuration of links:
// RKeys must not change then (§3.5.5.3).
func (g *Group) changing() bool {
	return g.adding.isUnderWay() || g.requests.is(exchangeDeleteLink)
}

// ending is how a group ends in order.
type ending struct {
	byPeer   bool      // the peer has ended the group, which is dead once our answer is delivered
	via      place     // the link that carries this answer, or our own DELETE LINK
	deadline time.Time // of the answer's delivery
}

// becomeAnswered: the peer has ended the group, and our answer is on its way.
func (e *ending) becomeAnswered(via *link, until time.Time) {
	*e = ending{byPeer: true, via: via.place(), deadline: until}
}

// becomeAsked: our own DELETE LINK for all is on its way.
func (e *ending) becomeAsked(via place) { e.via = via }

// err is why a group in state Draining ends.
func (e *ending) err() error {
	if e.byPeer {
		return ErrPeerDeleted
	}
	return nil
}

// handleDeleteAll ends the group because the peer says so; it also takes a
// deletion of the last link. The group is over when the peer has our answer.
func (e *ending) handleDeleteAll(g *Group, now time.Time, from *link, m llc.DeleteLink) {
	switch {
	case g.requests.is(exchangeDeleteAll):
		// Both sides end the group at once, or the server answers our request
		// with its own (§3.5.4).
		g.last.heardEnd()
		g.becomeDead(nil)
		return
	case e.byPeer:
		g.Discarded++ // the same once more: the answer is on its way
		return
	}
	m.Response = g.side.answersOrders()
	from.send(m)
	g.becomeDraining()
	g.last.heardEnd()
	e.becomeAnswered(from, now.Add(ExchangeTimeout))
}
