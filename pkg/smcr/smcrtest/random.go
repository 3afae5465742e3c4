// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Random draws a world and what happens in it. The seed decides.
func Random(seed uint64) Schedule {
	rng := rand.New(rand.NewPCG(seed, 2))
	g := &generator{rng: rng, cfg: Config{
		Seed: seed, Peers: 2, Delays: rng.IntN(2) == 0,
		RMBESizes:   []uint32{16 << 10, 32 << 10, 64 << 10}[:1+rng.IntN(3)],
		SendBuffers: []uint32{4 << 10, 16 << 10, 64 << 10},
		Releases:    true,
		Interrupts:  seed&2 == 0, // not drawn, so that a seed means what it did
		Subnets:     seed&4 == 0,
	}}
	if rng.IntN(10) == 0 {
		g.cfg.Peers = 3
	}
	if rng.IntN(3) == 0 {
		g.cfg.Loss = 1 + rng.IntN(50)
	}
	if rng.IntN(3) == 0 {
		g.cfg.Retry = 50 * time.Millisecond
	}
	for i := range g.cfg.Peers {
		g.cfg.RNICs[i] = []int{1, 2, 2, 2, 3}[rng.IntN(5)]
	}
	switch rng.IntN(6) {
	case 0:
		g.cfg.RFC = true
		for i := range g.cfg.Peers {
			g.cfg.MaxLinks[i] = []int{0, 1, 2, 3, 8}[rng.IntN(5)]
			g.cfg.RNICs[i] = 1 + rng.IntN(8)
		}
	case 1, 2:
		g.cfg.Linux[rng.IntN(2)] = true
		if rng.IntN(8) == 0 {
			g.cfg.Linux[0], g.cfg.Linux[1] = true, true // the model against itself
		}
	}
	if !g.cfg.RFC && rng.IntN(2) == 0 {
		g.version2()
	}
	if rng.IntN(4) == 0 {
		g.cfg.Declines = 1 + rng.IntN(100)
	}
	if rng.IntN(3) > 0 {
		g.faults = 10 + rng.IntN(50)
	}
	g.gentle = rng.IntN(3) == 0
	g.aborts = rng.IntN(2) == 0
	if rng.IntN(6) == 0 {
		g.slow, g.faults = true, 4+rng.IntN(20)
	}
	conns := 1 + rng.IntN(8)
	for range 40 + rng.IntN(400) {
		g.step(conns)
	}
	return Schedule{g.cfg, g.ops}
}

// version2 gives peers version 2 in all mixtures; some have nothing in common.
func (g *generator) version2() {
	rng := g.rng
	g.cfg.Routed = rng.IntN(3) == 0
	for i := range g.cfg.Peers {
		g.cfg.Versions[i] = []int{1, 2, 3, 3, 3, 3}[rng.IntN(6)]
		g.cfg.EIDs[i] = []int{1, 1, 1, 2, 3}[rng.IntN(5)]
		g.cfg.Release[i] = rng.IntN(2)
		if rng.IntN(3) == 0 { // so that groups are full soon
			g.cfg.MaxConns[i] = 16 + rng.IntN(4)
		}
		if !g.cfg.Linux[i] {
			g.cfg.MaxLinks[i] = []int{0, 1, 2, 3, 8}[rng.IntN(5)]
		}
	}
	if rng.IntN(4) == 0 {
		from := rng.IntN(g.cfg.Peers)
		n := 20 + rng.IntN(20)
		g.add(Op{Kind: OpBurst, Name: "b", Peer: from, To: (from + 1) % g.cfg.Peers, N: n})
		if rng.IntN(2) == 0 { // more messages at once than a link takes
			g.add(Op{Kind: OpRun, D: time.Duration(rng.IntN(50)) * time.Millisecond})
			for i := range 4 * n {
				g.add(Op{Kind: OpWrite, Name: fmt.Sprintf("b%d", i%n), N: 1 + rng.IntN(100)})
			}
		}
		for i := range 5 {
			g.names = append(g.names, fmt.Sprintf("b%d", 4*i))
		}
	}
}

// generator draws the events of a schedule.
type generator struct {
	rng    *rand.Rand
	cfg    Config
	ops    []Op
	names  []string
	opened int
	faults int  // one in so many steps; 0 is none
	gentle bool // the first RNIC of each peer stays sound
	slow   bool // the only fault is that RNICs are slow
	aborts bool
}

func (g *generator) add(o Op) { g.ops = append(g.ops, o) }

func (g *generator) step(conns int) {
	rng := g.rng
	if len(g.names) < conns && rng.IntN(len(g.names)*4+2) == 0 {
		g.connect()
	}
	if len(g.names) > 0 {
		i := rng.IntN(len(g.names))
		if g.use(g.names[i]) {
			g.names = append(g.names[:i], g.names[i+1:]...)
		}
	}
	if g.faults > 0 && rng.IntN(g.faults) == 0 {
		if g.slow {
			g.slowDown()
		} else {
			g.fault()
		}
	}
	if rng.IntN(3) == 0 {
		g.add(Op{Kind: OpRun, D: time.Duration(rng.IntN(200)) * time.Microsecond})
	}
	switch rng.IntN(60) {
	case 0:
		g.add(Op{Kind: OpRun, D: time.Duration(rng.IntN(20)) * time.Second})
	case 1, 2:
		g.add(Op{Kind: OpRun, D: time.Duration(rng.IntN(300)) * time.Millisecond})
	case 3:
		if rng.IntN(10) == 0 {
			g.add(Op{Kind: OpEnd, Peer: rng.IntN(g.cfg.Peers)})
		}
	}
}

func (g *generator) connect() {
	g.opened++
	name := fmt.Sprintf("c%d", g.opened)
	g.names = append(g.names, name)
	from := g.rng.IntN(g.cfg.Peers)
	g.add(Op{Kind: OpConnect, Name: name, Peer: from, To: (from + 1 + g.rng.IntN(g.cfg.Peers-1)) % g.cfg.Peers})
}

// use does something with a connection; true when it is over for its
// applications.
func (g *generator) use(name string) bool {
	side := g.rng.IntN(2)
	n := g.rng.IntN(40_000)
	switch k := g.rng.IntN(100); {
	case k < 45:
		g.add(Op{Kind: OpWrite, Name: name, Side: side, N: n})
	case k < 94:
		g.add(Op{Kind: OpRead, Name: name, Side: side, N: n})
	case k < 95:
		g.add(Op{Kind: OpShutdown, Name: name, Side: side})
	case k < 96:
		g.add(Op{Kind: OpClose, Name: name, Side: side})
	case k < 97 && g.aborts:
		g.add(Op{Kind: OpAbort, Name: name, Side: side})
	case k < 98:
		g.add(Op{Kind: OpClose, Name: name, Side: 0})
		g.add(Op{Kind: OpClose, Name: name, Side: 1})
		return true
	case k < 99 && g.faults > 0 && !g.gentle && !g.slow:
		g.churn(name)
		return true
	}
	return false
}

// churn ends a connection with data under way while its link is lost, and
// makes another one, which may get the RMBE.
func (g *generator) churn(name string) {
	rng := g.rng
	pause := func(d time.Duration) { g.add(Op{Kind: OpRun, D: time.Duration(rng.Int64N(int64(d)))}) }
	side := rng.IntN(2)
	g.add(Op{Kind: OpWrite, Name: name, Side: side, N: rng.IntN(10_000)})
	pause(40 * time.Microsecond)
	g.add(Op{Kind: OpRead, Name: name, Side: 1 - side, N: 10_000})
	for _, s := range []int{side, 1 - side} {
		g.add(Op{Kind: OpClose, Name: name, Side: s})
		pause(60 * time.Microsecond)
	}
	pause(100 * time.Microsecond)
	g.connect()
	pause(100 * time.Microsecond)
	g.add(Op{Kind: OpKillLink, Peer: rng.IntN(g.cfg.Peers), Side: rng.IntN(3) - 1, Link: rng.IntN(2)})
	pause(500 * time.Microsecond)
}

// slowDown makes an RNIC of each of two peers slow, about as long as a link may be
// silent and longer, while something is under way.
func (g *generator) slowDown() {
	rng := g.rng
	for _, peer := range rng.Perm(g.cfg.Peers)[:2] {
		d := time.Duration(rng.IntN(900)) * time.Millisecond
		g.add(Op{Kind: OpSlow, Peer: peer, RNIC: rng.IntN(g.cfg.RNICs[peer]), D: d})
		for range rng.IntN(4) {
			if len(g.names) > 0 {
				g.add(Op{Kind: OpWrite, Name: g.names[rng.IntN(len(g.names))], Side: rng.IntN(2), N: 1 + rng.IntN(1000)})
			}
		}
		g.add(Op{Kind: OpRun, D: time.Duration(rng.IntN(300)) * time.Millisecond})
	}
	g.add(Op{Kind: OpRun, D: 2 * time.Second})
}

// fault breaks something, or mends it.
func (g *generator) fault() {
	rng := g.rng
	peer := rng.IntN(g.cfg.Peers)
	nic := rng.IntN(g.cfg.RNICs[peer])
	kinds, link := 30, rng.IntN(3)
	if g.gentle {
		if nic == 0 {
			return
		}
		kinds, link = 28, 1+rng.IntN(2)
	}
	switch k := rng.IntN(kinds); {
	case k < 6:
		g.add(Op{Kind: OpPortDown, Peer: peer, RNIC: nic})
	case k < 12:
		g.add(Op{Kind: OpPortUp, Peer: peer, RNIC: nic})
	case k < 14:
		g.add(Op{Kind: OpRemove, Peer: peer, RNIC: nic})
	case k < 16:
		g.add(Op{Kind: OpInsert, Peer: peer, RNIC: nic})
	case k < 20:
		g.add(Op{Kind: OpBlackhole, Peer: peer, RNIC: nic, Dir: Direction(rng.IntN(3))})
	case k < 24:
		g.add(Op{Kind: OpHeal, Peer: peer, RNIC: nic})
	case k < 28:
		g.add(Op{Kind: OpKillLink, Peer: peer, Side: rng.IntN(3) - 1, Link: link})
	case k < 29:
		g.add(Op{Kind: OpJumpClock, Peer: peer, D: time.Duration(rng.IntN(100_000)) * time.Millisecond})
	default:
		g.add(Op{Kind: OpRestart, Peer: peer})
	}
}
