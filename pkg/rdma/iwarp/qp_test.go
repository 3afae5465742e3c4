// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestQP_operations runs every operation over each kind of framing.
func TestQP_operations(t *testing.T) {
	for _, tc := range []struct {
		name        string
		ask, answer Startup
		markers     bool
	}{
		{"CRC", Startup{PeerToPeer: true}, Startup{}, false},
		{"no CRC", Startup{PeerToPeer: true, NoCRC: true}, Startup{NoCRC: true}, false},
		{"revision 1", Startup{Rev: Rev1}, Startup{}, false},
		{"long FPDUs", Startup{MaxULPDU: MaxOwnULPDU, NoCRC: true}, Startup{MaxULPDU: MaxOwnULPDU, NoCRC: true}, false},
		{"long FPDUs, CRC", Startup{MaxULPDU: MaxOwnULPDU}, Startup{MaxULPDU: MaxOwnULPDU}, false},
	} {
		for _, size := range []int{0, 1, 3, 1428, 1429, 5000, 70_000, 300_000} {
			t.Run(fmt.Sprintf("%s/%d", tc.name, size), func(t *testing.T) {
				p := newTwoSides(t)
				p.b.recv(rdma.RecvWR{ID: 100, SGE: p.b.mr.sge(0, size/2), Spill: p.b.mr.sge(400_000, size-size/2)})
				p.a.recv(rdma.RecvWR{ID: 101, SGE: p.a.mr.sge(600_000, 8)})
				p.connect(tc.ask, tc.answer)
				fill(p.a.mr.buf[:size], 1)
				fill(p.b.mr.buf[800_000:][:min(size, 200_000)], 9)
				p.a.send(
					p.now,
					rdma.SendWR{ID: 1, Op: rdma.OpWrite, Flags: rdma.SendSignaled, RemoteAddr: p.b.mr.addr + 100_000, RKey: p.b.mr.rkey, SGL: []rdma.SGE{p.a.mr.sge(0, size/3), p.a.mr.sge(size/3, size-size/3)}},
					rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.SendSignaled, RemoteAddr: p.b.mr.addr + 800_000, RKey: p.b.mr.rkey, SGL: []rdma.SGE{p.a.mr.sge(400_000, min(size, 200_000))}},
					rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendSolicited, SGL: []rdma.SGE{p.a.mr.sge(0, size)}},
				)
				p.runUntilQuiet()
				wantWCs(t, p.a, fmt.Sprintf("1 RDMA_WRITE success %d", size), fmt.Sprintf("2 RDMA_READ success %d", min(size, 200_000)), fmt.Sprintf("3 SEND success %d", size))
				wantWCs(t, p.b, fmt.Sprintf("100 RECV success %d SE", size))
				p.b.send(p.now, rdma.SendWR{ID: 4, Flags: rdma.SendInline, Inline: []byte("answer")})
				p.runUntilQuiet()
				wantWCs(t, p.b)
				wantWCs(t, p.a, "101 RECV success 6")
				if size < 100_000 && !bytes.Equal(p.b.mr.buf[100_000:][:size], p.a.mr.buf[:size]) {
					t.Error("WRITE placed other bytes")
				}
				got := append(bytes.Clone(p.b.mr.buf[:size/2]), p.b.mr.buf[400_000:][:size-size/2]...)
				if size < 100_000 && !bytes.Equal(got, p.a.mr.buf[:size]) {
					t.Error("SEND placed other bytes")
				}
				if n := min(size, 200_000); !bytes.Equal(p.a.mr.buf[400_000:][:n], p.b.mr.buf[800_000:][:n]) {
					t.Error("READ brought other bytes")
				}
				p.a.mem.intact(t)
				p.b.mem.intact(t)
			})
		}
	}
}

// newMarkingSide is a side with a region of a size whose peer asks for markers and CRCs. The peer is a Framing in the
// hands of the test.
func newMarkingSide(t *testing.T, now time.Time, size int, ask Startup) *side {
	t.Helper()
	s := newSideOf(t, "a", size, nil)
	if err := s.q.Start(now, ask); err != nil {
		t.Fatal(err)
	}
	s.transmit(now, 1<<20)
	s.sent = s.sent[:0]
	reply := Frame{Reply: true, CRC: true, Markers: true, Rev: Rev2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}}
	if err := s.feed(now, reply.Append(nil)); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestQP_markers(t *testing.T) {
	now := time.Unix(1000, 0)
	a := newMarkingSide(t, now, testRegion, Startup{})
	fill(a.mr.buf[:9000], 3)
	a.send(now, rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{a.mr.sge(0, 9000)}, Flags: rdma.SendSignaled})
	a.send(now, rdma.SendWR{ID: 2, Op: rdma.OpSend, SGL: []rdma.SGE{a.mr.sge(0, 700)}})
	a.send(now, rdma.SendWR{ID: 3, Op: rdma.OpRead, SGL: []rdma.SGE{a.mr.sge(10_000, 4)}})
	for a.transmit(now, 333) > 0 {
	}
	if err := a.q.Modify(now, rdma.QPAttr{State: rdma.QPError}); err != nil { // the READ is not done: Terminate
		t.Fatal(err)
	}
	for a.transmit(now, 333) > 0 {
	}
	rx := Framing{CRC: true, Markers: true}
	var ops []Opcode
	var written []byte
	for b := a.sent; len(b) > 0; {
		u, n, err := rx.Next(b)
		if err != nil {
			t.Fatalf("behind %v: %v", ops, err)
		}
		b = b[n:]
		var h Header
		if err := h.Parse(u); err != nil {
			t.Fatal(err)
		}
		if h.Op == OpWrite {
			written = append(written, u[h.Len():]...)
		}
		if h.Last {
			ops = append(ops, h.Op)
		}
	}
	if want := []Opcode{OpWrite, OpSend, OpReadRequest, OpTerminate}; !slices.Equal(ops, want) {
		t.Errorf("messages %v, want %v", ops, want)
	}
	if !bytes.Equal(written, a.mr.buf[:9000]) {
		t.Error("other bytes between the markers")
	}
}

// TestQP_fullOfMarkers: with markers all is copied before it is sent. WRITEs of many lengths fill the memory for that
// nearly or wholly, and READs behind them wait for their turn.
func TestQP_fullOfMarkers(t *testing.T) {
	const fill = 4 * (MaxMarkedULPDU - taggedLen) // of payload, in four FPDUs
	now := time.Unix(1000, 0)
	for n := 1; n < 5000; n += 10 {
		a := newMarkingSide(t, now, fill+5000, Startup{MaxULPDU: MaxOwnULPDU})
		a.send(now, rdma.SendWR{ID: 1, Op: rdma.OpWrite, SGL: []rdma.SGE{a.mr.sge(0, fill+n)}, Flags: rdma.SendSignaled})
		read := rdma.SendWR{Op: rdma.OpRead, SGL: []rdma.SGE{a.mr.sge(0, 4)}}
		a.send(now, read, read, read)
		for a.transmit(now, 100_000) > 0 {
		}
		rx := Framing{CRC: true, Markers: true}
		reads := 0
		for b := a.sent; len(b) > 0; {
			u, size, err := rx.Next(b)
			if err != nil {
				t.Fatal(err)
			}
			if Opcode(u[1]&rdmapOpMask) == OpReadRequest {
				reads++
			}
			b = b[size:]
		}
		if reads != 3 {
			t.Fatalf("%d READs behind %d bytes", reads, fill+n)
		}
	}
}

// TestQP_sendForms sends the four forms of SEND.
func TestQP_sendForms(t *testing.T) {
	p := newTwoSides(t)
	for i := range 4 {
		p.b.recv(rdma.RecvWR{ID: uint64(i), SGE: p.b.mr.sge(i*16, 16)})
	}
	p.connect(Startup{}, Startup{})
	keys := []*region{p.b.mem.add(64, allAccess), p.b.mem.add(64, allAccess)}
	for i, f := range []rdma.SendFlags{0, rdma.SendSolicited, rdma.SendInvalidate, rdma.SendInvalidate | rdma.SendSolicited} {
		p.a.send(p.now, rdma.SendWR{ID: uint64(i), Flags: f | rdma.SendInline, Inline: []byte{byte(i)}, InvKey: keys[i&1].rkey})
	}
	p.runUntilQuiet()
	wantWCs(t, p.b, "0 RECV success 1", "1 RECV success 1 SE", "2 RECV success 1 invalidated 0x207", "3 RECV success 1 SE invalidated 0x307")
	for _, k := range keys {
		if !k.dead {
			t.Errorf("key %#x still opens its region", uint32(k.rkey))
		}
	}
}

// TestQP_readsWaitForTheirTurn has more READs than the peer serves at a time.
func TestQP_readsWaitForTheirTurn(t *testing.T) {
	for _, crc := range []bool{true, false} {
		p := newTwoSides(t)
		p.connect(Startup{IRD: 1, ORD: 9, NoCRC: !crc}, Startup{IRD: 2, ORD: 1, Exact: true, NoCRC: !crc})
		if r, _ := p.a.q.Request(); r.ORD != 2 {
			t.Fatalf("ORD %d, want the peer's IRD 2", r.ORD)
		}
		fill(p.b.mr.buf[:40_000], 5)
		var want []string
		for i := range 20 {
			p.a.send(p.now, rdma.SendWR{
				ID: uint64(i), Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: p.b.mr.rkey,
				RemoteAddr: p.b.mr.addr + uint64(i)*2000, SGL: []rdma.SGE{p.a.mr.sge(i*2000, 2000)},
			})
			want = append(want, fmt.Sprintf("%d RDMA_READ success 2000", i))
		}
		p.runUntilQuiet()
		wantWCs(t, p.a, want...)
		if !bytes.Equal(p.a.mr.buf[:40_000], p.b.mr.buf[:40_000]) {
			t.Error("READs brought other bytes")
		}
	}
}

// TestQP_readWithoutTurn has a READ where the peer serves none: it fails when what is before it is done,
// in place of waiting for ever.
func TestQP_readWithoutTurn(t *testing.T) {
	for _, tc := range []struct {
		name   string
		ours   Startup
		theirs Startup
	}{
		{"peer serves none", Startup{IRD: 1, ORD: 9}, Startup{ORD: 1, Exact: true}},
		{"none was to be asked", Startup{IRD: 1, ORD: 0, Exact: true}, Startup{IRD: 2, ORD: 1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newTwoSides(t)
			p.connect(tc.ours, tc.theirs)
			if r, _ := p.a.q.Request(); r.ORD != 0 {
				t.Fatalf("ORD %d", r.ORD)
			}
			p.b.recv(rdma.RecvWR{ID: 50, SGE: p.b.mr.sge(0, 100)})
			p.a.send(p.now,
				rdma.SendWR{ID: 1, Flags: rdma.SendSignaled, SGL: []rdma.SGE{p.a.mr.sge(0, 10)}},
				rdma.SendWR{ID: 2, Op: rdma.OpRead, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 10)}},
				rdma.SendWR{ID: 3})
			p.runUntilQuiet()
			wantWCs(t, p.a, "1 SEND success 10", "2 RDMA_READ local QP operation error", "3 SEND work request flushed")
			wantEnd(t, p.b, CodeLocal, false)
		})
	}
}

// TestQP_readOfChangingMemory changes what a READ reads, when its response is framed and before TCP takes it.
// What is framed has the right CRC, unless the owner promised that it does not change.
func TestQP_readOfChangingMemory(t *testing.T) {
	for _, tt := range []struct {
		access rdma.Access
		want   string
	}{
		{allAccess, "1 RDMA_READ success 5000"},
		{allAccess | rdma.StableRead, "1 RDMA_READ work request flushed"},
	} {
		p := newTwoSides(t)
		p.connect(Startup{}, Startup{})
		source := p.b.mem.add(5000, tt.access)
		fill(source.buf, 9)
		want := bytes.Clone(source.buf)
		p.a.send(p.now, rdma.SendWR{
			ID: 1, Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: source.rkey, RemoteAddr: source.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 5000)},
		})
		p.pass(p.a, p.b)
		p.b.q.TxBuffers(p.now, nil)
		source.buf[4000]++
		p.runUntilQuiet()
		wantWCs(t, p.a, tt.want)
		if tt.access&rdma.StableRead != 0 {
			wantEnd(t, p.a, CodeCRC, true)
			wantEnd(t, p.b, CodeCRC, false)
		} else if !bytes.Equal(p.a.mr.buf[:5000], want) {
			t.Error("the READ brought what the memory was later")
		}
	}
}

// TestQP_terminateBehindResponses has a queue pair end when the memory for what is copied is full of responses, of
// which TCP took all but the last byte: there is room for a Terminate behind that.
func TestQP_terminateBehindResponses(t *testing.T) {
	for _, ulpdu := range []int{MinULPDU, 172, 444, 1408, 1442, 1496, MaxOwnULPDU} {
		p := newTwoSides(t)
		p.connect(Startup{MaxULPDU: ulpdu}, Startup{MaxULPDU: ulpdu})
		for i := range uint64(4) {
			p.a.send(p.now, rdma.SendWR{
				ID: i, Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, testRegion)},
			})
		}
		p.pass(p.a, p.b)
		total := 0
		for {
			offered := 0
			for _, b := range p.b.q.TxBuffers(p.now, nil) {
				offered += len(b)
			}
			if offered <= 1 {
				break
			}
			total += p.b.transmit(p.now, offered-1)
		}
		if total < copiedLen/2 {
			t.Fatalf("ULPDU %d: the memory is full with %d bytes", ulpdu, total)
		}
		_ = p.b.feed(p.now, new(Framing{CRC: true}).Append(nil, tagged(OpWrite, 0x777, 0, 4)))
		wantEnd(t, p.b, CodeTaggedSTag, true)
		p.runUntilQuiet()
		wantEnd(t, p.a, CodeTaggedSTag, false)
	}
}

// TestQP_gate is RFC 5044 §7.1.2: a responder sends nothing before the first FPDU.
func TestQP_gate(t *testing.T) {
	for _, p2p := range []bool{false, true} {
		p := newTwoSides(t)
		p.a.recv(rdma.RecvWR{ID: 1, SGE: p.a.mr.sge(0, 8)})
		p.b.recv(rdma.RecvWR{ID: 2, SGE: p.b.mr.sge(0, 8)})
		p.connect(Startup{PeerToPeer: p2p}, Startup{})
		p.b.send(p.now, rdma.SendWR{ID: 3, Flags: rdma.SendInline | rdma.SendSignaled, Inline: []byte("first")})
		p.runUntilQuiet()
		if !p2p {
			wantWCs(t, p.a)
			wantWCs(t, p.b)
			p.a.send(p.now, rdma.SendWR{ID: 4})
			p.runUntilQuiet()
			wantWCs(t, p.b, "2 RECV success 0", "3 SEND success 5")
		} else {
			wantWCs(t, p.b, "3 SEND success 5")
		}
		wantWCs(t, p.a, "1 RECV success 5")
	}
}

// TestQP_gateToTheEnd: a responder that ends before the initiator has sent anything says nothing either.
func TestQP_gateToTheEnd(t *testing.T) {
	p := newTwoSides(t)
	p.connect(Startup{}, Startup{})
	p.b.send(p.now, rdma.SendWR{ID: 3, Flags: rdma.SendInline | rdma.SendSignaled, Inline: []byte("first")})
	p.runUntilQuiet()
	p.b.sent = nil
	if err := p.b.q.Modify(p.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	p.b.transmit(p.now, 1<<20)
	if len(p.b.sent) > 0 || !p.b.q.TxEnded() {
		t.Errorf("sent %x, our half ended %t", p.b.sent, p.b.q.TxEnded())
	}
	wantWCs(t, p.b, "3 SEND work request flushed")
}

// TestQP_nudge: an empty WRITE goes to a peer when nothing else does, and means nothing to it.
func TestQP_nudge(t *testing.T) {
	p := newTwoSides(t)
	p.a.q.Nudge() // there is no stream
	p.connect(Startup{}, Startup{})
	p.b.q.Nudge() // the responder has to wait
	if p.a.q.HasTx() || p.b.q.HasTx() {
		t.Error("a nudge where nothing may be sent")
	}
	p.a.q.Nudge()
	p.a.q.Nudge() // there is one
	before := p.b.q.Stats().RxFPDUs
	p.runUntilQuiet()
	if n := p.b.q.Stats().RxFPDUs - before; n != 1 {
		t.Errorf("%d FPDUs, want 1", n)
	}
	wantWCs(t, p.a)
	wantWCs(t, p.b)
	if p.a.q.State() != rdma.QPRTS || p.b.q.State() != rdma.QPRTS {
		t.Errorf("queue pairs in %v and %v", p.a.q.State(), p.b.q.State())
	}
}

// TestQP_rtrRead has a responder that takes only the empty READ as RTR.
func TestQP_rtrRead(t *testing.T) {
	p := newTwoSides(t)
	if err := p.a.q.Start(p.now, Startup{PeerToPeer: true}); err != nil {
		t.Fatal(err)
	}
	if err := p.b.q.Start(p.now, Startup{Role: Responder}); err != nil {
		t.Fatal(err)
	}
	p.runUntilQuiet()
	p.b.q.start.peer.Enhanced.RTRWrite = false
	if err := p.b.q.Reply(p.now, Reply{}); err != nil {
		t.Fatal(err)
	}
	p.runUntilQuiet()
	wantWCs(t, p.a)
	wantWCs(t, p.b)
	if p.b.q.start.gated || p.a.q.tx.reads.requests.size() != 0 {
		t.Error("the empty READ was not answered")
	}
	p.a.send(p.now, rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 9)}})
	p.runUntilQuiet()
	wantWCs(t, p.a, "1 RDMA_READ success 9")
}

// TestQP_disconnect ends a stream in order: what was posted is done first.
func TestQP_disconnect(t *testing.T) {
	p := newTwoSides(t)
	p.b.recv(rdma.RecvWR{ID: 7, SGE: p.b.mr.sge(0, 64)}, rdma.RecvWR{ID: 8, SGE: p.b.mr.sge(0, 64)})
	p.connect(Startup{}, Startup{})
	p.a.send(p.now, rdma.SendWR{ID: 1, Op: rdma.OpRead, Flags: rdma.SendSignaled, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 90_000)}}, rdma.SendWR{ID: 2, Flags: rdma.SendSignaled})
	if err := p.a.q.Disconnect(p.now); err != nil {
		t.Fatal(err)
	}
	p.a.send(p.now, rdma.SendWR{ID: 3, Flags: rdma.SendSignaled}) // in time
	p.b.recv(rdma.RecvWR{ID: 9})
	p.runUntilQuiet()
	wantWCs(t, p.a, "1 RDMA_READ success 90000", "2 SEND success 0", "3 SEND success 0")
	wantWCs(t, p.b, "7 RECV success 0", "8 RECV success 0", "9 RECV work request flushed")
	if ev, ok := p.b.q.PollEvent(); !ok || ev.Kind != rdma.EventDisconnected {
		t.Errorf("peer's event %v %v", ok, ev)
	}
	if ev, ok := p.a.q.PollEvent(); ok {
		t.Errorf("our event %v", ev)
	}
	if !p.a.q.Closed() || !p.b.q.Closed() {
		t.Errorf("%v and %v", p.a.q.Phase(), p.b.q.Phase())
	}
}

// TestQP_modifyToError tells the peer that something is missing.
func TestQP_modifyToError(t *testing.T) {
	p := newTwoSides(t)
	p.connect(Startup{}, Startup{})
	p.a.send(p.now, rdma.SendWR{ID: 1, Op: rdma.OpWrite, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 50_000)}})
	p.a.transmit(p.now, 5000) // in the middle of an FPDU
	before := bytes.Clone(p.a.mr.buf[:50_000])
	if err := p.a.q.Modify(p.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	fill(p.a.mr.buf[:50_000], 77) // the memory is the program's again
	p.runUntilQuiet()
	wantWCs(t, p.a, "1 RDMA_WRITE work request flushed")
	wantEnd(t, p.b, CodeLocal, false)
	if !bytes.Equal(p.b.mr.buf[:4000], before[:4000]) || !p.a.q.Closed() || !p.b.q.Closed() {
		t.Error("the FPDU that had begun did not end as it began")
	}
	if n, err := p.a.q.PostSend(p.now, []rdma.SendWR{{ID: 9}}); n != 1 || err != nil {
		t.Errorf("post in ERR: %d, %v", n, err)
	}
	p.a.recv(rdma.RecvWR{ID: 10})
	wantWCs(t, p.a, "9 SEND work request flushed", "10 RECV work request flushed")
}
