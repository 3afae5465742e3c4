// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"testing"
	"time"
)

// The receiver looks for what follows from the second datagram of a stream on, for a moment after each; after others
// it sleeps.
func TestStream(t *testing.T) {
	const us = time.Microsecond
	var s stream
	now := time.Now()
	for i, step := range []struct {
		after time.Duration
		bytes int
		look  time.Duration // after it
	}{
		{0, 60 << 10, 0}, // whether it is a stream is not known
		{90 * us, 60 << 10, 50 * us},
		{90 * us, 16 << 10, 50 * us},
		{120 * us, 60 << 10, 0}, // a slow one
		{60 * us, 44, 0},        // a message of another dialogue
		{20 * us, 60 << 10, 50 * us},
		{10 * us, 44, 40 * us}, // which changes nothing
		{60 * us, 44, 0},
	} {
		for end := now.Add(step.after); now.Before(end); now = now.Add(us) {
			s.goesOn(now)
		}
		s.arrived(now, step.bytes)
		look, later := time.Duration(0), s
		for look < time.Millisecond && later.goesOn(now.Add(look)) {
			look += us
		}
		if look != step.look && look != step.look+us {
			t.Errorf("step %d: looks for %v, want %v", i, look, step.look)
		}
	}
}

// In a stream without end the receiver sleeps again and again: who waits for another socket on the same processor has
// its turn.
func TestStream_turns(t *testing.T) {
	var s stream
	now := time.Now()
	slept, looked := now, 0
	for range 1000 {
		now = now.Add(20 * time.Microsecond)
		s.arrived(now, 60<<10)
		if s.goesOn(now) {
			looked++
			if d := now.Sub(slept); d > streamTurn+streamPoll {
				t.Fatalf("it looks for %v", d)
			}
			continue
		}
		slept = now
	}
	if looked < 800 {
		t.Errorf("it sleeps after %d of 1000 arrivals", 1000-looked)
	}
}
