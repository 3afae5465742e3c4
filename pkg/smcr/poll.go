// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"net"
	"sync/atomic"
	"time"
)

// In a dialogue a program answers what it was given, or asks the next question,
// after a few microseconds. For the device's goroutine to sleep meanwhile costs more than to
// look: the processor goes idle, and to wake the goroutine takes longer than the program took.
// So a device's goroutine that has written a small message to a program and
// has nothing else to do looks for a moment at the program's socket, and at
// the wire in between.
//
//	peer      device's goroutine             program
//	 |  CDC         |                           |
//	 |------------->| writeArrived: write(2)    |
//	 |              |-------------------------->|
//	 |              | pollAnswer: nothing yet   |
//	 |              | pollAnswer: read(2)       |
//	 |              |<--------------------------|
//	 |<-------------|                           |
//
// The goroutine looks for the answer of one connection that has the stack to itself, and as
// long as answers come in time: with several connections at work there is something else to
// do anyway, and a program that computes, or needs our processor, is not waited for.

const (
	// answerTime is how long an answer is looked for: twice what a program
	// takes to be scheduled and to answer at once, where processors sleep
	// deeply.
	answerTime = 75 * time.Microsecond
	// maxAnswerPoll keeps one connection from having the device's goroutine to itself: the
	// software device does not poll for longer without a wait either.
	maxAnswerPoll = 200 * time.Microsecond
	// dialogueStreak is how many small messages in a row make a dialogue.
	dialogueStreak = 8
	// A connection has credit while answers come in time. A connection without credit is
	// left alone for a while, longer each time.
	mostCredit   = 16
	missCost     = 4
	firstPause   = 32
	longestPause = 1 << 14
)

// intake is a RelayFrom under way.
type intake struct {
	pump
	c         *Conn
	from      *net.TCPConn
	total     int64
	announced bool // the peer knows that there is urgent data still to be sent
	timer     *time.Timer

	got bool // something, in this try of answered
	try func(fd uintptr)

	// Owned by the device's goroutine, like answerPoll; atomic, because the peer may use
	// several devices in turn.
	credit, pause, skip atomic.Int32
}

func newIntake(c *Conn, r *net.TCPConn) *intake {
	f := &intake{c: c, from: r}
	f.to = f
	f.credit.Store(mostCredit)
	f.try = f.tryOnce
	return f
}

// tryOnce reads once if there is something to read and room for it.
func (f *intake) tryOnce(fd uintptr) {
	if b, err := f.c.reserve(anyLength, false); f.err != nil || err != nil || len(b) == 0 {
		return // RelayFrom has to see to that
	}
	before := f.total
	_, f.err = f.once(fd)
	f.got = f.total > before
	if f.err != nil {
		f.prod() // wakes RelayFrom, which has to know; fails if closed: RelayFrom knows
		f.d.Wake()
	}
}

// answered looks for an answer once; usable tells whether it makes sense to
// look again.
func (f *intake) answered() (got, usable bool) {
	if !f.gate.enter() {
		return false, false // RelayFrom is at work
	}
	f.got = false
	err := f.s.raw.Control(f.try)
	got, usable = f.got, err == nil && f.err == nil
	f.gate.leave()
	return got, usable
}

// wanted reports whether an answer shall be looked for.
func (f *intake) wanted() bool {
	if f.credit.Load() > 0 {
		return true
	}
	if f.skip.Add(-1) > 0 {
		return false
	}
	f.credit.Store(1) // one more chance
	return true
}

func (f *intake) hit() {
	f.credit.Store(min(f.credit.Load()+1, mostCredit))
	if f.credit.Load() == mostCredit {
		f.pause.Store(0)
	}
}

func (f *intake) miss() {
	if f.credit.Add(-missCost) > 0 {
		return
	}
	p := min(max(2*f.pause.Load(), firstPause), longestPause)
	f.pause.Store(p)
	f.skip.Store(p)
}

// answerPoll is a device's look for an answer, owned by the device's
// goroutine.
type answerPoll struct {
	in    *intake // nil: none
	until time.Time
}

// pollAnswer is called by the device when nothing is left to receive. True
// asks the device to call again.
func (r *rnic) pollAnswer() bool {
	p := &r.answer
	if c := r.s.dialogue.take(); c != nil {
		p.in = c.send.intake.Load()
		if p.in == nil || !p.in.wanted() {
			p.in = nil
			return false
		}
		r.s.dialogue.polls.Add(1)
		p.until = time.Now().Add(r.s.cfg.AnswerPoll)
	}
	if p.in == nil {
		return false
	}
	got, usable := p.in.answered()
	switch {
	case got:
		r.s.dialogue.polled.Add(1)
		p.in.hit()
	case !usable:
	case time.Now().After(p.until):
		p.in.miss()
	default:
		return true
	}
	p.in = nil
	return false
}
