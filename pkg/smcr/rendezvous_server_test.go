// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestServer_badClients(t *testing.T) {
	good := testProposal("127.0.0.0/24")
	for _, tc := range []struct {
		name string
		talk func(t *testing.T, c net.Conn)
		tcp  bool // the server falls back, and the connection works as TCP
	}{
		{"says nothing", func(t *testing.T, c net.Conn) { wantReset(t, c) }, false},
		{"stops in the header", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:5])
			wantReset(t, c)
		}, false},
		{"stops in the Proposal", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:20])
			wantReset(t, c)
		}, false},
		{"closes in the Proposal", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:20])
			_ = c.(*net.TCPConn).CloseWrite()
			wantReset(t, c)
		}, false},
		{"sends application data", func(t *testing.T, c net.Conn) {
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"))
			wantReset(t, c)
		}, false},
		{"oversized length", func(t *testing.T, c net.Conn) {
			b := good.Append(nil)
			b[5], b[6] = 0xff, 0xff
			_, _ = c.Write(b)
			wantReset(t, c)
		}, false},
		{"stops after the Accept", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			wantReset(t, c)
		}, false},
		{"declines the Accept", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			_, _ = c.Write(clc.Decline{Version: clc.V1, PeerID: good.PeerID, Reason: clc.ReasonMem}.Append(nil))
		}, true},
		{"another subnet", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(testProposal("10.1.2.0/24").Append(nil))
			wantDecline(t, c, clc.ReasonDiffPrefix, false)
		}, true},
		{"SMC-D only", func(t *testing.T, c net.Conn) {
			p := good
			p.Version, p.V1, p.HasSMCD = clc.V2, clc.ModeD, true
			_, _ = c.Write(p.Append(nil))
			wantDecline(t, c, clc.ReasonModeUnsupp, false)
		}, true},
		{"confirms an impossible RMBE", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			e := testEndpoint(true)
			e.RMBEIndex = 0
			confirm(c, e)
			wantDecline(t, c, clc.ReasonErrRToken, false)
		}, true},
		{"confirms as somebody else", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			e := testEndpoint(true)
			e.PeerID[0]++
			confirm(c, e)
			wantDecline(t, c, clc.ReasonInternal, false)
		}, true},
		{"never answers CONFIRM LINK", func(t *testing.T, c net.Conn) {
			propose(t, c, &good)
			confirm(c, testEndpoint(true))
			_ = c.SetReadDeadline(time.Now().Add(8 * time.Second))
			wantDecline(t, &patient{c}, clc.ReasonTimeoutCL, false)
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, quick)
			c := p.dialTCP(t)
			tc.talk(t, c)
			if tc.tcp {
				checkPlain(t, p, c)
			}
			waitCleanedUp(t, p.server)
		})
	}
}

func TestServer_badClientsOfVersion2(t *testing.T) {
	// confirms sends a Confirm that is right but for what edit does.
	confirms := func(edit func(*clc.Confirm)) func(t *testing.T, c net.Conn) {
		return func(t *testing.T, c net.Conn) {
			p := proposalV2(t, smcr.DefaultEID)
			propose(t, c, &p)
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
			c := p.dialTCP(t)
			tc.talk(t, c)
			wantDecline(t, c, tc.reason, false)
			checkPlain(t, p, c)
			waitCleanedUp(t, p.server)
		})
	}
}

// A Proposal that offers both versions gets version 1 where the RNIC for version
// 2 cannot be reached, and the reason is kept.
func TestServer_versionOneWithoutRoute(t *testing.T) {
	p := newPair(t)
	c := p.dialTCP(t)
	m := proposalV2(t, smcr.DefaultEID)
	m.V1, m.GID, m.IPv4 = clc.ModeR, m.Ext.GID, netip.MustParsePrefix("127.0.0.0/24")
	m.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("2001:db8::1"))
	if a := propose(t, c, &m); a.Version != clc.V1 || !a.FirstContact {
		t.Errorf("Accept %+v, want version 1", a)
	}
	if g := p.server.LinkGroups(); len(g) != 1 || g[0].Version != 1 || g[0].NoV2 != clc.ReasonNoRoute {
		t.Errorf("groups %+v, want one of version 1 because of NOROUTE", g)
	}
	_ = c.Close()
	waitCleanedUp(t, p.server)
}

// Linux leaves the peer ID out of a Proposal of version 2 only: until the Confirm
// the client is known by its addresses.
func TestServer_clientWithoutPeerID(t *testing.T) {
	p := newPair(t)
	c := p.dialTCP(t)
	m := proposalV2(t, smcr.DefaultEID)
	m.PeerID = clc.PeerID{}
	propose(t, c, &m)
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
