// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// A connection moves to a link on which it can write. A symmetric link comes before an asymmetric one, then a
// link with fewer connections before one with more. A link that is being deleted is taken only if there is no
// other.
func TestLinkTable_best(t *testing.T) {
	table := tableOf([2]uint8{0, 0}, [2]uint8{1, 1}, [2]uint8{0, 1})
	c := &Conn{}
	first, second, odd := &table.at[0], &table.at[1], &table.at[2]
	if !odd.asymmetric {
		t.Fatal("the third link is symmetric")
	}
	first.conns = 2
	if l := table.best(c, nil, false); l != second {
		t.Errorf("link %d, want the empty one", l.index)
	}
	if l := table.best(c, second, false); l != first {
		t.Errorf("link %d, want the symmetric one", l.index)
	}
	table.becomeDraining(time.Unix(1, 0), first, llc.DeleteLink{})
	odd.asymmetric = true
	if l := table.best(c, second, false); l != odd {
		t.Errorf("link %d, want the one that stays", l.index)
	}
	c.peerRMB = &rtoken{}
	c.peerRMB.set(0, RToken{RKey: 1})
	if l := table.best(c, nil, false); l != first {
		t.Errorf("link %d, want the only one that the peer's RMB is known on", l.index)
	}
}

// Connections move until the numbers of connections on links differ by no more than one. An asymmetric link, or
// a link that has acknowledged nothing yet, gets no connections.
func TestGroup_balance(t *testing.T) {
	g, l, n := pair(Server)
	g.AddRMB(16<<10, 8, []RToken{{RKey: 1}, {RKey: 2}})
	for range 4 {
		c, err := g.OpenConn(16<<10, 1<<15)
		if err != nil {
			t.Fatal(err)
		}
		c.useLink(l)
	}
	n.inflight = 1
	if g.links.balance(&g.conns); n.conns != 0 {
		t.Errorf("%d connections on a link that has acknowledged nothing", n.conns)
	}
	n.inflight = 0
	if g.links.balance(&g.conns); l.conns != 2 || n.conns != 2 {
		t.Errorf("%d and %d connections", l.conns, n.conns)
	}
}
