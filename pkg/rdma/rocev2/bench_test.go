// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// pair is two queue pairs without a network: packets go from PollTx of one
// to HandlePacket of the other, in pieces of 64 as from a socket.
type pair struct {
	q    [2]*QP
	mem  [2]*testMemory
	mr   [2]*region
	now  time.Time
	tx   [64]TxPacket
	pkt  Packet
	raw  []byte
	wcs  [64]wq.Completion
	done int
	icrc *ICRC // computed and checked if not nil
}

func newPair(tb testing.TB, mtu rdma.MTU, size int) *pair {
	tb.Helper()
	p := &pair{now: time.Unix(0, 0), raw: make([]byte, 0, MaxPacketLen)}
	for i := range p.q {
		p.mem[i] = &testMemory{}
		p.mr[i] = p.mem[i].add(size, allAccess)
		q, err := NewQP(QPConfig{Num: rdma.QPN(i + 1), MaxSendWR: 64, MaxRecvWR: 64, MaxSGE: 2, MaxInline: 64, Memory: p.mem[i]})
		if err != nil {
			tb.Fatal(err)
		}
		a := rdma.QPAttr{Access: allAccess, DestQPN: rdma.QPN(2 - i), MTU: mtu, Timeout: 14, RetryCount: 7, RNRRetry: 7}
		for _, s := range []rdma.QPState{rdma.QPInit, rdma.QPRTR, rdma.QPRTS} {
			a.State = s
			if err := q.Modify(p.now, a); err != nil {
				tb.Fatal(err)
			}
		}
		p.q[i] = q
	}
	return p
}

// round moves packets both ways once. The copy into raw stands for the
// kernel's, without which there would be no packet to parse.
func (p *pair) round(tb testing.TB) {
	for i := range p.q {
		n := p.q[i].PollTx(p.now, p.tx[:])
		for j := range n {
			t := &p.tx[j]
			b := append(p.raw[:0], t.Hdr[:t.HdrLen]...)
			for _, s := range t.Payload[:t.Segs] {
				b = append(b, s...)
			}
			b = b[:len(b)+t.Pad+ICRCLen]
			if p.icrc != nil {
				clear(b[len(b)-t.Pad-ICRCLen:])
				c := p.icrc.SumTx(0, t)
				b[len(b)-4], b[len(b)-3], b[len(b)-2], b[len(b)-1] = byte(c), byte(c>>8), byte(c>>16), byte(c>>24)
				if !p.icrc.Check(b, 0) {
					tb.Fatal("ICRC")
				}
			}
			if err := p.pkt.Parse(b); err != nil {
				tb.Fatal(err)
			}
			p.q[1-i].HandlePacket(p.now, &p.pkt)
		}
	}
	for i := range p.q {
		n := p.q[i].PollWC(p.wcs[:])
		for j := range n {
			if p.wcs[j].WC.Status != rdma.StatusSuccess {
				tb.Fatal(p.wcs[j].WC.Status)
			}
			if p.wcs[j].Send {
				p.done++
			}
		}
	}
}

func (p *pair) flow() {
	c := NewICRC(Addresses{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2"), SrcPort: 50000, DstPort: Port})
	p.icrc = &c
}

// BenchmarkWrite is RDMA WRITEs of 64 KiB from one machine to the other.
func BenchmarkWrite(b *testing.B) {
	for _, mtu := range []rdma.MTU{rdma.MTU1024, rdma.MTU4096} {
		for _, crc := range []bool{false, true} {
			b.Run(fmt.Sprintf("mtu=%v/icrc=%v", mtu, crc), func(b *testing.B) {
				const size = 64 << 10
				p := newPair(b, mtu, 1<<20)
				if crc {
					p.flow()
				}
				wrs := []rdma.SendWR{{
					Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{p.mr[0].sge(0, size)},
					RemoteAddr: p.mr[1].addr, RKey: p.mr[1].rkey,
				}}
				b.SetBytes(size)
				b.ReportAllocs()
				posted := 0
				for b.Loop() {
					for ; posted < p.done+4; posted++ {
						if _, err := p.q[0].PostSend(p.now, wrs); err != nil {
							b.Fatal(err)
						}
					}
					for want := p.done + 1; p.done < want; {
						p.round(b)
					}
				}
			})
		}
	}
}

// BenchmarkSend44 is SENDs of 44 bytes, the size of an LLC or CDC message,
// one at a time.
func BenchmarkSend44(b *testing.B) {
	p := newPair(b, rdma.MTU1024, 1<<20)
	b.ReportAllocs()
	for b.Loop() {
		p.sendOne(b)
	}
}

func (p *pair) sendOne(tb testing.TB) {
	wr := [1]rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendInline, Inline: p.mr[0].buf[:44]}}
	rr := [1]rdma.RecvWR{{SGE: p.mr[1].sge(0, 64)}}
	if _, err := p.q[1].PostRecv(rr[:]); err != nil {
		tb.Fatal(err)
	}
	if _, err := p.q[0].PostSend(p.now, wr[:]); err != nil {
		tb.Fatal(err)
	}
	for want := p.done + 1; p.done < want; {
		p.round(tb)
	}
}

func BenchmarkICRC(b *testing.B) {
	c := NewICRC(Addresses{Src: netip.MustParseAddr("10.0.0.1"), Dst: netip.MustParseAddr("10.0.0.2"), SrcPort: 50000, DstPort: Port})
	pkt := make([]byte, bthLen+1024+ICRCLen)
	b.Run("sum", func(b *testing.B) {
		t := TxPacket{HdrLen: bthLen, Segs: 1, PayloadLen: 1024}
		t.Payload[0] = pkt[bthLen : bthLen+1024]
		b.SetBytes(1024)
		b.ReportAllocs()
		for b.Loop() {
			c.SumTx(1, &t)
		}
	})
	for _, unknown := range []bool{false, true} {
		b.Run(fmt.Sprintf("check/unknownID=%v", unknown), func(b *testing.B) {
			s := c.Sum(7, pkt[:bthLen], [][]byte{pkt[bthLen : bthLen+1024]}, 0)
			pkt[len(pkt)-4], pkt[len(pkt)-3], pkt[len(pkt)-2], pkt[len(pkt)-1] = byte(s), byte(s>>8), byte(s>>16), byte(s>>24)
			hint := uint16(7)
			if unknown {
				hint = 0
			}
			b.SetBytes(1024)
			b.ReportAllocs()
			for b.Loop() {
				if !c.Check(pkt, hint) {
					b.Fatal("wrong")
				}
			}
		})
	}
}

// TestNoAllocations: posting, sending, receiving and polling allocate nothing.
func TestNoAllocations(t *testing.T) {
	p := newPair(t, rdma.MTU1024, 1<<20)
	p.flow()
	ops := []rdma.Opcode{rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead}
	wrs := make([]rdma.SendWR, len(ops))
	for i, op := range ops {
		wrs[i] = rdma.SendWR{
			Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{p.mr[0].sge(0, 5000)},
			RemoteAddr: p.mr[1].addr, RKey: p.mr[1].rkey,
		}
	}
	rr := []rdma.RecvWR{{SGE: p.mr[1].sge(0, 64)}}
	got := testing.AllocsPerRun(100, func() {
		p.sendOne(t)
		if _, err := p.q[1].PostRecv(rr); err != nil {
			t.Fatal(err)
		}
		if _, err := p.q[0].PostSend(p.now, wrs); err != nil {
			t.Fatal(err)
		}
		for want := p.done + len(ops); p.done < want; {
			p.round(t)
		}
		p.q[0].HandleTimeout(p.now)
		p.q[0].NextTimeout()
	})
	if got != 0 {
		t.Errorf("%v allocations per run", got)
	}
}
