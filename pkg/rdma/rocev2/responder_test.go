// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

func TestResponder_sendOnly(t *testing.T) {
	b := newBench(t, nil)
	b.recv(100)
	b.in(SendOnly, 0, func(p *Packet) { data(44, 'x')(p); p.BTH.Solicited = true })
	b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
	b.wantWC("100 RECV success 44 SE")
	if d := cmp.Diff(bytes.Repeat([]byte("x"), 44), b.mr.buf[0x8000:0x8000+44]); d != "" {
		t.Error(d)
	}
}

func TestResponder_sendOfManyPackets(t *testing.T) {
	b := newBench(t, nil)
	b.recv(1000, 0)
	b.in(SendFirst, 0, data(256, 'a'))
	b.in(SendMiddle, 1, data(256, 'b'))
	b.in(SendLastImm, 2, func(p *Packet) { data(3, 'c')(p); p.Imm = 0xabcd })
	b.in(SendOnlyImm, 3, func(p *Packet) { p.Imm = 7 })
	b.wantOut("Acknowledge 3 [ACK credit 31 msn 2]")
	b.wantWC("100 RECV success 515 imm 0xabcd", "101 RECV success 0 imm 0x7")
}

func TestResponder_coalescesACKs(t *testing.T) {
	b := newBench(t, nil)
	for i := range 5 {
		b.in(WriteOnly, i, b.write(i*8, 8, 8, 'w'))
	}
	b.wantOut("Acknowledge 4 [ACK credit 31 msn 5]")
	b.wantOut()
}

func TestResponder_noACKUnlessAsked(t *testing.T) {
	b := newBench(t, nil)
	b.in(WriteOnly, 0, func(p *Packet) { b.write(0, 8, 8, 'w')(p); p.BTH.AckReq = false })
	b.wantOut()
	if string(b.mr.buf[:8]) != "wwwwwwww" {
		t.Error("not written")
	}
}

func TestResponder_writeOfManyPackets(t *testing.T) {
	b := newBench(t, nil)
	b.recv(0)
	b.mem.lookups = 0
	b.in(WriteFirst, 0, b.write(10, 700, 256, 'a'))
	b.in(WriteMiddle, 1, data(256, 'b'))
	b.in(WriteLastImm, 2, func(p *Packet) { data(188, 'c')(p); p.Imm = 5 })
	b.wantOut("Acknowledge 2 [ACK credit 31 msn 1]")
	b.wantWC("100 RECV_RDMA_WITH_IMM success 700 imm 0x5")
	want := bytes.Repeat([]byte("a"), 256)
	want = append(want, bytes.Repeat([]byte("b"), 256)...)
	want = append(want, bytes.Repeat([]byte("c"), 188)...)
	if !bytes.Equal(b.mr.buf[10:710], want) || b.mr.buf[9] != 0 || b.mr.buf[710] != 0 {
		t.Error("wrong bytes written")
	}
	if b.mem.lookups != 1 {
		t.Errorf("%d memory look-ups for one WRITE", b.mem.lookups)
	}
}

// A region counts each WRITE of the peer once and as a whole ([rdma.WriteCounter]), also if another region is closed
// meanwhile, or the peer repeats the request until there is a receive buffer.
func TestResponder_countsWrites(t *testing.T) {
	b := newBench(t, nil)
	b.in(WriteFirst, 0, b.write(0, 700, 256, 'a'))
	b.q.ForgetMemory(b.now)
	b.in(WriteMiddle, 1, data(256, 'b'))
	b.q.ForgetMemory(b.now)
	b.in(WriteLast, 2, data(188, 'c'))
	b.wantOut("Acknowledge 2 [ACK credit 31 msn 1]")
	if b.mr.written != 700 || b.mr.buf[699] != 'c' {
		t.Errorf("%d bytes are counted, want 700", b.mr.written)
	}
	imm := func(p *Packet) { b.write(0, 8, 8, 'i')(p); p.Imm = 5 }
	for range 3 {
		b.in(WriteOnlyImm, 3, imm)
		b.out()
	}
	if b.mr.written != 700 || b.mr.buf[0] != 'a' {
		t.Errorf("without a receive buffer %d bytes are counted, want 700", b.mr.written)
	}
	b.recv(0)
	b.in(WriteOnlyImm, 3, imm)
	b.wantOut("Acknowledge 3 [ACK credit 31 msn 2]")
	if b.mr.written != 708 || b.mr.buf[0] != 'i' {
		t.Errorf("%d bytes are counted, want 708", b.mr.written)
	}
}

// A request that waits for a receive buffer, and the rest of a WRITE, need the right to write like others.
func TestResponder_writesNotCountedNeedTheRight(t *testing.T) {
	b := newBench(t, nil)
	b.mr.access = rdma.LocalWrite | rdma.RemoteRead
	b.in(WriteOnlyImm, 0, b.write(0, 8, 8, 'i'))
	b.wantOut("Acknowledge 0 [NAK remote access error msn 0]")

	b = newBench(t, nil)
	b.in(WriteFirst, 0, b.write(0, 300, 256, 'a'))
	b.mr.access = rdma.LocalWrite | rdma.RemoteRead
	b.q.ForgetMemory(b.now)
	b.in(WriteLast, 1, data(44, 'b'))
	b.wantOut("Acknowledge 1 [NAK remote access error msn 0]")
	if b.mr.buf[256] != 0 {
		t.Error("written without the right")
	}
}

func TestResponder_writeOfNothingNeedsNoKey(t *testing.T) {
	b := newBench(t, nil)
	b.in(WriteOnly, 0, func(p *Packet) { p.BTH.AckReq = true })
	b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
	b.wantState(rdma.QPRTS)
}

func TestResponder_nakSequenceOnGap(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8, 8, 8)
	b.in(SendOnly, 0, data(1, 'a'))
	b.in(SendOnly, 2, data(1, 'c'))
	b.in(SendOnly, 3, data(1, 'd'))
	b.wantOut("Acknowledge 1 [NAK PSN sequence error msn 1]")
	b.in(SendOnly, 4, data(1, 'e'))
	b.wantOut() // once
	b.in(SendOnly, 1, data(1, 'b'))
	b.in(SendOnly, 3, data(1, 'd')) // the next gap is another
	b.wantOut("Acknowledge 2 [NAK PSN sequence error msn 2]")
}

func TestResponder_noNAKWhenGapClosed(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8, 8, 8)
	b.in(SendOnly, 1, data(1, 'b'))
	b.in(SendOnly, 0, data(1, 'a'))
	b.in(SendOnly, 1, data(1, 'b'))
	b.wantOut("Acknowledge 1 [ACK credit 31 msn 2]")
}

func TestResponder_duplicateIsAcknowledgedAgain(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8, 8)
	b.in(SendOnly, 0, data(1, 'a'))
	b.in(SendOnly, 1, data(1, 'b'))
	b.wantOut("Acknowledge 1 [ACK credit 31 msn 2]")
	b.in(SendOnly, 0, func(p *Packet) { data(1, 'z')(p); p.BTH.AckReq = false })
	b.wantOut("Acknowledge 1 [ACK credit 31 msn 2]")
	b.wantWC("100 RECV success 1", "101 RECV success 1")
	if b.mr.buf[0x8000] != 'a' {
		t.Error("duplicate executed")
	}
}

func TestResponder_rnrNAK(t *testing.T) {
	tests := []struct {
		name string
		op   OpCode
		edit func(b *bench) func(*Packet)
		wc   string
	}{
		{"SEND", SendOnly, func(*bench) func(*Packet) { return data(4, 'x') }, "100 RECV success 4"},
		{
			"WRITE with immediate", WriteOnlyImm,
			func(b *bench) func(*Packet) { return b.write(0, 4, 4, 'x') },
			"100 RECV_RDMA_WITH_IMM success 4 imm 0x0",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.in(tt.op, 0, tt.edit(b))
			b.wantOut("Acknowledge 0 [RNR NAK, 640µs msn 0]")
			b.in(tt.op, 1, tt.edit(b)) // behind an RNR NAK: silence
			b.wantOut()
			if b.mr.buf[0] != 0 {
				t.Error("written before the receive buffer was there")
			}
			b.in(tt.op, 0, tt.edit(b))
			b.wantOut("Acknowledge 0 [RNR NAK, 640µs msn 0]")
			b.recv(64)
			b.in(tt.op, 0, tt.edit(b))
			b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
			b.wantWC(tt.wc)
			b.wantState(rdma.QPRTS)
		})
	}
}

// TestResponder_refuses has the requests that end a queue pair, each with the
// NAK it gets. Nothing of the refused packet may be in memory.
func TestResponder_refuses(t *testing.T) {
	type step struct {
		op   OpCode
		edit func(b *bench) func(*Packet)
	}
	plain := func(n int) func(*bench) func(*Packet) {
		return func(*bench) func(*Packet) { return data(n, 'X') }
	}
	wr := func(off, total, n int) func(*bench) func(*Packet) {
		return func(b *bench) func(*Packet) { return b.write(off, total, n, 'X') }
	}
	reth := func(f func(b *bench, r *RETH)) func(*bench) func(*Packet) {
		return func(b *bench) func(*Packet) {
			return func(p *Packet) {
				if p.BTH.OpCode != ReadRequest {
					data(16, 'X')(p)
				}
				p.RETH = RETH{Addr: b.mr.addr, RKey: b.mr.rkey, Length: 16}
				f(b, &p.RETH)
			}
		}
	}
	const invalid, access, op = "NAK invalid request", "NAK remote access error", "NAK remote operational error"
	const gone = "region gone in a write"
	tests := []struct {
		name  string
		steps []step
		nak   string
		wc    []string
	}{
		{"middle without first", []step{{SendMiddle, plain(256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"last without first", []step{{WriteLast, plain(3)}}, invalid, []string{"100 RECV work request flushed"}},
		{"write middle in send", []step{{SendFirst, plain(256)}, {WriteMiddle, plain(256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"first in send", []step{{SendFirst, plain(256)}, {SendFirst, plain(256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"only in write", []step{{WriteFirst, wr(0, 512, 256)}, {WriteOnly, wr(0, 4, 4)}}, invalid, []string{"100 RECV work request flushed"}},
		{"read in write", []step{{WriteFirst, wr(0, 512, 256)}, {ReadRequest, reth(func(*bench, *RETH) {})}}, invalid, []string{"100 RECV work request flushed"}},
		{"first shorter than MTU", []step{{SendFirst, plain(252)}}, invalid, []string{"100 RECV work request flushed"}},
		{"only longer than MTU", []step{{SendOnly, plain(257)}}, invalid, []string{"100 RECV work request flushed"}},
		{"last empty", []step{{SendFirst, plain(256)}, {SendLast, plain(0)}}, invalid, []string{"100 RECV work request flushed"}},
		{"send longer than buffer", []step{{SendOnly, plain(201)}}, invalid, []string{"100 RECV local length error"}},
		{"send of many longer than buffer", []step{{SendFirst, plain(256)}}, invalid, []string{"100 RECV local length error"}},
		{"send with invalidate", []step{{SendOnlyInv, func(*bench) func(*Packet) {
			return func(p *Packet) { p.Ext = make([]byte, iethLen) }
		}}}, invalid, []string{"100 RECV work request flushed"}},
		{"atomic", []step{{FetchAdd, func(*bench) func(*Packet) {
			return func(p *Packet) { p.Ext = make([]byte, atomicETHLen) }
		}}}, invalid, []string{"100 RECV work request flushed"}},
		{"write longer than RETH", []step{{WriteFirst, wr(0, 300, 256)}, {WriteMiddle, plain(256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"write last longer than RETH", []step{{WriteFirst, wr(0, 300, 256)}, {WriteLast, plain(45)}}, invalid, []string{"100 RECV work request flushed"}},
		{"write last shorter than RETH", []step{{WriteFirst, wr(0, 300, 256)}, {WriteLast, plain(43)}}, invalid, []string{"100 RECV work request flushed"}},
		{"write only longer than RETH", []step{{WriteOnly, wr(0, 3, 4)}}, invalid, []string{"100 RECV work request flushed"}},
		{"write first of one packet", []step{{WriteFirst, wr(0, 256, 256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"message too long", []step{{WriteFirst, wr(0, MaxMessage+1, 256)}}, invalid, []string{"100 RECV work request flushed"}},
		{"unknown rkey", []step{{WriteOnly, reth(func(_ *bench, r *RETH) { r.RKey++ })}}, access, []string{"100 RECV work request flushed"}},
		{"write before region", []step{{WriteOnly, reth(func(_ *bench, r *RETH) { r.Addr-- })}}, access, []string{"100 RECV work request flushed"}},
		{"write behind region", []step{{WriteOnly, reth(func(b *bench, r *RETH) { r.Addr += uint64(len(b.mr.buf)) - 15 })}}, access, []string{"100 RECV work request flushed"}},
		{"write wraps address space", []step{{WriteOnly, reth(func(_ *bench, r *RETH) { r.Addr = 1<<64 - 8 })}}, access, []string{"100 RECV work request flushed"}},
		{"first packet of a write beyond the region", []step{{WriteFirst, wr(0, 1<<16+1, 256)}}, access, []string{"100 RECV work request flushed"}},
		{"read behind region", []step{{ReadRequest, reth(func(_ *bench, r *RETH) { r.Length = 1<<16 + 1 })}}, access, []string{"100 RECV work request flushed"}},
		{"write to read only", []step{{WriteOnly, reth(func(b *bench, r *RETH) {
			b.mr.access = rdma.RemoteRead
		})}}, access, []string{"100 RECV work request flushed"}},
		{"receive buffer not registered", []step{{SendOnly, func(b *bench) func(*Packet) {
			b.mr.gone = true
			return data(4, 'X')
		}}}, op, []string{"100 RECV local protection error"}},
		{gone, []step{{WriteFirst, wr(0, 512, 256)}, {WriteLast, func(b *bench) func(*Packet) {
			b.mr.gone = true
			b.q.ForgetMemory(time.Time{})
			return data(256, 'X')
		}}}, access, []string{"100 RECV work request flushed"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.recv(200)
			if tt.steps[0].op == SendFirst && len(tt.steps) == 2 {
				b.q.rsp.at(0).sge.Length = 1000
			}
			var before []byte
			for i, s := range tt.steps {
				edit := s.edit(b)
				before = bytes.Clone(b.mr.buf)
				b.wantState(rdma.QPRTS)
				b.in(s.op, i, edit)
			}
			if !bytes.Equal(before, b.mr.buf) {
				t.Error("memory changed by the refused packet")
			}
			b.mem.intact(t)
			last := len(tt.steps) - 1
			want := Packet{BTH: BTH{OpCode: Acknowledge, PSN: benchRQ.Add(last)}}
			for _, c := range []NAKCode{NAKInvalidRequest, NAKRemoteAccess, NAKRemoteOp} {
				if s := SyndromeNAK(c); s.String() == tt.nak {
					want.AETH.Syndrome = s
				}
			}
			b.wantOut(describe(&want))
			b.wantOut()
			b.wantWC(tt.wc...)
			ev := b.wantState(rdma.QPError)
			if got, want := errors.Is(ev.Err, rdma.ErrPeerAccess), tt.nak == access && tt.name != gone; got != want {
				t.Errorf("event %v accuses the peer of access without right: %v, want %v", ev.Err, got, want)
			}
			b.in(SendOnly, last, data(1, 'x'))
			b.wantOut(describe(&want)) // the first one may have been lost
			b.wantOut()
		})
	}
}

// A peer that would repeat its requests for ever hears that it is in vain, and
// that those before were done.
func TestResponder_refusesInError(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8, 8)
	b.in(SendOnly, 0, data(1, 'x'))
	b.out()
	b.wantWC("100 RECV success 1")
	b.q.Silence()
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	b.wantWC("101 RECV work request flushed")
	before := bytes.Clone(b.mr.buf)
	b.in(SendOnly, 0, data(1, 'x'))
	b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
	b.in(WriteOnly, 1, b.write(0, 4, 4, 'x'))
	b.wantOut() // not yet
	if !b.q.Refuse() {
		t.Error("a queue pair in ERR cannot refuse")
	}
	b.wantOut("Acknowledge 1 [NAK remote operational error msn 1]") // to what came before
	b.wantOut()
	b.in(WriteOnly, 1, b.write(0, 4, 4, 'x'))
	b.in(SendOnly, 2, data(1, 'x')) // one answer is enough
	b.wantOut("Acknowledge 1 [NAK remote operational error msn 1]")
	b.wantOut()
	b.in(WriteOnly, 1, b.write(0, 4, 4, 'x'))
	b.wantOut("Acknowledge 1 [NAK remote operational error msn 1]")
	b.in(ReadRequest, 0, readReq(b, 0, 8))
	b.wantOut()
	b.wantWC()
	if !bytes.Equal(before, b.mr.buf) {
		t.Error("memory changed by a refused packet")
	}
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPReset}); err != nil {
		t.Fatal(err)
	}
	if b.q.Refuse() {
		t.Error("a queue pair in RESET can refuse")
	}
}

func TestResponder_accessOfQueuePair(t *testing.T) {
	for _, op := range []OpCode{WriteOnly, ReadRequest} {
		b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.Access = 0 })
		b.in(op, 0, func(p *Packet) { p.RETH = RETH{Addr: b.mr.addr, RKey: b.mr.rkey} })
		b.wantOut("Acknowledge 0 [NAK remote access error msn 0]")
		if ev := b.wantState(rdma.QPError); !errors.Is(ev.Err, rdma.ErrPeerAccess) {
			t.Errorf("%v: event %v does not accuse the peer", op, ev.Err)
		}
	}
}

func readReq(b *bench, off, n int) func(*Packet) {
	return func(p *Packet) {
		p.BTH.AckReq = true
		p.RETH = RETH{Addr: b.mr.addr + uint64(off), RKey: b.mr.rkey, Length: uint32(n)}
	}
}

func TestResponder_read(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 600))
	b.in(ReadRequest, 3, readReq(b, 0, 0))
	b.in(WriteOnly, 4, b.write(0, 4, 4, 'x'))
	b.wantOut(
		"RDMA READ response First 0 [ACK credit 31 msn 1] 256 bytes",
		"RDMA READ response Middle 1 256 bytes",
		"RDMA READ response Last 2 [ACK credit 31 msn 1] 88 bytes",
		"RDMA READ response Only 3 [ACK credit 31 msn 2]",
		"Acknowledge 4 [ACK credit 31 msn 3]",
	)
}

func TestResponder_duplicateReadIsExecutedAgain(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 600))
	b.out()
	b.in(ReadRequest, 1, readReq(b, 256, 344)) // the rest of it
	b.wantOut(
		"RDMA READ response First 1 [ACK credit 31 msn 1] 256 bytes",
		"RDMA READ response Last 2 [ACK credit 31 msn 1] 88 bytes",
	)
	b.in(ReadRequest, 1, readReq(b, 256, 600)) // beyond what was asked before
	b.wantOut()
	b.in(ReadRequest, 1, readReq(b, 1<<20, 256)) // somewhere else
	b.wantOut()
	b.wantState(rdma.QPRTS)
}

func TestResponder_duplicateReadReplacesPending(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 512))
	b.in(ReadRequest, 2, readReq(b, 0, 8))
	b.in(ReadRequest, 0, readReq(b, 0, 512))
	b.wantOut(
		"RDMA READ response First 0 [ACK credit 31 msn 2] 256 bytes",
		"RDMA READ response Last 1 [ACK credit 31 msn 2] 256 bytes",
		"RDMA READ response Only 2 [ACK credit 31 msn 2] 8 bytes",
	)
}

func TestResponder_tooManyReads(t *testing.T) {
	b := newBench(t, nil)
	for i := range MaxReads + 1 {
		b.in(ReadRequest, i, readReq(b, 0, 8))
	}
	var want []string
	for i := range MaxReads {
		want = append(want, fmt.Sprintf("RDMA READ response Only %d [ACK credit 31 msn %d] 8 bytes", i, i+1))
	}
	b.wantOut(append(want, "Acknowledge 16 [NAK invalid request msn 16]")...)
	b.wantState(rdma.QPError)
}

// A READ that came before a request that ends the queue pair is answered, and what comes behind that is dropped.
func TestResponder_readBeforeRefusal(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 512))
	wrong := b.write(0, 8, 8, 'w')
	b.in(WriteOnly, 2, func(p *Packet) { wrong(p); p.RETH.RKey++ })
	b.in(WriteOnly, 3, b.write(16, 8, 8, 'w'))
	b.in(WriteOnly, 5, b.write(16, 8, 8, 'w'))
	b.wantOut(
		"RDMA READ response First 0 [ACK credit 31 msn 1] 256 bytes",
		"RDMA READ response Last 1 [ACK credit 31 msn 1] 256 bytes",
		"Acknowledge 2 [NAK remote access error msn 1]",
	)
	b.wantState(rdma.QPError)
	if b.mr.buf[16] == 'w' {
		t.Error("a WRITE behind the refused one was placed")
	}
}

// A receive that such a request fails completes when the queue pair fails, and not before.
func TestResponder_readBeforeFailedReceive(t *testing.T) {
	b := newBench(t, nil)
	b.recv(8)
	b.in(ReadRequest, 0, readReq(b, 0, 8))
	b.in(SendOnly, 1, func(p *Packet) { p.Payload = make([]byte, 9) })
	b.wantWC()
	b.wantState(rdma.QPRTS)
	b.wantOut("RDMA READ response Only 0 [ACK credit 31 msn 1] 8 bytes", "Acknowledge 1 [NAK invalid request msn 1]")
	b.wantWC("100 RECV local length error")
	b.wantState(rdma.QPError)
}

// A READ that comes again, because the peer has not seen the response yet, does not count against those that it may have
// outstanding: it sees that response, and asks for the next.
func TestResponder_readsAgain(t *testing.T) {
	b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.ReadsServed = 1 })
	b.in(ReadRequest, 0, readReq(b, 0, 8))
	b.wantOut("RDMA READ response Only 0 [ACK credit 31 msn 1] 8 bytes")
	b.in(ReadRequest, 0, readReq(b, 0, 8))
	b.in(ReadRequest, 1, readReq(b, 0, 8))
	b.wantOut(
		"RDMA READ response Only 0 [ACK credit 31 msn 1] 8 bytes",
		"RDMA READ response Only 1 [ACK credit 31 msn 2] 8 bytes",
	)
	b = newBench(t, nil)
	for i := range MaxReads {
		b.in(ReadRequest, i, readReq(b, 0, 8))
	}
	b.out()
	for i := range MaxReads {
		b.in(ReadRequest, i, readReq(b, 0, 8))
	}
	b.in(ReadRequest, MaxReads, readReq(b, 0, 8))
	out := b.out()
	if want := fmt.Sprintf("RDMA READ response Only %d [ACK credit 31 msn %d] 8 bytes", MaxReads, MaxReads+1); len(out) != MaxReads || out[MaxReads-1] != want {
		t.Errorf("answered with %q", out)
	}
}

func TestResponder_regionGoneBeforeResponses(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 8))
	b.mr.gone = true
	b.q.ForgetMemory(time.Time{})
	b.wantOut("Acknowledge 0 [NAK remote access error msn 1]")
	b.wantState(rdma.QPError)
}

// A READ that came again, and was answered in part when the program closed the region, ends nothing: the peer had the response to
// the first request, and said so.
func TestResponder_regionGoneBeforeResponsesAgain(t *testing.T) {
	b := newBench(t, nil)
	other := b.mem.add(8, allAccess)
	b.recv(8)
	b.in(ReadRequest, 0, readReq(b, 0, 600))
	b.out()
	b.in(ReadRequest, 0, readReq(b, 0, 600))
	if n := b.q.PollTx(b.now, make([]TxPacket, 1)); n != 1 {
		t.Fatalf("%d packets, want 1 of the response", n)
	}
	b.in(SendOnly, 3, data(1, 'x'))
	b.in(ReadRequest, 4, func(p *Packet) { p.RETH = RETH{Addr: other.addr, RKey: other.rkey, Length: 8} })
	b.wantWC("100 RECV success 1")
	b.mr.gone = true
	b.q.ForgetMemory(b.now)
	bad := b.q.Stats().Bad
	b.wantOut("RDMA READ response Only 4 [ACK credit 31 msn 3] 8 bytes", "Acknowledge 4 [ACK credit 31 msn 3]")
	b.wantState(rdma.QPRTS)
	if n := b.q.Stats().Bad - bad; n != 1 {
		t.Errorf("%d packets are counted as bad, want 1", n)
	}
}

// delayed is a bench whose ACKs may wait.
func delayed(t *testing.T) *bench {
	t.Helper()
	return newBench(t, func(c *QPConfig, _ *rdma.QPAttr) { c.ACKDelay = time.Millisecond })
}

func TestResponder_delayedACKGoesAlone(t *testing.T) {
	b := delayed(t)
	b.in(WriteOnly, 0, b.write(0, 8, 8, 'w'))
	b.wantOut()
	if d := b.expire(); d != time.Millisecond {
		t.Errorf("waited %v", d)
	}
	b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
	b.wantOut()
}

// TestResponder_delayedACKOutlivesTheQueuePair: the program has its message and
// ends; the peer must not think that it was lost.
func TestResponder_delayedACKOutlivesTheQueuePair(t *testing.T) {
	b := delayed(t)
	b.recv(8)
	b.in(SendOnly, 0, data(1, 'a'))
	b.wantOut()
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	b.wantOut("Acknowledge 0 [ACK credit 31 msn 1]")
	b.wantOut()
}

func TestResponder_delayedACKGoesWithTheAnswer(t *testing.T) {
	b := delayed(t)
	b.in(WriteOnly, 0, b.write(0, 8, 8, 'w'))
	b.send(b.wr(1, rdma.OpSend, 44))
	b.wantOut("SEND Only 0 44 bytes A", "Acknowledge 0 [ACK credit 31 msn 1]")
	if at, ok := b.q.NextTimeout(); ok && !at.After(b.now.Add(time.Millisecond)) {
		t.Error("the timer of the ACK still runs")
	}
}

func TestResponder_whatDoesNotDelay(t *testing.T) {
	const mtu = 256
	b := delayed(t)
	psn, messages := 0, 0
	write := func(n int, asks bool) {
		b.in(WriteOnly, psn, func(p *Packet) { b.write(0, n, n, 'w')(p); p.BTH.AckReq = asks })
		psn++
		messages++
	}
	message := func() { // what tells of WRITEs, as SMC-R's CDC
		b.recv(64)
		b.in(SendOnly, psn, data(44, 's'))
		b.q.PollWC(make([]wq.Completion, 4))
		psn++
		messages++
	}
	ack := func() string { return fmt.Sprintf("Acknowledge %d [ACK credit 31 msn %d]", psn-1, messages) }
	const stream = maxDelayedBytes/mtu + 1 // packets

	write(mtu, true) // the window of the peer may be closed
	b.wantOut(ack())

	for range stream {
		write(mtu, false)
	}
	message()
	b.wantOut()
	for range stream {
		write(mtu, false)
	}
	b.wantOut() // may go with what tells that there is room again
	message()
	b.wantOut(ack())

	message()
	for range maxHeldPackets - 1 {
		write(8, false)
	}
	b.wantOut()
	write(8, false)
	b.wantOut(ack())

	for range maxKeptPackets + 2 { // a dialogue that nobody answers
		message()
	}
	b.wantOut()
	message()
	b.wantOut(ack())

	b.in(WriteOnly, psn-1, b.write(0, 8, 8, 'w')) // a duplicate: the peer's timer has run out
	b.wantOut(ack())
}

// In a stream the ACK goes with the message that tells the peer of room.
func TestResponder_delayedACKGoesWithTheUpdate(t *testing.T) {
	b := delayed(t)
	for i := range 64 {
		b.in(WriteOnly, i, func(p *Packet) { b.write(0, 256, 256, 'w')(p); p.BTH.AckReq = false })
	}
	b.recv(64)
	b.in(SendOnly, 64, data(44, 's'))
	b.wantOut()
	b.send(b.wr(1, rdma.OpSend, 44))
	b.wantOut("SEND Only 0 44 bytes A", "Acknowledge 64 [ACK credit 31 msn 65]")
}

// dialogue is one question and its answer, number n; acked tells whether an
// ACK went with the answer. The peer acknowledges the answer.
func dialogue(b *bench, n int) (acked bool) {
	b.tb.Helper()
	b.recv(64)
	b.in(WriteOnly, 2*n, func(p *Packet) { b.write(0, 8, 8, 'w')(p); p.BTH.AckReq = false })
	b.in(SendOnly, 2*n+1, data(44, 's'))
	b.send(b.wr(uint64(n), rdma.OpSend, 44))
	for _, s := range b.out() {
		acked = acked || strings.HasPrefix(s, "Acknowledge")
	}
	b.in(Acknowledge, n, ackPacket)
	b.q.PollWC(make([]wq.Completion, 4))
	b.now = b.now.Add(100 * time.Microsecond)
	return acked
}

func TestResponder_keepsACKsBack(t *testing.T) {
	b := delayed(t)
	n := 0
	// play returns after how many dialogues each ACK came.
	play := func(dialogues int) (with []int) {
		t.Helper()
		for since := 1; dialogues > 0; dialogues-- {
			if dialogue(b, n) {
				with, since = append(with, since), 0
			}
			n, since = n+1, since+1
		}
		return with
	}
	always := func(dialogues int, why string) {
		t.Helper()
		if got := len(play(dialogues)); got != dialogues {
			t.Errorf("%s: %d of %d answers had an ACK", why, got, dialogues)
		}
	}
	seldom := func(why string) {
		t.Helper()
		// The ACK goes with the answer to the packet after maxKeptPackets; the
		// first of a WRITE and a SEND does not ask for one.
		want := maxKeptPackets/2 + 1
		if diff := cmp.Diff([]int{want, want, want}, play(3*want)); diff != "" {
			t.Errorf("%s: dialogues for each ACK (-want +got):\n%s", why, diff)
		}
	}
	always(minPause+1, "a new peer")
	seldom("a peer that did not wait")

	play(1)
	if d := b.expire(); d < (keptDelays-1)*time.Millisecond || d > keptDelays*time.Millisecond {
		t.Errorf("the ACK was kept back for %v more", d)
	}
	b.wantOut(fmt.Sprintf("Acknowledge %d [ACK credit 31 msn %d]", 2*n-1, 2*n))
	b.now = b.now.Add(time.Second)
	seldom("a peer that had nothing to say")

	play(1)
	b.expire()
	b.out()
	always(2*minPause+1, "a peer that went on when the ACK came")
	seldom("the next trial")
}

// A peer that asks for more READs at once than were agreed is refused.
func TestResponder_readsServed(t *testing.T) {
	b := newBench(t, func(_ *QPConfig, a *rdma.QPAttr) { a.ReadsServed = 2 })
	read := func(p *Packet) { p.RETH = RETH{Addr: b.mr.addr, RKey: b.mr.rkey, Length: 1} }
	for i := range 2 {
		b.in(ReadRequest, i, read)
	}
	if s := b.q.State(); s != rdma.QPRTS {
		t.Fatalf("state %v after two READs", s)
	}
	b.in(ReadRequest, 2, read)
	b.out()
	if s := b.q.State(); s != rdma.QPError {
		t.Errorf("state %v after the third READ, want ERR", s)
	}
}
