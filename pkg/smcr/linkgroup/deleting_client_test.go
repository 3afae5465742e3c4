// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RFC 7609 §3.5.5.1.3: a client cannot decline. It answers an urgent deletion at once, and
// one in order when no connection writes over the link any more.
func TestClient_obeys(t *testing.T) {
	now := time.Unix(1, 0)
	for _, c := range []struct {
		name   string
		m      llc.DeleteLink
		before func(g *Group, l *link)
		state  linkState
		answer bool
	}{
		{"urgent", llc.DeleteLink{Reason: llc.DeleteProtocolViolation}, nil, linkDown, true},
		{"lost path, which Linux calls orderly", llc.DeleteLink{Orderly: true, Reason: llc.DeleteLostPath}, func(g *Group, l *link) {
			writing(t, g, l)
		}, linkDown, true},
		{"in order", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator}, nil, linkDown, true},
		{
			"in order, with data under way",
			llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator},
			func(g *Group, l *link) { writing(t, g, l) }, linkDraining, false,
		},
		{
			"urgent, with data under way",
			llc.DeleteLink{Reason: llc.DeleteProtocolViolation},
			func(g *Group, l *link) { writing(t, g, l) }, linkDown, true,
		},
		{
			"a second time", llc.DeleteLink{Orderly: true, Reason: llc.DeleteOperator, Link: 2}, func(g *Group, l *link) {
				writing(t, g, l)
				g.drain(now, l, llc.DeleteLink{Link: 2, Reason: llc.DeleteUnknownLink})
			}, linkDraining, false,
		},
		{
			"urgent, while connections leave it", llc.DeleteLink{Reason: llc.DeleteProtocolViolation}, func(g *Group, l *link) {
				writing(t, g, l)
				g.side.handleDeleteLink(g, now, g.links.other(l), llc.DeleteLink{Link: l.id, Orderly: true})
			}, linkDown, true,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, other, l := pair(Client)
			if c.before != nil {
				c.before(g, l)
			}
			m := c.m
			m.Link = l.id
			g.side.handleDeleteLink(g, now, other, m)
			if l.state != c.state {
				t.Errorf("link is %v, want %v", l.state, c.state)
			}
			m.Response = true
			if c.state == linkDraining && l.deletion != m {
				t.Errorf("the answer will be %+v, want %+v", l.deletion, m)
			}
			if got := len(sentOn(t, other)); got > 1 || (got == 1) != c.answer {
				t.Errorf("%d answers", got)
			}
			if err := check(g); err != nil {
				t.Error(err)
			}
		})
	}
}

// A link whose deletion the client asked for stays until the server deletes it (§3.5.5.1.4). The server's DELETE
// LINK ends the client's request, even if the link was lost meanwhile.
func TestClient_asksForDeletion(t *testing.T) {
	now := time.Unix(1, 0)
	g, other, l := pair(Client)
	g.side.deleteInOrder(g, now, l, llc.DeleteLink{Link: l.id, Orderly: true, Reason: llc.DeleteOperator})
	if l.state != linkActive || !g.requests.has(exchangeAskDelete) {
		t.Fatalf("link is %v", l.state)
	}
	g.requests.start(g, now)
	sentOn(t, other)
	id := l.id
	g.closeLink(l)
	g.side.handleDeleteLink(g, now, other, llc.DeleteLink{Link: id, Reason: llc.DeleteOperator})
	m, ok := sentOn(t, other)[0].(llc.DeleteLink)
	if !ok || !m.Response || m.Reason != llc.DeleteOperator || g.requests.deletes(id) {
		t.Errorf("answer %+v, still in line: %t", m, g.requests.deletes(id))
	}
}

// Deletions of what is no link of the group yet, and of its last link.
func TestClient_deletionsOfOtherLinks(t *testing.T) {
	now := time.Unix(1, 0)
	g, l := formed(Client)
	g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: l.id, Orderly: true})
	if m, ok := sentOn(t, l)[0].(llc.DeleteLink); !ok || !m.Response || g.State() != Draining {
		t.Errorf("the last link is deleted: answer %+v, group is %v", m, g.State())
	}

	g, l = formed(Client)
	spare := g.links.free()
	g.links.becomeForming(spare, Endpoint{RNIC: 1})
	spare.id = 9
	g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: 9})
	if g.Discarded != 1 || spare.state != linkForming || len(l.queue) != 0 {
		t.Errorf("a link that is our wish only is deleted: it is %v, %d answers", spare.state, len(l.queue))
	}

	g.adding.becomeWanted(now, l)
	g.adding.link, g.adding.step = spare.index, addWaitCont
	g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: 9})
	if m, ok := sentOn(t, l)[0].(llc.DeleteLink); !ok || !m.Response || spare.state != linkDown || g.adding.isUnderWay() {
		t.Errorf("the new link is given up: answer %+v, it is %v", m, spare.state)
	}
}

// RFC 7609 C.7.1, C.8: after a second link has failed at first contact, data flow when both
// sides agree that there is none, and the client looks for another one later.
func TestClient_secondLinkFailed(t *testing.T) {
	now := time.Unix(1, 0)
	g := New(Config{Role: Client})
	g.AddFirstLink(Endpoint{})
	l := g.links.first()
	g.setup.becomeFailed(2, now.Add(ExchangeTimeout))
	g.side.handleDeleteSecond(g, now, l, llc.DeleteLink{Link: 2})
	if m, ok := sentOn(t, l)[0].(llc.DeleteLink); !ok || !m.Response || g.State() != Active || g.growth.at.IsZero() {
		t.Errorf("answer %+v, group is %v, again at %v", m, g.State(), g.growth.at)
	}
	g, _, l = pair(Client)
	g.leaveLink(now, l, ErrStalled)
	if g.growth.at.IsZero() {
		t.Error("a client that has lost a link asks for no other one")
	}
}

// A client asks for a link over its second RNIC when it loses the link over its first: the link
// that the server adds then is to be over the first.
func TestClient_lostWhileItAsks(t *testing.T) {
	now := time.Unix(1, 0)
	server := Endpoint{GID: rdma.GID{15: 7}, QPN: 7, MTU: rdma.MTU1024}
	g, l := formed(Client)
	l.peer = server
	second := g.links.free()
	g.links.becomeWanted(second)
	g.links.becomeForming(second, Endpoint{RNIC: 1})
	second.id, second.peer = 2, server
	g.adding.becomeWanted(now, l)
	g.adding.confirmed(g, now, second)
	now = g.growth.at
	g.out.list = nil
	g.growth.expired(g, now)
	spare := &g.links.at[g.out.list[0].Link]
	if !g.OfferLink(now, spare.index, Endpoint{RNIC: 1}) || !g.side.spareIn(spare.place()) {
		t.Fatalf("asks with %v", spare.state)
	}
	g.HandleLinkFailure(now, l.index, errors.New("cut"))
	if spare.state != linkDown || g.side.spareIn(spare.place()) {
		t.Fatalf("the spare link is %v", spare.state)
	}
	g.out.list = nil
	if err := g.side.handleAddLink(g, now, second, llc.AddLink{Link: 3, MTU: server.MTU, GID: server.GID, QPN: 8}); err != nil {
		t.Fatal(err)
	}
	if !g.OfferLink(now, g.adding.link, Endpoint{RNIC: 0}) || g.adding.step != addWaitCont {
		t.Errorf("the server's link over the first RNIC: %v", g.adding.step)
	}
}
