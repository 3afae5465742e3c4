// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// gate lets somebody else do a goroutine's work while that one waits.
//
//	off --owner waits--> parked --somebody has work--> busy
//	 ^                    |  ^                          |
//	 +--owner woke up-----+  +--------------------------+
type gate struct{ state atomic.Uint32 }

const (
	gateOff uint32 = iota
	gateParked
	gateBusy
)

// park lets others in.
func (g *gate) park() { g.state.Store(gateParked) }

// unpark keeps them out, after what one of them is doing has ended.
func (g *gate) unpark() {
	for g.state.Load() != gateOff && !g.state.CompareAndSwap(gateParked, gateOff) {
		runtime.Gosched()
	}
}

// enter begins to do the owner's work, if it waits and nobody else does.
func (g *gate) enter() bool { return g.state.CompareAndSwap(gateParked, gateBusy) }

func (g *gate) leave() { g.state.Store(gateParked) }

// sink lets the holder of the turn write arriving bytes straight to the
// socket that RelayTo writes to, while RelayTo waits for them. It saves waking
// a goroutine for each small message, which is most of a relay's latency.
type sink struct {
	gate gate
	// to is written by whoever is in the gate, or by RelayTo when nobody is.
	to *socket
	// try makes one write that does not wait; allocated once.
	try func(fd uintptr) bool
}

// sinkBytes is the most that the holder of the turn writes for somebody else:
// bulk data belongs to the connection's own goroutine, which may run on
// another processor and may wait.
const sinkBytes = 8 << 10

// newSink returns a sink to w. Nobody else may write to w: a write that waits
// there has the socket's lock, and the holder of the turn would wait with it.
func newSink(w *socket) *sink {
	k := &sink{to: w}
	k.try = func(fd uintptr) bool {
		w.w.do(syscall.SYS_WRITE, fd)
		return true
	}
	return k
}

// urge makes room in the socket if WriteTo waits for it: urgent data came. The
// caller holds the turn.
func (k *sink) urge(bytes int) {
	if k != nil && k.to.stalled.Load() {
		_ = k.to.raw.Control(func(fd uintptr) { growSendBuffer(int(fd), bytes) }) // closed: nobody waits
	}
}

// giveUp ends a write that waits for room: the connection was reset. The
// caller holds the turn.
func (k *sink) giveUp() {
	if k != nil && k.to.stalled.Load() {
		_ = k.to.conn.SetWriteDeadline(time.Unix(1, 0)) // closed: nobody waits
	}
}

// park offers the sink to the holder of the turn.
func (k *sink) park() {
	if k != nil {
		k.gate.park()
	}
}

// unpark takes it back, after a write under way has ended.
func (k *sink) unpark() {
	if k != nil {
		k.gate.unpark()
	}
}

// pour writes what has arrived, if RelayTo waits and it is little. It reports
// whether nothing is left for RelayTo to do. The caller holds the turn.
func (c *Conn) pour() bool {
	k := c.sink.Load()
	pos := c.consumed.Load()
	avail := c.peerProduced.Load() - pos
	if k == nil || avail == 0 || avail > sinkBytes || !k.gate.enter() {
		return false
	}
	pos = c.consumed.Load() // RelayTo may have gone on before it parked
	avail = c.peerProduced.Load() - pos
	if c.urgent.mark.Load() > pos {
		k.gate.leave()
		return false // RelayTo knows what to do with urgent data
	}
	for avail > 0 {
		off := c.ring.Offset(pos)
		w := &k.to.w
		w.buf, w.n = c.rmbe[off:min(uint64(off)+avail, uint64(c.ring.Size))], 0
		if err := k.to.raw.Write(k.try); err != nil || w.n == 0 {
			break // full or broken: RelayTo finds out
		}
		pos += uint64(w.n)
		avail -= uint64(w.n)
	}
	k.to.w.buf = nil
	c.consumed.Store(pos)
	k.gate.leave()
	if avail > 0 {
		return false
	}
	c.stack.expectAnswer(c)
	return true
}
