// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"sync"
	"sync/atomic"
)

// owner is the ownership of a queue pair: a lock that a poster never waits
// for. A poster that finds the lock taken leaves a request, and the holder cannot
// let go of the lock without seeing the request.
//
// The word has three bits. Every change is one compare-and-swap on it, so
// there is no moment between "the holder looked" and "the holder let go".
type owner struct {
	word atomic.Uint32
	mu   sync.Mutex    // orders those who wait
	hand chan struct{} // gives the held word to the one who waits
}

const (
	ownHeld   uint32 = 1 << iota
	ownAsked         // somebody left work in a ring
	ownWaited        // somebody waits in lock
)

func (o *owner) init() { o.hand = make(chan struct{}, 1) }

// tryLock takes the ownership if nobody has it.
func (o *owner) tryLock() bool { return o.word.CompareAndSwap(0, ownHeld) }

// ask takes the ownership if nobody has it; otherwise the holder will see the
// request before it lets go. It never waits.
func (o *owner) ask() (held bool) {
	for {
		w := o.word.Load()
		switch {
		case w&ownHeld == 0:
			if o.tryLock() {
				return true
			}
		case w&ownAsked != 0 || o.word.CompareAndSwap(w, w|ownAsked):
			return false
		}
	}
}

// lock takes the ownership and waits for it if necessary.
func (o *owner) lock() {
	if o.tryLock() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		w := o.word.Load()
		if w&ownHeld == 0 {
			if o.tryLock() {
				return
			}
			continue
		}
		if o.word.CompareAndSwap(w, w|ownWaited) {
			<-o.hand
			return
		}
	}
}

// unlock lets go. If it returns false there was a request: the caller still
// has the ownership and must look at the rings before it tries again.
func (o *owner) unlock() bool {
	for {
		w := o.word.Load()
		switch {
		case w&ownAsked != 0:
			if o.word.CompareAndSwap(w, w&^ownAsked) {
				return false
			}
		case w&ownWaited != 0:
			if o.word.CompareAndSwap(w, ownHeld) {
				o.hand <- struct{}{}
				return true
			}
		case o.word.CompareAndSwap(w, 0):
			return true
		}
	}
}
