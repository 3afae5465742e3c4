// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// An exchange that adds a link has a number before the link has one.
func TestAdding_hasNumber(t *testing.T) {
	g, l := formed(Client)
	g.adding.becomeWanted(time.Unix(1, 0), l)
	g.adding.request.Link = 7
	if !g.adding.hasNumber(g, 7) || g.adding.hasNumber(g, 1) {
		t.Error("the number of ADD LINK does not count")
	}
	g.adding.link = 1
	g.links.at[1].id = 7
	g.adding.becomeWaiting(time.Unix(1, 0), addWaitCont, ExchangeTimeout)
	if !g.adding.hasNumber(g, 7) || !g.adding.isAbout(1) || g.adding.isAbout(0) {
		t.Error("the number of the link does not count")
	}
	if g.adding.becomeNone(); g.adding.hasNumber(g, 7) || g.adding.isUnderWay() {
		t.Error("the exchange is not over")
	}
}

// RFC 7609 A.3.3: each side says how many RTokens it still has; both are told, and none is
// taken of another exchange.
func TestAdding_continuations(t *testing.T) {
	g, l := formed(Server)
	for range 3 {
		id, err := g.AddRMB(16<<10, 1, []RToken{{RKey: 1}})
		if err != nil {
			t.Fatal(err)
		}
		g.keys.rmb(id).becomeConfirmed()
	}
	a := &g.adding
	a.becomeWanted(time.Unix(1, 0), l)
	n, ok := a.want(g, Endpoint{}, false)
	if !ok {
		t.Fatal("no place")
	}
	g.links.becomeForming(n, Endpoint{})
	n.id, a.link, a.rmbs = 2, n.index, g.keys.announced()
	a.becomeWaiting(time.Unix(1, 0), addWaitCont, ExchangeTimeout)
	for i, want := range []uint8{3, 1} {
		if a.isTold() {
			t.Fatalf("told after %d messages", i)
		}
		a.sendContinuation(g, false)
		if m, ok := sentOn(t, l)[0].(llc.AddLinkContinuation); !ok || m.Remaining != want || m.Link != 2 {
			t.Errorf("message %d: %+v", i, m)
		}
	}
	g.peerKeys.learnPairs(g, l, n.index, nil)
	if ok, err := a.takeContinuation(g, l, llc.AddLinkContinuation{Link: 2, Remaining: 3}); !ok || err != nil || a.isTold() {
		t.Errorf("%t, %v: the peer has more to tell", ok, err)
	}
	if ok, _ := a.takeContinuation(g, l, llc.AddLinkContinuation{Link: 3}); ok {
		t.Error("a message about another link is taken")
	}
	if ok, err := a.takeContinuation(g, l, llc.AddLinkContinuation{Link: 2, Remaining: 1}); !ok || err != nil || !a.isTold() {
		t.Errorf("%t, %v: not told", ok, err)
	}
}
