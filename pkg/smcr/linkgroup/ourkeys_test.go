// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// sentOn parses what waits on a link, and takes it.
func sentOn(t *testing.T, l *link) (list []llc.Message) {
	t.Helper()
	for _, q := range l.queue {
		m, err := llc.Parse(llc.DialectLinux, llc.Version1, q.short[:])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, m)
	}
	l.queue = nil
	return list
}

// RFC 7609 A.3.5, A.3.6: an RMB is told for every link, in continuations where there are
// more than one message has room for.
func TestAnnouncement_continues(t *testing.T) {
	var pairs [][2]uint8
	for i := range uint8(MaxLinks) {
		pairs = append(pairs, [2]uint8{i, i})
	}
	table := tableOf(pairs...)
	k := &keyTable{}
	var tokens []RToken
	for i := range uint64(MaxLinks) {
		tokens = append(tokens, RToken{RKey: 100, VAddr: i})
	}
	id, err := k.add(16<<10, 1, tokens)
	if err != nil {
		t.Fatal(err)
	}
	var a announcement
	via, terms := &table.at[3], &terms{version: llc.Version1}
	a.begin(terms, &table, via, k.rmb(id))
	told := map[llc.LinkID]uint64{}
	note := func(list []llc.LinkRToken) {
		for _, o := range list {
			told[o.Link] = o.VAddr
		}
	}
	for a.goOn(terms, via) {
	}
	left := MaxLinks - 1
	for i, m := range sentOn(t, via) {
		switch m := m.(type) {
		case llc.ConfirmRKey:
			if i != 0 || int(m.Others) != left || m.This.VAddr != 3 {
				t.Errorf("%d: %v", i, m)
			}
			note(m.Other[:m.N()])
			left -= m.N()
		case llc.ConfirmRKeyContinuation:
			if i == 0 || int(m.Remaining) != left {
				t.Errorf("%d: %v, %d are left", i, m, left)
			}
			note(m.Other[:m.N()])
			left -= m.N()
		default:
			t.Errorf("%d: %v", i, m)
		}
	}
	if left != 0 || len(told) != MaxLinks-1 || !a.continued {
		t.Errorf("%d are left, told: %v", left, told)
	}
	for i := range table.at {
		if l := &table.at[i]; l != via && told[l.id] != uint64(i) {
			t.Errorf("link %d has address %d", l.id, told[l.id])
		}
	}
}

// What joins the line while the peer has not answered DELETE RKEY is not in the message that is sent again: the answer may
// be to the first one, of which the peer has forgotten the RMBs.
func TestDeleteRKey_again(t *testing.T) {
	now := time.Unix(1, 0)
	g, l := formed(Server)
	var rmbs [2]*rmb
	for i := range rmbs {
		id, err := g.AddRMB(16<<10, 1, []RToken{{RKey: rdma.RKey(10 + i)}})
		if err != nil {
			t.Fatal(err)
		}
		rmbs[i] = g.keys.rmb(id)
		rmbs[i].becomeDeleting()
		g.requests.add(exchange{kind: exchangeDeleteRKey, rmbs: []RMBID{id}})
		g.requests.start(g, now)
	}
	g.HandleTimeout(g.requests.resend)
	if n := len(sentOn(t, l)); n != 2 {
		t.Fatalf("sent %d times", n)
	}
	g.ourKeys.handleDeleteReply(g, []rdma.RKey{10})
	if rmbs[0].state == rmbDeleting || g.keys.rmb(rmbs[1].id) != rmbs[1] {
		t.Errorf("RMBs are %v and %v", rmbs[0].state, rmbs[1].state)
	}
}
