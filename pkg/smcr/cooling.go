// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

const (
	// coolEvery is how long nothing must have moved on a connection, twice that at most, until its
	// buffers give their pages back: longer than a dialogue pauses, since a page that is used again
	// takes half a microsecond.
	coolEvery = time.Second
	// coolBatch is how many connections are looked at in one turn.
	coolBatch = 32
)

// An idle connection needs no memory for its buffers: what was sent has arrived, what came was read.
// Software devices do not pin the pages, so that they can be given back. Of the send buffer we are the
// only writer. Into the RMBE the peer writes when it likes, and says so only afterwards:
//
//	peer        device                      holder of the turn
//	 |  WRITE     |
//	 |----------->| placed                  all that was announced was read: the page
//	 |            |                         seems to be empty, but is not
//	 |  CDC       |
//	 |----------->| there are bytes
//
// So the device counts what peers write into each RMBE, a WRITE as a whole before its first byte. The
// count is at least what was placed, and what was announced was placed. If the two are equal, nothing is in
// the RMBE that was not announced. While the turn's holder compares them and gives the page back, it
// holds the link group's domains, so that nothing is placed. A WRITE that is repeated after the loss of
// a link is counted twice, and the RMBE of that connection keeps its pages.
//
// cooling has the connections on which something moved lately. It is guarded by the stack's turn.
type cooling struct {
	now, later []*Conn   // to be looked at in this round, and in the next one
	at         time.Time // of the next look; zero: there is nothing to look at
}

// coolness is what cooling knows of a connection.
type coolness struct {
	listed bool   // cooling has the connection
	able   bool   // its buffers can give pages back
	moved  uint64 // the sum of its positions at the last look
}

// stir notes that something moves on a connection. The caller holds the turn.
func (s *Stack) stir(c *Conn) {
	h := &s.cooling
	if c.cool.listed || !c.cool.able {
		return
	}
	c.cool.listed = true
	h.later = append(h.later, c)
	if h.at.IsZero() {
		h.at = time.Now().Add(coolEvery)
		s.alarm.wakeAt(h.at)
	}
}

// coolDown looks at some connections if it is time to. The caller holds the turn.
func (s *Stack) coolDown(now time.Time) {
	h := &s.cooling
	if h.at.IsZero() || now.Before(h.at) {
		return
	}
	if len(h.now) == 0 {
		h.now, h.later = h.later, h.now
		s.devices.drainSends(now) // nobody looks for what was sent last before the next message
	}
	n := max(0, len(h.now)-coolBatch)
	for i, c := range h.now[n:] {
		h.now[n+i] = nil
		if c.coolDown() {
			h.later = append(h.later, c)
		} else {
			c.cool.listed = false
		}
	}
	h.now = h.now[:n]
	switch {
	case n > 0: // soon: others have the turn in between
	case len(h.later) > 0:
		h.at = now.Add(coolEvery)
	default:
		*h = cooling{} // the lists may have been long
	}
}

// coolDown gives back what the connection does without. True: look again. The caller holds the turn.
func (c *Conn) coolDown() bool {
	if !c.ref() {
		return false
	}
	defer c.unrefLocked()
	written, consumed, produced := c.streams.written(), c.streams.consumed.Load(), c.streams.peerProduced.Load()
	if moved := written + consumed + produced; moved != c.cool.moved {
		c.cool.moved = moved
		return true
	}
	busy := c.send.mu.TryLock() && !c.coolSend()
	if consumed != produced {
		return true
	}
	c.coolRMBE(produced)
	return busy
}

// coolSend gives the pages of the send buffer back if all of it has arrived; false: not yet. It
// unlocks send.mu, which keeps writers away. A relay has it as long as it runs, and sees to its buffer
// itself.
func (c *Conn) coolSend() bool {
	defer c.send.mu.Unlock()
	return c.send.settle(c.lc.Data().Completed(), c.streams.written())
}

// settle gives the pages of the send buffer back if what was written is completed; the caller has
// send.mu and the turn. False: not yet.
func (s *sender) settle(completed, written uint64) bool {
	if completed == written && s.settled != written && s.buf.region.discard(s.buf.off, len(s.buf.mem)) {
		s.settled = written
	}
	return completed == written
}

// coolRMBE gives the pages of the RMBE back if nothing is in it: all that was announced, up to a
// position, was read.
func (c *Conn) coolRMBE(pos uint64) {
	if pos == c.recv.settled {
		return
	}
	r, i := c.recv.region, c.recv.element
	r.hold(func() {
		if n, ok := r.written(i); !ok || n-c.recv.before != pos {
			return // there is more than was announced, or it is not known
		}
		off := i*len(c.recv.rmbe) + int(c.recv.ring.Origin)
		if r.discard(off, len(c.recv.rmbe)-int(c.recv.ring.Origin)) {
			c.recv.settled = pos
		}
	})
}

// canDiscard reports whether pages of the region can be given back, and what peers write into it is
// known, if they may write.
func (r *region) canDiscard() bool {
	for i := range r.at {
		mr, d := r.at[i].mr, r.at[i].domain
		if d == nil {
			continue
		}
		_, can := mr.(rdma.Discarder)
		if r.access&rdma.RemoteWrite != 0 {
			_, counts := mr.(rdma.WriteCounter)
			_, holds := d.pd.(rdma.Holder)
			can = can && counts && holds
		}
		if !can {
			return false
		}
	}
	return true
}

// discard makes bytes of the region zero, and gives back their pages. False: they stay, and have to be wiped. The
// caller holds the turn, and can discard.
func (r *region) discard(off, n int) bool {
	for i := range r.at {
		if r.at[i].domain != nil {
			return r.at[i].mr.(rdma.Discarder).Discard(off, n) == nil // the memory is the same for all
		}
	}
	return false
}

// countWrites has the region count what peers write into each of its blocks.
func (r *region) countWrites(blockBytes int) {
	r.block = blockBytes
	for i := range r.at {
		r.at[i].countWrites(blockBytes)
	}
}

func (r *registration) countWrites(blockBytes int) {
	if w, ok := r.mr.(rdma.WriteCounter); ok && blockBytes > 0 {
		w.CountWrites(blockBytes)
	}
}

// written is how many bytes peers wrote into a block, over all devices; false: it is not known.
func (r *region) written(block int) (n uint64, ok bool) {
	if r.forgot || r.block == 0 || !r.canDiscard() {
		return 0, false
	}
	for i := range r.at {
		if r.at[i].domain != nil {
			n += r.at[i].mr.(rdma.WriteCounter).Written(block)
		}
	}
	return n, true
}

// hold calls f while no peer's request touches the region, through none of the devices. The caller
// holds the turn.
func (r *region) hold(f func()) {
	for i := range r.at {
		if d := r.at[i].domain; d != nil {
			if h, ok := d.pd.(rdma.Holder); ok {
				inner := f
				f = func() { h.Hold(inner) }
			}
		}
	}
	f()
}
