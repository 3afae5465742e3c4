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
