// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// offering is a server that has offered a second link.
func offering(t *testing.T) (*Group, *link, *link) {
	t.Helper()
	g, l := formed(Server)
	now := time.Unix(1, 0)
	if !g.side.addIfUseful(g) {
		t.Fatal("a second link is of no use")
	}
	g.requests.start(g, now)
	n := g.links.in(place(g.adding.link) + 1)
	if !g.OfferLink(now, n.index, Endpoint{RNIC: 1, GID: rdma.GID{15: 9}}) {
		t.Fatal("the link is not wanted")
	}
	if _, ok := sentOn(t, l)[0].(llc.AddLink); !ok || g.adding.step != addWaitReply {
		t.Fatalf("no ADD LINK, waiting for %v", g.adding.step)
	}
	return g, l, n
}

// RFC 7609 §3.5.1.6: the client's refusal ends the exchange. The server tries to add a link again later.
func TestServer_rejected(t *testing.T) {
	g, l, n := offering(t)
	err := g.side.handleAddLink(g, time.Unix(1, 0), l, llc.AddLink{Header: llc.Header{Response: true}, Reject: true})
	if err != nil || g.adding.isUnderWay() || n.state != linkDown || g.requests.has(exchangeAddLink) || g.growth.at.IsZero() {
		t.Errorf("%v: %v, link is %v, again at %v", err, g.adding.step, n.state, g.growth.at)
	}
}

// The late refusal of a link that the server has given up says nothing about the one that the server offers now.
func TestServer_rejectedLate(t *testing.T) {
	g, l, n := offering(t)
	m := llc.AddLink{Header: llc.Header{Response: true}, Link: n.id + 1, Reject: true}
	if err := g.side.handleAddLink(g, time.Unix(1, 0), l, m); err != nil || g.adding.step != addWaitReply || g.Discarded != 1 {
		t.Errorf("%v: %v, link is %v", err, g.adding.step, n.state)
	}
}

// C.7.1: DELETE LINK for a parallel link goes over another link.
func TestServer_parallel(t *testing.T) {
	g, l, n := offering(t)
	n.local.RNIC = 0
	m := llc.AddLink{Header: llc.Header{Response: true}, Link: n.id, MTU: rdma.MTU1024}
	if err := g.side.handleAddLink(g, time.Unix(1, 0), l, m); err != nil {
		t.Fatal(err)
	}
	if g.adding.isUnderWay() || n.state != linkDown || !g.requests.deletes(2) {
		t.Errorf("%v, link is %v", g.adding.step, n.state)
	}
}

// The request of a client that asks for a link while a link is being added counts as a request for another
// link only when that exchange is over (§3.5.5.3.1).
func TestServer_hintCrosses(t *testing.T) {
	g, _, _ := offering(t)
	s, ok := g.side.(*server)
	if !ok {
		t.Fatal("not a server")
	}
	if s.handleHint(g); g.adding.again || g.Discarded != 1 {
		t.Error("a hint that has crossed with ADD LINK is not dropped")
	}
	g.adding.becomeWaiting(time.Unix(1, 0), addWaitConfirm, ExchangeTimeout)
	if s.handleHint(g); !g.adding.again {
		t.Error("a hint after the client's last answer is lost")
	}
}
