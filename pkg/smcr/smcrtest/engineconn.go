// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"
	"hash/fnv"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// engineConn is one end of a connection.
type engineConn struct {
	e        *engine
	name     string
	lc       *linkgroup.Conn
	key      byte // of the stream that this end writes
	send     []byte
	ring     cdc.Ring // of send
	produced uint64
	consumed uint64
	shut     bool
	closed   bool // by the application
	done     bool // EventConnDone
	aborted  bool
	eof      bool
}

// setShell notes what belongs to a connection of the group.
func (e *engine) setShell(c *engineConn) {
	slot := c.lc.Slot()
	for len(e.shells) <= slot {
		e.shells = append(e.shells, nil)
	}
	e.shells[slot] = c
}

// shellOf finds it; nil: the connection has none yet, or not any more.
func (e *engine) shellOf(lc *linkgroup.Conn) *engineConn {
	if slot := lc.Slot(); slot < len(e.shells) && e.shells[slot] != nil && e.shells[slot].lc == lc {
		return e.shells[slot]
	}
	return nil
}

// releaseIfOver gives the RMBE back when both the application and the machine
// are done, as the shell does.
func (c *engineConn) releaseIfOver(now time.Time) {
	if !c.done || !c.closed || c.e.conns[c.name] != c {
		return
	}
	l := c.lc.Local()
	r := c.e.regions[l.RMB]
	mem := r.mem[uint32(l.Index-1)*r.element:][:r.element]
	if origin := c.e.origin(); origin > 0 && string(mem[:origin]) != rmbeEyeCatcher && c.e.g.State() == linkgroup.Active {
		c.e.w.fault("eye catcher of %s is %x", c.name, mem[:origin])
	}
	r.owners[l.Index-1], r.last[l.Index-1] = "", c.name
	delete(c.e.conns, c.name)
	d := c.releaseDelay()
	if d == 0 {
		c.release(now, mem)
		return
	}
	c.e.ending[c] = true
	c.e.w.after(d, func() {
		if c.e.p.nodes[c.e.side] == node(c.e) { // no restart
			c.release(c.e.p.clock(c.e.side), mem)
		}
	})
}

// releaseDelay is how long the shell takes to give the RMBE back: often another goroutine does it, which wipes the
// RMBE first, and may wait for a processor. It is not drawn, so that a seed means what it did.
func (c *engineConn) releaseDelay() time.Duration {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, c.e.w.cfg.Seed, c.e.side, c.name) // it does not fail
	switch n := h.Sum64(); n % 8 {
	case 0:
		return time.Duration(1+(n>>8)%300) * time.Millisecond
	case 1, 2, 3:
		return time.Duration(1+(n>>8)%3000) * time.Microsecond
	default:
		return 0
	}
}

func (c *engineConn) release(now time.Time, mem []byte) {
	clear(mem[c.e.origin():])
	delete(c.e.ending, c)
	c.e.shells[c.lc.Slot()] = nil
	c.e.touch()
	c.lc.Release(now)
}

// streamKey makes the streams of a connection differ from all others.
func streamKey(name string, side int) byte {
	k := byte(side)
	for i := range len(name) {
		k = k*31 + name[i]
	}
	return k
}

// streamByte is the byte of a stream at a position.
func streamByte(key byte, pos uint64) byte { return byte((pos*0x9e3779b97f4a7c15)>>56) ^ key }

func (c *engineConn) write(n int) int {
	room := int(c.e.sendBuf) - int(c.produced-c.lc.Data().Completed())
	if c.shut || c.closed || c.aborted || c.done {
		return 0
	}
	n = min(n, room)
	for _, s := range c.ring.Spans(c.produced, uint32(max(n, 0))) {
		for i := range c.send[s.Offset:][:s.Len] {
			c.send[int(s.Offset)+i] = streamByte(c.key, c.produced)
			c.produced++
		}
	}
	c.e.touch()
	c.lc.Produce(c.produced)
	return n
}

func (c *engineConn) read(t reader, n int) int {
	if c.closed || c.aborted || c.done {
		return 0
	}
	d := c.lc.Data()
	n = min(n, int(d.PeerProduced()-c.consumed))
	l, ring := c.lc.Local(), c.lc.Ring()
	mem := c.e.regions[l.RMB].mem[uint32(l.Index-1)*l.Size:][:l.Size]
	key := streamKey(c.name, 1-c.e.side)
	for _, s := range ring.Spans(c.consumed, uint32(max(n, 0))) {
		for _, got := range mem[s.Offset:][:s.Len] {
			if want := streamByte(key, c.consumed); got != want {
				t.fault("%s at peer %d: byte %d is 0x%02x, want 0x%02x", c.name, c.e.peer(), c.consumed, got, want)
				n = 0
				break
			}
			c.consumed++
		}
		if n <= 0 {
			break
		}
	}
	c.e.touch()
	c.lc.Consume(c.consumed)
	if c.consumed == d.PeerProduced() && d.PeerIsDone() {
		c.eof = true
	}
	return n
}

func (c *engineConn) shutdown() {
	if !c.closed {
		c.shut = true
		c.lc.Shutdown()
	}
}

func (c *engineConn) close(now time.Time) { c.finish(now, c.lc.Close) }

func (c *engineConn) abort(now time.Time) { c.finish(now, c.lc.Abort) }

func (c *engineConn) finish(now time.Time, f func(time.Time)) {
	if c.closed {
		return
	}
	c.closed = true
	if !c.done {
		f(now)
	}
	c.releaseIfOver(now)
}

func (c *engineConn) progress() progress {
	d := c.lc.Data()
	return progress{
		produced: c.produced, consumed: c.consumed, unread: d.PeerProduced() - c.consumed, eof: c.eof,
		aborted: c.aborted || d.WasAborted(), over: c.done, closed: c.closed, state: d.State().String(),
	}
}
