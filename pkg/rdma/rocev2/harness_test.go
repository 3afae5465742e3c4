// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// region is a registered region of a testMemory. Guard bytes stand before and
// behind the part that is registered.
type region struct {
	addr   uint64
	buf    []byte
	lkey   rdma.LKey
	rkey   rdma.RKey
	access rdma.Access
	gone   bool
	all    []byte

	written int // bytes that peers were let write
}

const guardLen = 64

// testMemory is a table of regions.
type testMemory struct {
	regions []*region
	lookups int
}

func (m *testMemory) add(n int, acc rdma.Access) *region {
	k := uint32(len(m.regions) + 1)
	r := &region{
		addr: uint64(k) << 40, lkey: rdma.LKey(k), rkey: rdma.RKey(k<<8 | 7),
		access: acc, all: make([]byte, n+2*guardLen),
	}
	for i := range r.all {
		r.all[i] = 0xee
	}
	r.buf = r.all[guardLen : guardLen+n : guardLen+n]
	clear(r.buf)
	m.regions = append(m.regions, r)
	return r
}

// intact fails if a byte outside the registered part was written.
func (m *testMemory) intact(tb testing.TB) {
	tb.Helper()
	for _, r := range m.regions {
		for i, v := range r.all {
			if (i < guardLen || i >= len(r.all)-guardLen) && v != 0xee {
				tb.Fatalf("byte %d of region %v written outside its bounds", i-guardLen, r.lkey)
			}
		}
	}
}

func (r *region) at(addr uint64, n uint32) ([]byte, bool) {
	if r.gone || addr < r.addr || addr-r.addr > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(addr-r.addr) {
		return nil, false
	}
	o := addr - r.addr
	return r.buf[o : o+uint64(n) : o+uint64(n)], true
}

func (m *testMemory) Local(s rdma.SGE, write bool) ([]byte, rdma.Status) {
	m.lookups++
	for _, r := range m.regions {
		if r.lkey == s.LKey && (!write || r.access&rdma.LocalWrite != 0) {
			if b, ok := r.at(s.Addr, s.Length); ok {
				return b, rdma.StatusSuccess
			}
		}
	}
	return nil, rdma.StatusLocalProtect
}

func (m *testMemory) Remote(k rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, rdma.Status) {
	m.lookups++
	for _, r := range m.regions {
		if r.rkey != k {
			continue
		}
		if r.access&acc != acc {
			return nil, rdma.StatusRemoteAccess
		}
		if b, ok := r.at(addr, n); ok {
			if acc&rdma.RemoteWrite != 0 {
				r.written += int(n)
			}
			return b, rdma.StatusSuccess
		}
		return nil, rdma.StatusRemoteOp
	}
	return nil, rdma.StatusRemoteInvalid
}

func (m *testMemory) Invalidate(k rdma.RKey) bool {
	for _, r := range m.regions {
		if r.rkey == k {
			r.rkey = 0
			return true
		}
	}
	return false
}

const allAccess = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead

func (r *region) sge(off, n int) rdma.SGE {
	return rdma.SGE{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.lkey}
}

// bench is one queue pair in RTS whose peer is the test.
type bench struct {
	tb  testing.TB
	q   *QP
	mem *testMemory
	mr  *region
	now time.Time
}

// Numbers of the bench. RQPSN is close to the wrap on purpose.
const (
	benchQPN  = 0x11
	benchPeer = 0x22
	benchRQ   = rdma.PSN(0xfffffe)
	benchSQ   = rdma.PSN(0xfffffd)
	benchMTU  = rdma.MTU256
)

func newBench(tb testing.TB, edit func(*QPConfig, *rdma.QPAttr)) *bench {
	tb.Helper()
	b := &bench{tb: tb, mem: &testMemory{}, now: time.Unix(1000, 0)}
	b.mr = b.mem.add(1<<16, allAccess)
	c := QPConfig{Num: benchQPN, MaxSendWR: 16, MaxRecvWR: 16, MaxSGE: 3, MaxInline: 64, Memory: b.mem, Window: 64}
	a := rdma.QPAttr{
		Access: rdma.RemoteRead | rdma.RemoteWrite, DestQPN: benchPeer, RQPSN: benchRQ, MTU: benchMTU,
		MinRNRTimer: 12, SQPSN: benchSQ, Timeout: 14, RetryCount: 2, RNRRetry: 2,
	}
	if edit != nil {
		edit(&c, &a)
	}
	q, err := NewQP(c)
	if err != nil {
		tb.Fatal(err)
	}
	b.q = q
	for _, s := range []rdma.QPState{rdma.QPInit, rdma.QPRTR, rdma.QPRTS} {
		a.State = s
		if err := q.Modify(b.now, a); err != nil {
			tb.Fatal(err)
		}
	}
	q.req.cwnd.size = q.req.cwnd.limit // as after some traffic
	return b
}

// in hands a packet to the queue pair. PSNs are relative: requests to the
// first expected, responses to the first sent.
func (b *bench) in(op OpCode, psn int, edit func(*Packet)) {
	b.tb.Helper()
	base := benchRQ
	if !op.IsRequest() {
		base = benchSQ
	}
	p := Packet{BTH: BTH{OpCode: op, PKey: PKey, DestQP: benchQPN, PSN: base.Add(psn)}}
	if edit != nil {
		edit(&p)
	}
	p.BTH.PadCount = uint8(padLen(len(p.Payload)))
	raw := append(p.AppendHeader(nil), p.Payload...)
	raw = append(raw, make([]byte, int(p.BTH.PadCount)+ICRCLen)...)
	var got Packet
	if err := got.Parse(raw); err != nil {
		b.tb.Fatalf("%v: %v", op, err)
	}
	b.q.HandlePacket(b.now, &got)
}

// data is a packet with n payload bytes of value v that asks for an answer.
func data(n int, v byte) func(*Packet) {
	return func(p *Packet) {
		p.BTH.AckReq = true
		p.Payload = []byte(strings.Repeat(string(rune(v)), n))
	}
}

// write is data with a RETH.
func (b *bench) write(off, total, n int, v byte) func(*Packet) {
	return func(p *Packet) {
		data(n, v)(p)
		p.RETH = RETH{Addr: b.mr.addr + uint64(off), RKey: b.mr.rkey, Length: uint32(total)}
	}
}

func aeth(s Syndrome) func(*Packet) {
	return func(p *Packet) { p.AETH.Syndrome = s }
}

func ackPacket(p *Packet) { p.AETH.Syndrome = SyndromeACK(creditsInvalid) }

// describe writes a packet the way the tests expect it.
func describe(p *Packet) string {
	base := benchSQ
	if !p.BTH.OpCode.IsRequest() {
		base = benchRQ
	}
	s := fmt.Sprintf("%v %d", strings.TrimPrefix(p.BTH.OpCode.String(), "RC "), p.BTH.PSN.Sub(base))
	info := p.BTH.OpCode.info()
	if info&opAETH != 0 {
		s += fmt.Sprintf(" [%v msn %d]", p.AETH.Syndrome, p.AETH.MSN)
	}
	if info&opRETH != 0 {
		s += fmt.Sprintf(" to +%d len %d", p.RETH.Addr&(1<<40-1), p.RETH.Length)
	}
	if len(p.Payload) > 0 {
		s += fmt.Sprintf(" %d bytes", len(p.Payload))
	}
	if info&opImm != 0 {
		s += fmt.Sprintf(" imm %#x", p.Imm)
	}
	if p.BTH.Solicited {
		s += " SE"
	}
	if p.BTH.AckReq {
		s += " A"
	}
	return s
}

// bytesOf encodes a packet from PollTx.
func bytesOf(t *TxPacket, ic *ICRC) []byte {
	b := append([]byte(nil), t.Hdr[:t.HdrLen]...)
	for _, p := range t.Payload[:t.Segs] {
		b = append(b, p...)
	}
	b = append(b, make([]byte, t.Pad)...)
	var crc uint32
	if ic != nil {
		crc = ic.SumTx(0, t)
	}
	return append(b, byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24))
}

// out polls the packets to be sent.
func (b *bench) out() []string {
	b.tb.Helper()
	var got []string
	var tx [3]TxPacket
	for {
		n := b.q.PollTx(b.now, tx[:])
		for i := range n {
			raw := bytesOf(&tx[i], nil)
			if len(raw) != tx[i].UDPLen() {
				b.tb.Fatalf("UDPLen %d, packet has %d", tx[i].UDPLen(), len(raw))
			}
			p, err := ParsePacket(raw)
			if err != nil {
				b.tb.Fatalf("our own packet: %v", err)
			}
			got = append(got, describe(&p))
		}
		if n < len(tx) {
			return got
		}
	}
}

func (b *bench) wantOut(want ...string) {
	b.tb.Helper()
	if d := cmp.Diff(want, b.out()); d != "" {
		b.tb.Fatalf("packets (-want +got):\n%s", d)
	}
}

// wantWC compares the completions, as "ID op status bytes".
func (b *bench) wantWC(want ...string) {
	b.tb.Helper()
	var got []string
	var wcs [8]wq.Completion
	for {
		n := b.q.PollWC(wcs[:])
		for _, c := range wcs[:n] {
			s := fmt.Sprintf("%d %v %v", c.WC.ID, c.WC.Op, c.WC.Status)
			if c.WC.Status == rdma.StatusSuccess {
				s += fmt.Sprintf(" %d", c.WC.Bytes)
			}
			if c.WC.HasImm {
				s += fmt.Sprintf(" imm %#x", c.WC.Imm)
			}
			if c.WC.Solicit {
				s += " SE"
			}
			got = append(got, s)
		}
		if n == 0 {
			break
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		b.tb.Fatalf("completions (-want +got):\n%s", d)
	}
}

// wantState checks the state, and returns the event that tells of ERR.
func (b *bench) wantState(want rdma.QPState) rdma.AsyncEvent {
	b.tb.Helper()
	if got := b.q.State(); got != want {
		b.tb.Fatalf("state %v, want %v", got, want)
	}
	ev, ok := b.q.PollEvent()
	if ok != (want == rdma.QPError) {
		b.tb.Fatalf("event %v %v in state %v", ev, ok, want)
	}
	return ev
}

func (b *bench) send(wrs ...rdma.SendWR) {
	b.tb.Helper()
	if n, err := b.q.PostSend(b.now, wrs); err != nil || n != len(wrs) {
		b.tb.Fatalf("PostSend = %d, %v", n, err)
	}
}

// recv posts receive buffers of n bytes, with IDs from 100.
func (b *bench) recv(sizes ...int) {
	b.tb.Helper()
	for i, n := range sizes {
		wr := rdma.RecvWR{ID: uint64(100 + i), SGE: b.mr.sge(0x8000+i*0x1000, n)}
		if _, err := b.q.PostRecv([]rdma.RecvWR{wr}); err != nil {
			b.tb.Fatal(err)
		}
	}
}

// expire advances the clock to the next timeout and handles it. It returns
// how long that took.
func (b *bench) expire() time.Duration {
	b.tb.Helper()
	t, ok := b.q.NextTimeout()
	if !ok {
		b.tb.Fatal("no timer runs")
	}
	d := t.Sub(b.now)
	b.now = t
	b.q.HandleTimeout(t)
	return d
}
