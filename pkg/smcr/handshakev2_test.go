// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Hand-made peers of version 2, as in handshake_test.go.

func proposalV2(tb testing.TB, eid string) clc.Proposal {
	tb.Helper()
	return clc.Proposal{
		Version: clc.V2, V1: clc.ModeNone, V2: clc.ModeR, PeerID: clc.PeerID{1, 2, 3, 4, 5, 6, 7, 8},
		Ext: clc.V2Extension{
			EIDs: clc.ListOf(eids(tb, eid)...), Release: clc.Release1, GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.99")),
			MaxConns: 255, MaxLinks: 2,
		},
	}
}

func endpointV2(tb testing.TB, first bool) clc.Endpoint {
	tb.Helper()
	e := testEndpoint(first)
	e.Version, e.EID = clc.V2, eids(tb, smcr.DefaultEID)[0]
	e.Ext = clc.FirstContactExtension{Direct: true, OS: clc.OSLinux, Release: clc.Release1, MaxConns: 255, MaxLinks: 2}
	return e
}

func TestServer_badClientsOfVersion2(t *testing.T) {
	// confirms sends a Confirm that is right but for what edit does.
	confirms := func(edit func(*clc.Confirm)) func(t *testing.T, c net.Conn) {
		return func(t *testing.T, c net.Conn) {
			_, _ = c.Write(proposalV2(t, smcr.DefaultEID).Append(nil))
			readMessage(t, c)
			m := clc.Confirm{Endpoint: endpointV2(t, true)}
			m.GIDs.Add(m.GID)
			edit(&m)
			_, _ = c.Write(m.Append(nil))
		}
	}
	proposes := func(edit func(*clc.Proposal)) func(t *testing.T, c net.Conn) {
		return func(t *testing.T, c net.Conn) {
			p := proposalV2(t, smcr.DefaultEID)
			edit(&p)
			_, _ = c.Write(p.Append(nil))
		}
	}
	for _, tc := range []struct {
		name   string
		talk   func(t *testing.T, c net.Conn)
		reason clc.Reason
	}{
		{"another enterprise ID", proposes(func(p *clc.Proposal) { p.Ext.EIDs = clc.ListOf(eids(t, "ACME")...) }), clc.ReasonNoUEID},
		{"no enterprise ID", proposes(func(p *clc.Proposal) { p.Ext.EIDs = clc.List[clc.EID]{} }), clc.ReasonNoUEID},
		{"too few connections", proposes(func(p *clc.Proposal) { p.Ext.MaxConns = 15 }), clc.ReasonMaxConnErr},
		{"no links", proposes(func(p *clc.Proposal) { p.Ext.MaxLinks = 0 }), clc.ReasonMaxLinkErr},
		{"an RNIC that cannot be reached", proposes(func(p *clc.Proposal) { p.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1")) }), clc.ReasonNoRoute},
		{"an RNIC that is none", proposes(func(p *clc.Proposal) { p.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("224.0.0.1")) }), clc.ReasonNoRoute},
		{"the server's loopback", proposes(func(p *clc.Proposal) { p.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("127.0.0.1")) }), clc.ReasonNoRoute},
		{"confirms another release", confirms(func(m *clc.Confirm) { m.Ext.Release = clc.Release0 }), clc.ReasonReleaseErr},
		{"confirms more connections", confirms(func(m *clc.Confirm) { m.Ext.MaxConns = 200 }), clc.ReasonMaxConnErr},
		{"confirms more links", confirms(func(m *clc.Confirm) { m.Ext.MaxLinks = 4 }), clc.ReasonMaxLinkErr},
		{"confirms as somebody else", confirms(func(m *clc.Confirm) { m.PeerID[0]++ }), clc.ReasonInternal},
		{"confirms an RNIC that cannot be reached", confirms(func(m *clc.Confirm) {
			m.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1"))
			m.GIDs = clc.ListOf(m.GID)
		}), clc.ReasonNoRoute},
		{"confirms an impossible RMBE", confirms(func(m *clc.Confirm) { m.RMBEIndex = 0 }), clc.ReasonErrRToken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, quick)
			c, err := net.Dial("tcp", p.l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			tc.talk(t, c)
			wantDecline(t, c, tc.reason, false)
			checkPlain(t, p, c)
			waitFor(t, "rendezvous cleaned up", func() bool { return p.server.Stats().Conns == 0 && p.server.Stats().Groups == 0 })
		})
	}
}

// A Proposal that offers both versions gets version 1 where the RNIC for version
// 2 cannot be reached, and the reason is kept.
func TestServer_versionOneWithoutRoute(t *testing.T) {
	p := newPair(t)
	c, err := net.Dial("tcp", p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	m := proposalV2(t, smcr.DefaultEID)
	m.V1, m.GID, m.IPv4 = clc.ModeR, m.Ext.GID, netip.MustParsePrefix("127.0.0.0/24")
	m.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1"))
	_, _ = c.Write(m.Append(nil))
	a, err := clc.ParseAccept(readMessage(t, c))
	if err != nil || a.Version != clc.V1 || !a.FirstContact {
		t.Errorf("Accept %+v, %v; want version 1", a, err)
	}
	if g := p.server.LinkGroups(); len(g) != 1 || g[0].Version != 1 || g[0].NoV2 != clc.ReasonNoRoute {
		t.Errorf("groups %+v, want one of version 1 because of NOROUTE", g)
	}
	_ = c.Close()
	waitFor(t, "rendezvous cleaned up", func() bool { return p.server.Stats().Conns == 0 && p.server.Stats().Groups == 0 })
}

// Linux leaves the peer ID out of a Proposal of version 2 only: until the Confirm
// the client is known by its addresses.
func TestServer_clientWithoutPeerID(t *testing.T) {
	p := newPair(t)
	c, err := net.Dial("tcp", p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	m := proposalV2(t, smcr.DefaultEID)
	m.PeerID = clc.PeerID{}
	_, _ = c.Write(m.Append(nil))
	readMessage(t, c)
	e := clc.Confirm{Endpoint: endpointV2(t, true)}
	e.GIDs.Add(e.GID)
	_, _ = c.Write(e.Append(nil))
	waitFor(t, "the server knows the client", func() bool {
		g := p.server.LinkGroups()
		return len(g) == 1 && g[0].PeerID == e.PeerID
	})
	_ = c.SetReadDeadline(time.Now().Add(8 * time.Second))
	wantDecline(t, &patient{c}, clc.ReasonTimeoutCL, false)
	checkPlain(t, p, c)
}

func TestClient_badServersOfVersion2(t *testing.T) {
	for _, tc := range []struct {
		name   string
		edit   func(*clc.Endpoint)
		reason clc.Reason
	}{
		{"an enterprise ID that was not offered", func(e *clc.Endpoint) { e.EID = eids(t, "ACME")[0] }, clc.ReasonNoUEID},
		{"a later release", func(e *clc.Endpoint) { e.Ext.Release = 2 }, clc.ReasonReleaseErr},
		{"too few connections", func(e *clc.Endpoint) { e.Ext.MaxConns = 15 }, clc.ReasonMaxConnErr},
		{"more links than offered", func(e *clc.Endpoint) { e.Ext.MaxLinks = 3 }, clc.ReasonMaxLinkErr},
		{"version 1, which was not offered", func(e *clc.Endpoint) { e.Version = clc.V1 }, clc.ReasonModeUnsupp},
		{"a router that is not there", func(e *clc.Endpoint) { e.Ext.Direct = false }, clc.ReasonNoIndirect},
		{"an RNIC that cannot be reached", func(e *clc.Endpoint) { e.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1")) }, clc.ReasonNoRoute},
		{"a group that does not exist", func(e *clc.Endpoint) { e.FirstContact = false }, clc.ReasonSyncErr},
		{"an impossible RMBE", func(e *clc.Endpoint) { e.RMBEIndex = 0 }, clc.ReasonErrRToken},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, newFakeFabric().device("c", 1), quick, versions(smcr.VersionsV2))
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			served := make(chan net.Conn, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					t.Error(err)
				}
				defer func() { served <- c }()
				readMessage(t, c)
				e := endpointV2(t, true)
				tc.edit(&e)
				_, _ = c.Write(clc.Accept{Endpoint: e}.Append(nil))
				wantDecline(t, c, tc.reason, tc.reason == clc.ReasonSyncErr)
			}()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			c, err := (&smcr.Dialer{Stack: s}).DialContext(ctx, "tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			peer := <-served
			defer peer.Close()
			if i := c.(*smcr.Conn).Info(); i.Mode != smcr.ModeTCP || i.Reason != tc.reason || i.PeerDeclined {
				t.Errorf("mode %v, reason %v, want TCP, %v", i.Mode, i.Reason, tc.reason)
			}
			_ = c.Close()
			waitFor(t, "rendezvous cleaned up", func() bool { return s.Stats().Conns == 0 && s.Stats().Groups == 0 })
		})
	}
}
