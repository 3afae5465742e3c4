// SPDX-License-Identifier: Apache-2.0

package smcr

import "time"

// alarm wakes the stack's goroutine, which sees to timers and what others leave to it.
type alarm struct {
	wake chan struct{} // has a token when the goroutine shall look again
	at   time.Time     // when it does so anyway; guarded by the stack's turn
}

func (a *alarm) init() { a.wake = make(chan struct{}, 1) }

// poke wakes the goroutine now.
func (a *alarm) poke() { wakeUp(a.wake) }

// wakeAt wakes the goroutine at a time, or before. The caller holds the turn.
func (a *alarm) wakeAt(at time.Time) {
	if at.Before(a.at) {
		a.at = at // one token is enough
		a.poke()
	}
}
