// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// TestAttack_hostNames: a peer may claim the name of a node, or send a name with control characters for
// the terminal of its readers. The SMCRLink shows the name as the peer's claim, with other characters than
// those of host names replaced, and never as the name of the peer's node.
func TestAttack_hostNames(t *testing.T) {
	nodes := nodesOfTheTests()
	for _, tt := range []struct {
		name, calls string // calls is what the peer calls itself
		gid         string
		peer, claim string
	}{
		{"an honest node", "node-b", "::ffff:192.0.2.2", "node-b", "node-b"},
		{"the name of a node", "node-b", "::ffff:192.0.2.66", "192.0.2.66", "node-b"},
		{"the name of another node", "node-b", "::ffff:192.0.2.3", "node-c", "node-b"},
		{"an address that two nodes claim", "node-b", "::ffff:192.0.2.4", "192.0.2.4", "node-b"},
		{"colours and a new line", "\x1b[2J\x1b[31mroot\r\nnode-b Active", "::ffff:192.0.2.66", "192.0.2.66", "??2J??31mroot??node-b?Active"},
		{"no UTF-8", "n\xff\xfe\xc0\x80", "::ffff:192.0.2.66", "192.0.2.66", "n????"},
		{"letters that look like others", "n\u043ede-b", "::ffff:192.0.2.66", "192.0.2.66", "n??de-b"},
		{"text that turns around", "\u202eb-edon", "::ffff:192.0.2.66", "192.0.2.66", "???b-edon"},
		{"a zero in the middle", "node-b\x00x", "::ffff:192.0.2.66", "192.0.2.66", "node-b?x"},
		{"markup", `<b>"{{.}}"</b>`, "::ffff:192.0.2.66", "192.0.2.66", "?b????.?????b?"},
		{"longer than the field", "a234567890b234567890c234567890d234567890", "::ffff:192.0.2.66", "192.0.2.66", "a234567890b234567890c234567890d2"},
		{"nothing", "", "::ffff:192.0.2.66", "192.0.2.66", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var x clc.FirstContactExtension
			x.SetHost(tt.calls)
			nodes[netip.MustParseAddr("192.0.2.4")] = "" // as Source says of an address that two nodes claim
			g := group("shop/web", 1, 1)
			g.PeerClaimedName, g.Links[0].PeerGID = x.Host(), tt.gid
			s := linkStatus(node, &g, "cache", nodes)
			if s.Peer != tt.peer || s.PeerClaimedName != tt.claim {
				t.Errorf("peer %q claims %q, want %q and %q", s.Peer, s.PeerClaimedName, tt.peer, tt.claim)
			}
			text, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			var back v1alpha1.SMCRLinkStatus
			if err := json.Unmarshal(text, &back); err != nil || back.PeerClaimedName != tt.claim {
				t.Errorf("as JSON %s: %v", text, err)
			}
		})
	}
}
