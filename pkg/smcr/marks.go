// SPDX-License-Identifier: Apache-2.0

package smcr

import "sync/atomic"

// marks are what goroutines leave for the holder of the turn, for which they do not wait. The
// holder looks at the marks when it has given up the turn, so none is overlooked:
//
//	writer                      holder of the turn
//	  | commit: leaves a mark     |
//	  | kick: the turn is taken   |
//	  |                           | kick: gives up the turn, finds the mark,
//	  |                           | takes the turn again: step
//
// Writers, readers and devices look at dirty and ready for each message: they are next to each
// other.
type marks struct {
	dirty atomic.Pointer[Conn] // the last of the connections whose positions moved
	ready atomic.Bool          // a completion queue called: there is something in it
}

// any reports whether there is a mark.
func (m *marks) any() bool { return m.dirty.Load() != nil || m.ready.Load() }

// moved notes that the positions of a connection moved.
func (m *marks) moved(c *Conn) {
	if c.mark.left.Swap(true) {
		return
	}
	for {
		head := m.dirty.Load()
		c.mark.next = head
		if m.dirty.CompareAndSwap(head, c) {
			return
		}
	}
}

// take empties the queue of connections whose positions moved, and returns its first one.
func (m *marks) take() *Conn { return m.dirty.Swap(nil) }

// dirtyMark is a connection's place in the queue of marks.
type dirtyMark struct {
	left atomic.Bool // the connection is in the queue
	next *Conn       // owned by the queue
}

// wipe has the connection leave the queue that take returned, and returns the next one. From
// then on its positions may move again, which puts it on the queue again.
func (d *dirtyMark) wipe() (next *Conn) {
	next, d.next = d.next, nil
	d.left.Store(false)
	return next
}
