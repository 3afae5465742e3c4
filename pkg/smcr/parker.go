// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// parkerEvents is how many sockets are taken from the kernel at once.
const parkerEvents = 64

// Parker is where the directions of relays wait that have had nothing to do for a while: one
// goroutine waits for all of their sockets, so that an idle relay has none. See [Direction].
type Parker struct {
	epoll *epoll
	every time.Duration // between two looks at the directions that run
	calm  func()        // nil: nobody wants to know
	ended chan struct{} // closed when run returns

	mu     sync.Mutex // guards what is below
	last   uint64     // id of a direction
	socket map[uint64]*Direction
	begun  []*Direction // run, and were not looked at yet

	// Owned by run.
	looked []*Direction // run, as far as the last look knows
	waved  bool         // some have come to rest since calm was called
}

// NewParker returns a parker without directions. A direction is parked when nothing has moved for
// as long as every at least, and for twice as long at most. calm, if given, is called when a wave of
// directions has come to rest: some were parked or ended, and no more are. What they needed while they
// ran is garbage then. The parker waits for calm.
func NewParker(every time.Duration, calm func()) (*Parker, error) {
	e, err := newEpoll()
	if err != nil {
		return nil, err
	}
	p := &Parker{epoll: e, every: every, calm: calm, ended: make(chan struct{}), socket: map[uint64]*Direction{}}
	go p.run()
	return p, nil
}

// Close ends the parker. All calls of its directions must have ended.
func (p *Parker) Close() error {
	err := p.epoll.close()
	<-p.ended
	return err
}

// run is the goroutine.
func (p *Parker) run() {
	defer close(p.ended)
	var events [parkerEvents]unix.EpollEvent
	look := time.Now().Add(p.every)
	for {
		if p.epoll.file.SetReadDeadline(look) != nil {
			return // closed
		}
		n, err := p.epoll.wait(events[:])
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return // closed
		}
		for i := range events[:n] {
			p.of(idOf(&events[i])).Wake()
		}
		if now := time.Now(); !now.Before(look) {
			p.look()
			look = now.Add(p.every)
		}
	}
}

// look asks the directions that have had nothing to do since the last look to park.
func (p *Parker) look() {
	p.mu.Lock()
	p.looked = append(p.looked, p.begun...)
	p.begun = nil
	p.mu.Unlock()
	kept := p.looked[:0]
	for _, d := range p.looked {
		if d.look() {
			kept = append(kept, d)
		}
	}
	rested := len(kept) < len(p.looked)
	clear(p.looked[len(kept):])
	p.looked = kept
	p.waved = p.waved || rested
	if p.waved && (!rested || len(kept) == 0) {
		p.waved = false
		if p.calm != nil {
			p.calm()
		}
	}
}

// begin has run look at a direction.
func (p *Parker) begin(d *Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begun = append(p.begun, d)
}

// enter returns an id for the socket of a direction.
func (p *Parker) enter(d *Direction) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	p.socket[p.last] = d
	return p.last
}

// leave forgets an id: an event that was on its way is nobody's.
func (p *Parker) leave(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.socket, id)
}

// of returns the direction with an id, nil if it has left.
func (p *Parker) of(id uint64) *Direction {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.socket[id]
}
