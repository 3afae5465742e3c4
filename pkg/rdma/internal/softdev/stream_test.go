// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"testing"
	"time"
)

// The receiver looks for what follows from the second datagram of a stream on, for a moment after each; after others
// it sleeps.
func TestStream(t *testing.T) {
	const us = time.Microsecond
	var s Stream
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
		now = now.Add(step.after)
		s.Arrived(now, step.bytes)
		look, later := time.Duration(0), s
		for look < time.Millisecond && later.GoesOn(now.Add(look)) {
			look += us
		}
		if look != step.look && look != step.look+us {
			t.Errorf("step %d: looks for %v, want %v", i, look, step.look)
		}
	}
}
