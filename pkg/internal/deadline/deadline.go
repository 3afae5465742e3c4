// SPDX-License-Identifier: Apache-2.0

package deadline

import (
	"sync"
	"sync/atomic"
	"time"
)

// Deadline is a point in time that can be moved while somebody waits for it. Init comes first.
type Deadline struct {
	mu    sync.Mutex // guards what follows
	timer *time.Timer
	over  chan struct{} // closed when the deadline has passed
	past  atomic.Bool   // the same, to be had without the lock
	ended bool          // by Stop
}

// Init makes a deadline that never passes, until it is set.
func (d *Deadline) Init() { d.over = make(chan struct{}) }

// Set moves the deadline; the zero time means never.
func (d *Deadline) Set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return
	}
	if d.timer != nil && !d.timer.Stop() {
		<-d.over // the timer fired: wait until it has closed the channel
	}
	d.timer = nil
	wait := time.Until(t)
	if !t.IsZero() && wait <= 0 {
		if !d.past.Swap(true) {
			close(d.over)
		}
		return
	}
	if d.past.Swap(false) {
		d.over = make(chan struct{})
	}
	if t.IsZero() {
		return
	}
	over := d.over
	d.timer = time.AfterFunc(wait, func() {
		d.past.Store(true)
		close(over)
	})
}

// Stop ends the use of the deadline: it is what it is from now on, and Set does nothing. Stop lets go of the timer, which
// would keep the connection in memory.
func (d *Deadline) Stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	if d.timer != nil {
		d.timer.Stop()
	}
}

// Wait returns a channel that is closed when the deadline passes.
func (d *Deadline) Wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.over
}

// Past reports whether the deadline has passed. It takes no lock.
func (d *Deadline) Past() bool { return d.past.Load() }
