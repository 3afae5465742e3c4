// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Direction is one direction of a relay, which makes one call after the other: it copies bytes
// ([Conn.StartRelayTo], [Conn.StartRelayFrom], [StartRelayTCP]), and then waits for the end
// ([Conn.StartAwaitEnd], [StartAwaitTCPEnd]). A call runs in a goroutine of its own. When nothing
// has moved for a while, the goroutine ends, and the call waits in the [Parker] with all that it
// has; what arrives starts another goroutine, which goes on.
//
//	     start                look: nothing moved        (a call that has nothing to do when it
//	                                                       begins is parking at once)
//	idle ------------> running --------------------> asked
//	 ^                 ^  ^  ^                       |  |
//	 |   end           |  |  +---something moved-----+  |
//	 +-----------------+  |                             | nothing to do
//	                Wake  |                             v
//	       parked --------+----------Wake----------- parking
//	         ^                                          |
//	         +---------the goroutine ends---------------+
//
// What a call needs has one owner at a time: the goroutine, until it becomes parked, and then the
// goroutine that Wake starts. Between asked and parking the goroutine has others do its work in
// its place, as it does in every wait (see gate), and between parking and parked it looks once
// more whether there is something to do: who brings it comes either before that look, or finds
// parking or parked, and wakes.
//
//	RelayTo                         holder of the turn
//	  | becomes parking               |
//	  |                               | stores peerProduced
//	  | looks: there are bytes        | Wake: parking, so running
//	  | does not become parked        |
//
// A message costs one load of an atomic for all this, and a wait that is over another one.
type Direction struct {
	p      *Parker
	state  atomic.Uint32 // a directionState
	quiet  atomic.Bool   // nothing moved since the parker's last look
	looked atomic.Bool   // the parker looks at it

	// Of the call, with the call's owner.
	then  func(int64, error)
	id    uint64       // of the socket in the parker; 0: none
	armed *net.TCPConn // which the epoll knows

	mu   sync.Mutex // guards task while a goroutine runs it, and may be asked
	task task       // nil: no call is under way
}

// task is a call of a Direction, or of a caller that waits for it, for whom d is nil.
type task interface {
	// begin takes what the call needs; without an error end gives it back.
	begin(d *Direction) error
	// run makes the call, or goes on with it: until its end, or errParked.
	run() error
	// prod has run look whether it may park, in a moment in which it waits for something to do.
	prod()
	// end returns what became of the call.
	end(err error) (int64, error)
}

// rester is a task that may have nothing to do when it begins.
type rester interface {
	task
	// rest begins the call without waiting, and returns whether it has. The call is parked then, or
	// shall run.
	rest(d *Direction) (begun bool)
}

// errParked is what run returns when the direction is parked: whoever runs it must not touch it
// any more.
var errParked = errors.New("smcr: parked")

type directionState uint32

const (
	directionIdle    directionState = iota // no call, or one that begins
	directionRunning                       // a goroutine makes the call
	directionAsked                         // and shall end when it has nothing to do
	directionParking                       // and is about to
	directionParked                        // no goroutine
)

func (s directionState) String() string {
	switch s {
	case directionIdle:
		return "idle"
	case directionRunning:
		return "running"
	case directionAsked:
		return "asked"
	case directionParking:
		return "parking"
	case directionParked:
		return "parked"
	}
	return "unknown"
}

// NewDirection returns a direction without a call.
func (p *Parker) NewDirection() *Direction { return &Direction{p: p} }

// do makes a call in the caller's goroutine.
func do(t task) (int64, error) {
	if err := t.begin(nil); err != nil {
		return 0, err
	}
	return t.end(t.run())
}

// start makes a call, and then calls then, which may start the next one.
func (d *Direction) start(t task, then func(int64, error)) {
	d.mu.Lock()
	d.task, d.then = t, then
	d.mu.Unlock()
	if r, ok := t.(rester); ok && r.rest(d) {
		if !d.becomeParked() { // there is something to do
			d.becomeRunning()
			go d.run()
		}
		return
	}
	go func() {
		if err := t.begin(d); err != nil {
			d.becomeIdle()
			then(0, err)
			return
		}
		d.becomeRunning()
		d.run()
	}()
}

// run goes on with the call.
func (d *Direction) run() {
	t, then := d.task, d.then
	err := t.run()
	if errors.Is(err, errParked) {
		return
	}
	d.becomeIdle()
	then(t.end(err))
}

// Wake has the direction look at its connections if it is parked. What the kernel and [Conn]
// tell of wakes it by itself; that somebody closed the socket from which it reads the kernel does
// not tell. Wake may be called at any time; d may be nil.
func (d *Direction) Wake() {
	if d == nil {
		return
	}
	for {
		switch d.stateNow() {
		case directionParking:
			if d.becomes(directionParking, directionRunning) {
				return // its goroutine goes on
			}
		case directionParked:
			if d.becomes(directionParked, directionRunning) {
				d.quiet.Store(false)
				d.beLooked()
				go d.run()
				return
			}
		default:
			return
		}
	}
}

// Parked reports whether the call under way is parked now.
func (d *Direction) Parked() bool { return d.stateNow() == directionParked }

func (d *Direction) stateNow() directionState { return directionState(d.state.Load()) }

// becomes is a transition from one of several goroutines; false: another one came first.
func (d *Direction) becomes(from, to directionState) bool {
	return d.state.CompareAndSwap(uint32(from), uint32(to))
}

// becomeRunning begins the call.
func (d *Direction) becomeRunning() {
	d.quiet.Store(false)
	d.state.Store(uint32(directionRunning))
	d.beLooked()
}

// becomeIdle ends the call; from now on nobody prods it.
func (d *Direction) becomeIdle() {
	d.mu.Lock()
	d.state.Store(uint32(directionIdle))
	d.task = nil
	d.mu.Unlock()
	if d.id != 0 {
		d.p.leave(d.id)
		d.id = 0
	}
}

// look is the parker's look. False: the direction does not run, and comes back when it does.
func (d *Direction) look() bool {
	switch d.stateNow() {
	case directionRunning:
		if d.quiet.Swap(true) {
			d.becomeAsked()
		}
	case directionAsked, directionParking:
	case directionIdle, directionParked:
		d.looked.Store(false)
		// Who has it run since looks at looked afterwards, so one of the two sees the other.
		s := d.stateNow()
		return s != directionIdle && s != directionParked && !d.looked.Swap(true)
	}
	return true
}

// beLooked has the parker look at the direction, which runs.
func (d *Direction) beLooked() {
	if !d.looked.Swap(true) {
		d.p.begin(d)
	}
}

// becomeAsked asks the call to park.
func (d *Direction) becomeAsked() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.becomes(directionRunning, directionAsked) {
		d.task.prod()
	}
}

// stir notes that something moves. d may be nil, here and below.
func (d *Direction) stir() {
	if d != nil && d.quiet.Load() {
		d.quiet.Store(false)
	}
}

// becomeParking is for a call that has nothing to do. It reports whether the call was asked to
// park, and nothing has moved since.
func (d *Direction) becomeParking() bool {
	if d == nil || d.stateNow() != directionAsked {
		return false
	}
	if !d.quiet.Load() {
		d.state.Store(uint32(directionRunning)) // nobody else changes asked
		return false
	}
	d.state.Store(uint32(directionParking))
	return true
}

// becomeResting is for a call that begins, and looks whether there is something to do: nobody knows of
// it yet who could wake it.
func (d *Direction) becomeResting() { d.state.Store(uint32(directionParking)) }

// becomeParked ends the goroutine of the call, which found nothing to do. False: it goes on,
// since somebody woke it.
func (d *Direction) becomeParked() bool { return d.becomes(directionParking, directionParked) }

// stay has the goroutine of a call go on that is parking, because it found something to do.
func (d *Direction) stay() { d.becomes(directionParking, directionRunning) }

// prodded reports whether a wait for a socket, which ended with *err, ended because of prod, and
// takes prod's deadline and that error away.
func (d *Direction) prodded(c *net.TCPConn, err *error) bool {
	if d == nil || !errors.Is(*err, os.ErrDeadlineExceeded) {
		return false
	}
	*err = c.SetReadDeadline(time.Time{})
	return *err == nil
}

// arm has the parker wake the direction at an event of a socket.
func (d *Direction) arm(c *net.TCPConn, events uint32) error {
	op := unix.EPOLL_CTL_MOD
	if d.armed != c {
		op = unix.EPOLL_CTL_ADD
	}
	if d.id == 0 {
		d.id = d.p.enter(d)
	}
	err := d.p.epoll.arm(c, op, events, d.id)
	if err == nil {
		d.armed = c
	}
	return err
}
