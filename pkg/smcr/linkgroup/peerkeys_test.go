// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// The answer to a DELETE RKEY of version 2 has room for few keys, and says how many more
// there were.
func TestAnswerDeleteV2(t *testing.T) {
	var keys []rdma.RKey
	for i := range rdma.RKey(llc.ShortDeleteRKeysV2 + 3) {
		keys = append(keys, i)
	}
	a := answerDeleteV2(llc.DeleteRKeyV2{RKeys: keys}, 2)
	want := llc.DeleteRKeyV2{Header: llc.Header{Response: true}, Negative: true, Invalid: 2, Omitted: 3, RKeys: keys[:llc.ShortDeleteRKeysV2]}
	if d := cmp.Diff(want, a); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if a := answerDeleteV2(llc.DeleteRKeyV2{RKeys: keys[:1]}, 0); a.Negative || a.Omitted != 0 || len(a.RKeys) != 1 {
		t.Errorf("%+v", a)
	}
}

// RFC 7609 A.3.7: of the keys of a DELETE RKEY those that we do not know are in the mask.
func TestPeerKeys_handleDelete(t *testing.T) {
	g := New(Config{Role: Server})
	l := g.links.first()
	g.links.becomeForming(l, Endpoint{})
	g.keys.learn(0, RToken{RKey: 5})
	m := llc.DeleteRKey{Count: 3}
	copy(m.RKeys[:], []rdma.RKey{4, 5, 5})
	g.peerKeys.handleDelete(g, l, m)
	got, ok := sentOn(t, l)[0].(llc.DeleteRKey)
	if !ok || !got.Response || !got.Negative || got.ErrorMask != 0b1010_0000 || len(g.keys.peers) != 0 {
		t.Errorf("%+v, %d RMBs are left", got, len(g.keys.peers))
	}
}

// RFC 7609 A.3.5, A.3.6: an RMB with RKeys for more links than fit into CONFIRM RKEY is told in
// pieces, and each must say how many remain.
func TestPeerKeys_continues(t *testing.T) {
	g, _, l := pair(Client)
	now := time.Unix(1, 0)
	confirm := llc.ConfirmRKey{Others: 3, This: llc.RToken{RKey: 5, VAddr: 0x1000}}
	g.peerKeys.handleConfirm(g, now, l, confirm)
	if g.peerKeys.token == nil || g.peerKeys.left != 3-confirm.N() {
		t.Fatalf("%d RTokens are still to come, want %d", g.peerKeys.left, 3-confirm.N())
	}
	for _, m := range []struct {
		remaining uint8
		negative  bool
		left      int
	}{
		{7, true, 3 - confirm.N()}, // another one than expected
		{uint8(3 - confirm.N()), false, 0},
		{1, true, 0}, // continues nothing
		{0, false, 0},
	} {
		l.queue = nil
		g.peerKeys.handleCont(g, now, l, llc.ConfirmRKeyContinuation{Remaining: m.remaining})
		got, ok := sentOn(t, l)[0].(llc.ConfirmRKeyContinuation)
		if !ok || !got.Response || got.Negative != m.negative || g.peerKeys.left != m.left {
			t.Errorf("%d remain: %+v, and %d are still to come", m.remaining, got, g.peerKeys.left)
		}
	}
	if g.peerKeys.token != nil || g.keys.peer(l.index, 5) == nil {
		t.Error("the RMB is not known once all is said")
	}
}

// RFC 7609 §3.5.5.3: while the server changes the links, a client says later what RKeys a new RMB has.
// A Linux client would decline its connection, so that one is not refused.
func TestSide_refusesKeys(t *testing.T) {
	for _, c := range []struct {
		role    Role
		dialect llc.Dialect
		step    addStep
		want    bool
	}{
		{Server, llc.DialectRFC, addNone, false},
		{Server, llc.DialectRFC, addWantEndpoint, false}, // the client does not know of it
		{Server, llc.DialectRFC, addWaitReply, true},
		{Server, llc.DialectLinux, addWaitReply, false},
		{Client, llc.DialectRFC, addWaitCont, false},
	} {
		g, l := formed(c.role)
		g.dialect = c.dialect
		g.adding.step = c.step
		if got := g.side.refusesKeys(g); got != c.want {
			t.Errorf("%v, %v, %v is waited for: %t", c.role, c.dialect, c.step, got)
		}
		g.peerKeys.handleConfirm(g, time.Unix(1, 0), l, llc.ConfirmRKey{This: llc.RToken{RKey: 9}})
		m, ok := sentOn(t, l)[0].(llc.ConfirmRKey)
		if !ok || m.Negative != c.want || m.Retry != c.want || (g.keys.peer(l.index, 9) == nil) != c.want {
			t.Errorf("%v, %v, %v is waited for: %+v", c.role, c.dialect, c.step, m)
		}
	}
}
