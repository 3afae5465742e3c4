// SPDX-License-Identifier: Apache-2.0

package linkgroup

import "time"

// clocks are the connections that wait for the peer's close (RFC 7609 §4.8.1),
// in the order of their deadlines: all wait equally long, so whoever starts, or
// starts again, is last.
type clocks struct{ head, tail *Conn }

// due returns the connection whose deadline comes first.
func (q *clocks) due() (time.Time, bool) {
	if q.head == nil {
		return time.Time{}, false
	}
	return q.head.deadline, true
}

func (q *clocks) remove(c *Conn) {
	if c.clockPrev != nil {
		c.clockPrev.clockNext = c.clockNext
	} else {
		q.head = c.clockNext
	}
	if c.clockNext != nil {
		c.clockNext.clockPrev = c.clockPrev
	} else {
		q.tail = c.clockPrev
	}
	c.clockPrev, c.clockNext = nil, nil
}

func (q *clocks) push(c *Conn) {
	c.clockPrev = q.tail
	if q.tail != nil {
		q.tail.clockNext = c
	} else {
		q.head = c
	}
	q.tail = c
}

// startClock bounds the wait for the peer's close.
func (c *Conn) startClock(now time.Time) {
	if c.deadline.IsZero() && !c.done {
		c.resetClock(now)
	}
}

// resetClock starts the wait anew.
func (c *Conn) resetClock(now time.Time) {
	c.stopClock()
	c.deadline = now.Add(c.g.cfg.CloseTimeout)
	c.g.conns.closing.push(c)
}

func (c *Conn) stopClock() {
	if !c.deadline.IsZero() {
		c.g.conns.closing.remove(c)
		c.deadline = time.Time{}
	}
}
