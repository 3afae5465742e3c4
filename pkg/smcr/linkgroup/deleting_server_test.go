// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RFC 7609 §3.5.5.1.4: the server deletes the link that a client asks it to delete. An urgent deletion happens at
// once. Before another deletion is told to the client, connections leave the link.
func TestServer_deletesForClient(t *testing.T) {
	now := time.Unix(1, 0)
	for _, c := range []struct {
		name      string
		m         llc.DeleteLink
		before    func(g *Group, l *link)
		state     linkState
		told      bool // the client will hear of the deletion
		add       bool // another link is offered
		forbidden bool // an operator does not want another one
	}{
		{"urgent", llc.DeleteLink{Reason: llc.DeleteProtocolViolation}, nil, linkDown, true, true, false},
		{"in order", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator}, nil, linkDraining, true, false, true},
		{"in order, with data under way", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator}, func(g *Group, l *link) {
			writing(t, g, l)
		}, linkDraining, false, false, true},
		{"an operator, urgently", llc.DeleteLink{Reason: llc.DeleteOperator}, nil, linkDown, true, false, true},
		{"a second time", llc.DeleteLink{Orderly: true}, func(g *Group, l *link) {
			writing(t, g, l)
			g.drain(now, l, llc.DeleteLink{Link: l.id})
		}, linkDraining, false, false, false},
		{"urgent, while connections leave it", llc.DeleteLink{Reason: llc.DeleteProtocolViolation}, func(g *Group, l *link) {
			writing(t, g, l)
			g.drain(now, l, llc.DeleteLink{Link: l.id, Orderly: true})
		}, linkDown, true, true, false},
		{"lost path, which Linux calls orderly, while connections leave it", llc.DeleteLink{Orderly: true, Reason: llc.DeleteLostPath}, func(g *Group, l *link) {
			writing(t, g, l)
			g.drain(now, l, llc.DeleteLink{Link: l.id, Orderly: true})
			g.adding.becomeWanted(now, g.links.other(l)) // an exchange is under way
		}, linkDown, true, true, false},
		{"a second time, urgent, when connections have left it", llc.DeleteLink{}, func(g *Group, l *link) {
			g.drain(now, l, llc.DeleteLink{Link: l.id, Orderly: true})
		}, linkDraining, true, false, false},
		{"while a link is added", llc.DeleteLink{Orderly: true}, func(g *Group, l *link) {
			g.adding.becomeWanted(now, l)
		}, linkActive, true, false, false},
		{"an operator, while a link is added", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator}, func(g *Group, l *link) {
			g.adding.becomeWanted(now, l)
		}, linkActive, true, false, true},
		{"the same, and the client has asked for a link since", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator}, func(g *Group, l *link) {
			g.adding.becomeWanted(now, l)
			g.requests.tellDeleted(g, llc.DeleteLink{Link: l.id, Orderly: true, Reason: llc.DeleteOperator})
		}, linkActive, true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, other, l := pair(Server)
			if c.before != nil {
				c.before(g, l)
			}
			id, m := l.id, c.m
			m.Link = id
			g.side.handleDeleteLink(g, now, other, m)
			if l.state != c.state || g.requests.has(exchangeDeleteLink) != c.told || g.requests.has(exchangeAddLink) != c.add || g.growth.isForbidden() != c.forbidden {
				t.Errorf("link is %v, told %t, another one is offered %t, forbidden %t",
					l.state, g.requests.has(exchangeDeleteLink), g.requests.has(exchangeAddLink), g.growth.isForbidden())
			}
			if crossed := strings.HasPrefix(c.name, "a second time"); (g.Discarded == 1) != crossed {
				t.Errorf("%d messages discarded", g.Discarded)
			}
			if len(other.queue) != 0 {
				t.Error("the client has an answer before the exchange that deletes the link")
			}
		})
	}
}

// An urgent deletion ends the exchange that waits for an answer over the deleted link.
func TestServer_deletionEndsAdding(t *testing.T) {
	for _, urgent := range []bool{true, false} {
		g, l, n := offering(t)
		other := g.links.free()
		g.links.becomeForming(other, Endpoint{RNIC: 2})
		other.id = 7
		g.links.becomeActive(time.Unix(1, 0), other)
		g.side.handleDeleteLink(g, time.Unix(1, 0), l, llc.DeleteLink{Link: l.id, Orderly: !urgent})
		if g.adding.isUnderWay() == urgent || (n.state == linkDown) != urgent || !g.requests.deletes(l.id) {
			t.Errorf("urgent %t: waiting for %v, new link is %v", urgent, g.adding.step, n.state)
		}
	}
}

// The client's answer closes the link; with the last one the group ends.
func TestServer_deleted(t *testing.T) {
	g, _, l := pair(Server)
	if g.side.deleted(g, 77); l.state != linkActive || g.State() != Active {
		t.Error("an answer about no link closes one")
	}
	forming := g.links.free()
	g.links.becomeForming(forming, Endpoint{RNIC: 2})
	forming.id = 9
	if g.side.deleted(g, 9); forming.state != linkForming {
		t.Errorf("a link that is being set up is %v", forming.state)
	}
	if g.side.deleted(g, l.id); l.state != linkDown || !g.requests.has(exchangeAddLink) {
		t.Errorf("link is %v, another one is offered: %t", l.state, g.requests.has(exchangeAddLink))
	}
	g, l = formed(Server)
	g.side.deleted(g, l.id)
	if g.State() != Dead || !errors.Is(g.Err(), ErrPeerDeleted) || !g.PeerKnows() {
		t.Errorf("the last link: group is %v, %v, the peer knows: %t", g.State(), g.Err(), g.PeerKnows())
	}
}

// The exchange that deletes a link starts late if others were before it. What counts is the state of the link when
// the exchange starts.
func TestServer_sendDelete(t *testing.T) {
	now := time.Unix(1, 0)
	for _, c := range []struct {
		name   string
		m      llc.DeleteLink
		before func(g *Group, l *link)
		link   linkState
		group  State
		sent   bool // DELETE LINK goes over the other link
	}{
		{"urgent", llc.DeleteLink{}, nil, linkDown, Active, true},
		{"in order", llc.DeleteLink{Orderly: true}, nil, linkDraining, Active, false},
		{"in order, and connections have left", llc.DeleteLink{Orderly: true}, func(g *Group, l *link) {
			g.links.becomeDraining(now, l, llc.DeleteLink{})
		}, linkDraining, Active, true},
		{"gone meanwhile", llc.DeleteLink{Orderly: true}, func(g *Group, l *link) { g.dropLink(l, nil) }, linkDown, Active, true},
		{"the last one meanwhile", llc.DeleteLink{Orderly: true}, func(g *Group, l *link) {
			g.dropLink(g.links.other(l), nil)
		}, linkActive, Draining, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, other, l := pair(Server)
			via := other
			if c.before != nil {
				c.before(g, l)
			}
			if !other.isUp() {
				via = l
			}
			m := c.m
			m.Link = 2
			g.requests.add(exchange{kind: exchangeDeleteLink, deletion: m})
			g.requests.begin(now, via)
			g.side.sendDelete(g, now)
			if l.state != c.link || g.State() != c.group {
				t.Errorf("link is %v, group is %v", l.state, g.State())
			}
			sent := sentOn(t, via)
			if (len(sent) == 1) != c.sent {
				t.Fatalf("sent: %+v", sent)
			}
			if c.sent && c.group == Active && !g.requests.resend.Equal(now.Add(ResendInterval)) {
				t.Errorf("sent again at %v", g.requests.resend)
			}
			if c.group == Draining && !sent[0].(llc.DeleteLink).All {
				t.Errorf("the group ends with %+v", sent[0])
			}
		})
	}
}

// DELETE LINK for a link that was to carry the message itself goes over another link.
func TestServer_sendDeleteOverItself(t *testing.T) {
	now := time.Unix(1, 0)
	g, other, l := pair(Server)
	g.requests.add(exchange{kind: exchangeDeleteLink, deletion: llc.DeleteLink{Link: l.id}})
	g.requests.begin(now, l)
	g.side.sendDelete(g, now)
	if g.requests.current() != nil || !g.requests.deletes(2) || l.state != linkDown {
		t.Fatalf("link is %v, %v is under way", l.state, g.requests.current())
	}
	g.requests.start(g, now)
	if m := sentOn(t, other); len(m) != 1 {
		t.Errorf("sent: %+v", m)
	}
}

// A request of the client that has crossed with the server's own deletion is dropped.
func TestServer_handleDeleteSecond(t *testing.T) {
	g, l := formed(Server)
	g.side.handleDeleteSecond(g, time.Unix(1, 0), l, llc.DeleteLink{Link: 2})
	if g.Discarded != 1 || len(l.queue) != 0 {
		t.Errorf("%d discarded, %d answers", g.Discarded, len(l.queue))
	}
}

// The client has given up the link that is being added: the server agrees by its own exchange.
func TestServer_addDeleted(t *testing.T) {
	g, l, n := offering(t)
	g.side.handleDeleteLink(g, time.Unix(1, 0), l, llc.DeleteLink{Link: n.id, Reason: llc.DeleteLostPath})
	if g.adding.isUnderWay() || n.state != linkDown || !g.requests.deletes(2) {
		t.Errorf("waiting for %v, link is %v", g.adding.step, n.state)
	}
}
