// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"container/heap"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

func TestTimers_earliestFirst(t *testing.T) {
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	var ts timers
	start := time.Unix(1000, 0)
	all := make([]*group, 100)
	for i := range all {
		all[i] = &group{id: uint32(i), due: start.Add(time.Duration(r.IntN(1000)))}
		heap.Push(&ts, all[i])
	}
	for range 300 {
		g := all[r.IntN(len(all))]
		switch {
		case g.timer == 0:
			heap.Push(&ts, g)
		case r.IntN(2) == 0:
			heap.Remove(&ts, g.timer-1)
		default:
			g.due = start.Add(time.Duration(r.IntN(1000)))
			heap.Fix(&ts, g.timer-1)
		}
	}
	for i, g := range ts {
		if g.timer != i+1 {
			t.Fatalf("seed %d: group %d thinks it is at %d, it is at %d", seed, g.id, g.timer, i+1)
		}
	}
	var got []time.Time
	for len(ts) > 0 {
		got = append(got, heap.Pop(&ts).(*group).due)
	}
	if !slices.IsSortedFunc(got, time.Time.Compare) {
		t.Errorf("seed %d: not in order: %v", seed, got)
	}
	for _, g := range all {
		if g.timer != 0 {
			t.Errorf("seed %d: group %d is still at %d", seed, g.id, g.timer)
		}
	}
}

func TestGroupTable_with(t *testing.T) {
	s := &Stack{}
	s.groups.init()
	here, there := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	one, two := clc.PeerID{1}, clc.PeerID{2}
	server := func(a netip.Addr, id clc.PeerID) party { return party{linkgroup.Server, a, id} }
	client := func(a netip.Addr, id clc.PeerID) party { return party{linkgroup.Client, a, id} }
	add := func(id uint32, p party) *group {
		g := &group{s: s, id: id, contact: contact{role: p.role, addr: p.addr, peer: p.peer, key: clc.PeerKey{PeerID: p.peer}}}
		s.groups.add(g)
		return g
	}
	check := func(what string, p party, want ...uint32) {
		t.Helper()
		var ids []uint32
		for _, g := range s.groups.with(p) {
			ids = append(ids, g.id)
		}
		if d := cmp.Diff(want, ids); d != "" {
			t.Errorf("%s: %s", what, d)
		}
	}
	a := add(1, server(here, one))
	add(2, client(here, one))
	b := add(3, server(here, clc.PeerID{}))
	add(4, server(here, one))
	add(5, server(there, one))
	check("servers", server(here, one), 1, 4)
	check("servers of another address", server(there, one), 5)
	check("clients", client(here, one), 2)
	check("nobody", server(here, two))
	check("somebody without an ID", server(here, clc.PeerID{}), 3)
	b.peer = two
	check("named by its Confirm", server(here, two))
	check("somebody without an ID, still", server(here, clc.PeerID{}), 3)
	s.groups.remove(a)
	check("one removed", server(here, one), 4)
	s.groups.remove(b)
	check("all removed", server(here, clc.PeerID{}))
	if len(s.groups.byParty) != 3 {
		t.Errorf("%d lists are left, want 3", len(s.groups.byParty))
	}
}

// Groups that have to wait come before those that come later.
func TestGroupTable_flushTouched(t *testing.T) {
	s := &Stack{}
	s.groups.init()
	s.alarm.init()
	groups := make([]*group, 5)
	for i := range groups {
		groups[i] = &group{s: s, id: uint32(i), lg: linkgroup.New(linkgroup.Config{Rand: rand.New(rand.NewPCG(0, 0))})}
		s.groups.touch(groups[i])
	}
	now := time.Unix(1000, 0)
	check := func(flushed, want int, left ...uint32) {
		t.Helper()
		var ids []uint32
		for _, g := range s.groups.touched {
			ids = append(ids, g.id)
			if !g.touched {
				t.Errorf("group %d does not know that it is on the list", g.id)
			}
		}
		if d := cmp.Diff(left, ids); d != "" || flushed != want {
			t.Errorf("%d groups, want %d; left: %s", flushed, want, d)
		}
	}
	groups[4].heardOfLinks()
	check(s.groups.flushTouched(now, 0), 0, 0, 1, 2, 3, 4)
	check(s.groups.flushTouched(now, 2), 2, 2, 3, 4)
	s.groups.touch(groups[0])
	s.groups.touch(groups[3])
	check(s.groups.flushTouched(now, 2), 2, 4, 0)
	if !groups[4].heardDelete {
		t.Error("a group that waits has forgotten what the peer knows")
	}
	check(s.groups.flushTouched(now, unbounded), 2)
	if groups[4].heardDelete {
		t.Error("the peer still counts as one that has just said which links are deleted")
	}
	for _, g := range s.groups.touched[:cap(s.groups.touched)] {
		if g != nil {
			t.Errorf("the list still has group %d", g.id)
		}
	}
}
