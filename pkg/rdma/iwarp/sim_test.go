// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "play the schedule of this seed only")
	simBase  = flag.Uint64("sim.base", 1, "play the schedules that this number stands for, in the order of their seeds; 0 draws one")
	simCount = flag.Int("sim.schedules", 150, "play so many schedules")
)

// TestSim runs two queue pairs on streams that come in pieces, stall, are damaged and end,
// as a seed draws it. Without damage every byte arrives and every work request completes;
// with it, both queue pairs fail, nothing is placed outside, and every work request still
// completes once.
func TestSim(t *testing.T) {
	if *simSeed != 0 {
		newSim(t, *simSeed).run()
		return
	}
	base, seed := *simBase, uint64(0)
	if base == 0 {
		base = uint64(time.Now().UnixNano())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("repeat it with -sim.seed=%d, which is of -sim.base=%d", seed, base)
		}
	})
	seeds := rand.New(rand.NewPCG(base, 1))
	for range *simCount {
		seed = seeds.Uint64() | 1
		newSim(t, seed).run()
		if t.Failed() {
			return
		}
	}
}

type sim struct {
	*twoSides
	seed   uint64
	rnd    *rand.Rand
	damage string
	at     int // bytes from a to b, or back, before the damage
	fromA  bool
	moved  [2]int
	done   bool
	posted [2]map[uint64]bool
	next   uint64
	credit [2]int // receives of the peer that no SEND was posted for
	model  []byte // what the peer's memory must be: of WRITEs of a
}

func newSim(tb testing.TB, seed uint64) *sim {
	s := &sim{twoSides: newTwoSides(tb), seed: seed, rnd: rand.New(rand.NewPCG(seed, 7))}
	s.damage = []string{"", "", "flip", "cut", "end", "region"}[s.rnd.IntN(6)]
	s.at = 24 + s.rnd.IntN(200_000)
	s.fromA = s.rnd.IntN(3) > 0
	s.posted = [2]map[uint64]bool{{}, {}}
	s.credit = [2]int{8, 8}
	s.model = make([]byte, 256<<10)
	return s
}

func (s *sim) fatalf(format string, args ...any) {
	s.tb.Helper()
	s.tb.Fatalf("seed %d (%q): %s", s.seed, s.damage, fmt.Sprintf(format, args...))
}

// Each side's memory: what is sent from, from 0; WRITEs of the peer from 256 KiB;
// receives from 512 KiB, READs into from 768 KiB.
const simPart = 256 << 10

func (s *sim) run() {
	for _, x := range []*side{s.a, s.b} {
		fill(x.mr.buf[:simPart], byte(len(x.name)))
		if s.rnd.IntN(2) == 0 {
			x.mr.access |= rdma.StableRead
		}
		s.postRecvs(x)
	}
	// Without CRC damage can go unseen.
	noCRC := s.rnd.IntN(2) == 0 && s.damage != "flip"
	sizes := []int{MinULPDU, 1442, 9000, MaxOwnULPDU}
	s.connect(
		Startup{PeerToPeer: s.rnd.IntN(2) == 0, NoCRC: noCRC, IRD: 1 + s.rnd.IntN(4), ORD: 1 + s.rnd.IntN(4), MaxULPDU: sizes[s.rnd.IntN(4)]},
		Startup{NoCRC: noCRC, MaxULPDU: sizes[s.rnd.IntN(4)]},
	)
	for range 300 {
		for i, x := range []*side{s.a, s.b} {
			if s.rnd.IntN(4) == 0 && x.q.State() == rdma.QPRTS {
				s.post(i, x)
			}
		}
		s.move()
		s.reap()
	}
	for range 1_000_000 {
		if !s.move() && s.quiet() {
			break
		}
		s.reap()
	}
	s.check()
}

// move passes some bytes in one direction, or stalls.
func (s *sim) move() bool {
	limit := []int{1, 7, 1000, 1 << 20}[s.rnd.IntN(4)]
	from, to, i := s.a, s.b, 0
	if s.rnd.IntN(2) == 0 {
		from, to, i = s.b, s.a, 1
	}
	if from.cut {
		return false
	}
	before := from.transmit(s.now, limit)
	b := from.sent
	from.sent = from.sent[:0]
	s.moved[i] += before
	hit := !s.done && s.damage != "" && s.moved[i] >= s.at && (i == 0) == s.fromA && before > 0
	if hit {
		s.done = true
		switch s.damage {
		case "flip":
			b[s.rnd.IntN(len(b))] ^= 1 << s.rnd.IntN(8)
		case "end":
			b = b[:s.rnd.IntN(len(b)+1)]
		case "region":
			from.mr.gone = true
			from.q.ForgetMemory(s.now)
		}
	}
	if len(b) > 0 {
		_ = to.feed(s.now, b) // the state tells
	}
	if hit && (s.damage == "cut" || s.damage == "end") {
		for _, x := range []*side{s.a, s.b} {
			var err error
			if s.damage == "cut" {
				err = fmt.Errorf("reset")
			}
			x.q.HandleEnd(s.now, err)
			x.cut = true
		}
	}
	if from.q.TxEnded() && !from.cut {
		from.cut = true
		to.q.HandleEnd(s.now, nil)
		return true
	}
	return len(b) > 0
}

// quiet reports whether nothing will move any more.
func (s *sim) quiet() bool {
	for _, x := range []*side{s.a, s.b} {
		if !x.cut && (len(x.q.TxBuffers(s.now, nil)) > 0 || x.q.TxEnded()) {
			return false
		}
	}
	return true
}

func (s *sim) postRecvs(x *side) {
	for range 8 {
		s.next++
		s.posted[sideIndex(x)][s.next] = true
		x.recv(rdma.RecvWR{ID: s.next, SGE: x.mr.sge(2*simPart+s.rnd.IntN(1000), 20_000), Spill: x.mr.sge(2*simPart+30_000, 180_000)})
	}
}

func sideIndex(x *side) int { return len(x.name) - 1 }

func (s *sim) post(i int, x *side) {
	peer := []*side{s.b, s.a}[i]
	s.next++
	n := s.rnd.IntN([]int{1, 100, 3000, 150_000}[s.rnd.IntN(4)] + 1)
	off := s.rnd.IntN(simPart - n)
	k := s.rnd.IntN(n + 1)
	w := rdma.SendWR{ID: s.next, Flags: rdma.SendSignaled, RKey: peer.mr.rkey}
	kind := s.rnd.IntN(4)
	if s.credit[i] == 0 {
		kind %= 2
	}
	switch kind {
	case 0:
		w.Op = rdma.OpWrite
		w.RemoteAddr = peer.mr.addr + simPart + uint64(off)
		w.SGL = []rdma.SGE{x.mr.sge(off, k), x.mr.sge(off+k, n-k)}
	case 1:
		w.Op = rdma.OpRead
		w.RemoteAddr = peer.mr.addr + uint64(off)
		w.SGL = []rdma.SGE{x.mr.sge(3*simPart+off, n)}
	case 2:
		w.Op = rdma.OpSend
		w.SGL = []rdma.SGE{x.mr.sge(off, n)}
	default:
		w.Op, w.Flags = rdma.OpSend, w.Flags|rdma.SendInline
		w.Inline = x.mr.buf[off:][:min(n, 64)]
	}
	if took, err := x.q.PostSend(s.now, []rdma.SendWR{w}); took == 1 && err == nil {
		s.posted[i][w.ID] = true
		if w.Op == rdma.OpSend {
			s.credit[i]--
		}
		if i == 0 && w.Op == rdma.OpWrite {
			copy(s.model[off:], x.mr.buf[off:off+n])
		}
	}
}

// reap polls completions and posts receives again.
func (s *sim) reap() {
	for i, x := range []*side{s.a, s.b} {
		x.poll()
		recvs := 0
		for _, c := range x.wcs {
			if !s.posted[i][c.WC.ID] {
				s.fatalf("%s: %d completed and was not posted: %+v", x.name, c.WC.ID, c)
			}
			delete(s.posted[i], c.WC.ID)
			if c.WC.Op == rdma.OpRecv {
				recvs++
			}
		}
		x.wcs = x.wcs[:0]
		for range recvs {
			if x.q.State() == rdma.QPError {
				break
			}
			s.next++
			s.posted[i][s.next] = true
			s.credit[1-i]++
			x.recv(rdma.RecvWR{ID: s.next, SGE: x.mr.sge(2*simPart+s.rnd.IntN(1000), 20_000), Spill: x.mr.sge(2*simPart+30_000, 180_000)})
		}
	}
}

func (s *sim) check() {
	s.a.mem.intact(s.tb)
	s.b.mem.intact(s.tb)
	failed := s.a.q.State() == rdma.QPError || s.b.q.State() == rdma.QPError
	if failed != s.done && (s.done || s.damage != "region") {
		s.fatalf("damage done %t, but %v (%v) and %v (%v)", s.done, s.a.q.State(), s.a.q.Err(), s.b.q.State(), s.b.q.Err())
	}
	if failed {
		for i, x := range []*side{s.a, s.b} {
			if x.q.State() != rdma.QPError {
				s.fatalf("%s in %v, its peer failed: %v and %v", x.name, x.q.State(), s.a.q.Err(), s.b.q.Err())
			}
			s.reap()
			if len(s.posted[i]) > 0 {
				s.fatalf("%s: %v never completed", x.name, s.posted[i])
			}
		}
		return
	}
	// The responder may still hold what it sends.
	if s.b.q.start.gated {
		return
	}
	for i, x := range []*side{s.a, s.b} {
		if len(s.posted[i]) != 8 {
			s.fatalf("%s: %d work requests left, want its 8 receives; %v", x.name, len(s.posted[i]), x.q.Phase())
		}
	}
	if !bytes.Equal(s.b.mr.buf[simPart:2*simPart], s.model) {
		s.fatalf("WRITEs placed other bytes")
	}
	for i := range simPart {
		if v := s.a.mr.buf[3*simPart+i]; v != 0 && v != s.b.mr.buf[i] {
			s.fatalf("READs brought byte %d as %#x, want %#x", i, v, s.b.mr.buf[i])
		}
	}
	for _, x := range []*side{s.a, s.b} {
		if err := x.q.Modify(s.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
			s.fatalf("%v", err)
		}
	}
	s.reap()
	if len(s.posted[0])+len(s.posted[1]) > 0 {
		s.fatalf("receives were not flushed")
	}
}

// Bits of the first byte of FuzzQP's script.
const (
	fuzzInitiator = 16 << iota
	fuzzCRC
	fuzzWrong // CRCs stay as they are
)

// withCRCs gives each FPDU of a stream the CRC that belongs to it.
func withCRCs(b []byte) []byte {
	b = bytes.Clone(b)
	for rest := b; len(rest) >= lengthLen; {
		n := fpduLen(int(binary.BigEndian.Uint16(rest)))
		if n > len(rest) {
			break
		}
		binary.LittleEndian.PutUint32(rest[n-crcLen:], crc32.Checksum(rest[:n-crcLen], castagnoli))
		rest = rest[n:]
	}
	return b
}

// rightCRCs counts the FPDUs of a stream before the first one whose CRC is wrong.
func rightCRCs(b []byte) (n uint64) {
	f := Framing{CRC: true}
	for {
		_, size, err := f.Next(b)
		if err != nil {
			return n
		}
		b = b[size:]
		n++
	}
}

// FuzzQP gives a queue pair in OPEN, with work in both directions, a stream in pieces of
// any length. Whatever it is, nothing panics, no byte outside of what the peer may write
// changes, and every work request completes once. The script says how the stream is cut and what
// happens in between; its first byte, too, whether the queue pair is the initiator, and whether FPDUs have
// CRCs: they get the right ones then, mostly, so that the fuzzer gets beyond them.
func FuzzQP(f *testing.F) {
	for _, g := range golden {
		f.Add([]byte{3, 1, 200}, unhex(f, g.hex))
	}
	for _, s := range capturedStreams(f) {
		f.Add([]byte{50, 9}, s.initiator[s.segmentLen(0):])
		f.Add([]byte{255, 2}, s.responder[s.segmentLen(1):])
	}
	long := new(Framing{}).Append(nil, tagged(OpWrite, 0x107, 1<<40, 6000))
	f.Add([]byte{100, 7, 33, 254}, long)
	for _, g := range golden {
		for _, how := range []byte{fuzzInitiator, fuzzCRC, fuzzInitiator | fuzzCRC, fuzzCRC | fuzzWrong} {
			f.Add([]byte{how | 3, 1, 200}, unhex(f, g.hex))
		}
	}
	f.Fuzz(func(t *testing.T, script, in []byte) {
		if len(in) > 1<<16 || len(script) == 0 {
			return
		}
		start := Startup{Role: Responder, NoCRC: script[0]&fuzzCRC == 0}
		if script[0]&fuzzInitiator != 0 {
			start.Role = Initiator
		}
		if !start.NoCRC && script[0]&fuzzWrong == 0 {
			in = withCRCs(in)
		}
		r := newErrorRigOf(t, start, 1<<14)
		for i := range r.secret.buf {
			r.secret.buf[i] = 0x55
		}
		posted := map[uint64]bool{100: true, 101: true}
		right := rightCRCs(in)
		for i := uint64(1); len(in) > 0 && r.q.State() == rdma.QPRTS; i++ {
			step := script[int(i)%len(script)]
			if step&1 != 0 {
				ops := []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead}
				w := rdma.SendWR{ID: 1000 + i, Op: ops[step%3], Flags: rdma.SendSignaled, SGL: []rdma.SGE{r.mr.sge(100, int(step)*50)}}
				if n, _ := r.q.PostSend(r.now, []rdma.SendWR{w}); n == 1 {
					posted[w.ID] = true
				}
			}
			if step&2 != 0 {
				r.transmit(r.now, int(step))
			}
			if step&4 != 0 {
				r.q.ForgetMemory(r.now)
			}
			n := min(len(in), 1+int(step)*int(step))
			_ = r.feed(r.now, in[:n])
			in = in[n:]
		}
		if script[0]&8 != 0 {
			r.q.HandleEnd(r.now, nil)
		}
		for range 10_000 {
			if r.transmit(r.now, 1+int(script[0])*100) == 0 {
				break
			}
		}
		r.q.HandleTimeout(r.now.Add(time.Hour))
		if err := r.q.Modify(r.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
			t.Fatal(err)
		}
		r.poll()
		for _, c := range r.wcs {
			if !posted[c.WC.ID] {
				t.Fatalf("%d completed twice, or was not posted", c.WC.ID)
			}
			delete(posted, c.WC.ID)
		}
		if len(posted) != 0 {
			t.Fatalf("%v did not complete", posted)
		}
		if n := r.q.Stats().RxFPDUs; !start.NoCRC && n > right {
			t.Fatalf("%d FPDUs were taken, of which %d have the right CRC", n, right)
		}
		r.mem.intact(t)
		for i, v := range r.secret.buf {
			if v != 0x55 {
				t.Fatalf("byte %d of a region without rights was written", i)
			}
		}
	})
}

// FuzzStartup gives both roles a stream that is no start-up frame, or a strange one.
func FuzzStartup(f *testing.F) {
	for _, s := range capturedStreams(f) {
		f.Add(byte(0), s.responder)
		f.Add(byte(1), s.initiator)
		f.Add(byte(5), s.initiator)
	}
	f.Fuzz(func(t *testing.T, flags byte, in []byte) {
		if len(in) > rxBufferLen {
			return
		}
		now := time.Unix(1000, 0)
		a := newSideOf(t, "a", 4096, nil)
		s := Startup{Role: Role(flags & 1), PeerToPeer: flags&2 != 0, Exact: flags&4 != 0, IRD: 3, ORD: 3}
		if err := a.q.Start(now, s); err != nil {
			t.Fatal(err)
		}
		_ = a.feed(now, in)
		if a.q.Phase() == PhaseAsked {
			_ = a.q.Reply(now, Reply{Reject: flags&8 != 0})
		}
		for a.transmit(now, 1<<20) > 0 {
		}
		a.q.HandleEnd(now, nil)
		if st := a.q.State(); (st == rdma.QPInit) != (a.q.Phase() == PhaseFailed) {
			t.Fatalf("%v in %v", st, a.q.Phase())
		}
		a.mem.intact(t)
	})
}
