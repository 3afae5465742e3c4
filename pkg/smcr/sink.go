// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// gate lets another goroutine do the work of its owner while the owner waits.
//
//	off --owner waits--> parked --another has work--> busy
//	 ^                    |  ^                         |
//	 +--owner woke up-----+  +---the work is done------+
type gate struct{ state atomic.Uint32 }

const (
	gateOff uint32 = iota
	gateParked
	gateBusy
)

// park lets others in: the owner waits.
func (g *gate) park() { g.state.Store(gateParked) }

// unpark keeps others out, after the work that one of them is doing has ended.
func (g *gate) unpark() {
	for g.state.Load() != gateOff && !g.state.CompareAndSwap(gateParked, gateOff) {
		runtime.Gosched()
	}
}

// enter begins to do the owner's work; false: the owner does not wait, or another has entered.
func (g *gate) enter() bool { return g.state.CompareAndSwap(gateParked, gateBusy) }

func (g *gate) leave() { g.state.Store(gateParked) }

// sink lets the holder of the turn write arriving bytes straight to the
// socket that RelayTo writes to, while RelayTo waits for them. To wake RelayTo's
// goroutine for each small message would be most of a relay's latency.
type sink struct {
	gate gate
	// to is written by whoever is in the gate, or by RelayTo when nobody is.
	to *socket
	// try makes one write that does not wait. The closure is allocated once.
	try func(fd uintptr) bool
}

// sinkBytes is the most that the holder of the turn writes for RelayTo: bulk data belongs
// to RelayTo's own goroutine, which may run on another processor and may wait.
const sinkBytes = 8 << 10

// newSink returns a sink to w. Nobody but RelayTo and the sink may write to w: another write,
// which waits for room, has the socket's lock, and the holder of the turn would wait, too.
func newSink(w *socket) *sink {
	k := &sink{to: w}
	k.try = func(fd uintptr) bool {
		w.w.do(syscall.SYS_WRITE, fd)
		return true
	}
	return k
}

// makeRoom makes room in the socket if RelayTo waits for room: urgent data came. The
// caller holds the turn.
func (k *sink) makeRoom(bytes int) {
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

// unpark takes the sink back, after a write under way has ended.
func (k *sink) unpark() {
	if k != nil {
		k.gate.unpark()
	}
}

// writeArrived writes the bytes that have arrived to RelayTo's socket, if RelayTo waits and
// they are few. True: nothing is left for RelayTo to do. The caller holds the turn.
func (c *Conn) writeArrived() bool {
	k := c.recv.sink.Load()
	_, avail := c.streams.unread()
	if k == nil || avail == 0 || avail > sinkBytes || !k.gate.enter() {
		return false
	}
	pos, avail := c.streams.unread() // RelayTo may have gone on before it parked
	if c.urgent.mark.Load() > pos {
		k.gate.leave()
		return false // RelayTo knows what to do with urgent data
	}
	for avail > 0 {
		w := &k.to.w
		w.buf, w.n = c.recv.span(pos, avail), 0
		if err := k.to.raw.Write(k.try); err != nil || w.n == 0 {
			break // full or broken: RelayTo finds out
		}
		pos += uint64(w.n)
		avail -= uint64(w.n)
	}
	k.to.w.buf = nil
	c.streams.consumed.Store(pos)
	k.gate.leave()
	if avail > 0 {
		return false
	}
	c.stack.dialogue.expect(c)
	return true
}
