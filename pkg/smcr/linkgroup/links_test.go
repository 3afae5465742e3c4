// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// tableOf has an ACTIVE link for each pair of our RNIC and the peer's.
func tableOf(pairs ...[2]uint8) linkTable {
	t := newLinkTable()
	for i, p := range pairs {
		l := &t.at[i]
		t.becomeForming(l, Endpoint{RNIC: p[0]})
		l.id, l.peer = t.nextID(func(llc.LinkID) bool { return false }), Endpoint{GID: rdma.GID{15: p[1] + 1}}
		t.becomeActive(time.Unix(1, 0), l)
	}
	return t
}

// RFC 7609 §2.2.1: of two links that share an RNIC the younger one is asymmetric, and
// becomes symmetric when the older one goes.
func TestLinkTable_redundancy(t *testing.T) {
	for _, c := range []struct {
		name  string
		pairs [][2]uint8
		want  Redundancy
	}{
		{"one link", [][2]uint8{{0, 0}}, Single},
		{"no shared RNIC", [][2]uint8{{0, 0}, {1, 1}}, Symmetric},
		{"ours is shared", [][2]uint8{{0, 0}, {0, 1}}, AsymmetricLocal},
		{"the peer's is shared", [][2]uint8{{0, 0}, {1, 0}}, AsymmetricPeer},
		{"a symmetric one beside the asymmetric one", [][2]uint8{{0, 0}, {0, 1}, {1, 1}}, Symmetric},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := tableOf(c.pairs...)
			if got := table.redundancy(); got != c.want {
				t.Errorf("redundancy %v, want %v", got, c.want)
			}
			table.becomeDown(&table.at[0])
			table.classify()
			if l := &table.at[1]; l.state == linkActive && l.asymmetric {
				t.Error("the second link is asymmetric to one that is gone")
			}
		})
	}
}

// RFC 7609 §2.2.1: two links between the same RNICs are not permitted, also while the
// first one is being set up.
func TestLinkTable_parallel(t *testing.T) {
	table := newLinkTable()
	table.becomeForming(table.first(), Endpoint{})
	l := table.free()
	table.becomeWanted(l)
	table.becomeForming(l, Endpoint{})
	if !table.isParallel(l, true) || table.isParallel(l, false) {
		t.Error("the first link counts when it is not being set up, or does not when it is")
	}
	table.becomeActive(time.Unix(1, 0), table.first())
	if !table.isParallel(l, false) {
		t.Error("a link beside an ACTIVE one between the same RNICs is not parallel")
	}
}

// RFC 7609 §2.2.4: a number is not used again before all others were, nor while its link
// is being cleaned up. Places are taken in turn.
func TestLinkTable_numbersAndPlaces(t *testing.T) {
	table := tableOf([2]uint8{0, 0})
	seen := map[llc.LinkID]bool{1: true}
	for range 253 {
		id := table.nextID(func(id llc.LinkID) bool { return id == 100 })
		if id == 0 || id == 100 || seen[id] {
			t.Fatalf("number %d is taken", id)
		}
		seen[id] = true
	}
	if id := table.nextID(func(llc.LinkID) bool { return false }); id != 2 {
		t.Errorf("number %d after all were used, want 2: link 1 stands", id)
	}
	for want := LinkIndex(1); want < MaxLinks; want++ {
		if l := table.free(); l.index != want {
			t.Fatalf("place %d, want %d", l.index, want)
		}
	}
	if l := table.free(); l.index != 1 {
		t.Errorf("place %d, want 1: place 0 is taken", l.index)
	}
}

// LLC messages go over an ACTIVE link before a DRAINING one.
func TestLinkTable_other(t *testing.T) {
	table := tableOf([2]uint8{0, 0}, [2]uint8{1, 1}, [2]uint8{2, 2})
	table.becomeDraining(time.Unix(1, 0), &table.at[0], llc.DeleteLink{})
	if l := table.other(nil); l != &table.at[1] {
		t.Errorf("link %d, want 1", l.index)
	}
	table.becomeDown(&table.at[2])
	if l := table.other(&table.at[1]); l != &table.at[0] {
		t.Errorf("link %v, want the DRAINING one", l)
	}
	table.becomeKept(&table.at[0])
	if table.at[0].state != linkActive || !table.at[0].drainBy.IsZero() {
		t.Errorf("link 0 is %v", table.at[0].state)
	}
}
