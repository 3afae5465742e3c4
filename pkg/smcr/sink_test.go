// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"sync"
	"testing"
)

func TestGate(t *testing.T) {
	var g gate
	if g.enter() {
		t.Error("somebody comes in while the owner works")
	}
	g.park()
	if !g.enter() {
		t.Fatal("nobody comes in while the owner waits")
	}
	if g.enter() {
		t.Error("two come in")
	}
	g.leave()
	if !g.enter() {
		t.Error("nobody comes in a second time")
	}
	g.leave()
	g.unpark()
	if g.enter() {
		t.Error("somebody comes in after the owner woke up")
	}
	g.unpark() // it need not have been parked
}

// Whoever is in the gate, or owns it and does not wait, works alone.
func TestGate_excludes(t *testing.T) {
	const rounds = 2000
	var (
		g    gate
		work int // guarded by the gate: the race detector says whether it is
		wg   sync.WaitGroup
	)
	done := make(chan struct{})
	helped := 0
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if g.enter() {
				work++
				helped++
				g.leave()
			}
		}
	})
	for range rounds {
		g.park()
		g.unpark()
		work++
	}
	close(done)
	wg.Wait()
	if work != rounds+helped {
		t.Errorf("%d pieces of work, want %d of the owner and %d of others", work, rounds, helped)
	}
}
