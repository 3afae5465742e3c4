// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// netStack is a stack with a device in each of these subnets, on a host where elsewhere says whether the way to
// another subnet leads through another interface than the device's.
func netStack(tb testing.TB, f *fakeFabric, last byte, elsewhere bool, nets ...byte) *smcr.Stack {
	tb.Helper()
	return newStack(tb, nil, quick, func(c *smcr.Config) {
		c.Devices = nil
		c.Route = func(netip.Addr, netip.Addr) (clc.Route, error) {
			return clc.Route{Found: true, Elsewhere: elsewhere}, nil
		}
		for _, n := range nets {
			c.Devices = append(c.Devices, netDevice(f, n, last))
		}
	})
}

// netDevice is the device of such a stack in a subnet.
func netDevice(f *fakeFabric, n, last byte) *fakeDevice {
	return &fakeDevice{f: f, name: fmt.Sprintf("net%d", n), gid: rdma.GIDEntry{
		GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{10, 0, n, last})), PrefixBits: 24,
		Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 0, 0, 0, n, last},
	}}
}

// TestGroup_pairsDevicesOfASubnet: links join devices of one subnet, whatever
// order the devices are in and however many links each carries already.
func TestGroup_pairsDevicesOfASubnet(t *testing.T) {
	f := newFakeFabric()
	client := netStack(t, f, 1, true, 1, 2)
	for i, nets := range [][]byte{{1, 2}, {2, 1}, {1, 2}, {2}, {2, 1}} {
		server := netStack(t, f, byte(2+i), true, nets...)
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
		if prefers := smcr.Prefers(client, netip.MustParseAddr("127.0.0.1")); (prefers == 1) != (i >= 3) {
			t.Errorf("server %d on subnets %d: device %d is proposed to it next", i, nets, prefers)
		}
		_, _ = a.Close(), b.Close()
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestGroup_staysWithWhatWasProposed: a server whose RNIC is in another subnet, and which says that it
// reaches the proposed RNIC directly, gets a link to that one, although another device of the client is in
// the server's subnet: Linux knows no other.
func TestGroup_staysWithWhatWasProposed(t *testing.T) {
	f := newFakeFabric()
	client, server := netStack(t, f, 1, true, 1, 2), netStack(t, f, 2, false, 2)
	p := &pair{fabric: f, client: client, server: server}
	p.listen(t)
	a, b := p.dial(t)
	if a.Mode() != smcr.ModeSMCR {
		t.Fatal(a.Info().Reason)
	}
	g := client.LinkGroups()
	if len(g) != 1 || len(g[0].Links) == 0 || g[0].Links[0].Device != "net1" {
		t.Errorf("link groups %+v, want a link of net1, which was proposed", g)
	}
	_, _ = a.Close(), b.Close()
}

// TestGroup_subnetComesLater: links within subnets take the place of one across them once the device comes that
// was missing, under a connection.
func TestGroup_subnetComesLater(t *testing.T) {
	f := newFakeFabric()
	client, server := netStack(t, f, 1, false, 1, 2), netStack(t, f, 2, false, 2)
	p := &pair{fabric: f, client: client, server: server}
	p.listen(t)
	a, b := p.dial(t)
	if g := waitGroup(t, server, "ASYMMETRIC LOCAL", 2); g.Links[0].PeerGID.Addr().As4()[2] != 1 {
		t.Fatalf("link group %+v, want a first link across subnets", g)
	}
	if err := server.AddDevice(netDevice(f, 1, 2)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*smcr.Stack{client, server} {
		waitFor(t, "two links within subnets", func() bool {
			g := s.LinkGroups()
			return len(g) == 1 && g[0].Redundancy == "SYMMETRIC" && len(g[0].Links) == 2 &&
				!slices.ContainsFunc(g[0].Links, func(k smcr.LinkInfo) bool {
					return k.LocalGID.Addr().As4()[2] != k.PeerGID.Addr().As4()[2]
				})
		})
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// TestGroup_secondRail: with two devices on the first's rail and one on another,
// which come in any order, the second link is on the other rail, at both sides.
func TestGroup_secondRail(t *testing.T) {
	rails := map[string]int{"a0": 0, "a1": 0, "b0": 1}
	stack := func(f *fakeFabric, last byte, names ...string) *smcr.Stack {
		return newStack(t, nil, quick, func(c *smcr.Config) {
			c.Devices, c.Rail = nil, func(name string) int { return rails[name] }
			for i, name := range names {
				c.Devices = append(c.Devices, &fakeDevice{f: f, name: name, gid: rdma.GIDEntry{
					GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{10, 0, 0, last + byte(i)})), PrefixBits: 24,
					Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 0, 0, 0, 0, last + byte(i)},
				}})
			}
		})
	}
	for _, order := range [][2][]string{
		{{"a0", "a1", "b0"}, {"a0", "a1", "b0"}},
		{{"a0", "a1", "b0"}, {"b0", "a0", "a1"}},
		{{"b0", "a0", "a1"}, {"a1", "a0", "b0"}},
	} {
		f := newFakeFabric()
		p := &pair{fabric: f, client: stack(f, 10, order[0]...), server: stack(f, 20, order[1]...)}
		p.listen(t)
		a, b := p.dial(t)
		for _, s := range []*smcr.Stack{p.client, p.server} {
			g := waitGroup(t, s, "SYMMETRIC", 2)
			if rails[g.Links[0].Device] == rails[g.Links[1].Device] {
				t.Errorf("order %v: links of a %v over %s and %s, which are on one rail", order, g.Role, g.Links[0].Device, g.Links[1].Device)
			}
		}
		_, _ = a.Close(), b.Close()
	}
}

// TestGroup_clientRNICOutOfReach: a server goes by the RNICs of the client that it reaches, and makes an offer even if
// it reaches no other than that of the first link: without an offer the client gives up.
func TestGroup_clientRNICOutOfReach(t *testing.T) {
	for _, tc := range []struct {
		name           string
		client, server []byte
		routed         byte // the subnet from which there are routes to all others
		redundancy     string
		links          int
	}{
		{"no other", []byte{1, 2}, []byte{1}, 0, "SINGLE", 1},
		{"a third", []byte{1, 2, 3}, []byte{1, 3}, 0, "SYMMETRIC", 2},
		{"a second, by the device that carries the first link", []byte{1, 2, 3}, []byte{1, 3}, 1, "SYMMETRIC", 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeFabric()
			stack := func(last byte, nets []byte) *smcr.Stack {
				return newStack(t, nil, quick, func(c *smcr.Config) {
					c.Devices = nil
					c.Route = func(src, _ netip.Addr) (clc.Route, error) {
						return clc.Route{Found: src.As4()[2] == tc.routed}, nil
					}
					for _, n := range nets {
						c.Devices = append(c.Devices, netDevice(f, n, last))
					}
				})
			}
			p := &pair{fabric: f, client: stack(1, tc.client), server: stack(2, tc.server)}
			p.listen(t)
			a, b := p.dial(t)
			if a.Mode() != smcr.ModeSMCR {
				t.Fatal(a.Info().Reason)
			}
			exchange(t, a, b)
			waitGroup(t, p.server, tc.redundancy, tc.links)
			_, _ = a.Close(), b.Close()
		})
	}
}

// TestGroup_noOfferOutOfReach: the server of a live group that gets another device offers no link over it while none of its devices
// reaches another RNIC of the client.
func TestGroup_noOfferOutOfReach(t *testing.T) {
	f := newFakeFabric()
	var routed atomic.Bool
	stack := func(last byte, nets ...byte) *smcr.Stack {
		return newStack(t, nil, quick, func(c *smcr.Config) {
			c.Devices = nil
			c.Route = func(netip.Addr, netip.Addr) (clc.Route, error) { return clc.Route{Found: routed.Load()}, nil }
			for _, n := range nets {
				c.Devices = append(c.Devices, netDevice(f, n, last))
			}
		})
	}
	p := &pair{fabric: f, client: stack(1, 1, 2), server: stack(2, 1)}
	p.listen(t)
	a, b := p.dial(t)
	exchange(t, a, b)
	link := waitGroup(t, p.server, "SINGLE", 1).Links[0]
	offers := 0
	f.mu.Lock()
	f.drops = func(from rdma.QPN, b []byte) bool {
		m, err := llc.Parse(llc.DialectLinux, llc.Version2, b)
		if add, ok := m.(llc.AddLink); ok && err == nil && from == link.LocalQPN && !add.Response {
			offers++
		}
		return false
	}
	f.mu.Unlock()
	if err := p.server.AddDevice(netDevice(f, 3, 2)); err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	if offers != 0 {
		t.Errorf("%d links were offered to an RNIC that the server does not reach", offers)
	}
	f.mu.Unlock()
	routed.Store(true)
	if err := p.server.AddDevice(netDevice(f, 4, 2)); err != nil {
		t.Fatal(err)
	}
	waitGroup(t, p.server, "SYMMETRIC", 2)
	f.mu.Lock()
	if offers == 0 {
		t.Error("the link was not offered over the first one")
	}
	f.mu.Unlock()
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}
