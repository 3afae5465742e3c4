// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RFC 7609 §3.5.5.1.2: a client that has an RNIC says so, and keeps a queue pair for the
// server's answer for a while.
func TestClient_hint(t *testing.T) {
	g, l := formed(Client)
	now := time.Unix(1, 0)
	g.side.retry(g)
	o := g.out.list[0]
	if !g.OfferLink(now, o.Link, Endpoint{RNIC: 1}) {
		t.Fatal("the link is not wanted")
	}
	if m, ok := sentOn(t, l)[0].(llc.AddLink); !ok || m.Link != 0 {
		t.Errorf("%+v", m)
	}
	spare := &g.links.at[o.Link]
	if !g.side.spareIn(spare.place()) || !g.side.spareTimeout().Equal(now.Add(ExchangeTimeout)) {
		t.Fatal("the queue pair is not kept")
	}
	if err := g.side.handleAddLink(g, now, l, llc.AddLink{Link: 2, MTU: rdma.MTU1024, GID: rdma.GID{15: 7}}); err != nil {
		t.Fatal(err)
	}
	if g.adding.link != o.Link || g.adding.step != addWaitCont || g.side.spareIn(spare.place()) {
		t.Errorf("link %d, waiting for %v", g.adding.link, g.adding.step)
	}
}

// §3.5.1.6.1: the offer of a link that no RNIC is there for is refused at once.
func TestClient_rejects(t *testing.T) {
	for name, c := range map[string]struct {
		mtu  rdma.MTU
		held bool
		why  llc.RejectReason
	}{
		"no RNIC":            {rdma.MTU1024, false, llc.RejectNoAlternatePath},
		"an impossible MTU":  {0, false, llc.RejectInvalidMTU},
		"out of our service": {rdma.MTU1024, true, llc.RejectNoAlternatePath},
	} {
		t.Run(name, func(t *testing.T) {
			g, l := formed(Client)
			if c.held {
				g.growth.forbid(llc.DeleteOperator, ourOperator)
			}
			if err := g.side.handleAddLink(g, time.Unix(1, 0), l, llc.AddLink{Link: 2, MTU: c.mtu}); err != nil {
				t.Fatal(err)
			}
			for _, o := range g.out.list {
				if o.Event == EventWantLink {
					g.NoLink(time.Unix(1, 0), o.Link)
				}
			}
			m, ok := sentOn(t, l)[0].(llc.AddLink)
			if !ok || !m.Response || !m.Reject || m.Reason != c.why || g.adding.isUnderWay() {
				t.Errorf("%+v", m)
			}
		})
	}
}

// Where the links share the server's RNIC, the client asks for a better one again and again: also if its timer fires while
// the server offers a link, or what the server offers for its hint is no better.
func TestClient_asksAgain(t *testing.T) {
	now := time.Unix(1, 0)
	server := Endpoint{GID: rdma.GID{15: 7}, QPN: 7, MTU: rdma.MTU1024}
	offer := llc.AddLink{Link: 3, MTU: server.MTU, GID: server.GID, QPN: 8}
	g, l := formed(Client)
	l.peer = server
	second := g.links.free()
	g.links.becomeWanted(second)
	g.links.becomeForming(second, Endpoint{RNIC: 1})
	second.id, second.peer = 2, server
	g.adding.becomeWanted(now, l)
	g.adding.confirmed(g, now, second)
	if r := g.Redundancy(); r != AsymmetricPeer || !g.growth.at.Equal(now.Add(AddLinkRetryMin)) {
		t.Fatalf("the group is %v, and asks at %v", r, g.growth.at)
	}
	if err := g.side.handleAddLink(g, now, l, offer); err != nil || !g.adding.isUnderWay() {
		t.Fatalf("under way: %v, %v", g.adding.step, err)
	}
	now = g.growth.at
	if g.growth.expired(g, now); !g.growth.at.Equal(now.Add(AddLinkRetryMin)) {
		t.Errorf("while a link is offered: asks again at %v", g.growth.at)
	}
	g.NoLink(now, g.adding.link)
	if g.adding.isUnderWay() || g.growth.at.IsZero() {
		t.Fatalf("when that is refused: %v, asks again at %v", g.adding.step, g.growth.at)
	}
	g.out.list = nil
	g.growth.expired(g, g.growth.at)
	if len(g.out.list) != 1 || !g.OfferLink(now, g.out.list[0].Link, Endpoint{RNIC: 1}) || !g.growth.at.IsZero() {
		t.Fatalf("asks with %v, again at %v", g.out.list, g.growth.at)
	}
	offer.Link = 4 // for the hint, and over the same RNIC of the server
	if err := g.side.handleAddLink(g, now, l, offer); err != nil || g.adding.isUnderWay() || g.growth.at.IsZero() {
		t.Errorf("when the answer is no better: %v, asks again at %v, %v", g.adding.step, g.growth.at, err)
	}
}
