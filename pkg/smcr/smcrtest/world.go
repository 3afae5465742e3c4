// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Config describes a world. The zero value is two peers of this project on a
// good network, in Linux's dialect.
type Config struct {
	Seed uint64
	// Linux makes a peer the model of the kernel.
	Linux [2]bool
	// LinuxTwoDevices gives the model a second RNIC, so that it accepts the
	// second link it is offered.
	LinuxTwoDevices bool
	// RFC removes the flags from CONFIRM LINK under way, so that both peers
	// take the dialect with RMBE eye catchers.
	RFC bool
	// RMBESizes and SendBuffers are chosen from for each connection or group.
	RMBESizes   []uint32
	SendBuffers []uint32
	// Delays makes messages and completions late now and then.
	Delays bool
}

// World is two peers, what is under way between them, and the time. It belongs
// to one goroutine.
type World struct {
	cfg    Config
	rng    *rand.Rand
	now    time.Time
	start  time.Time
	events eventHeap
	seq    uint64
	paths  []*path
	conns  map[string]*pair
	keys   uint32 // RKeys given out so far
	tokens uint32
	errs   []error
	writes int // RDMA writes delivered
	trace  func(format string, args ...any)
}

// pair is the two ends of one connection; what its rendezvous has reached.
type pair struct {
	name   string
	client int
	path   *path
	opened bool // both ends are there
	failed error
}

// New returns a world.
func New(cfg Config) *World {
	if len(cfg.RMBESizes) == 0 {
		cfg.RMBESizes = []uint32{16 << 10}
	}
	if len(cfg.SendBuffers) == 0 {
		cfg.SendBuffers = []uint32{32 << 10}
	}
	start := time.Unix(1_000_000, 0)
	return &World{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0)), now: start, start: start,
		conns: map[string]*pair{}, trace: func(string, ...any) {},
	}
}

// Trace sends a line per message and event to f.
func (w *World) Trace(f func(format string, args ...any)) { w.trace = f }

// Elapsed is the time since the world began.
func (w *World) Elapsed() time.Duration { return w.now.Sub(w.start) }

// fault records what must not happen.
func (w *World) fault(format string, args ...any) {
	err := fmt.Errorf("at %v: %w", w.Elapsed(), fmt.Errorf(format, args...))
	w.errs = append(w.errs, err)
	w.trace("FAULT %v", err)
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
	d := time.Duration(5+w.rng.IntN(20)) * time.Microsecond
	if w.cfg.Delays && w.rng.IntN(20) == 0 {
		d += time.Duration(w.rng.IntN(20_000)) * time.Microsecond
	}
	return d
}

// Run lets time pass.
func (w *World) Run(d time.Duration) {
	end := w.now.Add(d)
	for {
		w.pump()
		next, timers := end, false
		for _, p := range w.paths {
			for _, n := range p.nodes {
				if t, ok := n.nextTimeout(); ok && t.Before(next) {
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
			for _, p := range w.paths {
				for _, n := range p.nodes {
					if t, ok := n.nextTimeout(); ok && !t.After(w.now) {
						n.timeout(w.now)
						if t, ok := n.nextTimeout(); ok && !t.After(w.now) {
							w.spin(n)
						}
					}
				}
			}
		default:
			w.advance(end)
			return
		}
	}
}

// spin runs a timer that is due again at once; after a few turns it is a bug.
func (w *World) spin(n node) {
	for range 8 {
		n.timeout(w.now)
		if t, ok := n.nextTimeout(); !ok || t.After(w.now) {
			return
		}
	}
	w.fault("a timer of %v is due again and again", n)
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
		for i, n := range p.nodes {
			for n.poll(w.now, func(wr work) { p.post(i, wr) }) {
				continue
			}
		}
	}
}

// work is a work request on its way.
type work struct {
	send   bool
	msg    [llc.Size]byte
	id     uint64
	source func() []byte // RDMA write: the bytes, taken when they arrive
	addr   uint64
	rkey   uint32
	conn   string // that writes
}

// path is a link group between the peers, with one link.
type path struct {
	w       *World
	id      int
	client  int
	nodes   [2]node
	alive   [2]bool // the queue pairs
	last    [2]time.Time
	lastAck [2]time.Time
	inQueue [2]int // SENDs that have not completed
	dying   [2]bool
}

// post puts a work request on the wire, behind those before it.
func (p *path) post(from int, wr work) {
	w := p.w
	if !p.alive[from] {
		return // flushed
	}
	if wr.send {
		p.inQueue[from]++
		if limit := p.nodes[from].sendLimit(); p.inQueue[from] > limit {
			w.fault("peer %d has %d SENDs under way, limit %d", from, p.inQueue[from], limit)
		}
		w.trace("%v %d> %s", w.Elapsed(), from, describe(p.nodes[from].dialect(), wr.msg[:]))
	}
	t := w.now.Add(w.delay())
	if t.Before(p.last[from]) {
		t = p.last[from]
	}
	p.last[from] = t
	w.at(t, func() { p.deliver(from, wr) })
}

func describe(d llc.Dialect, b []byte) string {
	if b[0] == cdc.Type {
		if m, err := cdc.Parse(b); err == nil {
			return m.String()
		}
	}
	if m, err := llc.Parse(d, 1, b); err == nil {
		return m.String()
	}
	return fmt.Sprintf("%x", b)
}

// deliver is the arrival of a work request at the other queue pair.
func (p *path) deliver(from int, wr work) {
	w, to := p.w, 1-from
	if !p.alive[from] {
		return
	}
	if !p.alive[to] {
		p.exhaust(from)
		return
	}
	if !wr.send {
		w.writes++
		if err := p.nodes[to].place(wr.conn, wr.rkey, wr.addr, wr.source()); err != nil {
			w.fault("RDMA write of %s, peer %d: %w", wr.conn, from, err)
			p.fail(from, "remote access error")
		}
		return
	}
	if w.cfg.RFC && wr.msg[0] == byte(llc.TypeConfirmLink) {
		wr.msg[3] &^= byte(llc.NoRMBEEyecatcher)
	}
	t := w.now.Add(w.delay())
	if t.Before(p.lastAck[from]) {
		t = p.lastAck[from]
	}
	p.lastAck[from] = t
	w.at(t, func() {
		if p.alive[from] {
			p.inQueue[from]--
			p.nodes[from].sent(w.now, wr.id)
		}
	})
	if err := p.nodes[to].recv(w.now, wr.msg[:]); err != nil {
		w.fault("peer %d refuses %s: %w", to, describe(p.nodes[from].dialect(), wr.msg[:]), err)
	}
}

// exhaust fails a queue pair whose peer does not answer, after its retries.
func (p *path) exhaust(side int) {
	if !p.dying[side] {
		p.dying[side] = true
		p.w.after(time.Second+time.Duration(p.w.rng.IntN(3000))*time.Millisecond, func() { p.fail(side, "retries exceeded") })
	}
}

// fail puts one queue pair into state ERR.
func (p *path) fail(side int, why string) {
	if p.alive[side] {
		p.w.trace("%v %d! %s", p.w.Elapsed(), side, why)
		p.alive[side] = false
		p.nodes[side].linkFailed(p.w.now, errors.New(why))
	}
}

// KillLink breaks the queue pairs of the paths that peer 0 or 1 began, at one
// side or, with side -1, at both.
func (w *World) KillLink(client, side int) {
	for _, p := range w.paths {
		if p.client != client {
			continue
		}
		for i := range p.nodes {
			if side < 0 || side == i {
				p.fail(i, "killed")
			}
		}
	}
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
