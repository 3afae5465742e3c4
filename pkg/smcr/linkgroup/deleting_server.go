// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// deleteInOrder: connections leave the link before the client is told.
func (s *server) deleteInOrder(g *Group, now time.Time, l *link, m llc.DeleteLink) {
	g.drain(now, l, m)
}

func (s *server) deletion() exchangeKind { return exchangeDeleteLink }

// drained: the link is closed when the client has answered.
func (s *server) drained(g *Group, _ *link, m llc.DeleteLink) { g.requests.tellDeleted(g, m) }

func (s *server) dropped(g *Group, m llc.DeleteLink) { g.requests.tellDeleted(g, m) }

// handleDeleteLink takes the client's wish (§3.5.5.1.4).
func (s *server) handleDeleteLink(g *Group, now time.Time, from *link, m llc.DeleteLink) {
	l := g.links.byID(m.Link)
	switch {
	case g.adding.hasNumber(g, m.Link):
		s.addDeleted(g, now, from, m)
	case l != nil && l.state == linkDraining && !l.drainBy.IsZero() && isUrgent(m):
		s.deleteForClient(g, now, l, m) // connections are still leaving it, and what they wait for does not arrive
	case l == nil && g.isDeleting(m.Link), l != nil && l.state == linkDraining:
		g.Discarded++ // it is being cleaned up: the messages have crossed (C.7.1)
	case l == nil:
		answerUnknown(from, m)
	case l.state == linkForming:
		g.Discarded++
	case g.changing():
		if !g.isDeleting(m.Link) { // else it has said so before, and may have asked for a link since
			g.growth.forbid(m.Reason, peersOperator)
		}
		g.requests.tellDeleted(g, m) // §3.5.5.3: after the exchange under way
		if isUrgent(m) && g.adding.isWaitingFor(l) {
			g.adding.abandon(g, now, m.Reason, false) // it goes on nowhere: the link was to carry it
		}
	case g.links.other(l) == nil:
		g.ending.handleDeleteAll(g, now, from, m)
	default:
		s.deleteForClient(g, now, l, m)
	}
}

// deleteForClient is what the server does when a client asks (§3.5.5.1.4).
func (s *server) deleteForClient(g *Group, now time.Time, l *link, m llc.DeleteLink) {
	g.growth.forbid(m.Reason, peersOperator)
	if !isUrgent(m) {
		g.drain(now, l, m)
		return
	}
	g.requests.tellDeleted(g, m)
	g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
	s.addIfUseful(g)
}

// addDeleted: the client has given the new link up.
func (s *server) addDeleted(g *Group, now time.Time, _ *link, m llc.DeleteLink) {
	g.growth.forbid(m.Reason, peersOperator)
	g.adding.abandon(g, now, m.Reason, m.Orderly)
}

// handleDeleteSecond: the client's DELETE LINK has crossed with ours.
func (s *server) handleDeleteSecond(g *Group, _ time.Time, _ *link, _ llc.DeleteLink) { g.Discarded++ }

// deleted closes the link that the client has agreed to end.
func (s *server) deleted(g *Group, id llc.LinkID) {
	switch l := g.links.byID(id); {
	case l == nil || !l.isUp():
	case g.links.other(l) == nil: // it has become the last one
		g.last.heardEnd()
		g.becomeDead(ErrPeerDeleted)
	default:
		g.dropLink(l, nil)
		s.addIfUseful(g)
	}
}

// lost: another link is offered as soon as there is an RNIC.
func (s *server) lost(*Group, time.Time) {}

// answersOrders: a client asks, and the server does it, or not: also to end the group (§3.5.4).
func (s *server) answersOrders() bool { return false }

// endsByAnswer: an answer about one link is to an older request.
func (s *server) endsByAnswer(m llc.DeleteLink) bool { return m.All }

// endsWhenDelivered: what the server decides is done when it is delivered (C.7.1).
func (s *server) endsWhenDelivered() bool { return true }

// sendDelete starts the deletion of a link. One that the client
// asked for during another exchange has still to be taken out of service.
func (s *server) sendDelete(g *Group, now time.Time) {
	m := g.requests.current().deletion
	if l := g.links.byID(m.Link); l != nil && l.state == linkActive {
		if g.links.other(l) == nil { // the last one meanwhile
			g.requests.end()
			g.Terminate(now, m.Reason)
			return
		}
		if !isUrgent(m) {
			g.requests.end()
			g.drain(now, l, m)
			return
		}
		g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
		s.addIfUseful(g)
		if g.requests.current() == nil { // the lost link carried the exchange with this request
			return
		}
	}
	g.requests.sendRepeatedly(g, now, ResendInterval)
}
