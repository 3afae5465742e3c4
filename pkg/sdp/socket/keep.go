// SPDX-License-Identifier: Apache-2.0

package socket

import "math"

// Kept is the number that private memory of the shell has in [Output.Buffer]. It is a queue of bytes: OutKeep appends,
// OutCopy takes from its front.
const Kept = -1

// keptCount is what the program has not read, by where it lies.
type keptCount struct {
	buffers int    // receive buffers that hold payload
	bytes   uint64 // in them
	kept    uint64 // bytes in private memory
	parts   int    // stretches of them
}

// keepDue reports whether payload should go to private memory: half of the receive buffers are held, and they are not half
// full, as with messages of one byte. What a program may leave unread is then half of the receive buffers' bytes at
// least, whatever the messages (§9.5.6); private memory has as many at most.
func (k *sink) keepDue(cfg *Config, recvBytes uint32) bool {
	c, room := &k.count, uint64(cfg.RecvBuffers)*uint64(recvBytes)
	return cfg.Keep && c.buffers >= cfg.RecvBuffers/2 && c.bytes < uint64(c.buffers)*uint64(recvBytes)/2 && c.kept+c.bytes <= room &&
		c.parts <= cfg.RecvBuffers
}

// holdsMuch reports whether so much is unread that the connection may not move yet: a peer that moves gets all receive buffers anew, and
// fills them, so one that moves again and again could make us hold more each time. What arrives between SuspComm and its answer comes on
// top of the bound.
func (k *sink) holdsMuch(cfg *Config, recvBytes uint32) bool {
	c, room := &k.count, uint64(cfg.RecvBuffers)*uint64(recvBytes)
	return c.kept+c.bytes > 2*room || c.parts+c.buffers > 2*cfg.RecvBuffers
}

// keep moves all payload that waits in receive buffers to private memory, and posts them again.
func (s *Socket) keep() {
	k := &s.snk
	var last *heldPayload
	k.count.parts = 0
	for range k.held.n {
		p := k.held.pop()
		if p.buffer != Kept {
			s.out.put(Output{Kind: OutKeep, Buffer: p.buffer, From: p.off, Len: p.len})
			s.recycle(p.buffer)
			p.buffer, p.off = Kept, 0
			k.count.kept += uint64(p.len)
		}
		if last != nil && !last.urgent && p.len <= math.MaxInt32-last.len {
			last.len, last.urgent = last.len+p.len, p.urgent
			continue
		}
		k.held.push(p)
		k.count.parts++
		last = k.held.at(k.held.n - 1)
	}
	k.count.buffers, k.count.bytes = 0, 0
	s.credits.tell()
}

// holds counts payload that waits in a receive buffer.
func (c *keptCount) holds(n uint32) { c.buffers, c.bytes = c.buffers+1, c.bytes+uint64(n) }

// takes counts n bytes that the program took; done says that they were the last of their place.
func (c *keptCount) takes(p *heldPayload, n uint32, done bool) {
	bytes, places := &c.bytes, &c.buffers
	if p.buffer == Kept {
		bytes, places = &c.kept, &c.parts
	}
	*bytes -= uint64(n)
	if done {
		*places--
	}
}
