// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// DeleteLink takes a link out of service in order, for an operator: its
// connections move to another link first (RFC 7609 §3.5.5.1.3). The client asks
// the server to do it (§3.5.5.1.4). With the last link the group ends. After
// llc.DeleteOperator no other link takes its place before AllowLinks, or before
// a port comes up.
func (g *Group) DeleteLink(now time.Time, index LinkIndex, why llc.DeleteReason) {
	l := &g.links[index]
	if g.state != Active || l.state != linkActive {
		return
	}
	other := g.otherLink(l)
	g.hold(why, heldByUs)
	switch m := (llc.DeleteLink{Link: l.id, Orderly: true, Reason: why}); {
	case other == nil:
		g.Terminate(now, why)
	case g.cfg.Role == Server:
		g.drain(now, l, m)
	default:
		g.tellDeleted(m)
	}
}

// tellDeleted tells the peer that a link goes or is gone: the server with the
// exchange that deletes it, the client by asking the server for that.
func (g *Group) tellDeleted(m llc.DeleteLink) {
	if g.isDeleting(m.Link) {
		return
	}
	kind := flowDeleteLink
	if g.cfg.Role == Client {
		kind = flowAskDelete
	}
	g.startFlow(flow{kind: kind, deletion: m})
}

// isDeleting reports whether a link is being cleaned up.
func (g *Group) isDeleting(id llc.LinkID) bool {
	for _, f := range g.flows {
		if (f.kind == flowDeleteLink || f.kind == flowAskDelete) && f.deletion.Link == id {
			return true
		}
	}
	return g.deleting == id && id != 0
}

// drain moves connections off a link as soon as nothing of theirs is under way
// on it, and then tells the peer: m is the server's request, or the client's
// answer to it.
func (g *Group) drain(now time.Time, l *link, m llc.DeleteLink) {
	l.state = linkDraining
	l.drainBy = now.Add(DrainTimeout)
	l.deletion = m
	g.classify()
	for _, c := range g.conns {
		if c != nil && c.dest() == l {
			c.moveTo(g.bestLink(c, l))
		}
	}
	g.drained(l)
}

// drained goes on with the deletion of a link once no connection uses it.
func (g *Group) drained(l *link) {
	if l.state != linkDraining || l.drainBy.IsZero() {
		return
	}
	for _, c := range g.conns {
		if c != nil && c.link == l {
			return
		}
	}
	l.drainBy = time.Time{}
	m := l.deletion
	if g.cfg.Role == Server {
		g.tellDeleted(m) // closed when the client has answered
		return
	}
	g.otherLink(l).send(m)
	g.dropLink(l, nil)
}

// drainExpired stops to wait for connections that do not leave the link.
func (g *Group) drainExpired(l *link) {
	m := l.deletion
	g.dropLink(l, nil)
	if g.cfg.Role == Server {
		g.tellDeleted(m)
	} else {
		g.otherLink(l).send(m)
	}
}

// undrain keeps a link that was to be deleted, because it is the last one now.
func (g *Group) undrain() {
	for i := range g.links {
		if g.links[i].state == linkActive {
			return
		}
	}
	for i := range g.links {
		l := &g.links[i]
		if l.state != linkDraining {
			continue
		}
		l.state = linkActive
		l.drainBy = time.Time{}
		g.held = heldByNobody // what the operator wanted has not come about
		for j := range g.flows {
			if f := &g.flows[j]; f.kind == flowDeleteLink && f.deletion.Link == l.id && (j > 0 || !g.flowSent) {
				g.flows = append(g.flows[:j], g.flows[j+1:]...)
				break
			}
		}
	}
}

// handleDeleteLink takes DELETE LINK of either side (A.3.4).
func (g *Group) handleDeleteLink(now time.Time, from *link, m llc.DeleteLink) error {
	switch {
	case m.Response:
		g.handleDeleteReply(now, m)
		return nil
	case g.state == Forming:
		return g.handleDeleteForming(now, from, m)
	case m.All:
		g.handleDeleteAll(now, from, m)
		return nil
	case g.state != Active:
		if g.flowSent && g.flows[0].kind == flowDeleteAll && g.linkByID(m.Link) != nil && g.otherLink(g.linkByID(m.Link)) == nil {
			g.heardEnd()
			g.becomeDead(nil) // both sides end the group
			return nil
		}
		g.Discarded++
		return nil
	}
	l := g.linkByID(m.Link)
	switch {
	case g.isAdding(m.Link):
		g.addDeleted(now, from, m)
	case l == nil && g.cfg.Role == Client && g.isDeleting(m.Link):
		// The server does what we asked for.
		m.Response = true
		from.send(m)
		g.endDelete(m.Link)
	case l == nil && g.isDeleting(m.Link), l != nil && l.state == linkDraining && g.cfg.Role == Server:
		g.Discarded++ // it is being cleaned up: the messages have crossed (C.7.1)
	case l == nil:
		m.Response = true
		m.Reason = llc.DeleteUnknownLink
		from.send(m)
	case l.state == linkForming: // our own wish for a link; it has no number yet
		g.Discarded++
	case g.cfg.Role == Server && g.changing():
		g.tellDeleted(m) // §3.5.5.3: after the exchange under way
		if a := g.adding; isUrgent(m) && a.via == l && (a.step == addWaitReply || a.step == addWaitCont) {
			g.abandonAdd(now, m.Reason, false) // it goes on nowhere: the link was to carry it
		}
	case g.otherLink(l) == nil:
		g.handleDeleteAll(now, from, m)
	case g.cfg.Role == Client:
		g.obeyDelete(now, l, m)
	default:
		g.deleteForClient(now, l, m)
	}
	return nil
}

// isUrgent reports whether the link is of no use any more. A lost path is,
// although Linux calls the deletion orderly.
func isUrgent(m llc.DeleteLink) bool { return !m.Orderly || m.Reason == llc.DeleteLostPath }

// obeyDelete is the client's part of the deletion: it cannot decline
// (§3.5.5.1.3).
func (g *Group) obeyDelete(now time.Time, l *link, m llc.DeleteLink) {
	m.Response = true
	g.endDelete(l.id) // we may have asked for it
	switch {
	case l.state == linkDraining:
		l.deletion = m
	case isUrgent(m):
		g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
		g.otherLink(l).send(m)
	default:
		g.drain(now, l, m)
	}
}

// deleteForClient is what the server does when a client asks (§3.5.5.1.4).
func (g *Group) deleteForClient(now time.Time, l *link, m llc.DeleteLink) {
	g.hold(m.Reason, heldByPeer)
	if !isUrgent(m) {
		g.drain(now, l, m)
		return
	}
	g.tellDeleted(m)
	g.leaveLink(now, l, fmt.Errorf("%w: %v", ErrLinkDeleted, m.Reason))
	g.addIfUseful()
}

// addDeleted ends the exchange that adds a link because the peer has given
// the link up.
func (g *Group) addDeleted(now time.Time, from *link, m llc.DeleteLink) {
	if g.cfg.Role == Server {
		g.abandonAdd(now, m.Reason, m.Orderly)
		return
	}
	g.closeLink(&g.links[g.adding.link])
	m.Response = true
	from.send(m)
	g.endAdd(now, false)
}

// handleDeleteForming takes a request during first contact: it may be about
// the second link only.
func (g *Group) handleDeleteForming(now time.Time, from *link, m llc.DeleteLink) error {
	switch {
	case !m.All && g.isAdding(m.Link):
		g.addDeleted(now, from, m)
		return nil
	case !m.All && g.step == waitDeleteReply && m.Link == g.deleting:
		if g.cfg.Role == Client {
			m.Response = true
			from.send(m)
			g.becomeActive(now)
		} else {
			g.Discarded++ // it has crossed with ours
		}
		return nil
	case !m.All && m.Link != g.firstLink().id:
		m.Response = true
		m.Reason = llc.DeleteUnknownLink
		from.send(m)
		return nil
	}
	m.Response = true
	from.send(m)
	return fmt.Errorf("%w: DELETE LINK during first contact", ErrProtocol)
}

// handleDeleteAll ends the group because the peer says so; it also takes a
// deletion of the last link. The group is over when the peer has our answer.
func (g *Group) handleDeleteAll(now time.Time, from *link, m llc.DeleteLink) {
	switch {
	case g.flowSent && g.flows[0].kind == flowDeleteAll:
		// Both sides end the group at once, or the server answers our request
		// with its own (§3.5.4).
		g.heardEnd()
		g.becomeDead(nil)
		return
	case g.deleted:
		g.Discarded++ // the same once more: the answer is on its way
		return
	}
	// A client answers the server; a server answers the client's request by
	// starting the exchange itself.
	m.Response = g.cfg.Role == Client
	from.send(m)
	g.becomeDraining()
	g.heardEnd()
	g.deleted = true
	g.lastWord = from
	g.deadline = now.Add(FlowTimeout)
}

// handleDeleteReply takes the answer to our DELETE LINK.
func (g *Group) handleDeleteReply(now time.Time, m llc.DeleteLink) {
	if g.state == Forming {
		if g.step == waitDeleteReply {
			g.becomeActive(now)
		} else {
			g.Discarded++
		}
		return
	}
	if !g.flowSent {
		g.Discarded++
		return
	}
	switch f := g.flows[0]; {
	case f.kind == flowDeleteAll:
		g.heardEnd()
		g.becomeDead(nil)
	case (f.kind == flowDeleteLink || f.kind == flowAskDelete) && f.deletion.Link == m.Link:
		g.endDelete(m.Link)
	default:
		g.Discarded++
	}
}

// endDelete finishes the deletion of a link, at the server with the client's
// answer.
func (g *Group) endDelete(id llc.LinkID) {
	for i, f := range g.flows {
		if (f.kind != flowDeleteLink && f.kind != flowAskDelete) || f.deletion.Link != id {
			continue
		}
		g.flows = append(g.flows[:i], g.flows[i+1:]...)
		if i == 0 {
			g.flowSent = false
		}
		break
	}
	if g.cfg.Role == Server {
		switch l := g.linkByID(id); {
		case l == nil || !l.isUp():
		case g.otherLink(l) == nil: // it has become the last one
			g.heardEnd()
			g.becomeDead(ErrPeerDeleted)
		default:
			g.dropLink(l, nil)
			g.addIfUseful()
		}
	}
}
