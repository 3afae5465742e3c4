// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// order names the exchanges in line.
func (q *requests) order() (s []string) {
	for i, f := range q.line {
		name := f.kind.String()
		if i == 0 && q.sent {
			name = "under way: " + name
		}
		s = append(s, name)
	}
	return s
}

func deletion(id llc.LinkID) exchange {
	return exchange{kind: exchangeDeleteLink, deletion: llc.DeleteLink{Link: id}}
}

// Deletions go before exchanges that have not begun, and keep their order among themselves.
func TestRequests_order(t *testing.T) {
	q := &requests{}
	q.add(confirmExchange(1))
	q.add(exchange{kind: exchangeAddLink})
	q.begin(time.Unix(1, 0), &link{})
	q.add(deletion(7))
	q.add(deletion(8))
	want := []string{"under way: CONFIRM RKEY", "DELETE LINK", "DELETE LINK", "ADD LINK"}
	if d := cmp.Diff(want, q.order()); d != "" {
		t.Error(d)
	}
	if q.first() != nil || q.current().kind != exchangeConfirmRKey {
		t.Error("another one may start while one is under way")
	}
	if q.line[1].deletion.Link != 7 || !q.deletes(8) || q.deletes(9) {
		t.Error("deletions are not in the order in which they came")
	}
	q.end()
	if q.current() != nil || q.first().deletion.Link != 7 {
		t.Error("the first deletion is not next")
	}
}

// hasten puts one deletion before all exchanges that have not begun, and the others keep their order. The peer
// has been told of a deletion that is under way.
func TestRequests_hasten(t *testing.T) {
	q := &requests{}
	q.add(deletion(6))
	if !q.hasUntold() {
		t.Error("a deletion that has not begun counts as told")
	}
	q.begin(time.Unix(1, 0), &link{})
	q.add(confirmExchange(1))
	if q.hasUntold() {
		t.Error("the deletion under way counts as untold")
	}
	q.add(deletion(7))
	q.add(deletion(8))
	q.hasten(8)
	q.hasten(9)
	var ids []llc.LinkID
	for _, f := range q.line {
		ids = append(ids, f.deletion.Link)
	}
	if d := cmp.Diff([]llc.LinkID{6, 8, 7, 0}, ids); d != "" || !q.hasUntold() {
		t.Errorf("untold %t, %s", q.hasUntold(), d)
	}
	q.end()
	q.hasten(7)
	if q.first().deletion.Link != 7 {
		t.Errorf("%+v is next", q.first())
	}
}

// The deletion of a link that is gone leaves the line, wherever it stands. If a link is needed after all, its
// deletion leaves the line unless it is under way.
func TestRequests_endDeletion(t *testing.T) {
	q := &requests{}
	for id := llc.LinkID(7); id < 9; id++ {
		q.add(exchange{kind: exchangeDeleteLink, deletion: llc.DeleteLink{Link: id, Orderly: true}})
	}
	q.add(deletion(9))
	q.begin(time.Unix(1, 0), &link{})
	if q.cancelDeletion(7) || !q.is(exchangeDeleteLink) || !q.deletes(7) {
		t.Error("the deletion under way was cancelled")
	}
	if !q.cancelDeletion(8) || q.deletes(8) {
		t.Error("the waiting deletion was not cancelled")
	}
	if q.cancelDeletion(9) || !q.deletes(9) {
		t.Error("the deletion of a link that is lost was cancelled")
	}
	q.endDeletion(7)
	q.endDeletion(7)
	q.endDeletion(9)
	if q.current() != nil || len(q.line) != 0 {
		t.Errorf("left: %v", q.order())
	}
}

// RFC 7609 §2.3: a request whose link is lost is sent again over another one, but ADD LINK
// has an end of its own.
func TestRequests_linkLost(t *testing.T) {
	lost, other := &link{index: 0}, &link{index: 1}
	for _, kind := range []exchangeKind{exchangeConfirmRKey, exchangeDeleteRKey, exchangeDeleteLink, exchangeAskDelete, exchangeDeleteAll, exchangeAddLink} {
		q := &requests{}
		q.add(exchange{kind: kind})
		q.begin(time.Unix(1, 0), lost)
		if q.linkLost(other); !q.is(kind) {
			t.Errorf("%v ends with a link that does not carry it", kind)
		}
		if q.linkLost(lost); q.is(kind) != (kind == exchangeAddLink) {
			t.Errorf("%v is under way: %t", kind, q.is(kind))
		}
	}
}

// DELETE RKEY takes along the RMBs of the DELETE RKEY requests directly behind it, as many as one message has
// room for.
func TestRequests_joinDeletes(t *testing.T) {
	q := &requests{}
	for id := range RMBID(4) {
		q.add(exchange{kind: exchangeDeleteRKey, rmbs: []RMBID{id}})
	}
	q.add(confirmExchange(9))
	q.add(exchange{kind: exchangeDeleteRKey, rmbs: []RMBID{10}})
	q.begin(time.Unix(1, 0), &link{})
	q.joinDeletes(3)
	if d := cmp.Diff([]RMBID{0, 1, 2}, q.current().rmbs); d != "" {
		t.Error(d)
	}
	want := []string{"under way: DELETE RKEY", "DELETE RKEY", "CONFIRM RKEY", "DELETE RKEY"}
	if d := cmp.Diff(want, q.order()); d != "" {
		t.Error(d)
	}
}

// The line takes no more than maxExchanges.
func TestRequests_full(t *testing.T) {
	q := &requests{}
	for id := range RMBID(2 * maxExchanges) {
		q.add(confirmExchange(id))
	}
	if len(q.line) != maxExchanges {
		t.Errorf("%d are in line, want %d", len(q.line), maxExchanges)
	}
}
