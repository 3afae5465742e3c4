// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"time"
)

// deadline is a point in time that can be moved while somebody waits for it.
type deadline struct {
	mu    sync.Mutex // guards what follows
	timer *time.Timer
	over  chan struct{} // closed when the deadline has passed
}

func newDeadline() deadline { return deadline{over: make(chan struct{})} }

// set moves the deadline; the zero time means never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.over // the timer fired: wait until it has closed the channel
	}
	d.timer = nil
	passed := d.passed()
	if t.IsZero() {
		if passed {
			d.over = make(chan struct{})
		}
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		if !passed {
			close(d.over)
		}
		return
	}
	if passed {
		d.over = make(chan struct{})
	}
	over := d.over
	d.timer = time.AfterFunc(wait, func() { close(over) })
}

// passed reports whether over is closed.
func (d *deadline) passed() bool {
	select {
	case <-d.over:
		return true
	default:
		return false
	}
}

// passedNow reports whether the deadline has passed.
func (d *deadline) passedNow() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.passed()
}

// wait returns a channel that is closed when the deadline passes.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.over
}
