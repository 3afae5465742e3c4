// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// If the clients of one address that owe their Confirm have the address's share already, another client from there
// waits for a second and then falls back with MEM. That is not the reason of a slow server, and comes long before
// the client itself gives up.
func TestServer_noPlaceDeclines(t *testing.T) {
	p := newPair(t, func(c *smcr.Config) { c.MaxHalfOpen = 4 }) // one of an address
	from := netip.MustParseAddr("127.0.0.9")
	silent := dialFrom(t, from, p.l.Addr().String())
	m := proposalV2(t, smcr.DefaultEID)
	propose(t, silent, &m)

	began := time.Now()
	late := dialFrom(t, from, p.l.Addr().String())
	m.PeerID[0]++
	if _, err := late.Write(m.Append(nil)); err != nil {
		t.Fatal(err)
	}
	wantDecline(t, late, clc.ReasonMem, false)
	if d := time.Since(began); d < smcr.PlaceWait {
		t.Errorf("declined after %v, want a wait of %v for a place", d, smcr.PlaceWait)
	}
	checkPlain(t, p, late)

	a, b := p.dial(t) // of another address
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// A client that says once that it does not have a link group joins the group again when the group's links have
// answered. A client that says so twice gets another group, whatever the links answer: somebody else may have made
// the first group in the client's name.
func TestServer_twoDoubtsMakeAnotherGroup(t *testing.T) {
	p := newPair(t, versions(smcr.VersionsV2))
	a, b := p.dial(t)
	group := p.server.LinkGroups()[0]
	m := proposalV2(t, smcr.DefaultEID)
	m.PeerID, m.Ext.GID = group.PeerID, group.Links[0].PeerGID
	again := func() (net.Conn, bool) {
		c := dialFrom(t, netip.MustParseAddr("127.0.0.1"), p.l.Addr().String())
		acc := propose(t, c, &m)
		return c, acc.FirstContact
	}
	for i := range 2 {
		c, first := again()
		if first {
			t.Fatalf("after %d doubts: a first contact, want the group of before", i)
		}
		d := clc.Decline{Version: clc.V2, PeerID: group.PeerID, Reason: clc.ReasonSyncErr, OutOfSync: true}
		if _, err := c.Write(d.Append(nil)); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the links' answer after the doubt", func() bool {
			doubts, proven := smcr.Doubts(p.server, group.ID)
			return doubts == i+1 && proven
		})
		checkPlain(t, p, c)
	}
	if _, first := again(); !first {
		t.Error("after two doubts the client is put into the same group")
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// A client that vanishes between Accept and Confirm may know its RMBE, which stays out of use. The send buffer, into
// which nothing was written, is free.
func TestServer_vanishedClientsKeepNoSendBuffer(t *testing.T) {
	const clients, size = 16, 64 << 10
	p := newPair(t, versions(smcr.VersionsV2), func(c *smcr.Config) { c.RMBESizeBytes, c.SendBufferBytes = size, size })
	a, b := p.dial(t)
	group := p.server.LinkGroups()[0]
	m := proposalV2(t, smcr.DefaultEID)
	m.PeerID, m.Ext.GID = group.PeerID, group.Links[0].PeerGID
	var vanish []net.Conn
	for range clients {
		c := dialFrom(t, netip.MustParseAddr("127.0.0.1"), p.l.Addr().String())
		if propose(t, c, &m).FirstContact {
			t.Fatal("a first contact, want the group of before")
		}
		vanish = append(vanish, c)
	}
	before := p.server.Stats()
	for _, c := range vanish {
		_ = c.Close()
	}
	waitFor(t, "half of the send buffers' memory", func() bool {
		return p.server.Stats().MemoryBytes+clients/2*size <= before.MemoryBytes
	})
	if n := p.server.Stats().Conns; n != before.Conns {
		t.Errorf("%d connections have RMBEs, want %d", n, before.Conns)
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}
