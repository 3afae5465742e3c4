// SPDX-License-Identifier: Apache-2.0

package rocev2

import "testing"

func TestCongestionWindow(t *testing.T) {
	var c congestionWindow
	c.start(64)
	if c.size != initialCwnd {
		t.Fatalf("starts with %d packets, want %d", c.size, initialCwnd)
	}
	c.grow(20)
	c.grow(20)
	if c.size != 64 {
		t.Fatalf("%d packets after 40 acknowledged ones, want the limit of 64", c.size)
	}
	c.loss()
	if c.size != 32 || c.ssthresh != 32 {
		t.Fatalf("%d packets after a loss, threshold %d, want 32", c.size, c.ssthresh)
	}
	// Slowly from there: one more packet for each window.
	c.grow(31)
	if c.size != 32 {
		t.Errorf("%d packets before a window is acknowledged, want 32", c.size)
	}
	c.grow(1)
	c.grow(32)
	if c.size != 33 {
		t.Errorf("%d packets after 64 acknowledged ones, want 33", c.size)
	}
	for range 10 {
		c.loss()
	}
	if c.size != minCwnd {
		t.Errorf("%d packets after many losses, want %d", c.size, minCwnd)
	}
	c.start(4)
	c.loss()
	if c.size != 4 {
		t.Errorf("%d packets after a loss, limit 4, want 4", c.size)
	}
}
