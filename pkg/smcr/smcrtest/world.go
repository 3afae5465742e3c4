// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// MaxPeers is how many peers a world may have.
const MaxPeers = 4

// Config describes a world. The zero value is two peers of this project with
// one RNIC each on a good network, in Linux's dialect.
type Config struct {
	Seed  uint64
	Peers int // 0 means 2
	// RNICs of each peer; 0 means 1.
	RNICs [MaxPeers]int
	// MaxLinks that each peer of this project allows; 0 is its default.
	MaxLinks [MaxPeers]int
	// Routed puts a router between the peers: version 2 only.
	Routed bool
	// Subnets puts RNICs of the same number into a subnet. Peers of this project know that, and prefer links
	// within one to those across, which work as well.
	Subnets bool
	// Versions of each peer: bit 0 is version 1, bit 1 version 2; 0 means
	// version 1. The rest is about version 2: the set of enterprise IDs, of which
	// there are two, 0 being the first one, and the release.
	Versions, EIDs, Release [MaxPeers]int
	// MaxConns of each peer on a group; 0 is its default.
	MaxConns [MaxPeers]int
	// Declines is how many of 1000 rendezvous each side declines for no reason.
	Declines int
	// Linux makes a peer the model of the kernel.
	Linux [MaxPeers]bool
	// Interrupts has the model take a DELETE LINK, about whatever link, for the end of a link
	// that it is adding, as Linux 6.12 does. Without, one is kept until that link is added or
	// given up, as §3.5.5.3.1 has servers do, and more are lost.
	Interrupts bool
	// RFC removes the flags from CONFIRM LINK under way, so that both peers
	// take the dialect with RMBE eye catchers.
	RFC bool
	// RMBESizes and SendBuffers are chosen from for each connection or group.
	RMBESizes   []uint32
	SendBuffers []uint32
	// Releases has some groups give their RMBs back soon after the last connection, and
	// some later.
	Releases bool
	// Handover has each group of this project replaced, after every so many things that
	// happened to it, by one that is restored from its snapshot; 0: never. Nothing else in
	// the world changes by that.
	Handover int
	// Delays makes messages and completions late now and then.
	Delays bool
	// Loss is the share of packets that are sent again, of 1000.
	Loss int
	// Retry is how long a queue pair sends again before it fails; 0 draws
	// from 1 to 4 s for each one, which is what RNICs do.
	Retry time.Duration
}

// World is the peers, what is under way between them, and the time. It belongs
// to one goroutine.
type World struct {
	cfg    Config
	rng    *rand.Rand
	now    time.Time
	start  time.Time
	events eventHeap
	seq    uint64
	peers  []*host
	holes  map[wire]bool
	paths  []*path
	qps    map[rdma.QPN]*qp
	conns  map[string]*pair
	talks  []*talk
	keys   uint32 // RKeys and QPNs given out so far
	tokens uint32
	errs   []error
	writes int // RDMA writes delivered
	// faulted: something happened that may make a rendezvous fail.
	faulted bool
	// slowed: an RNIC was slow, which may be as long as a rendezvous waits.
	slowed  bool
	holed   bool // there was a blackhole
	trace   func(format string, args ...any)
	tracing bool
	steps   int  // events and turns of nodes so far
	halted  bool // too much went wrong to go on

	handovers int
}

// What a world may do before it is taken for one that never rests: many times
// what the longest schedules need.
const (
	maxSteps  = 300_000
	maxFaults = 100
)

// host is a peer: what its link groups share.
type host struct {
	rnics []*rnic
	skew  time.Duration // of its clock, which jumps forward
	// instance grows with each restart.
	instance uint16
}

// pair is the two ends of one connection; what its rendezvous has reached. Its
// sides are its peers in the order of their numbers.
type pair struct {
	name   string
	peers  [2]int
	client int // side
	path   *path
	opened bool    // the client may write
	stands [2]bool // an application has the connection
	ended  bool    // an application closed or reset it
	lost   bool    // the kernel's model moved it with data under way that it will not write again
	failed error
	// kept: a side may keep its RMBE until the group ends, since nobody told it
	// that the peer will not write.
	kept bool
}

// releaseTimeout is that of one of our groups.
func (c *Config) releaseTimeout(group int) time.Duration {
	if !c.Releases {
		return 0
	}
	return [...]time.Duration{0, 100 * time.Millisecond, 3 * time.Second}[group%3]
}

// New returns a world.
func New(cfg Config) *World {
	if len(cfg.RMBESizes) == 0 {
		cfg.RMBESizes = []uint32{16 << 10}
	}
	if len(cfg.SendBuffers) == 0 {
		cfg.SendBuffers = []uint32{32 << 10}
	}
	cfg.Peers = max(cfg.Peers, 2)
	start := time.Unix(1_000_000, 0)
	w := &World{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0)), now: start, start: start,
		conns: map[string]*pair{}, qps: map[rdma.QPN]*qp{}, holes: map[wire]bool{}, trace: func(string, ...any) {},
	}
	for i := range cfg.Peers {
		h := &host{instance: 1}
		for n := range max(cfg.RNICs[i], 1) {
			h.rnics = append(h.rnics, &rnic{peer: i, index: n, present: true, up: true})
		}
		w.peers = append(w.peers, h)
	}
	return w
}

// Trace sends a line per message and event to f.
func (w *World) Trace(f func(format string, args ...any)) { w.trace, w.tracing = f, true }

// Elapsed is the time since the world began.
func (w *World) Elapsed() time.Duration { return w.now.Sub(w.start) }

// fault records what must not happen.
func (w *World) fault(format string, args ...any) {
	err := fmt.Errorf("at %v: %w", w.Elapsed(), fmt.Errorf(format, args...))
	w.errs = append(w.errs, err)
	w.trace("FAULT %v", err)
	w.halted = w.halted || len(w.errs) >= maxFaults
}

// rests counts a step; true when the world must stop.
func (w *World) rests() bool {
	if w.steps++; w.steps > maxSteps && !w.halted {
		w.fault("more than %d steps: something goes on forever", maxSteps)
		w.halted = true
	}
	return w.halted
}

// Check returns what went wrong so far.
func (w *World) Check() error { return errors.Join(w.errs...) }

// event is something that will happen.
type event struct {
	at  time.Time
	seq uint64 // events of one instant happen in the order they were made
	f   func()
}

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }
func (h eventHeap) Less(i, j int) bool {
	if h[i].at.Equal(h[j].at) {
		return h[i].seq < h[j].seq
	}
	return h[i].at.Before(h[j].at)
}
func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements heap.Interface.
func (h *eventHeap) Push(x any) {
	if e, ok := x.(event); ok {
		*h = append(*h, e)
	}
}

// Pop implements heap.Interface.
func (h *eventHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	*h = old[:len(old)-1]
	return e
}

func (w *World) at(t time.Time, f func()) {
	w.seq++
	heap.Push(&w.events, event{t, w.seq, f})
}

func (w *World) after(d time.Duration, f func()) { w.at(w.now.Add(d), f) }

// delay is how long something takes on the network.
func (w *World) delay() time.Duration {
	wait, way := w.transit()
	return wait + way
}

// transit is how long the sender waits until it sends what was lost again, and how long
// the way takes.
func (w *World) transit() (wait, way time.Duration) {
	way = time.Duration(5+w.rng.IntN(20)) * time.Microsecond
	if w.cfg.Delays && w.rng.IntN(20) == 0 {
		way += time.Duration(w.rng.IntN(20_000)) * time.Microsecond
	}
	if w.cfg.Loss > 0 && w.rng.IntN(1000) < w.cfg.Loss {
		wait = minRTO << w.rng.IntN(3)
	}
	return wait, way
}

// Run lets time pass.
func (w *World) Run(d time.Duration) {
	end := w.now.Add(d)
	for !w.rests() {
		w.pump()
		next, timers := end, false
		for _, p := range w.paths {
			for side := range p.nodes {
				if t, ok := p.nextTimeout(side); ok && t.Before(next) {
					next, timers = t, true
				}
			}
		}
		switch {
		case len(w.events) > 0 && !w.events[0].at.After(next):
			e, ok := heap.Pop(&w.events).(event)
			if !ok {
				return
			}
			w.advance(e.at)
			e.f()
		case timers:
			w.advance(next)
			w.runTimers()
		default:
			w.advance(end)
			return
		}
	}
}

// runTimers runs the timers that are due now.
func (w *World) runTimers() {
	for _, p := range w.paths {
		for side, n := range p.nodes {
			if t, ok := p.nextTimeout(side); ok && !t.After(w.now) {
				n.timeout(p.clock(side))
				if t, ok := p.nextTimeout(side); ok && !t.After(w.now) {
					w.spin(p, side)
				}
			}
		}
	}
}

// spin runs a timer that is due again at once; after a few turns it is a bug.
func (w *World) spin(p *path, side int) {
	for range 8 {
		p.nodes[side].timeout(p.clock(side))
		if t, ok := p.nextTimeout(side); !ok || t.After(w.now) {
			return
		}
	}
	w.fault("a timer of %v is due again and again", p.nodes[side])
	w.now = w.now.Add(time.Second)
}

func (w *World) advance(t time.Time) {
	if t.After(w.now) {
		w.now = t
	}
}

// pump carries out what the peers want.
func (w *World) pump() {
	for _, p := range w.paths {
		for side, n := range p.nodes {
			post := func(index int, wr work) { p.post(side, index, wr) }
			for n.poll(p.clock(side), post) && !w.rests() {
				continue
			}
		}
		w.watch(p)
	}
}

// path is a link group between two peers.
type path struct {
	w      *World
	id     int
	peers  [2]int
	client int // side
	nodes  [2]node
	qps    [2][]*qp // by the number that the node gave
	voices [2]map[string]*voice
	key    clc.PeerKey // of the client
	server clc.PeerID  // set once the group is being set up
	first  *talk       // that made it
	// excused says why the group may die though a link is sound.
	excused string
	dead    [2]bool // the checker has seen it
	// lostSound is when a side destroyed a link that was sound and in use.
	lostSound [2]time.Time
	stood     bool // both sides have been active at the same time
}

// clock is what a peer thinks the time is.
func (p *path) clock(side int) time.Time { return p.w.now.Add(p.w.peers[p.peers[side]].skew) }

// nextTimeout is when a node wants to be called, in the world's time.
func (p *path) nextTimeout(side int) (time.Time, bool) {
	t, ok := p.nodes[side].nextTimeout()
	return t.Add(-p.w.peers[p.peers[side]].skew), ok
}

// Names returns the names of all connections in order.
func (w *World) Names() []string {
	var names []string
	for n := range w.conns {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}
