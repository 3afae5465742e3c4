// SPDX-License-Identifier: Apache-2.0

package smcr

import "sync/atomic"

// dialogue tells which connection of a stack is in a dialogue that has the stack to itself, so
// that a device looks for the program's answer (see pollAnswer):
//
//	small messages to the programs of   a  b  a  a  a ... a  a
//	in a row, beyond the first          0  0  0  1  2 ... 8  8
//	answerer                                                 a
type dialogue struct {
	// Guarded by the turn: the connection whose program was last given a small message, and
	// how many in a row.
	last *Conn
	row  int

	answerer      atomic.Pointer[Conn] // whose program may answer soon; nil: none
	polls, polled atomic.Uint64        // Stats.AnswerPolls and AnswersPolled
}

// expect notes that a small message was written to a connection's program. The caller
// holds the turn.
func (d *dialogue) expect(c *Conn) {
	if d.last != c {
		d.last, d.row = c, 0
		return
	}
	if d.row < dialogueStreak {
		d.row++
		return
	}
	d.answerer.Store(c)
}

// take returns the connection whose program may answer soon, once; nil: none.
func (d *dialogue) take() *Conn { return d.answerer.Swap(nil) }

// forget is for a connection that ends. The caller holds the turn.
func (d *dialogue) forget(c *Conn) {
	if d.last == c {
		d.last = nil
	}
	d.answerer.CompareAndSwap(c, nil)
}
