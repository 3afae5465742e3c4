// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// In the tests of this file a victim has a link group with a server, and an attacker,
// who may open TCP connections to the server or is a server of the victim's itself,
// speaks CLC and RDMA of its own.

// attacker has a device and a TCP address of its own.
type attacker struct {
	from netip.Addr
	gid  rdma.GID
	pd   rdma.PD
	cq   rdma.CQ
}

func newAttacker(t *testing.T, addr string) *attacker {
	t.Helper()
	m := &attacker{from: netip.MustParseAddr(addr), gid: rdma.GIDFromAddr(netip.MustParseAddr(addr))}
	ctx, err := openSoft(t, addr, rdma.MTU1024).Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ctx.Close() })
	if m.pd, err = ctx.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if m.cq, err = ctx.CreateCQ(1024); err != nil {
		t.Fatal(err)
	}
	return m
}

// dialFrom opens a TCP connection from an address.
func dialFrom(t *testing.T, from netip.Addr, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	c, err := d.DialContext(t.Context(), "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// propose sends a Proposal and returns the answer.
func propose(t *testing.T, c net.Conn, p *clc.Proposal) clc.Accept {
	t.Helper()
	if _, err := c.Write(p.Append(nil)); err != nil {
		t.Fatal(err)
	}
	a, err := clc.ParseAccept(readMessage(t, c))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// contact makes a first contact with a server under a peer ID, and returns the queue
// pair, which may write, and what the server said.
func (m *attacker) contact(t *testing.T, to string, id clc.PeerID) (rdma.QP, clc.Accept) {
	t.Helper()
	c := dialFrom(t, m.from, to)
	p := proposalV2(t, smcr.DefaultEID)
	p.PeerID, p.Ext.GID = id, m.gid
	a := propose(t, c, &p)
	qp, err := m.pd.CreateQP(rdma.QPConfig{SendCQ: m.cq, RecvCQ: m.cq, MaxSendWR: 16, MaxRecvWR: 16, MaxSGE: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, attr := range []rdma.QPAttr{
		{State: rdma.QPInit, Access: rdma.RemoteWrite},
		{State: rdma.QPRTR, Path: rdma.Path{DGID: a.GID, HopLimit: 64}, DestQPN: a.QPN, RQPSN: a.PSN, MTU: rdma.MTU1024, MinRNRTimer: 5},
		{State: rdma.QPRTS, SQPSN: 4242, Timeout: 15, RetryCount: 7, RNRRetry: 7},
	} {
		if err := qp.Modify(attr); err != nil {
			t.Fatal(err)
		}
	}
	cf := clc.Confirm{Endpoint: endpointV2(t, true)}
	cf.PeerID, cf.GID, cf.QPN, cf.PSN, cf.MTU = id, m.gid, qp.Num(), 4242, rdma.MTU1024
	cf.GIDs.Add(cf.GID)
	if _, err := c.Write(cf.Append(nil)); err != nil {
		t.Fatal(err)
	}
	return qp, a
}

// write writes data with a key, and returns how that ended.
func (m *attacker) write(t *testing.T, qp rdma.QP, key rdma.RKey, addr uint64, data []byte) rdma.Status {
	t.Helper()
	mr, err := m.pd.AllocMR(len(data), rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer mr.Close()
	copy(mr.Bytes(), data)
	if _, err = qp.PostSend([]rdma.SendWR{{
		ID: 1, Op: rdma.OpWrite, Flags: rdma.SendSignaled, RemoteAddr: addr, RKey: key,
		SGL: []rdma.SGE{{Addr: mr.Addr(), Length: uint32(len(data)), LKey: mr.LKey()}},
	}}); err != nil {
		t.Fatal(err)
	}
	var wcs [1]rdma.WC
	waitFor(t, "end of the RDMA WRITE", func() bool {
		n, err := m.cq.Poll(wcs[:])
		if err != nil {
			t.Fatal(err)
		}
		return n > 0 && wcs[0].QPN == qp.Num() && wcs[0].Op == rdma.OpWrite
	})
	return wcs[0].Status
}

// swallow accepts all connections, and reads from them until they end.
func swallow(l *smcr.Listener) {
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
}

// dialOnly opens a connection and leaves it to others to accept it.
func (p *pair) dialOnly(t *testing.T) *smcr.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := (&smcr.Dialer{Stack: p.client}).DialContext(ctx, "tcp", p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return c.(*smcr.Conn)
}

// victimPair is a victim's stack and that of its server, with one connection.
func victimPair(t *testing.T, v smcr.VersionSet, victim, server string) (p *pair, a, b *smcr.Conn) {
	t.Helper()
	p = &pair{client: newStack(t, openSoft(t, victim, rdma.MTU1024), versions(v)), server: newStack(t, openSoft(t, server, rdma.MTU1024))}
	p.listen(t)
	a, b = p.dial(t)
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return p, a, b
}

// proposalOf is what the victim's next Proposal says.
func proposalOf(t *testing.T, v smcr.VersionSet, g *smcr.GroupInfo, victim string) clc.Proposal {
	t.Helper()
	p := proposalV2(t, smcr.DefaultEID)
	if v == smcr.VersionsV1 {
		p = testProposal("127.0.0.0/24")
		p.GID = rdma.GIDFromAddr(netip.MustParseAddr(victim))
	} else {
		p.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr(victim))
	}
	p.PeerID = g.PeerID
	return p
}

// No Proposal gets anybody but the victim into the victim's link group.
func TestAttack_joinOthersGroup(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		victim := map[smcr.VersionSet]string{smcr.VersionsV1: "127.92.1.1", smcr.VersionsV2: "127.92.2.1"}[v]
		p, a, b := victimPair(t, v, victim, victim+"0")
		exchange(t, a, b)
		swallow(p.l)
		groups := p.server.LinkGroups()
		if len(groups) != 1 {
			t.Fatalf("%d link groups, want the victim's", len(groups))
		}
		loopback := netip.MustParseAddr("127.0.0.1") // the victim's, in TCP
		other := netip.MustParseAddr("127.0.0.9")
		for _, tc := range []struct {
			name  string
			from  netip.Addr
			edit  func(*clc.Proposal)
			joins bool
		}{
			{"the victim itself", loopback, func(*clc.Proposal) {}, true},
			{"no peer ID", loopback, func(p *clc.Proposal) { p.PeerID = clc.PeerID{} }, false},
			{"another peer ID", loopback, func(p *clc.Proposal) { p.PeerID[7]++ }, false},
			{"the victim's peer ID from elsewhere", other, func(*clc.Proposal) {}, false},
			{"no peer ID from elsewhere", other, func(p *clc.Proposal) { p.PeerID = clc.PeerID{} }, false},
			{"another RNIC", loopback, func(p *clc.Proposal) {
				p.GID = rdma.GIDFromAddr(netip.MustParseAddr("127.92.1.77"))
				p.Ext.GID = p.GID
			}, false},
			{"another MAC address", loopback, func(p *clc.Proposal) { p.MAC[5]++ }, v == smcr.VersionsV2},
			{"the other version", loopback, func(p *clc.Proposal) {
				other := proposalOf(t, smcr.VersionsV1+smcr.VersionsV2-v, &groups[0], victim)
				*p = other
			}, false},
		} {
			t.Run(tc.name, func(t *testing.T) {
				m := proposalOf(t, v, &groups[0], victim)
				tc.edit(&m)
				c := dialFrom(t, tc.from, p.l.Addr().String())
				acc := propose(t, c, &m)
				if acc.FirstContact == tc.joins {
					t.Errorf("Accept says first contact %v, want %v", acc.FirstContact, !tc.joins)
				}
				_ = c.Close()
			})
		}
		exchange(t, a, b)
	})
}

// With the RKey of one link group nothing can be written on a queue pair of another link group of the same
// server: the server's program reads what the victim wrote.
func TestAttack_writeWithOthersKey(t *testing.T) {
	p, a, b := victimPair(t, smcr.VersionsBoth, "127.92.3.1", "127.92.3.2")
	good := []byte("transfer 1 EUR to alice;")
	if _, err := a.Write(good); err != nil {
		t.Fatal(err)
	}
	swallow(p.l)
	m := newAttacker(t, "127.92.3.3")
	qp, own := m.contact(t, p.l.Addr().String(), clc.PeerID{9, 9, 2, 4, 5, 6, 7, 1})
	if s := m.write(t, qp, own.RKey, own.RMBAddr, []byte("mine")); s != rdma.StatusSuccess {
		t.Fatalf("write into the attacker's own RMB: %v", s)
	}
	key, addr := smcr.RMBToken(b)
	if s := m.write(t, qp, key, addr, []byte("transfer 9 MIO to mallo;")); s != rdma.StatusRemoteAccess {
		t.Errorf("write into the victim's RMB: %v, want %v", s, rdma.StatusRemoteAccess)
	}
	got := make([]byte, len(good))
	_ = b.SetReadDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, good) {
		t.Errorf("the program read %q, %v, the victim wrote %q", got, err, good)
	}
}

// Declines with the S bit, silence and resets of other clients do not touch the victim's link group. Those in
// the victim's own rendezvous end the group only if its links are dead.
func TestAttack_declineOthersGroup(t *testing.T) {
	p, a, b := victimPair(t, smcr.VersionsV2, "127.92.4.1", "127.92.4.2")
	swallow(p.l)
	g := p.server.LinkGroups()
	loopback := netip.MustParseAddr("127.0.0.1")
	decline := clc.Decline{Version: clc.V2, PeerID: clc.PeerID{7}, Reason: clc.ReasonSyncErr, OutOfSync: true}.Append(nil)
	for _, id := range []clc.PeerID{{}, {9, 9, 2, 4, 5, 6, 7, 1}, g[0].PeerID} {
		m := proposalOf(t, smcr.VersionsV2, &g[0], "127.92.4.1")
		m.PeerID = id
		for range 3 {
			c := dialFrom(t, loopback, p.l.Addr().String())
			propose(t, c, &m)
			if _, err := c.Write(decline); err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
			exchange(t, a, b)
		}
	}
	// What came under the victim's own name makes its server ask for another link group.
	x := p.dialOnly(t)
	if x.Mode() != smcr.ModeSMCR {
		t.Errorf("the victim's next connection is on %v: %v", x.Mode(), x.Reason())
	}
	_ = x.Close()
	exchange(t, a, b)
}

// A server must not name another server's link in its Accept. The client would write the data for the one server
// to the other, and tell the other server where the one may write.
func TestAttack_acceptOthersLink(t *testing.T) {
	p, a, b := victimPair(t, smcr.VersionsV2, "127.92.5.1", "127.92.5.2")
	groups := p.client.LinkGroups()
	l := groups[0].Links[0]
	for _, tc := range []struct {
		name string
		at   string
		id   clc.PeerID
	}{
		{"from another address, with the server's peer ID", "127.0.0.9:0", groups[0].PeerID},
		{"from the same address, with another peer ID", "127.0.0.1:0", clc.PeerID{9, 9, 2, 4, 5, 6, 7, 1}},
		{"from the same address, without one", "127.0.0.1:0", clc.PeerID{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			addr, served := serveOnce(t, tc.at, func(t *testing.T, c net.Conn) {
				e := endpointV2(t, false)
				e.PeerID, e.GID, e.QPN, e.MTU = tc.id, l.PeerGID, l.PeerQPN, l.MTU
				e.RKey, e.RMBAddr = smcr.RMBToken(b)
				_, _ = c.Write(clc.Accept{Endpoint: e}.Append(nil))
				if d, err := clc.ParseDecline(readMessage(t, c)); err != nil {
					t.Errorf("the client's answer: %+v, %v; want a Decline", d, err)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			c, err := (&smcr.Dialer{Stack: p.client}).DialContext(ctx, "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			if c.(*smcr.Conn).Mode() != smcr.ModeTCP {
				t.Error("the connection is on SMC-R")
			}
			_ = c.Close()
			<-served
		})
	}
	exchange(t, a, b)
}

// A client whose Proposal names no peer ID, as Linux does, may join the groups of such clients with
// its TCP address and its RNIC. Only its Confirm makes the connection one of the group.
func TestAttack_joinNameless(t *testing.T) {
	p := &pair{
		client: newStack(t, openSoft(t, "127.92.9.1", rdma.MTU1024), versions(smcr.VersionsV2)),
		server: newStack(t, openSoft(t, "127.92.9.2", rdma.MTU1024)),
	}
	p.listen(t)
	named := newStack(t, openSoft(t, "127.92.9.4", rdma.MTU1024), versions(smcr.VersionsV2))
	x, y := (&pair{client: named, server: p.server, l: p.l}).dial(t)
	p.dialTo = newProxy(t, p.l.Addr().String(), withoutPeerID).addr
	a, b := p.dial(t)
	c, d := p.dial(t)
	if a.Mode() != smcr.ModeSMCR || c.Mode() != smcr.ModeSMCR || a.Info().GroupID != c.Info().GroupID {
		t.Fatalf("the victim has the link groups %d and %d, want one for all its connections", a.Info().GroupID, c.Info().GroupID)
	}
	swallow(p.l)
	loopback, other := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.9")
	for _, tc := range []struct {
		name  string
		from  netip.Addr
		gid   string
		joins bool
	}{
		{"the victim's address and RNIC", loopback, "127.92.9.1", true},
		{"from elsewhere", other, "127.92.9.1", false},
		{"another RNIC", loopback, "127.92.9.77", false},
		{"the RNIC of one who said who he is", loopback, "127.92.9.4", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := proposalV2(t, smcr.DefaultEID)
			m.PeerID, m.Ext.GID = clc.PeerID{}, rdma.GIDFromAddr(netip.MustParseAddr(tc.gid))
			tcp := dialFrom(t, tc.from, p.l.Addr().String())
			acc := propose(t, tcp, &m)
			if acc.FirstContact == tc.joins {
				t.Fatalf("Accept says first contact %v, want %v", acc.FirstContact, !tc.joins)
			}
			if tc.joins { // another client behind the same address
				cf := clc.Confirm{Endpoint: endpointV2(t, false)}
				cf.GID = m.Ext.GID
				if _, err := tcp.Write(cf.Append(nil)); err != nil {
					t.Fatal(err)
				}
				wantReset(t, tcp)
			}
			_ = tcp.Close()
		})
	}
	exchange(t, a, b)
	exchange(t, c, d)
	exchange(t, x, y)
	for _, o := range []*smcr.Conn{a, b, c, d, x, y} {
		_ = o.Close()
	}
}

// Silent first contacts under the victim's peer ID do not keep the victim waiting. Those from other addresses do
// not count, and in spite of those from the victim's own address the victim is answered in time.
func TestAttack_blockOthers(t *testing.T) {
	const wait = 3 * time.Second
	for _, tc := range []struct {
		name string
		from string
	}{{"from elsewhere", "127.0.0.9"}, {"from its address", "127.0.0.1"}} {
		t.Run(tc.name, func(t *testing.T) {
			victim := newStack(t, openSoft(t, "127.92.6.1", rdma.MTU1024), versions(smcr.VersionsV2))
			p := &pair{client: victim, server: newStack(t, openSoft(t, "127.92.6.2", rdma.MTU1024), func(c *smcr.Config) { c.MessageTimeout = wait })}
			p.listen(t)
			swallow(p.l)
			m := proposalV2(t, smcr.DefaultEID)
			m.PeerID = smcr.PeerIDFor(victim, netip.MustParseAddr("127.0.0.1"))
			m.Ext.GID = rdma.GIDFromAddr(netip.MustParseAddr("127.92.6.1"))
			for range 20 {
				c := dialFrom(t, netip.MustParseAddr(tc.from), p.l.Addr().String())
				if _, err := c.Write(m.Append(nil)); err != nil {
					t.Fatal(err)
				}
			}
			waitFor(t, "the silent ones' first contact", func() bool { return p.server.Stats().Groups > 0 })
			p.client = victim
			began := time.Now()
			c := p.dialOnly(t)
			if d := time.Since(began); d > wait {
				t.Errorf("the victim waited for %v", d)
			}
			if mode := c.Mode(); tc.from != "127.0.0.1" && mode != smcr.ModeSMCR {
				t.Errorf("the victim's connection is on %v", mode)
			}
			_ = c.Close()
		})
	}
}

// A client that guesses RKeys gets no more first contacts, and other clients do.
func TestAttack_guessKeys(t *testing.T) {
	p := &pair{client: newStack(t, openSoft(t, "127.92.7.1", rdma.MTU1024)), server: newStack(t, openSoft(t, "127.92.7.2", rdma.MTU1024))}
	p.listen(t)
	swallow(p.l)
	m := newAttacker(t, "127.92.7.3")
	for i := range 3 {
		qp, own := m.contact(t, p.l.Addr().String(), clc.PeerID{9, 9, 2, 4, 5, 6, 7, byte(i)})
		if s := m.write(t, qp, own.RKey^1<<20, own.RMBAddr, []byte("guess")); s != rdma.StatusRemoteAccess {
			t.Fatalf("guess %d: %v", i, s)
		}
		waitFor(t, "the server counts it", func() bool { return p.server.Stats().Trespasses == uint64(i+1) })
	}
	c := dialFrom(t, m.from, p.l.Addr().String())
	prop := proposalV2(t, smcr.DefaultEID)
	prop.PeerID, prop.Ext.GID = clc.PeerID{9, 9, 2, 4, 5, 6, 7, 8}, m.gid
	if _, err := c.Write(prop.Append(nil)); err != nil {
		t.Fatal(err)
	}
	wantDecline(t, c, clc.ReasonNoActLink, false)
	if mode := p.dialOnly(t).Mode(); mode != smcr.ModeSMCR {
		t.Errorf("the connection of another address is on %v", mode)
	}
}

// Clients that propose and then are silent take a bounded part of the memory: others have room.
func TestAttack_silentClients(t *testing.T) {
	const rmbe = 16 << 10
	small := func(c *smcr.Config) {
		c.RMBESizeBytes, c.SendBufferBytes, c.MemoryBytes, c.MaxHalfOpen = rmbe, rmbe, 4<<20, 32
	}
	p := &pair{client: newStack(t, openSoft(t, "127.92.8.1", rdma.MTU1024), small), server: newStack(t, openSoft(t, "127.92.8.2", rdma.MTU1024), small)}
	p.listen(t)
	swallow(p.l)
	m := proposalV2(t, smcr.DefaultEID)
	for i := range 500 {
		c := dialFrom(t, netip.MustParseAddr("127.0.0.9"), p.l.Addr().String())
		m.PeerID = clc.PeerID{9, 9, 2, 4, 5, 6, byte(i >> 8), byte(i)}
		if _, err := c.Write(m.Append(nil)); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "the silent ones' groups", func() bool { return p.server.Stats().Groups >= 8 })
	for range 5 {
		c := p.dialOnly(t)
		if c.Mode() != smcr.ModeSMCR {
			t.Errorf("a good client's connection is on %v: %v", c.Mode(), c.Reason())
		}
		_ = c.Close()
	}
	if st := p.server.Stats(); st.Groups > 8+1 {
		t.Errorf("%d link groups, want 8 of the silent ones and one", st.Groups)
	}
}
