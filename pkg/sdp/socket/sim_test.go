// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// schedules is how many are played without SIM_SCHEDULES.
const schedules = 2000

var simBase = flag.Uint64("sim.base", 0, "seed before the first one")

var simSeed = flag.Uint64("sim.seed", 0, "play the schedule of this seed only, with a trace")

// simOp is one thing that programs and the network do.
type simOp struct {
	kind         opKind
	side         int
	n            uint32
	direct, more bool
}

type opKind uint8

const (
	opDeliver opKind = iota
	opComplete
	opWrite
	opUrgent
	opRead
	opCancelWrites
	opCancelReads
	opMode
	opTime
	opShutdown
	opAbort
	opKeys
	opResize
	opSuspend
	opLost
	opFail
)

func (o simOp) String() string {
	names := [...]string{
		"deliver", "complete", "write", "urgent", "read", "cancel-writes", "cancel-reads", "mode", "time", "shutdown", "abort", "keys", "resize", "suspend", "lost", "fail",
	}
	return fmt.Sprintf("%s side=%d n=%d direct=%t more=%t", names[o.kind], o.side, o.n, o.direct, o.more)
}

// schedule is all that a run depends on.
type schedule struct {
	cfg   [2]Config
	ops   []simOp
	few   [2]bool       // the peer has three receive buffers, with which no connection of ours begins
	first [2]uint32     // number of its first message, as if others had been before
	plant func(*Socket) // a deliberate bug of the accepting side
}

func (s schedule) String() string {
	var b strings.Builder
	for _, c := range s.cfg {
		c.Memory = nil
		fmt.Fprintf(&b, "%+v\n", c)
	}
	for _, o := range s.ops {
		fmt.Fprintf(&b, "%v\n", o)
	}
	return b.String()
}

// randomSchedule draws a schedule.
func randomSchedule(seed uint64) schedule {
	rng := rand.New(rand.NewPCG(seed, 7))
	pick := func(v ...int) int { return v[rng.IntN(len(v))] }
	var s schedule
	layout := bsdh.Layout(rng.IntN(2))
	for i := range s.cfg {
		s.cfg[i] = Config{
			Layout: layout, RecvBuffers: pick(4, 5, 8, 32), RecvBytes: uint32(pick(37, 60, 60, 200, 1000)), SendDepth: pick(1, 3, 64),
			MaxAdverts: pick(1, 2, 5, 16), IRD: pick(1, 2, 16), ORD: pick(1, 2, 16), Keep: rng.IntN(2) == 0, ZcopyBytes: uint32(pick(1, 50, 50, 50, 50, 300, NoZcopy)),
		}
	}
	weights := []int{30, 22, 10, 1, 22, 1, 2, 4, 3, 0, 0, 0, 0, 0, 0, 0}
	if rng.IntN(4) == 0 {
		weights[opSuspend] = 2
		for i := range s.cfg {
			s.cfg[i].Keep, s.cfg[i].Suspends = true, true
		}
	}
	if rng.IntN(3) == 0 {
		weights[opResize] = 3
		for i := range s.cfg {
			s.cfg[i].MinRecvBytes, s.cfg[i].MaxRecvBytes = uint32(pick(0, 37)), uint32(pick(0, 1000, 1500))
		}
	}
	if rng.IntN(8) == 0 {
		weights[opKeys] = 2
	}
	if rng.IntN(4) == 0 {
		weights[opShutdown] = 1
	}
	switch rng.IntN(30) {
	case 0, 1, 2:
		weights[opAbort] = 1
	case 3:
		weights[opLost] = 1
	case 4, 5, 6:
		weights[opFail] = 2
	}
	switch rng.IntN(12) {
	case 0: // little is answered, so that there is much under way
		weights[opDeliver], weights[opComplete] = 6, 2
	case 1: // peers complete late
		weights[opComplete] = 3
	case 2:
		s.few[rng.IntN(2)] = true
	}
	if rng.IntN(3) == 0 {
		s.first = [2]uint32{-rng.Uint32N(60), -rng.Uint32N(60)}
	}
	sum := 0
	for _, w := range weights {
		sum += w
	}
	for range 50 + rng.IntN(250) {
		k, r := opKind(0), rng.IntN(sum)
		for r >= weights[k] {
			r -= weights[k]
			k++
		}
		o := simOp{kind: k, side: rng.IntN(2), direct: rng.IntN(8) > 0, more: rng.IntN(12) == 0}
		switch k {
		case opDeliver, opComplete:
			o.n = uint32(1 + rng.IntN(4))
		case opMode:
			o.n = uint32(pick(0, 1, 1, 2, 2, 2, 2))
		case opTime:
			o.n = uint32(1 + rng.IntN(80))
		default:
			o.n = uint32(1 + rng.IntN(pick(3, 80, 700, 700, 3000)))
		}
		s.ops = append(s.ops, o)
	}
	if rng.IntN(5) == 0 {
		at := rng.IntN(len(s.ops))
		for i := range s.cfg {
			s.cfg[i].ZcopyBytes, s.cfg[i].MaxAdverts, s.cfg[i].RecvBytes = 50, 16, 60
		}
		s.ops = slices.Insert(s.ops, at, burst(rng)...)
	}
	for i, few := range s.few {
		if few { // else what must go by Bcopy, with a wait for credit for each message, takes longer than a cancel may
			s.cfg[i].RecvBytes, s.cfg[i].MinRecvBytes, s.cfg[1-i].SendBytes = 1000, 0, 1000
		}
	}
	return s
}

// burst is a program that writes much into what the other one waits with.
func burst(rng *rand.Rand) []simOp {
	side := rng.IntN(2)
	ops := []simOp{{kind: opMode, side: side, n: uint32(bsdh.Pipelined)}}
	move := func() {
		for range 3 {
			ops = append(ops, simOp{kind: opDeliver, side: side, n: 4}, simOp{kind: opDeliver, side: 1 - side, n: 4})
		}
	}
	move()
	for range 4 {
		ops = append(ops, simOp{kind: opRead, side: 1 - side, n: 301 + rng.Uint32N(700), direct: true})
	}
	move()
	for range 4 {
		ops = append(ops, simOp{kind: opWrite, side: side, n: 301 + rng.Uint32N(700), direct: true})
	}
	if rng.IntN(4) == 0 {
		ops = append(ops, simOp{kind: opFail, side: side, n: 2})
	}
	return ops
}

// play runs a schedule to its end, and returns what was wrong.
func (s schedule) play(trace func(string, ...any)) (w *world, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	w = newWorld(s.cfg[0], s.cfg[1], trace, s.few[:]...)
	if w.plant = s.plant; s.first != [2]uint32{} {
		w.numberFrom(s.first)
	}
	for _, o := range s.ops {
		if w.err != nil {
			return w, w.err
		}
		trace("%v", o)
		w.do(o)
	}
	w.finish()
	return w, w.err
}

func (w *world) do(o simOp) {
	h := w.sides[o.side]
	switch o.kind {
	case opDeliver:
		for range o.n {
			h.deliver()
		}
	case opComplete:
		for range o.n {
			h.complete()
		}
	case opWrite:
		h.write(o.n, o.direct, false)
	case opUrgent:
		h.write(o.n, o.direct, true)
	case opRead:
		h.read(o.n, o.direct, o.more)
	case opCancelWrites:
		for p := range h.marks {
			if p >= h.s.src.next {
				delete(h.marks, p) // may be taken back; what is sent all the same is not looked for
			}
		}
		h.s.CancelWrites(w.now)
		h.run()
	case opCancelReads:
		h.s.CancelReads(w.now)
		h.run()
	case opMode:
		h.s.PreferMode(w.now, bsdh.Mode(o.n))
		h.run()
	case opTime:
		w.now = w.now.Add(time.Duration(o.n) * time.Millisecond)
		w.expire()
	case opShutdown:
		h.s.Shutdown(w.now)
		h.run()
	case opAbort:
		w.gone = true
		h.s.Abort(w.now)
		h.run()
	case opResize:
		if err := h.s.ResizePeer(w.now, bsdh.MinBuffer+o.n); err != nil && h.s.State() <= StateOpen {
			w.fail("side %d: %v", h.side, err)
		}
		h.run()
	case opSuspend:
		_ = h.s.Suspend(w.now, 4711) // not while the last one goes on
		h.run()
	case opLost:
		for _, h := range w.sides {
			if h.s.susp.isActive() || h.s.susp.away {
				return // it is to end, and they go on with another one
			}
		}
		w.gone = true
		for _, h := range w.sides {
			h.out = nil
			h.down(errors.New("lost"))
		}
	case opFail: // the next completion of a kind, behind those that come before it
		k := [...]OutputKind{OutSend, OutRDMARead, OutRDMAWrite}[o.n%3]
		for range slices.IndexFunc(h.done, func(d Output) bool { return d.Kind == k }) {
			h.complete()
		}
		if len(h.done) > 0 && h.done[0].Kind == k && !h.ended {
			w.gone = true
			w.failed[k]++
			h.failNext(k)
			h.run()
		}
	case opKeys:
		h.refuse = o.direct
	}
}

func (w *world) expire() {
	for _, h := range w.sides {
		if at, ok := h.s.NextTimeout(); ok && !w.now.Before(at) {
			h.s.HandleTimeout(w.now)
			if again, ok := h.s.NextTimeout(); ok && !again.After(w.now) {
				w.fail("side %d: due at %v, and again: %v", h.side, w.now, h.s.Snapshot())
			}
			h.run()
		}
	}
}

// rest moves all there is until nothing moves but time.
func (w *world) rest() {
	for range 20_000 {
		if w.err != nil {
			return
		}
		moved := false
		for _, h := range w.sides {
			moved = h.deliver() || moved
			moved = h.complete() || moved
		}
		if !moved {
			return
		}
	}
	w.fail("messages without end")
}

// finish lets both programs read all there is, closes both streams, and looks at what is left.
func (w *world) finish() {
	for _, h := range w.sides {
		h.refuse = false
	}
	for round := 0; w.err == nil && !w.arrived(); round++ {
		w.rest()
		for _, h := range w.sides {
			if h.received < h.peer().s.src.produced && h.s.snk.reads.isEmpty() {
				h.read(uint32(40+round*37%900), round%3 > 0, false)
			}
		}
		w.rest()
		if round%5 == 4 { // a Read that waits to be full may wait for ever
			for _, h := range w.sides {
				h.s.CancelReads(w.now)
				h.run()
			}
		}
		if round%4 == 3 {
			w.now = w.now.Add(60 * time.Millisecond)
			w.expire()
		}
		if round > 3000 {
			w.fail("stalled:\n0: %v\n1: %v", w.sides[0].s.Snapshot(), w.sides[1].s.Snapshot())
		}
	}
	for range 10 { // what is still to be reported may wait for credit
		w.rest()
		w.now = w.now.Add(50 * time.Millisecond)
		w.expire()
	}
	w.rest()
	w.wantAccounts()
	for _, h := range w.sides {
		h.s.Shutdown(w.now)
		h.run()
	}
	for range 400 {
		w.rest()
		w.now = w.now.Add(50 * time.Millisecond)
		w.expire()
	}
	w.rest()
	w.wantEnd()
}

// arrived reports whether both programs have all bytes.
func (w *world) arrived() bool {
	for _, h := range w.sides {
		if p := h.peer(); !w.gone && h.received < p.s.src.produced || h.s.src.cancel.wanted {
			return w.gone
		}
	}
	return true
}

// wantAccounts compares what both sides believe, with nothing under way.
func (w *world) wantAccounts() {
	for _, h := range w.sides {
		p := h.peer()
		if w.err != nil || w.gone || h.s.state != StateOpen || p.s.state != StateOpen {
			return
		}
		a, b := h.s.Snapshot(), p.s.Snapshot()
		switch {
		case a.PotentialNonDiscards != b.NonDiscards && !a.FinSent:
			w.fail("side %d counts %d discards, its peer %d", h.side, a.PotentialNonDiscards, b.NonDiscards)
		case fmt.Sprint(a.PeerSinks) != fmt.Sprint(b.SinkAdverts):
			w.fail("side %d has adverts %v of its peer, which has %v", h.side, a.PeerSinks, b.SinkAdverts)
		case a.SendMode != b.RecvMode:
			w.fail("side %d sends in %v mode, its peer receives in %v", h.side, a.SendMode, b.RecvMode)
		case len(a.SrcAdverts) > 0 || len(b.PeerSrcs) > 0 || b.Owed > 0 || b.Held > 0:
			w.fail("side %d: all arrived, and there is more: %v\n%v", h.side, a, b)
		case !a.Resizing && !b.Resizing && a.PeerRecvBytes != b.RecvBytes:
			w.fail("side %d: receive buffers of %d bytes, its peer thinks %d", 1-h.side, b.RecvBytes, a.PeerRecvBytes)
		case b.PeerHas > a.Available+b.Posted:
			w.fail("side %d may send %d messages, its peer thinks %d", h.side, a.Available, b.PeerHas)
		}
	}
}

func (w *world) wantEnd() {
	for _, h := range w.sides {
		if w.err != nil {
			return
		}
		if !h.ended {
			w.fail("side %d has not ended: %v", h.side, h.s.Snapshot())
		}
		if !w.gone && (h.endErr != nil || h.received != h.peer().s.src.produced) {
			w.fail("side %d ended with %v, %d of %d bytes", h.side, h.endErr, h.received, h.peer().s.src.produced)
		}
		if len(h.keys)+len(h.writes) > 0 {
			w.fail("side %d has ended: %d keys, %d Writes", h.side, len(h.keys), len(h.writes))
		}
		for id, r := range h.reads {
			if !r.over {
				w.fail("side %d has ended: Read %d is not over", h.side, id)
			}
		}
		if !w.gone {
			for p := range h.marks {
				if !h.peer().seen[p] {
					w.fail("side %d: out-of-band byte %d was not seen", h.side, p)
				}
			}
		}
	}
}

// shorten takes events out of a schedule that fails as long as it fails.
func (s schedule) shorten() schedule {
	fails := func(ops []simOp) bool {
		t := s
		t.ops = ops
		_, err := t.play(func(string, ...any) {})
		return err != nil
	}
	ops := s.ops
	for size := len(ops) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(ops); {
			less := append(append([]simOp(nil), ops[:at]...), ops[at+size:]...)
			if fails(less) {
				ops = less
			} else {
				at += size
			}
		}
	}
	s.ops = ops
	return s
}

// TestSim plays random schedules of two sockets: programs write, read, cancel and close as they like, and each thing
// on the queue pair arrives when it likes, in order. All bytes arrive as they were written, no buffer changes
// after it was given back, no message meets a missing receive buffer, nothing stalls, and both sides agree.
func TestSim(t *testing.T) {
	if *simSeed != 0 {
		if _, err := randomSchedule(*simSeed).play(t.Logf); err != nil {
			t.Fatal(err)
		}
		return
	}
	n := uint64(schedules)
	if v := os.Getenv("SIM_SCHEDULES"); v != "" {
		var err error
		if n, err = strconv.ParseUint(v, 10, 64); err != nil {
			t.Fatalf("SIM_SCHEDULES: %v", err)
		}
	}
	if testing.Short() {
		n /= 10
	}
	mids, modes := map[bsdh.MID]int{}, map[[2]bsdh.Mode]int{}
	var reads, writes, wraps uint64 // schedules with several at a time, and with numbers that wrap
	failed := map[OutputKind]int{}
	for seed := *simBase + 1; seed <= *simBase+n; seed++ {
		w, err := randomSchedule(seed).play(func(string, ...any) {})
		if err != nil {
			t.Errorf("-sim.seed %d: %v", seed, err)
			short := randomSchedule(seed).shorten()
			_, err := short.play(t.Logf)
			t.Fatalf("shortened to %d events:\n%v\n%v", len(short.ops), short, err)
		}
		for k, c := range w.mids {
			mids[k] += c
		}
		for k, c := range w.modes {
			modes[k] += c
		}
		for k, c := range w.failed {
			failed[k] += c
		}
		for _, h := range w.sides {
			if h.most[OutRDMARead] > 1 {
				reads++
			}
			if h.most[OutRDMAWrite] > 1 {
				writes++
			}
			if h.s.credits.sent < 1<<31 && h.oracle.first > 1<<31 {
				wraps++
			}
		}
	}
	if reads < n/100 || writes < n/100 || wraps < n/100 || failed[OutSend]*failed[OutRDMARead]*failed[OutRDMAWrite] == 0 && n >= schedules && *simBase == 0 {
		t.Errorf("%d schedules with several RDMA READs, %d with several WRITEs, %d with numbers that wrap, failed completions %v: this tests too little", reads, writes, wraps, failed)
	}
	for _, k := range []bsdh.MID{
		bsdh.HelloAck, bsdh.DisConn, bsdh.SendSm, bsdh.RdmaWrCompl, bsdh.RdmaRdCompl, bsdh.ModeChange, bsdh.SrcAvailCancel,
		bsdh.SinkAvailCancel, bsdh.SinkCancelAck, bsdh.SinkAvail, bsdh.SrcAvail, bsdh.Data, bsdh.ChRcvBuf, bsdh.ChRcvBufAck,
		bsdh.SuspComm, bsdh.SuspCommAck,
	} {
		if uint64(mids[k]) < n/100 {
			t.Errorf("%d messages %v in %d schedules: this tests too little", mids[k], k, n)
		}
	}
	if len(modes) != 9 {
		t.Errorf("%d of 9 pairs of modes: %v", len(modes), modes)
	}
	t.Logf("%d schedules: %v; several RDMA READs in %d, WRITEs in %d, numbers wrap in %d, failed %v", n, mids, reads, writes, wraps, failed)
}
