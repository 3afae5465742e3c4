// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func subnets(s ...string) (ps []netip.Prefix) {
	for _, x := range s {
		ps = append(ps, netip.MustParsePrefix(x))
	}
	return ps
}

func gidOf(addr string) rdma.GID { return rdma.GIDFromAddr(netip.MustParseAddr(addr)) }

// What a client proposes for each setting and connection.
func TestConfig_Proposal(t *testing.T) {
	id := NewPeerID(7, macClient)
	gid1, gid2 := gidOf("fe80::5054:ff:fe00:2"), gidOf("10.0.0.2")
	both := Offer{GID: gid1, MAC: macClient, GIDv2: gid2}
	v2 := Support{V2: true, EIDs: []EID{eid("A"), eid("B")}, Release: Release1, FeatureMask: 1}
	v1v2 := v2
	v1v2.V1, v1v2.Subnets = true, subnets("10.0.0.2/24")
	old := v2
	old.Release = Release0
	ext := V2Extension{EIDs: ListOf(eid("A"), eid("B")), Release: 1, GID: gid2, MaxConns: 255, MaxLinks: 2, FeatureMask: 1}
	tests := []struct {
		name   string
		cfg    Support
		offer  Offer
		want   Proposal
		len    int
		reason Reason
	}{
		{"zero settings are version 1", Support{Subnets: subnets("10.0.0.2/24", "10.1.0.0/16")}, both, Proposal{
			Version: V1, V1: ModeR, V2: ModeNone, PeerID: id, GID: gid1, MAC: macClient, IPv4: netip.MustParsePrefix("10.0.0.0/24"), HasSMCD: true,
		}, 92, 0},
		{"version 1 over IPv6, nine prefixes", Support{V1: true, Subnets: subnets(
			"fd00:1::1/64", "fd00:2::1/64", "fd00:3::1/64", "fd00:4::1/64", "fd00:5::1/64", "fd00:6::1/64", "fd00:7::1/64", "fd00:8::1/64", "fd00:9::1/64")}, both, Proposal{
			Version: V1, V1: ModeR, V2: ModeNone, PeerID: id, GID: gid1, MAC: macClient, HasSMCD: true, IPv6: ListOf(subnets(
				"fd00:1::/64", "fd00:2::/64", "fd00:3::/64", "fd00:4::/64", "fd00:5::/64", "fd00:6::/64", "fd00:7::/64", "fd00:8::/64")...),
		}, 92 + 8*17, 0},
		{"version 2 only", v2, both, Proposal{
			Version: V2, V1: ModeNone, V2: ModeR, PeerID: id, MAC: macClient, HasSMCD: true, Ext: ext,
		}, 156 + 32, 0},
		{"release 0 announces no limits", old, both, Proposal{
			Version: V2, V1: ModeNone, V2: ModeR, PeerID: id, MAC: macClient, HasSMCD: true, Ext: V2Extension{EIDs: ext.EIDs, GID: gid2},
		}, 156 + 32, 0},
		{"both versions", v1v2, both, Proposal{
			Version: V2, V1: ModeR, V2: ModeR, PeerID: id, GID: gid1, MAC: macClient, IPv4: netip.MustParsePrefix("10.0.0.0/24"), HasSMCD: true, Ext: ext,
		}, 164 + 32, 0},
		{"both allowed, no subnet", Support{V1: true, V2: true, EIDs: v2.EIDs, Release: Release1, FeatureMask: 1}, both, Proposal{
			Version: V2, V1: ModeNone, V2: ModeR, PeerID: id, MAC: macClient, HasSMCD: true, Ext: ext,
		}, 156 + 32, 0},
		{"both allowed, no routable GID", v1v2, Offer{GID: gid1, MAC: macClient}, Proposal{
			Version: V1, V1: ModeR, V2: ModeNone, PeerID: id, GID: gid1, MAC: macClient, IPv4: netip.MustParsePrefix("10.0.0.0/24"), HasSMCD: true,
		}, 92, 0},
		{"version 1, no subnet", Support{V1: true}, both, Proposal{}, 0, ReasonConfigErr},
		{"version 2, no routable GID", v2, Offer{GID: gid1, MAC: macClient}, Proposal{}, 0, ReasonNoDevR},
		{"neither works", Support{V1: true, V2: true, EIDs: v2.EIDs}, Offer{}, Proposal{}, 0, ReasonNoDevR},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Config{PeerID: id, Support: tt.cfg}.Proposal(tt.offer)
			if r := reasonOf(err); r != tt.reason || (err != nil) != (tt.reason != 0) {
				t.Fatalf("%v, want %v", err, tt.reason)
			}
			if diff := cmp.Diff(tt.want, got, opts); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err != nil {
				return
			}
			b := got.Append(nil)
			if len(b) != tt.len {
				t.Errorf("%d bytes, want %d", len(b), tt.len)
			}
			again, err := ParseProposal(b)
			if diff := cmp.Diff(got, again, opts); diff != "" || err != nil {
				t.Errorf("%v, decoded (-want +got):\n%s", err, diff)
			}
		})
	}
}

// A client with the settings of the captured kernels proposes what they did,
// but names itself also where it offers version 2 only.
func TestConfig_ProposalIsLinuxs(t *testing.T) {
	raw := load(t, "captured/proposal-01")
	want, err := ParseProposal(raw)
	if err != nil {
		t.Fatal(err)
	}
	cfg := testCfg
	cfg.V1 = false
	got, err := cfg.Proposal(Offer{GIDv2: want.Ext.GID, MAC: macClient})
	if err != nil {
		t.Fatal(err)
	}
	if got.PeerID != cfg.PeerID || got.MAC != macClient {
		t.Errorf("peer ID %v, MAC %v", got.PeerID, got.MAC)
	}
	got.PeerID, got.MAC = PeerID{}, rdma.MAC{}
	if diff := cmp.Diff(raw, got.Append(nil)); diff != "" {
		t.Errorf("(-captured +ours):\n%s", diff)
	}
}

func TestConfig_Validate(t *testing.T) {
	good := Support{V2: true, EIDs: []EID{eid("A")}, Release: Release1}
	with := func(f func(*Support)) Support { s := good; f(&s); return s }
	tests := []struct {
		name string
		s    Support
		want string
	}{
		{"zero", Support{}, ""},
		{"version 1 ignores what is of version 2", Support{V1: true, Release: 9}, ""},
		{"version 2", good, ""},
		{"no EID", with(func(s *Support) { s.EIDs = nil }), "needs an enterprise ID"},
		{"nine EIDs", with(func(s *Support) { s.EIDs = make([]EID, 9) }), "9 enterprise IDs"},
		{"empty EID", with(func(s *Support) { s.EIDs = append(s.EIDs, EID{}) }), "empty"},
		{"release 2", with(func(s *Support) { s.Release = 2 }), "release 2"},
		{"15 connections", with(func(s *Support) { s.MaxConns = 15 }), "15 connections"},
		{"nine links", with(func(s *Support) { s.MaxLinks = 9 }), "9 links"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := Config{Support: tt.s}.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func TestParseUEID(t *testing.T) {
	for s, ok := range map[string]bool{
		"SMCV2-DEFAULT-UEID": true, "A": true, "9.Z-": true, strings.Repeat("X", 32): true,
		"": false, strings.Repeat("X", 33): false, "lower": false, "-A": false, ".A": false, "A B": false, "A\x00": false, "Ä": false,
	} {
		e, err := ParseUEID(s)
		if (err == nil) != ok {
			t.Errorf("%q: %v", s, err)
		} else if ok && e.String() != s {
			t.Errorf("%q became %q", s, e)
		}
	}
}

// Where a link's packets go in version 2, and which Decline a client answers
// when the two sides differ about the router between them.
func TestNextHop(t *testing.T) {
	router := rdma.MAC{2, 0, 0, 0, 0, 9}
	at := func(version uint8, direct bool) Endpoint {
		return Endpoint{Version: version, MAC: macServer, FirstContact: true, Ext: FirstContactExtension{Direct: direct}}
	}
	tests := []struct {
		name   string
		peer   Endpoint
		route  Route
		accept rdma.MAC
		reason Reason
		confrm rdma.MAC
	}{
		{"version 1 has no routers", at(1, false), Route{Found: true, Gateway: true, MAC: router}, macServer, 0, macServer},
		{"direct", at(2, true), Route{Found: true}, macServer, 0, macServer},
		{"the server is direct, our route has a router", at(2, true), Route{Found: true, Gateway: true, MAC: router}, macServer, 0, router},
		{"behind a router", at(2, false), Route{Found: true, Gateway: true, MAC: router}, router, 0, router},
		{"no route", at(2, false), Route{}, rdma.MAC{}, ReasonNoRoute, macServer},
		{"the server sees a router, we do not", at(2, false), Route{Found: true}, rdma.MAC{}, ReasonNoIndirect, macServer},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			mac, err := Accept{tt.peer}.NextHop(tt.route)
			if mac != tt.accept || reasonOf(err) != tt.reason || (err != nil) != (tt.reason != 0) {
				t.Errorf("server at %v, %v, want %v, %v", mac, err, tt.accept, tt.reason)
			}
			if err != nil && !errors.Is(err, ErrDecline) {
				t.Errorf("%v does not allow the fallback", err)
			}
			if mac := (Confirm{Endpoint: tt.peer}).NextHop(tt.route); mac != tt.confrm {
				t.Errorf("client at %v, want %v", mac, tt.confrm)
			}
		})
	}
}
