// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bytes"
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// faults are the probabilities of what happens to a packet.
type faults struct {
	loss, dup, corrupt float64
	jitter             time.Duration // reorders
	noBuffers          int           // of ten times, how often receive buffers are not posted
}

// flight is a packet on its way, or a wake-up.
type flight struct {
	at  time.Time
	seq int
	to  int
	raw []byte
}

type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	if !f[i].at.Equal(f[j].at) {
		return f[i].at.Before(f[j].at)
	}
	return f[i].seq < f[j].seq
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	o := *f
	x := o[len(o)-1]
	*f = o[:len(o)-1]
	return x
}

// node is one end of the simulation: a queue pair, a source region that its
// sends take from, a region that the peer writes to and reads from, and one
// with receive buffers.
type node struct {
	q       *QP
	mem     *testMemory
	src     *region // our data, never changes
	dst     *region // the peer writes here
	rcv     *region // receive buffers
	get     *region // what we READ
	want    []byte  // what the peer's dst must be in the end
	wantGet []byte
	todo    []rdma.SendWR
	posted  int
	wantWC  []string // send completions expected, in order
	gotWC   []string
	wantRx  []string // receive completions at this node, in order
	gotRx   []string
	rxSlot  int
	icrc    ICRC // of packets to the peer
	peer    ICRC // of packets from the peer
}

// sim is two nodes and the network between them.
type sim struct {
	tb    testing.TB
	rng   *rand.Rand
	f     faults
	now   time.Time
	seq   int
	queue flights
	n     [2]*node
}

const (
	simRegion   = 1 << 17
	simRecvSize = 5000
	simRecvs    = 8
)

func newSim(tb testing.TB, seed uint64, f faults) *sim {
	s := &sim{tb: tb, rng: rand.New(rand.NewPCG(seed, 1)), f: f, now: time.Unix(0, 0)}
	mtu := rdma.MTU(1 + s.rng.IntN(5))
	window := []int{1, 4, 33, 256}[s.rng.IntN(4)]
	delay := []time.Duration{0, 100 * time.Microsecond, 3 * time.Millisecond}[s.rng.IntN(3)]
	psn := [2]rdma.PSN{rdma.PSN(s.rng.Uint32()) & rdma.PSNMask, rdma.PSNMask - rdma.PSN(s.rng.IntN(50))}
	addr := [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	for i := range s.n {
		n := &node{mem: &testMemory{}}
		n.src = n.mem.add(simRegion, allAccess)
		n.dst = n.mem.add(simRegion, allAccess)
		n.rcv = n.mem.add(simRecvs*simRecvSize, rdma.LocalWrite)
		n.get = n.mem.add(simRegion, allAccess)
		for j := range n.src.buf {
			n.src.buf[j] = byte(s.rng.Uint32())
		}
		q, err := NewQP(QPConfig{
			Num: rdma.QPN(i + 1), MaxSendWR: 1 + s.rng.IntN(20), MaxRecvWR: simRecvs,
			MaxSGE: 3, MaxInline: 64, Memory: n.mem, Window: window, ACKDelay: delay,
		})
		if err != nil {
			tb.Fatal(err)
		}
		n.q = q
		a := rdma.QPAttr{
			Access: allAccess, DestQPN: rdma.QPN(2 - i), RQPSN: psn[1-i], MTU: mtu, MinRNRTimer: uint8(s.rng.IntN(15) + 1),
			SQPSN: psn[i], Timeout: 14, RetryCount: 7, RNRRetry: 7,
		}
		for _, st := range []rdma.QPState{rdma.QPInit, rdma.QPRTR, rdma.QPRTS} {
			a.State = st
			if err := q.Modify(s.now, a); err != nil {
				tb.Fatal(err)
			}
		}
		fl := Addresses{Src: addr[i], Dst: addr[1-i], SrcPort: 50000, DstPort: Port}
		n.icrc = NewICRC(fl)
		fl.Src, fl.Dst = fl.Dst, fl.Src
		n.peer = NewICRC(fl)
		s.n[i] = n
	}
	return s
}

// plan makes n work requests of node i and what they must do.
func (s *sim) plan(i, count int) {
	n, p := s.n[i], s.n[1-i]
	if p.want == nil {
		p.want = make([]byte, simRegion)
	}
	n.wantGet = make([]byte, simRegion)
	wr, rd := 0, 0 // each byte is written and read once, so that order matters not
	for k := range count {
		w := rdma.SendWR{ID: uint64(k)}
		if s.rng.IntN(3) > 0 {
			w.Flags |= rdma.SendSignaled
		}
		if s.rng.IntN(3) == 0 {
			w.Flags |= rdma.SendSolicited
		}
		size := s.rng.IntN(simRecvSize)
		if s.rng.IntN(3) == 0 {
			size = s.rng.IntN(60)
		}
		var payload []byte
		inline := size <= 64 && s.rng.IntN(2) == 0
		switch s.rng.IntN(5) {
		case 0, 1:
			w.Op = rdma.OpSend
		case 2:
			w.Op = rdma.OpWrite
		case 3:
			w.Op = rdma.OpWriteImm
			w.Imm = s.rng.Uint32()
		case 4:
			w.Op = rdma.OpRead
		}
		if w.Op == rdma.OpRead {
			size = min(size*3, simRegion-rd)
			w.SGL = []rdma.SGE{n.get.sge(rd, size)}
			w.RemoteAddr, w.RKey = p.src.addr+uint64(rd), p.src.rkey
			copy(n.wantGet[rd:], p.src.buf[rd:rd+size])
			rd += size
		} else {
			left := size
			for g := 0; g < 3 && !inline; g++ {
				c := left
				if g < 2 {
					c = s.rng.IntN(left + 1)
				}
				off := s.rng.IntN(simRegion - c)
				w.SGL = append(w.SGL, n.src.sge(off, c))
				payload = append(payload, n.src.buf[off:off+c]...)
				left -= c
			}
			if inline {
				payload = bytes.Clone(n.src.buf[k : k+size])
				w.Inline = payload
				w.Flags |= rdma.SendInline
			}
		}
		if w.Op == rdma.OpWrite || w.Op == rdma.OpWriteImm {
			if wr+size > simRegion {
				wr = 0
			}
			w.RemoteAddr, w.RKey = p.dst.addr+uint64(wr), p.dst.rkey
			copy(p.want[wr:], payload)
			wr += size
		}
		se := w.Flags&rdma.SendSolicited != 0
		switch w.Op {
		case rdma.OpSend:
			p.wantRx = append(p.wantRx, fmt.Sprintf("RECV %x se=%v", payload, se))
		case rdma.OpWriteImm:
			p.wantRx = append(p.wantRx, fmt.Sprintf("IMM %d %x se=%v", size, w.Imm, se))
		}
		if w.Flags&rdma.SendSignaled != 0 {
			n.wantWC = append(n.wantWC, fmt.Sprintf("%d %v success", k, w.Op))
		}
		n.todo = append(n.todo, w)
	}
}

// work lets node i post, poll and send.
func (s *sim) work(i int) {
	n := s.n[i]
	var wcs [4]wq.Completion
	for {
		k := n.q.PollWC(wcs[:])
		for _, c := range wcs[:k] {
			s.completed(n, &c)
		}
		if k == 0 {
			break
		}
	}
	if s.rng.IntN(4) > 0 && n.posted < len(n.todo) {
		m := min(len(n.todo)-n.posted, 1+s.rng.IntN(4))
		k, err := n.q.PostSend(s.now, n.todo[n.posted:n.posted+m])
		if err != nil && !errors.Is(err, rdma.ErrQueueFull) {
			s.tb.Fatal(err)
		}
		n.posted += k
	}
	if s.rng.IntN(10) >= s.f.noBuffers { // or the peer gets RNR NAKs
		for n.q.rsp.tail-n.q.rsp.head+uint32(n.q.wcs.Recvs()) < simRecvs {
			wr := rdma.RecvWR{ID: uint64(n.rxSlot), SGE: n.rcv.sge(n.rxSlot*simRecvSize, simRecvSize)}
			if _, err := n.q.PostRecv([]rdma.RecvWR{wr}); err != nil {
				s.tb.Fatal(err)
			}
			n.rxSlot = (n.rxSlot + 1) % simRecvs
		}
	}
	if s.rng.IntN(50) == 0 {
		n.q.ForgetMemory(time.Time{})
	}
	var tx [5]TxPacket
	for k := len(tx); k == len(tx); {
		k = n.q.PollTx(s.now, tx[:])
		for j := range k {
			s.transmit(1-i, bytesOf(&tx[j], &n.icrc))
		}
	}
}

func (s *sim) completed(n *node, c *wq.Completion) {
	if c.Send {
		n.gotWC = append(n.gotWC, fmt.Sprintf("%d %v %v", c.WC.ID, c.WC.Op, c.WC.Status))
		return
	}
	if c.WC.Status != rdma.StatusSuccess {
		s.tb.Fatalf("receive: %v", c.WC.Status)
	}
	if c.WC.Op == rdma.OpRecv {
		b := n.rcv.buf[int(c.WC.ID)*simRecvSize:][:c.WC.Bytes]
		n.gotRx = append(n.gotRx, fmt.Sprintf("RECV %x se=%v", b, c.WC.Solicit))
		return
	}
	n.gotRx = append(n.gotRx, fmt.Sprintf("IMM %d %x se=%v", c.WC.Bytes, c.WC.Imm, c.WC.Solicit))
}

// transmit gives a packet to the network.
func (s *sim) transmit(to int, raw []byte) {
	for s.rng.Float64() >= s.f.loss {
		d := 50 * time.Microsecond
		if s.f.jitter > 0 && s.rng.IntN(4) == 0 {
			d += time.Duration(s.rng.Int64N(int64(s.f.jitter)))
		}
		b := raw
		if s.rng.Float64() < s.f.corrupt {
			b = bytes.Clone(raw)
			b[s.rng.IntN(len(b))] ^= 1 << s.rng.IntN(8)
		}
		s.seq++
		heap.Push(&s.queue, flight{s.now.Add(d), s.seq, to, b})
		if s.rng.Float64() >= s.f.dup {
			return
		}
	}
}

// step advances to the next thing that happens.
func (s *sim) step() {
	at := s.now.Add(time.Millisecond) // the programs look around
	if len(s.queue) > 0 && s.queue[0].at.Before(at) {
		at = s.queue[0].at
	}
	for _, n := range s.n {
		if t, ok := n.q.NextTimeout(); ok && t.Before(at) {
			at = t
		}
	}
	if at.After(s.now) {
		s.now = at
	}
	for len(s.queue) > 0 && !s.queue[0].at.After(s.now) {
		f := heap.Pop(&s.queue).(flight)
		n := s.n[f.to]
		if !n.peer.Check(f.raw, 0) {
			continue
		}
		var p Packet
		if err := p.Parse(f.raw); err != nil {
			s.tb.Fatalf("packet with right ICRC: %v", err)
		}
		n.q.HandlePacket(s.now, &p)
		if s.rng.IntN(2) == 0 {
			s.work(f.to)
		}
	}
	for i, n := range s.n {
		if t, ok := n.q.NextTimeout(); ok && !t.After(s.now) {
			n.q.HandleTimeout(s.now)
		}
		s.work(i)
	}
}

func (s *sim) done() bool {
	for _, n := range s.n {
		if n.posted < len(n.todo) || !n.q.req.queue.isEmpty() || len(n.gotWC) < len(n.wantWC) {
			return false
		}
	}
	return true
}

// run goes on until all work is done.
func (s *sim) run() {
	for i := 0; !s.done(); i++ {
		if i > 200000 {
			s.tb.Fatalf("not done after %d steps: %+v %+v", i, s.n[0].q.stats, s.n[1].q.stats)
		}
		for _, n := range s.n {
			if n.q.State() != rdma.QPRTS {
				ev, _ := n.q.PollEvent()
				s.tb.Fatalf("queue pair died: %v", ev.Err)
			}
		}
		s.step()
	}
	for i, n := range s.n {
		n.mem.intact(s.tb)
		if d := firstDiff(n.wantWC, n.gotWC); d != "" {
			s.tb.Fatalf("send completions of node %d: %s", i, d)
		}
		if d := firstDiff(n.wantRx, n.gotRx); d != "" {
			s.tb.Fatalf("receive completions of node %d: %s", i, d)
		}
		if !bytes.Equal(n.want, n.dst.buf) {
			s.tb.Fatalf("memory written at node %d differs", i)
		}
		if !bytes.Equal(n.wantGet, n.get.buf) {
			s.tb.Fatalf("memory read by node %d differs", i)
		}
	}
}

func firstDiff(want, got []string) string {
	for i := range max(len(want), len(got)) {
		switch {
		case i >= len(got):
			return fmt.Sprintf("number %d of %d is missing: %.60s", i, len(want), want[i])
		case i >= len(want):
			return fmt.Sprintf("number %d is one too many: %.60s", i, got[i])
		case want[i] != got[i]:
			return fmt.Sprintf("number %d is %.60s, want %.60s", i, got[i], want[i])
		}
	}
	return ""
}

// TestSim runs two queue pairs against each other, both sending a random mix
// over a network with faults, and compares memory and completions.
func TestSim(t *testing.T) {
	tests := []struct {
		name string
		f    faults
	}{
		{"clean", faults{}},
		{"loss", faults{loss: 0.05}},
		{"duplication", faults{dup: 0.1}},
		{"reordering", faults{jitter: 300 * time.Microsecond}},
		{"corruption", faults{corrupt: 0.05}},
		{"slow receiver", faults{noBuffers: 9}},
		{"slow receiver and loss", faults{noBuffers: 9, loss: 0.05, dup: 0.05}},
		{"all", faults{loss: 0.02, dup: 0.02, corrupt: 0.02, jitter: 100 * time.Microsecond, noBuffers: 5}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			first := testenv.Seed(t)
			for seed := first; seed != first+10; seed++ {
				t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { simulate(t, seed, tt.f) })
			}
		})
	}
}

func simulate(tb testing.TB, seed uint64, f faults) *sim {
	s := newSim(tb, seed, f)
	s.plan(0, 60)
	s.plan(1, 60)
	s.run()
	return s
}
