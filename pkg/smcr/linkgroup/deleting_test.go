// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// pair is a group with two links.
func pair(role Role) (*Group, *link, *link) {
	g, l := formed(role)
	n := g.links.free()
	g.links.becomeForming(n, Endpoint{RNIC: 1})
	n.id, n.peer = 2, Endpoint{GID: rdma.GID{15: 9}}
	g.links.becomeActive(time.Unix(1, 0), n)
	return g, l, n
}

// writing opens a connection that has data under way over a link.
func writing(t *testing.T, g *Group, l *link) *Conn {
	t.Helper()
	c := opened(t, g)
	c.rmb.becomeConfirmed()
	c.useLink(l)
	peer := RToken{RKey: 1}
	for i := range g.links.at {
		g.keys.set(g.keys.learn(0, peer), LinkIndex(i), peer)
	}
	if err := c.Activate(RMBE{Index: 1, Size: 16 << 10, Token: 5, RToken: peer}); err != nil {
		t.Fatal(err)
	}
	c.Produce(100)
	if out := g.Poll(time.Unix(1, 0), nil); len(out) == 0 || c.data.InFlight() == 0 {
		t.Fatalf("nothing is under way: %+v", out)
	}
	return c
}

// RFC 7609 §3.5.5.1.3, §3.5.5.1.4: the server closes the link when the client has answered,
// the client answers and closes it, or asks first.
func TestDeleteLink_inOrder(t *testing.T) {
	now := time.Unix(1, 0)
	g, l, n := pair(Server)
	g.DeleteLink(now, n.index, llc.DeleteOperator)
	g.requests.start(g, now)
	if n.state != linkDraining || len(sentOn(t, l)) != 1 {
		t.Fatalf("link is %v", n.state)
	}
	if g.requests.handleDeleteReply(g, now, llc.DeleteLink{Link: 2}); n.state != linkDown || !g.growth.isForbidden() {
		t.Errorf("link is %v after the answer", n.state)
	}
	g, l, n = pair(Client)
	g.DeleteLink(now, n.index, llc.DeleteOperator)
	g.requests.start(g, now)
	if n.state != linkActive || !g.requests.is(exchangeAskDelete) || len(sentOn(t, l)) != 1 {
		t.Fatalf("link is %v before the server has said anything", n.state)
	}
	g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: 2, Orderly: true, Reason: llc.DeleteOperator})
	if n.state != linkDown || g.requests.deletes(2) {
		t.Errorf("link is %v after the server's request", n.state)
	}
	if m, ok := sentOn(t, l)[0].(llc.DeleteLink); !ok || !m.Response {
		t.Errorf("answer: %+v", m)
	}
}

// DELETE LINK for a link that is not known is refused. If both sides delete the same link, the
// requests have crossed, and the client's is dropped.
func TestDeleteLink_unknown(t *testing.T) {
	now := time.Unix(1, 0)
	for _, role := range []Role{Client, Server} {
		g, l, _ := pair(role)
		g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: 7})
		if m, ok := sentOn(t, l)[0].(llc.DeleteLink); !ok || !m.Response || m.Reason != llc.DeleteUnknownLink {
			t.Errorf("%v: %+v", role, m)
		}
	}
	g, l, n := pair(Server)
	g.loseLink(now, n, llc.DeleteLostPath, FaultLink, ErrStalled)
	before := g.Discarded
	g.side.handleDeleteLink(g, now, l, llc.DeleteLink{Link: 2})
	if g.Discarded != before+1 || len(l.queue) != 0 {
		t.Error("a deletion that has crossed with ours is answered")
	}
}

// The end of a group: the client answers, the server starts the exchange itself (§3.5.4).
func TestEnding(t *testing.T) {
	now := time.Unix(1, 0)
	for _, role := range []Role{Client, Server} {
		g, l := formed(role)
		g.ending.handleDeleteAll(g, now, l, llc.DeleteLink{All: true})
		m, ok := sentOn(t, l)[0].(llc.DeleteLink)
		if !ok || m.Response != (role == Client) || g.state != Draining || !g.PeerKnows() {
			t.Errorf("%v: %+v, group is %v", role, m, g.state)
		}
		if g.ending.via != l.place() || !errors.Is(g.ending.err(), ErrPeerDeleted) || !g.ending.deadline.Equal(now.Add(ExchangeTimeout)) {
			t.Errorf("%v: %+v", role, g.ending)
		}
	}
}

// A link is being deleted in order, and the other one is lost meanwhile: the link is kept, at the server, which has told
// the client over the one that was lost, and at the client, which has asked for it, over whichever link.
func TestGroup_keepsTheLastLink(t *testing.T) {
	now := time.Unix(1, 0)
	for i, role := range []Role{Server, Client, Server, Client} {
		g, l, second := pair(role)
		if i > 1 {
			l, second = second, l
		}
		opened(t, g)
		g.DeleteLink(now, second.index, llc.DeleteOperator)
		g.Poll(now, nil)
		if x := g.requests.current(); x == nil || x.deletion.Link != second.id {
			t.Fatalf("%v: under way: %+v", role, x)
		}
		g.HandleLinkFailure(now, l.index, errors.New("cut"))
		g.Poll(now, nil)
		if g.State() != Active || second.state != linkActive || g.requests.deletes(second.id) || g.growth.isForbidden() {
			t.Errorf("%v: group is %v, link is %v, deleted: %t, no other one may be added: %t",
				role, g.State(), second.state, g.requests.deletes(second.id), g.growth.isForbidden())
		}
	}
}

// The exchange that adds a link ends with the link that carries it, also where that one is deleted in order and too slow:
// the other link is not to blame.
func TestGroup_drainExpiredEndsAdding(t *testing.T) {
	now := time.Unix(1, 0)
	g, l, second := pair(Server)
	writing(t, g, l)
	third := g.links.free()
	g.links.becomeForming(third, Endpoint{RNIC: 2})
	g.adding.becomeWanted(now, l)
	g.adding.link = third.index
	g.adding.becomeWaiting(now, addWaitReply, ExchangeTimeout)
	g.DeleteLink(now, l.index, llc.DeleteOperator)
	if l.state != linkDraining {
		t.Fatalf("link is %v", l.state)
	}
	g.HandleTimeout(l.drainBy)
	if l.state != linkDown || g.adding.isUnderWay() {
		t.Fatalf("link is %v, another one is added: %v", l.state, g.adding.step)
	}
	if g.State() != Active || second.state != linkActive {
		t.Errorf("group is %v, the other link %v", g.State(), second.state)
	}
}

// A connection that leaves a link in order for one on which the peer has not told the key of its buffer is reset: it would
// write there with another key, and the peer would end the link.
func TestConn_arrivesWithoutKey(t *testing.T) {
	now := time.Unix(1, 0)
	g, l, n := pair(Server)
	c := writing(t, g, n)
	c.peerRMB.known = 1 << n.index
	c.Produce(100)
	g.DeleteLink(now, n.index, llc.DeleteOperator)
	c.handleSent()
	if c.link != l.place() || c.data.State() == cdc.Active {
		t.Fatalf("the connection is %v on link %v", c.data.State(), c.link)
	}
	for _, o := range g.Poll(now, nil) {
		if o.Kind == OutWrite {
			t.Errorf("writes over link %d", o.Link)
		}
	}
}
