// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func eids(tb testing.TB, names ...string) (out []clc.EID) {
	tb.Helper()
	for _, n := range names {
		e, err := clc.ParseUEID(n)
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, e)
	}
	return out
}

// side is what one end of a connection may use.
type side struct {
	versions smcr.VersionSet
	eids     string
	subnet   string
}

func (s side) edit(tb testing.TB) func(*smcr.Config) {
	return func(c *smcr.Config) {
		c.Versions, c.EIDs = s.versions, eids(tb, strings.Fields(s.eids)...)
		if s.subnet != "" {
			c.Prefixes = []netip.Prefix{netip.MustParsePrefix(s.subnet)}
		}
	}
}

// TestStack_versions: what two stacks agree on, and why not on more.
func TestStack_versions(t *testing.T) {
	const here, there = "127.0.0.0/8", "127.0.0.0/16" // the client's and another subnet
	for _, tc := range []struct {
		name           string
		client, server side
		version        uint8 // 0: TCP
		eid            string
		noV2, reason   clc.Reason
	}{
		{"both know both", side{}, side{}, 2, smcr.DefaultEID, 0, 0},
		{"both in other subnets", side{subnet: here}, side{subnet: there}, 2, smcr.DefaultEID, 0, 0},
		{"client version 1 only", side{versions: smcr.VersionsV1}, side{}, 1, "", 0, 0},
		{"server version 1 only", side{}, side{versions: smcr.VersionsV1}, 1, "", 0, 0},
		{"both version 2 only", side{versions: smcr.VersionsV2}, side{versions: smcr.VersionsV2}, 2, smcr.DefaultEID, 0, 0},
		{"version 1 only, other subnets", side{subnet: here}, side{versions: smcr.VersionsV1, subnet: there}, 0, "", 0, clc.ReasonDiffPrefix},
		{"client version 2 only, server 1", side{versions: smcr.VersionsV2}, side{versions: smcr.VersionsV1}, 0, "", 0, clc.ReasonVersMismat},
		{"client version 1 only, server 2", side{versions: smcr.VersionsV1}, side{versions: smcr.VersionsV2}, 0, "", 0, clc.ReasonVersMismat},
		{"the server's first ID in common", side{eids: "A B C"}, side{eids: "X C B"}, 2, "C", 0, 0},
		{"no ID in common", side{eids: "A"}, side{eids: "B"}, 1, "", clc.ReasonNoUEID, 0},
		{"no ID in common, other subnets", side{eids: "A", subnet: here}, side{eids: "B", subnet: there}, 0, "", 0, clc.ReasonNoUEID},
		{"no ID in common, client version 2 only", side{versions: smcr.VersionsV2, eids: "A"}, side{eids: "B"}, 0, "", 0, clc.ReasonNoUEID},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFakeFabric()
			p := &pair{
				fabric: f, client: newStack(t, f.device("c", 1), tc.client.edit(t)),
				server: newStack(t, f.device("s", 2), tc.server.edit(t), func(c *smcr.Config) { c.Hostname = "node-s" }),
			}
			p.listen(t)
			for range 2 {
				a, b := p.dial(t)
				exchange(t, a, b)
				i, j := a.Info(), b.Info()
				if tc.version == 0 {
					if i.Mode != smcr.ModeTCP || i.Reason != tc.reason || !i.PeerDeclined || j.Reason != tc.reason || j.PeerDeclined {
						t.Errorf("client %v because of %v (peer declined %v), server %v; want %v of the server", i.Mode, i.Reason, i.PeerDeclined, j.Reason, tc.reason)
					}
				} else if i.Version != tc.version || j.Version != tc.version || i.NoV2 != 0 || j.NoV2 != tc.noV2 {
					t.Errorf("versions %d and %d, no version 2 because of %v and %v; want %d, %v at the server", i.Version, j.Version, i.NoV2, j.NoV2, tc.version, tc.noV2)
				}
				defer a.Close()
				defer b.Close()
			}
			if tc.version == 0 {
				return
			}
			for _, s := range []*smcr.Stack{p.client, p.server} {
				if g := s.LinkGroups(); len(g) != 1 || g[0].Version != tc.version || g[0].EID != tc.eid || g[0].Conns != 2 {
					t.Errorf("groups %+v; want one of version %d with enterprise ID %q and both connections", g, tc.version, tc.eid)
				}
			}
			c, s := p.client.LinkGroups()[0], p.server.LinkGroups()[0]
			if s.NoV2 != tc.noV2 {
				t.Errorf("the server's group is not of version 2 because of %v, want %v", s.NoV2, tc.noV2)
			}
			if v2 := tc.version == 2; v2 && (c.PeerHost != "node-s" || c.Release != clc.Release1) {
				t.Errorf("the client's group: peer %q, release %d", c.PeerHost, c.Release)
			}
		})
	}
}

// TestSection3_5_1_2_PartOfSubnet: of IPv6 the peer's subnet may be a part of ours, if our address is in that part.
func TestSection3_5_1_2_PartOfSubnet(t *testing.T) {
	for _, tt := range []struct {
		ours, local, theirs string
		want                bool
	}{
		{"fd00:1:2:3::5/48", "fd00:1:2:3::5", "fd00:1:2:3::/64", true},
		{"fd00:1:2:3::5/48", "fd00:1:2:3::5", "fd00:1:2:4::/64", false},
		{"fd00:1:2:3::5/48", "fd00:1:2:3::5", "fd00:1:2:3::5/128", true},
		{"", "fd00:1:2:3::5", "fd00:1:2:3::4/126", true}, // ours is not known
		{"", "fd00:1:2:3::5", "fd00:1:2:4::/64", false},
	} {
		s := newStack(t, newFakeFabric().device("s", 1), side{subnet: tt.ours}.edit(t))
		local := netip.MustParseAddr(tt.local)
		p := clc.Proposal{IPv6: clc.ListOf(netip.MustParsePrefix(tt.theirs))}
		if got := p.MatchesPrefix(local, smcr.PrefixesFor(s, local)); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

// A link group belongs to one version: a peer that comes with the other one
// later gets a group of its own, and both live.
func TestStack_groupsOfBothVersions(t *testing.T) {
	p := newPair(t)
	f := p.fabric
	a, b := p.dial(t)
	old := &pair{fabric: f, client: newStack(t, f.device("c", 1), versions(smcr.VersionsV1)), server: p.server, l: p.l}
	c, d := old.dial(t)
	seen := map[uint8]int{}
	for _, g := range p.server.LinkGroups() {
		seen[g.Version]++
	}
	if len(seen) != 2 || seen[1] != 1 || seen[2] != 1 {
		t.Errorf("groups by version %v, want one each", seen)
	}
	exchange(t, a, b)
	exchange(t, c, d)
	for _, x := range []*smcr.Conn{a, b, c, d} {
		_ = x.Close()
	}
}

// In version 2 the smaller limits of both sides hold: a link group that is full
// gets a parallel one.
func TestStack_limitsOfAGroup(t *testing.T) {
	f := newFakeFabric()
	limits := func(conns, links int) func(*smcr.Config) {
		return func(c *smcr.Config) { c.ConnsPerGroup, c.LinksPerGroup = conns, links; small(c) }
	}
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1), limits(16, 8)), server: newStack(t, f.device("s", 2), limits(30, 1))}
	p.listen(t)
	for range 17 {
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("%v because of %v", a.Mode(), a.Reason())
		}
		defer a.Close()
		defer b.Close()
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		sizes := map[int]int{}
		for _, g := range s.LinkGroups() {
			sizes[g.Conns]++
			if len(g.Links) != 1 {
				t.Errorf("group %d has %d links, want 1", g.ID, len(g.Links))
			}
		}
		if sizes[16] != 1 || sizes[1] != 1 || len(sizes) != 2 {
			t.Errorf("groups by number of connections: %v, want one with 16 and one with 1", sizes)
		}
	}
}

func TestConfig_ValidateVersions(t *testing.T) {
	many := eids(t, strings.Fields("A B C D E F G H I")...)
	small, _ := clc.NewEID("lower case")
	for _, tc := range []struct {
		name string
		edit func(*smcr.Config)
		want string // "" for valid
	}{
		{"defaults", func(*smcr.Config) {}, ""},
		{"version set", func(c *smcr.Config) { c.Versions = 3 }, "version set 3"},
		{"too many IDs", func(c *smcr.Config) { c.EIDs = many }, "9 EIDs"},
		{"characters of an ID", func(c *smcr.Config) { c.EIDs = []clc.EID{many[0], small} }, "EIDs[1]"},
		{"empty ID", func(c *smcr.Config) { c.EIDs = make([]clc.EID, 1) }, "EIDs[0]"},
		{"few connections", func(c *smcr.Config) { c.ConnsPerGroup = 15 }, "ConnsPerGroup 15"},
		{"many connections", func(c *smcr.Config) { c.ConnsPerGroup = 256 }, "ConnsPerGroup 256"},
		{"many links", func(c *smcr.Config) { c.LinksPerGroup = 9 }, "LinksPerGroup 9"},
		{"negative links", func(c *smcr.Config) { c.LinksPerGroup = -1 }, "LinksPerGroup -1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := smcr.Config{Devices: []rdma.Device{newFakeFabric().device("d", 1)}}
			tc.edit(&c)
			err := c.Validate()
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}
