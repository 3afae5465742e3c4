// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"net"
	"runtime"
	"sync/atomic"
	"syscall"
)

// sink lets the holder of the turn write arriving bytes straight to the
// socket that WriteTo writes to, while WriteTo waits for them. It saves waking
// a goroutine for each small message, which is most of a relay's latency.
//
//	off --WriteTo waits--> parked --data, holder of the turn--> busy
//	 ^                      |  ^                                 |
//	 +--WriteTo woke up-----+  +---------------------------------+
type sink struct {
	state atomic.Uint32
	raw   syscall.RawConn
	// What the write under way works on; owned by whoever made state busy.
	buf []byte
	n   int
	// write is allocated once, not for every call.
	write func(fd uintptr) bool
}

const (
	sinkOff uint32 = iota
	sinkParked
	sinkBusy
)

// sinkBytes is the most that the holder of the turn writes for somebody else:
// bulk data belongs to the connection's own goroutine, which may run on
// another processor and may wait.
const sinkBytes = 8 << 10

// newSink returns a sink to w. Nobody else may write to w: a write that waits
// there has the socket's lock, and the holder of the turn would wait with it.
func newSink(w *net.TCPConn) *sink {
	raw, err := w.SyscallConn()
	if err != nil {
		return nil // it is closed; the first ordinary write says so
	}
	k := &sink{raw: raw}
	k.write = func(fd uintptr) bool {
		n, err := syscall.Write(int(fd), k.buf)
		if err == nil {
			k.n = n
		}
		return true // never wait here
	}
	return k
}

// park offers the sink to the holder of the turn.
func (k *sink) park() {
	if k != nil {
		k.state.Store(sinkParked)
	}
}

// unpark takes it back, after a write under way has ended.
func (k *sink) unpark() {
	for k != nil && !k.state.CompareAndSwap(sinkParked, sinkOff) {
		runtime.Gosched()
	}
}

// pour writes what has arrived, if WriteTo waits and it is little. It reports
// whether nothing is left for WriteTo to do. The caller holds the turn.
func (c *Conn) pour() bool {
	k := c.sink.Load()
	pos := c.consumed.Load()
	avail := c.peerProduced.Load() - pos
	if k == nil || avail == 0 || avail > sinkBytes || !k.state.CompareAndSwap(sinkParked, sinkBusy) {
		return false
	}
	pos = c.consumed.Load() // WriteTo may have gone on before it parked
	avail = c.peerProduced.Load() - pos
	for avail > 0 {
		off := c.ring.Offset(pos)
		k.buf, k.n = c.rmbe[off:min(uint64(off)+avail, uint64(c.ring.Size))], 0
		if err := k.raw.Write(k.write); err != nil || k.n == 0 {
			break // full or broken: WriteTo finds out
		}
		pos += uint64(k.n)
		avail -= uint64(k.n)
	}
	k.buf = nil
	c.consumed.Store(pos)
	k.state.Store(sinkParked)
	return avail == 0
}
