// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "play the schedule of this seed only")
	simBase  = flag.Uint64("sim.base", 1, "play the schedules that this number stands for, in the order of their seeds; 0 draws one")
	simCount = flag.Int("sim.schedules", 400, "play so many schedules, or a seventh of them with -short")
)

const (
	simPart  = 70_000 // the longest message: two segments
	simDepth = 8
	simSlots = simDepth + 2 // nothing is used again before it was looked at
)

// Memory of a side, in parts: one to send from, which does not change, and slots to receive into, to be written by
// the peer, and for what READs bring.
const (
	simRecvs  = 1
	simWrites = simRecvs + simSlots
	simSinks  = simWrites + simSlots
	simParts  = simSinks + simSlots
)

// simWork is a request that has not completed.
type simWork struct {
	id      uint64
	op      rdma.Opcode
	arrived []byte // where its bytes must be when it completes, if that is known
	want    []byte
}

// simMessage is a message that takes a receive.
type simMessage struct {
	op    rdma.Opcode
	imm   uint32
	place []byte // of a Write
	want  []byte
}

// simRecv is a receive that has not completed.
type simRecv struct {
	id    uint64
	place []byte
}

// simSide is what a simulation knows of one side's work.
type simSide struct {
	*side
	sends           []simWork
	recvs           []simRecv
	coming          []simMessage
	id              uint64
	nrecv, nwr, nrd int
	received        int
}

func (s *simSide) part(i int) []byte { return s.mr.buf[i*simPart : (i+1)*simPart] }

// TestSim_faultyStreams plays random work of both sides over streams that come in pieces, stall, and
// sometimes break. What completes as received is what was sent; each request completes once, in order; what is
// written or read is right when it completes; and nothing stalls.
func TestSim_faultyStreams(t *testing.T) {
	if *simSeed != 0 {
		simulate(t, *simSeed)
		return
	}
	runs := *simCount
	if testing.Short() {
		runs = max(runs/7, 1)
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
	messages, cuts := 0, 0
	for range runs {
		seed = seeds.Uint64() | 1
		n, cut := simulate(t, seed)
		messages += n
		if cut {
			cuts++
		}
	}
	if messages < runs*10 || cuts < runs/20 {
		t.Errorf("%d messages and %d cuts in %d runs: this tests too little", messages, cuts, runs)
	}
}

// sim is a run.
type sim struct {
	*duo
	seed  uint64
	size  int
	sides [2]*simSide
	cut   bool
}

func (m *sim) fatalf(format string, args ...any) {
	m.t.Helper()
	m.t.Logf("seed %d", m.seed)
	m.t.Fatalf(format, args...)
}

func simulate(t *testing.T, seed uint64) (messages int, cut bool) {
	rng := rand.New(rand.NewPCG(seed, 99))
	a := reliable()
	a.ReadWindow = uint16(1 + rng.IntN(4))
	pieces := []int{1, 30, 700, 5000, 70_000, 0}
	m := &sim{seed: seed, size: simPart}
	m.duo = newDuo(t, duoConfig{
		attr: a, depth: 1 + rng.IntN(simDepth), bytes: simParts * simPart, piece: pieces[rng.IntN(len(pieces))], seed: seed,
		first: rng.Uint32(), inline: 32,
	})
	if m.piece == 1 {
		m.size = 2000
	}
	m.sides = [2]*simSide{{side: m.x}, {side: m.y}}
	for i, s := range m.sides {
		fillWith(s.part(0), byte(i*100)+byte(seed))
	}
	breaks := rng.IntN(4) == 0
	for range 150 {
		i := rng.IntN(2)
		s, o := m.sides[i], m.sides[1-i]
		switch k := rng.IntN(10); {
		case k < 3:
			m.recv(s)
		case k < 7:
			m.send(s, o, rng)
		case k == 7:
			s.deaf = !s.deaf
		case k == 8:
			s.ForgetMemory(time.Time{})
		default:
			m.now = m.now.Add(time.Duration(rng.IntN(2000)) * time.Microsecond)
			s.HandleTimeout(m.now)
		}
		for range rng.IntN(30) {
			m.step(m.sides[rng.IntN(2)].side)
			m.check()
		}
		if breaks && rng.IntN(60) == 0 {
			m.x.broken, m.y.broken, m.cut = true, true, true
		}
	}
	m.finish()
	for _, s := range m.sides {
		if len(s.sends)+len(s.recvs) > 0 {
			m.fatalf("%d sends and %d receives never completed", len(s.sends), len(s.recvs))
		}
		s.mem.intact(t)
		messages += s.received
	}
	m.wantOver("end")
	return messages, m.cut
}

// finish lets everything end: there are receives for what is on its way.
func (m *sim) finish() {
	m.x.deaf, m.y.deaf = false, false
	if m.piece > 0 {
		m.piece = max(m.piece, 500)
	}
	for range 100 {
		for _, s := range m.sides {
			m.recv(s)
		}
		for range 1000 {
			if a, b := m.step(m.x), m.step(m.y); !a && !b {
				break
			}
			m.check()
		}
		for _, s := range m.sides {
			if at, ok := s.NextTimeout(); ok && !m.cut {
				m.now = at
				s.HandleTimeout(at)
			}
		}
		if len(m.sides[0].sends)+len(m.sides[1].sends) == 0 {
			break
		}
	}
	if !m.cut {
		for i, s := range m.sides {
			if len(s.sends)+len(s.coming) > 0 {
				m.fatalf("side %d stalled: %d sends, %d messages to come", i, len(s.sends), len(s.coming))
			}
		}
		if err := m.x.Disconnect(m.now); err != nil {
			m.fatalf("disconnect: %v", err)
		}
		m.cut = true
		m.run()
		m.check()
		m.cut = false
		return
	}
	m.run()
	m.check()
}

func (m *sim) recv(s *simSide) {
	if s.State() != rdma.QPRTS {
		return
	}
	at := (simRecvs + s.nrecv%simSlots) * simPart
	half := m.size / 2
	n, err := s.PostRecv([]rdma.RecvWR{{ID: s.id + 1, SGE: s.mr.sge(at, half), Spill: s.mr.sge(at+half, m.size-half)}})
	if n == 1 && err == nil {
		s.id++
		s.recvs = append(s.recvs, simRecv{s.id, s.mr.buf[at : at+m.size]})
		s.nrecv++
	}
}

func (m *sim) send(s, o *simSide, rng *rand.Rand) {
	if s.State() != rdma.QPRTS {
		return
	}
	n := rng.IntN(m.size + 1)
	if rng.IntN(2) == 0 {
		n = rng.IntN(200)
	}
	off := rng.IntN(simPart - n + 1)
	data := s.part(0)[off : off+n]
	w := rdma.SendWR{
		ID: s.id + 1, Op: []rdma.Opcode{rdma.OpSend, rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead}[rng.IntN(5)],
		Flags: rdma.SendSignaled, SGL: []rdma.SGE{s.mr.sge(off, n/2), s.mr.sge(off+n/2, n-n/2)}, Imm: rng.Uint32(), RKey: o.mr.rkey,
	}
	work := simWork{id: w.ID, op: w.Op, want: data}
	msg := simMessage{op: rdma.OpRecv, imm: w.Imm, want: data}
	switch w.Op {
	case rdma.OpRead:
		at := (simSinks + s.nrd%simSlots) * simPart
		w.SGL, w.RemoteAddr = []rdma.SGE{s.mr.sge(at, n)}, o.mr.addr+uint64(off)
		work.arrived, work.want = s.mr.buf[at:at+n], o.part(0)[off:off+n]
	case rdma.OpWrite, rdma.OpWriteImm:
		at := (simWrites + s.nwr%simSlots) * simPart
		w.RemoteAddr = o.mr.addr + uint64(at)
		work.arrived = o.mr.buf[at : at+n]
		msg.op, msg.place = rdma.OpRecvWriteImm, work.arrived
	default:
		w.Flags |= rdma.SendImm
		if n <= 32 && rng.IntN(2) == 0 {
			w.Flags, w.SGL, w.Inline = w.Flags|rdma.SendInline, nil, data
		}
	}
	if k, err := s.PostSend(m.now, []rdma.SendWR{w}); k != 1 || err != nil {
		return
	}
	s.id++
	s.sends = append(s.sends, work)
	s.nrd++
	s.nwr++
	if w.Op == rdma.OpSend || w.Op == rdma.OpWriteImm {
		o.coming = append(o.coming, msg)
	}
}

// check looks at the completions of both sides.
func (m *sim) check() {
	for _, s := range m.sides {
		for _, c := range s.take() {
			ok := c.Status == rdma.StatusSuccess
			switch {
			case !ok && !m.cut:
				m.fatalf("completion %+v (%v), events %+v", c, c.Status, s.events)
			case c.Op == rdma.OpRecv || c.Op == rdma.OpRecvWriteImm:
				if len(s.recvs) == 0 || s.recvs[0].id != c.ID {
					m.fatalf("receive %d completed, outstanding %+v", c.ID, s.recvs)
				}
				r := s.recvs[0]
				s.recvs = s.recvs[1:]
				if ok {
					m.received(s, c, r.place)
				}
			default:
				if len(s.sends) == 0 || s.sends[0].id != c.ID || s.sends[0].op != c.Op {
					m.fatalf("%+v completed, outstanding %d", c, len(s.sends))
				}
				w := s.sends[0]
				s.sends = s.sends[1:]
				if ok && w.arrived != nil && !bytes.Equal(w.arrived, w.want) {
					m.fatalf("%v %d of %d bytes completed and is not where it belongs", c.Op, c.ID, len(w.want))
				}
			}
		}
	}
}

func (m *sim) received(s *simSide, c rdma.WC, place []byte) {
	if len(s.coming) == 0 {
		m.fatalf("received %+v, which nobody sent", c)
	}
	want := s.coming[0]
	s.coming = s.coming[1:]
	if want.place != nil {
		place = want.place
	}
	if c.Op != want.op || int(c.Bytes) != len(want.want) || !c.HasImm || c.Imm != want.imm {
		m.fatalf("received %+v, want %v of %d bytes with %#x", c, want.op, len(want.want), want.imm)
	}
	if !bytes.Equal(place[:c.Bytes], want.want) {
		m.fatalf("contents of %+v differ", c)
	}
	s.received++
}
