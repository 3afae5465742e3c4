// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// netStack is a stack with a device in each of these subnets.
func netStack(tb testing.TB, f *fakeFabric, last byte, nets ...byte) *smcr.Stack {
	tb.Helper()
	return newStack(tb, nil, quick, func(c *smcr.Config) {
		c.Devices = nil
		for _, n := range nets {
			c.Devices = append(c.Devices, &fakeDevice{f: f, name: fmt.Sprintf("net%d", n), gid: rdma.GIDEntry{
				GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{10, 0, n, last})), PrefixBits: 24,
				Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 0, 0, 0, n, last},
			}})
		}
	})
}

// TestGroup_pairsDevicesOfASubnet: links join devices of one subnet, whatever
// order the devices are in and however many links each carries already.
func TestGroup_pairsDevicesOfASubnet(t *testing.T) {
	f := newFakeFabric()
	client := netStack(t, f, 1, 1, 2)
	for i, nets := range [][]byte{{1, 2}, {2, 1}, {1, 2}, {2}, {2, 1}} {
		server := netStack(t, f, byte(2+i), nets...)
		p := &pair{fabric: f, client: client, server: server}
		l, err := smcr.Listen(t.Context(), server, "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		p.l = l
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("server %d on subnets %d: %v", i, nets, a.Info().Reason)
		}
		want := 1
		if len(nets) == 2 {
			want = 2
		}
		var g smcr.GroupInfo
		waitFor(t, fmt.Sprintf("server %d on subnets %d: %d links", i, nets, want), func() bool {
			if gs := server.LinkGroups(); len(gs) == 1 {
				g = gs[0]
			}
			return len(g.Links) >= want
		})
		if len(g.Links) != want {
			t.Errorf("server %d on subnets %d has links %+v, want %d", i, nets, g.Links, want)
		}
		for _, k := range g.Links {
			if k.LocalGID.Addr().As4()[2] != k.PeerGID.Addr().As4()[2] {
				t.Errorf("server %d on subnets %d: link from %v to %v", i, nets, k.LocalGID, k.PeerGID)
			}
		}
		_, _ = a.Close(), b.Close()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}
