// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

func TestTimers_earliestFirst(t *testing.T) {
	seed := rand.Uint64()
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

func TestStack_groupsWith(t *testing.T) {
	s := &Stack{groups: map[uint32]*group{}, byPeer: map[peerKey][]*group{}}
	one, two := clc.PeerID{1}, clc.PeerID{2}
	add := func(id uint32, role linkgroup.Role, peer clc.PeerID) *group {
		g := &group{s: s, id: id}
		g.role, g.peer = role, peer
		s.addGroup(g)
		return g
	}
	ids := func(role linkgroup.Role, peer clc.PeerID) []uint32 {
		var l []uint32
		for g := range s.groupsWith(role, peer) {
			l = append(l, g.id)
		}
		if peer.IsZero() {
			slices.Sort(l)
		}
		return l
	}
	check := func(what string, role linkgroup.Role, peer clc.PeerID, want ...uint32) {
		t.Helper()
		if d := cmp.Diff(want, ids(role, peer)); d != "" {
			t.Errorf("%s: %s", what, d)
		}
	}
	a := add(1, linkgroup.Server, one)
	add(2, linkgroup.Client, one)
	b := add(3, linkgroup.Server, clc.PeerID{})
	add(4, linkgroup.Server, one)
	check("servers", linkgroup.Server, one, 1, 4)
	check("clients", linkgroup.Client, one, 2)
	check("nobody", linkgroup.Server, two)
	check("somebody without an ID", linkgroup.Server, clc.PeerID{}, 1, 2, 3, 4)
	s.setPeer(b, two)
	check("named later", linkgroup.Server, two, 3)
	s.removeGroup(a)
	check("one removed", linkgroup.Server, one, 4)
	s.setPeer(a, two)
	check("named after its end", linkgroup.Server, two, 3)
	s.removeGroup(b)
	check("all removed", linkgroup.Server, two)
	if len(s.byPeer) != 2 {
		t.Errorf("%d lists are left, want 2", len(s.byPeer))
	}
}
