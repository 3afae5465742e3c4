// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// hostile is one of two peers that do what a script says to a server, which serves a good client at the same
// time. The two peers know more of each other and of the good client than a real peer can.
type hostile struct {
	t      *testing.T
	from   netip.Addr
	gid    rdma.GID
	pd     rdma.PD
	cq     rdma.CQ
	id     clc.PeerID
	to     string
	conns  []*hostileConn
	script *script
}

// hostileConn is one TCP connection of a hostile peer.
type hostileConn struct {
	net.Conn
	accept clc.Accept
	qp     rdma.QP // nil until there was an Accept
}

// script has the rest of the fuzzer's bytes. When they are used up, it gives zeros.
type script struct{ b []byte }

func (s *script) next() byte {
	if len(s.b) == 0 {
		return 0
	}
	b := s.b[0]
	s.b = s.b[1:]
	return b
}

// spoil changes one byte of a message, or none.
func (s *script) spoil(msg []byte) []byte {
	at, with := s.next(), s.next()
	if len(msg) > 0 {
		msg[int(at)%len(msg)] ^= with
	}
	return msg
}

// These say what a hostile peer knows of the good client.
type secrets struct {
	id   clc.PeerID
	gid  rdma.GID
	key  rdma.RKey
	addr uint64
}

const hostileConns = 4 // of each peer at a time

// act does one thing that the script says, and waits for an answer only for a short time.
func (h *hostile) act(victim *secrets) {
	s := h.script
	var c *hostileConn
	if len(h.conns) > 0 {
		c = h.conns[int(s.next())%len(h.conns)]
	}
	switch op := s.next() % 9; {
	case c == nil || op == 0:
		if len(h.conns) < hostileConns {
			h.dial()
		}
	case op == 1:
		_, _ = c.Write(s.spoil(h.proposal(victim).Append(nil)))
	case op == 2:
		h.hear(c)
	case op == 3:
		_, _ = c.Write(s.spoil(h.confirm(c, victim).Append(nil)))
	case op == 4:
		d := clc.Decline{Version: clc.V2, PeerID: h.id, Reason: clc.ReasonSyncErr, OutOfSync: s.next()&1 == 0}
		_, _ = c.Write(s.spoil(d.Append(nil)))
	case op == 5 && c.qp != nil:
		h.write(c, victim)
	case op == 6 && c.qp != nil:
		h.send(c)
	case op == 7:
		_ = c.Close()
		for i, o := range h.conns {
			if o == c {
				h.conns = append(h.conns[:i], h.conns[i+1:]...)
				break
			}
		}
	case op == 8:
		raw := make([]byte, s.next())
		for i := range raw {
			raw[i] = s.next()
		}
		_, _ = c.Write(raw)
	}
}

// dial opens another connection, unless the kernel has no free port at the moment: thousands of runs use the
// ports up.
func (h *hostile) dial() {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(h.from, 0))}
	c, err := d.DialContext(h.t.Context(), "tcp", h.to)
	if err != nil {
		return
	}
	h.t.Cleanup(func() { _ = c.Close() })
	h.conns = append(h.conns, &hostileConn{Conn: c})
}

// whose returns a peer ID: the hostile peer's own, the victim's, or one that nobody has.
func (h *hostile) whose(victim *secrets) clc.PeerID {
	return [...]clc.PeerID{h.id, {}, victim.id, {7}}[h.script.next()%4]
}

func (h *hostile) proposal(victim *secrets) clc.Proposal {
	p := proposalV2(h.t, smcr.DefaultEID)
	if h.script.next()&1 == 0 {
		p = testProposal("127.0.0.0/24")
	}
	p.PeerID = h.whose(victim)
	p.GID = [...]rdma.GID{h.gid, victim.gid}[h.script.next()%2]
	p.Ext.GID = p.GID
	return p
}

// hear takes an answer. If the answer is an Accept, hear connects a queue pair to the one that it names.
func (h *hostile) hear(c *hostileConn) {
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	msg := make([]byte, 4096)
	n, _ := c.Read(msg)
	a, err := clc.ParseAccept(msg[:n])
	if err != nil {
		return
	}
	c.accept = a
	if c.qp != nil {
		return
	}
	qp, err := h.pd.CreateQP(rdma.QPConfig{SendCQ: h.cq, RecvCQ: h.cq, MaxSendWR: 64, MaxRecvWR: 64, MaxSGE: 1})
	if err != nil {
		h.t.Fatal(err)
	}
	for _, attr := range []rdma.QPAttr{
		{State: rdma.QPInit, Access: rdma.RemoteWrite},
		{State: rdma.QPRTR, Path: rdma.Path{DGID: a.GID, HopLimit: 64}, DestQPN: a.QPN, RQPSN: a.PSN, MTU: rdma.MTU1024, MinRNRTimer: 5},
		{State: rdma.QPRTS, SQPSN: 4242, Timeout: 12, RetryCount: 2, RNRRetry: 2},
	} {
		if qp.Modify(attr) != nil {
			return // the Accept was for somebody else
		}
	}
	c.qp = qp
}

func (h *hostile) confirm(c *hostileConn, victim *secrets) clc.Confirm {
	e := endpointV2(h.t, c.accept.FirstContact)
	if c.accept.Version == clc.V1 {
		e = testEndpoint(c.accept.FirstContact)
	}
	e.PeerID, e.GID, e.PSN, e.MTU = h.whose(victim), h.gid, 4242, rdma.MTU1024
	if c.qp != nil {
		e.QPN = c.qp.Num()
	}
	e.RMBEIndex, e.AlertToken = h.script.next(), uint32(h.script.next())
	m := clc.Confirm{Endpoint: e}
	m.GIDs.Add(e.GID)
	return m
}

// write writes with the hostile peer's own RKey, the victim's, or one that nobody has.
func (h *hostile) write(c *hostileConn, victim *secrets) {
	key, addr := c.accept.RKey, c.accept.RMBAddr
	switch h.script.next() % 3 {
	case 1:
		key, addr = victim.key, victim.addr
	case 2:
		key ^= rdma.RKey(1 << (h.script.next() % 32))
	}
	h.post(c, rdma.OpWrite, key, addr+uint64(h.script.next())*64, bytes.Repeat([]byte{0xee}, 512))
}

// send sends bytes that look like an LLC or CDC message.
func (h *hostile) send(c *hostileConn) {
	msg := make([]byte, llc.Size)
	msg[0], msg[1] = h.script.next(), llc.Size
	for i := 2; i < 20; i++ {
		msg[i] = h.script.next()
	}
	h.post(c, rdma.OpSend, 0, 0, msg)
}

func (h *hostile) post(c *hostileConn, op rdma.Opcode, key rdma.RKey, addr uint64, data []byte) {
	mr, err := h.pd.AllocMR(len(data), rdma.LocalWrite)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = mr.Close() })
	copy(mr.Bytes(), data)
	_, _ = c.qp.PostSend([]rdma.SendWR{{
		Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{{Addr: mr.Addr(), Length: uint32(len(data)), LKey: mr.LKey()}}, RemoteAddr: addr, RKey: key,
	}}) // an error is the end of the queue pair
	var wcs [16]rdma.WC
	_, _ = h.cq.Poll(wcs[:])
}

// Whatever two peers do to a server at once, the data of a third peer arrives as it was sent, the third peer's
// link group lives on, and the server's memory stays within its bounds.
func FuzzStack_hostilePeers(f *testing.F) {
	f.Add([]byte{}) // the good client alone
	// A first contact of each, then a write with a key of the victim.
	f.Add([]byte{0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 2, 0, 2, 0, 3, 0, 0, 0, 1, 5, 0, 3, 0, 0, 0, 1, 5, 0, 5, 1, 0, 0, 5, 1, 0})
	// Declines with the S bit under the victim's name.
	f.Add([]byte{0, 0, 0, 0, 0, 1, 1, 2, 1, 0, 0, 0, 1, 1, 2, 1, 0, 0, 0, 2, 0, 2, 0, 4, 0, 0, 0, 0, 4, 0, 0, 0})
	// LLC messages of all kinds.
	f.Add([]byte{0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 2, 0, 2, 0, 3, 0, 0, 0, 1, 5, 0, 3, 0, 0, 0, 1, 5, 0, 6, 4, 0x80, 0, 6, 6, 0, 0, 6, 0xfe, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		const budget = 4 << 20
		quiet := func(c *smcr.Config) {
			c.Hooks.Malformed, c.Hooks.Failed = nil, nil
			c.MessageTimeout, c.MemoryBytes = 5*time.Second, budget
			c.RMBESizeBytes, c.SendBufferBytes = 16<<10, 16<<10
		}
		fabric := softtest.NewFabric(t, 1)
		open := func(addr string) *soft.Device {
			return fabric.Open(t, soft.Config{Name: "soft-" + addr, Addr: netip.MustParseAddr(addr), MTU: rdma.MTU1024})
		}
		p := &pair{client: newStack(t, open("192.0.2.1"), quiet), server: newStack(t, open("192.0.2.2"), quiet)}
		p.listen(t)
		good, peer := p.dial(t)
		defer good.Close()
		defer peer.Close()
		swallow(p.l)
		group := p.server.LinkGroups()[0]
		known := secrets{id: group.PeerID, gid: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.1"))}
		known.key, known.addr = smcr.RMBToken(peer)

		work := &script{b[:min(len(b), 512)]}
		var peers [2]*hostile
		for i, addr := range []string{"192.0.2.3", "192.0.2.4"} {
			ctx, err := open(addr).Open()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = ctx.Close() })
			h := &hostile{
				t: t, from: netip.AddrFrom4([4]byte{127, 0, 0, byte(8 + i)}), gid: rdma.GIDFromAddr(netip.MustParseAddr(addr)),
				id: clc.PeerID{1, 1, 2, 4, 5, 6, 7, byte(i)}, to: p.l.Addr().String(), script: work,
			}
			if h.pd, err = ctx.AllocPD(); err != nil {
				t.Fatal(err)
			}
			if h.cq, err = ctx.CreateCQ(1024); err != nil {
				t.Fatal(err)
			}
			peers[i] = h
		}
		say := make([]byte, 256)
		for round := 0; round == 0 || len(work.b) > 0; round++ {
			binary.BigEndian.PutUint64(say, uint64(round))
			if _, err := good.Write(say); err != nil { // the data lies in the server's memory meanwhile
				t.Fatal(err)
			}
			for _, h := range peers {
				h.act(&known)
			}
			heard := make([]byte, len(say))
			_ = peer.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := io.ReadFull(peer, heard); err != nil || !bytes.Equal(heard, say) {
				t.Fatalf("round %d: the server's program read %x, %v; sent was %x", round, heard, err, say)
			}
			if n := p.server.Stats().MemoryBytes; n > budget {
				t.Fatalf("%d bytes are registered, the budget is %d", n, budget)
			}
		}
		exchange(t, good, peer)
		if id := good.Info().GroupID; p.client.LinkGroups()[0].ID != id {
			t.Error("the good client's link group is another one")
		}
	})
}
