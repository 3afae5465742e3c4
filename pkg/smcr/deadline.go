// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a point in time that can be moved while somebody waits for it.
type deadline struct {
	mu    sync.Mutex // guards what follows
	timer *time.Timer
	over  chan struct{} // closed when the deadline has passed
	// past says the same without the lock, for the data path.
	past atomic.Bool
}

func (d *deadline) init() { d.over = make(chan struct{}) }

// set moves the deadline; the zero time means never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
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

// stop lets go of the timer, which would keep the connection in memory.
func (d *deadline) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
}

// wait returns a channel that is closed when the deadline passes.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.over
}
