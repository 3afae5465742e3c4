// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The Proposal names the client, the RNIC that it prefers by GID and MAC, and its
// subnet. Version 2 has the GID in its extension; version 1 is offered besides. That of
// a later connection (§3.5.2.1) is the same.
func TestSection3_5_1_2_Proposal(t *testing.T) {
	for _, tc := range []struct {
		name     string
		versions smcr.VersionSet
	}{{"v1", smcr.VersionsV1}, {"v2", smcr.VersionsV2}, {"both", smcr.VersionsBoth}} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, versions(tc.versions))
			k := newProxy(t, p.l.Addr().String())
			p.dialTo = k.addr
			a, b := p.dial(t)
			exchange(t, a, b)
			first := k.take(t)[0]
			got, err := clc.ParseProposal(first)
			if err != nil {
				t.Fatal(err)
			}
			c, d := p.dial(t)
			exchange(t, c, d)
			if diff := cmp.Diff(first, k.take(t)[0]); diff != "" || p.client.Stats().Groups != 1 {
				t.Errorf("Proposal of a subsequent contact (-first +second), %d groups:\n%s", p.client.Stats().Groups, diff)
			}
			_, _ = c.Close(), d.Close()
			rnic := rdma.GIDEntry{GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{192, 0, 2, 1})), MAC: rdma.MAC{2, 0, 0, 0, 0, 1}}
			if tc.versions != smcr.VersionsV2 {
				if got.GID != rnic.GID || got.MAC != rnic.MAC || got.IPv4 != netip.MustParsePrefix("127.0.0.0/24") {
					t.Errorf("version 1 offers GID %v, MAC %v, subnet %v", got.GID, got.MAC, got.IPv4)
				}
				if got.PeerID != smcr.PeerIDFor(p.client, netip.MustParseAddr("127.0.0.1")) {
					t.Errorf("peer ID %v, want %v", got.PeerID, smcr.PeerIDFor(p.client, netip.MustParseAddr("127.0.0.1")))
				}
			}
			if tc.versions != smcr.VersionsV1 && got.Ext.GID != rnic.GID {
				t.Errorf("version 2 offers GID %v", got.Ext.GID)
			}
			_, _ = a.Close(), b.Close()
		})
	}
}
