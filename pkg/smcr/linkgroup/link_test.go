// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// LLC messages leave in their order, as far as the budget goes; what is longer than
// Output.Msg is in Long.
func TestLink_pump(t *testing.T) {
	l := &link{index: 3, state: linkActive, inflight: SendBudget - 3}
	long := llc.DeleteRKeyV2{Header: llc.Header{Version: llc.Version2}, RKeys: make([]rdma.RKey, llc.ShortDeleteRKeysV2+1)}
	l.send(llc.TestLink{UserData: [16]byte{1}})
	l.send(long)
	l.send(llc.TestLink{UserData: [16]byte{2}})
	l.send(llc.TestLink{UserData: [16]byte{3}})
	var out outbox
	if n := l.pump(&out); n != 3 || l.inflight != SendBudget || len(l.queue) != 1 {
		t.Fatalf("%d messages went, %d are under way, %d wait", n, l.inflight, len(l.queue))
	}
	type sent struct {
		Link LinkIndex
		Msg  byte // the last one of the user data's first byte
		Long int
	}
	var got []sent
	for _, o := range out.list {
		s := sent{Link: o.Link, Long: len(o.Long)}
		if m, err := llc.ParseTestLink(o.Msg[:]); o.Long == nil && err == nil {
			s.Msg = m.UserData[0]
		}
		got = append(got, s)
	}
	if d := cmp.Diff([]sent{{3, 1, 0}, {3, 0, len(long.Append(nil))}, {3, 2, 0}}, got); d != "" {
		t.Error(d)
	}
	if n := l.pump(&out); n != 0 {
		t.Errorf("%d messages went without a budget", n)
	}
	l.inflight--
	if n := l.pump(&out); n != 1 || len(l.queue) != 0 {
		t.Errorf("%d messages went with room for one, %d wait", n, len(l.queue))
	}
}

// The shell has room for one long LLC message: the next one, and what is behind it, leave when the first has
// completed. All that left before it completes before it.
func TestLink_pumpOneLong(t *testing.T) {
	l := &link{state: linkActive, inflight: 2}
	long := llc.DeleteRKeyV2{Header: llc.Header{Version: llc.Version2}, RKeys: make([]rdma.RKey, llc.ShortDeleteRKeysV2+1)}
	for _, m := range []llc.Message{llc.TestLink{}, long, llc.TestLink{}, long, llc.TestLink{}, long} {
		l.send(m)
	}
	var out outbox
	for _, want := range []struct{ completed, sent, inflight int }{{0, 3, 5}, {3, 0, 2}, {1, 2, 3}, {1, 0, 2}, {1, 1, 2}, {2, 0, 0}} {
		for range want.completed {
			if !l.isIdle(true) {
				t.Error("not idle while a long message is under way")
			}
			l.completed()
		}
		if n := l.pump(&out); int(n) != want.sent || l.inflight != want.inflight {
			t.Errorf("after %d more completions %d messages went, %d are under way, want %+v", want.completed, n, l.inflight, want)
		}
	}
	if len(l.queue) > 0 || l.untilLong != 0 {
		t.Errorf("%d messages wait, %d until the long one", len(l.queue), l.untilLong)
	}
}

// A link has something to do if an LLC message or a connection waits, and the budget
// allows it: data leave room for LLC messages.
func TestLink_isIdle(t *testing.T) {
	for _, c := range []struct {
		name             string
		llc, data        bool
		inflight         int
		idle             bool // while connections may send
		idleWithoutConns bool
		sending          bool
	}{
		{"nothing waits", false, false, 0, true, true, false},
		{"something is under way", false, false, 1, true, true, true},
		{"LLC", true, false, 0, false, false, true},
		{"LLC, room for one", true, false, SendBudget - 1, false, false, true},
		{"LLC, no room", true, false, SendBudget, true, true, true},
		{"data", false, true, 0, false, true, false},
		{"data, room for one", false, true, SendBudget - llcReserve - 1, false, true, true},
		{"data, room for LLC only", false, true, SendBudget - llcReserve, true, true, true},
		{"both, room for LLC only", true, true, SendBudget - llcReserve, false, false, true},
	} {
		l := &link{state: linkActive, inflight: c.inflight}
		if c.llc {
			l.send(llc.TestLink{})
		}
		if c.data {
			l.ready.push(&Conn{})
		}
		if got := l.isIdle(true); got != c.idle {
			t.Errorf("%s: idle %t, want %t", c.name, got, c.idle)
		}
		if got := l.isIdle(false); got != c.idleWithoutConns {
			t.Errorf("%s: idle %t without connections, want %t", c.name, got, c.idleWithoutConns)
		}
		if got := l.isSending(); got != c.sending {
			t.Errorf("%s: sending %t, want %t", c.name, got, c.sending)
		}
	}
}

// No LLC message can be meant for a link that has no queue pair: that is our own mistake.
func TestLink_sendWithoutQueuePair(t *testing.T) {
	for _, s := range []linkState{linkDown, linkWanted} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a message for a link that is %v is taken", s)
				}
			}()
			(&link{state: s}).send(llc.TestLink{})
		}()
	}
}

// RFC 7609 §2.2.1: the RNIC of a peer is its MAC and its GID. Our half of the way to it
// may say which router is between.
func TestLink_peer(t *testing.T) {
	peer := Endpoint{QPN: 1, GID: rdma.GID{15: 2}, MAC: rdma.MAC{5: 2}}
	router, other := rdma.MAC{5: 8}, rdma.MAC{5: 9}
	l := &link{peer: peer, local: Endpoint{Router: router}}
	for name, c := range map[string]struct {
		e    Endpoint
		same bool
	}{
		"another queue pair": {Endpoint{QPN: 7, GID: peer.GID, MAC: peer.MAC}, true},
		"another GID":        {Endpoint{QPN: 1, GID: rdma.GID{15: 3}, MAC: peer.MAC}, false},
		"another MAC":        {Endpoint{QPN: 1, GID: peer.GID, MAC: other}, false},
	} {
		if got := l.samePeer(c.e); got != c.same {
			t.Errorf("%s: same peer %t, want %t", name, got, c.same)
		}
	}
	if e := l.peerHalf(); e.Router != router || l.peer.Router != (rdma.MAC{}) {
		t.Errorf("router %v of the peer's half, want ours; the link has %v", e.Router, l.peer.Router)
	}
	l.peer.Router = other
	if e := l.peerHalf(); e.Router != other {
		t.Errorf("router %v of the peer's half, want its own", e.Router)
	}
}

// Displays know a link that is to get a queue pair as FORMING, like one that has it. A link
// can send while it is ACTIVE or DRAINING.
func TestLink_stateNames(t *testing.T) {
	want := map[linkState]string{
		linkDown: "DOWN", linkWanted: "FORMING", linkForming: "FORMING", linkActive: "ACTIVE", linkDraining: "DRAINING", linkDraining + 1: "DOWN",
	}
	for s, name := range want {
		l := &link{state: s}
		if got := l.state.String(); got != name || l.isUp() != (name == "ACTIVE" || name == "DRAINING") {
			t.Errorf("state %d is %s, up %t, want %s", s, got, l.isUp(), name)
		}
	}
	var none *link
	if none.place() != noPlace || (&link{index: 0}).place() == noPlace {
		t.Error("the place of no link is taken for that of the first one")
	}
}
