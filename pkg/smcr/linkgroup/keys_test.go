// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"testing"
)

// keysOf has RMBs of two elements of 16 KiB, which the peer knows.
func keysOf(t *testing.T, n int) *keyTable {
	t.Helper()
	k := &keyTable{}
	for range n {
		id, err := k.add(16<<10, 2, []RToken{{RKey: 1}})
		if err != nil {
			t.Fatal(err)
		}
		k.rmb(id).becomeConfirmed()
	}
	return k
}

// An RKey means one RMB on each link. If the peer gives the RKey to another RMB there, the older RMB is gone.
func TestKeyTable_keyIsTakenOver(t *testing.T) {
	k := &keyTable{}
	older := k.learn(0, RToken{RKey: 1, VAddr: 10})
	k.set(older, 1, RToken{RKey: 7, VAddr: 20})
	newer := k.learn(0, RToken{RKey: 2, VAddr: 30})
	k.set(newer, 1, RToken{RKey: 7, VAddr: 40})
	if k.peer(1, 7) != newer || k.peer(0, 1) != older || older.knows(1) {
		t.Error("the older RMB is still known by the key on link 1")
	}
	if k.learn(0, RToken{RKey: 1, VAddr: 11}) != older || len(k.peers) != 2 {
		t.Error("an RMB that is told again is another one")
	}
}

// A CLC message may name an RMB by its RKey on a lost link, even if another link has that link's place.
func TestKeyTable_formerToken(t *testing.T) {
	k := &keyTable{}
	v := RToken{RKey: 1, VAddr: 10}
	r := k.learn(0, v)
	k.retire(0)
	if r.knows(0) || k.peer(0, 1) != nil {
		t.Error("the token counts for the new link")
	}
	if k.find(v) != r {
		t.Error("the RMB is not found by its former token")
	}
	k.retire(0)
	if k.find(v) != nil {
		t.Error("the RMB is found by the token of the link before the last one")
	}
}

// The table is bounded. RMBs without an RKey on any link make room for new ones.
func TestKeyTable_full(t *testing.T) {
	k := &keyTable{}
	for i := range MaxRTokens {
		k.learn(0, RToken{RKey: 1, VAddr: 1})
		k.peers[i].known = 1
		k.peers[i].tokens[0].RKey = 1000
	}
	if len(k.peers) != MaxRTokens || k.learn(0, RToken{RKey: 2}) != nil {
		t.Fatal("the table is not full, or takes another one")
	}
	k.peers[3].known = 0
	if k.learn(0, RToken{RKey: 2}) == nil || len(k.peers) != MaxRTokens {
		t.Error("an RMB that no link knows makes no room")
	}
	if k.forget(0, 2) == nil || k.forget(0, 2) != nil {
		t.Error("an RMB is forgotten never, or twice")
	}
	full := keysOf(t, MaxRMBs)
	if _, err := full.add(16<<10, 1, nil); !errors.Is(err, ErrFull) {
		t.Errorf("our RMBs: %v, want ErrFull", err)
	}
}

// RFC 7609 §4.4: an RMB goes when no connection uses it and the other RMBs have as many free elements.
func TestKeyTable_surplus(t *testing.T) {
	k := keysOf(t, 2)
	first, second := k.rmbs[0], k.rmbs[1]
	if !k.isSurplus(first) {
		t.Error("of two empty RMBs none is surplus")
	}
	r, i, err := k.take(16 << 10)
	if err != nil || r != first {
		t.Fatal(r, err)
	}
	if k.isSurplus(first) || k.isSurplus(second) {
		t.Error("an RMB is surplus while one element is in use and two are the slack")
	}
	first.zombies, first.retired = 1, true
	if !k.isSurplus(first) {
		t.Error("an RMB with connections that the peer does not end is not surplus")
	}
	first.elements[i].used = false
	k.unlist(first)
	k.unlist(first)
	if gone := k.takeGone(); len(gone) != 1 || gone[0] != first.id || len(k.takeGone()) != 0 || len(k.rmbs) != 1 {
		t.Errorf("gone: %v", gone)
	}
}

// In a group that lives for days the numbers of RMBs wrap. Numbers in use are left out, and so is 0, which means
// no RMB.
func TestKeyTable_numbersComeRound(t *testing.T) {
	k := keysOf(t, 2)
	k.last = 0xffff
	id, err := k.add(16<<10, 2, []RToken{{RKey: 9}})
	if err != nil || id != 3 {
		t.Errorf("number %d, %v, want 3: 1 and 2 are in use", id, err)
	}
}
