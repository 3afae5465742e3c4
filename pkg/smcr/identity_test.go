// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// RFC 7609 §2.2.4, A.2.1: a stack that starts again on the same device has another peer ID, so that its peers do
// not take it for the stack that they know. A stack tells each peer address another peer ID, and one address the
// same one each time.
func TestSection2_2_4_PeerIDIsNew(t *testing.T) {
	d := newFakeFabric().device("c", 1)
	peers := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1"), {}}
	seen := map[clc.PeerID]bool{}
	for i := range 16 {
		s := newStack(t, d)
		for _, a := range peers {
			id := smcr.PeerIDFor(s, a)
			if id.IsZero() || seen[id] {
				t.Fatalf("stack %d has peer ID %v for %v; before: %v", i, id, a, seen)
			}
			if again := smcr.PeerIDFor(s, a); again != id {
				t.Errorf("stack %d has peer ID %v for %v, and then %v", i, id, a, again)
			}
			seen[id] = true
		}
	}
}

// RFC 7609 A.3.1: a link user ID is unique over all groups of a stack, whether the stack is their client or their
// server.
func TestSectionA_3_1_LinkUserIDs(t *testing.T) {
	p := newPair(t)
	for _, d := range bothDirections(t, p) {
		c, s := d.dial(t)
		defer c.Close()
		defer s.Close()
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		seen := map[uint32]bool{}
		for _, g := range s.LinkGroups() {
			for _, l := range g.Links {
				if l.UserID == 0 || seen[l.UserID] {
					t.Errorf("link user ID %d; before: %v", l.UserID, seen)
				}
				seen[l.UserID] = true
			}
		}
		if len(seen) < 2 {
			t.Errorf("%d links, want one per direction", len(seen))
		}
	}
}
