// SPDX-License-Identifier: Apache-2.0

package rocev2

// minCwnd is the least number of packets in flight after losses.
const minCwnd = 8

// congestionWindow is how many packets may be outstanding now. Loss shrinks the window,
// acknowledgements open the window again, as in TCP's slow start and congestion avoidance.
type congestionWindow struct {
	limit    int // configured
	size     int
	ssthresh int // up to here the window grows fast
	acked    int // acknowledged since the window last grew, when growing slowly
}

// start begins small, because nothing is known of the path.
func (c *congestionWindow) start(limit int) {
	c.limit, c.size, c.ssthresh = limit, min(limit, initialCwnd), limit
}

// grow opens the window again after loss shrank it: fast up to half of where
// the loss was, then by one packet per window.
func (c *congestionWindow) grow(acked int) {
	if c.size >= c.limit {
		return
	}
	if c.size < c.ssthresh {
		c.size = min(c.size+acked, c.limit)
		return
	}
	c.acked += acked
	if c.acked >= c.size {
		c.acked -= c.size
		c.size = min(c.size+1, c.limit)
	}
}

// loss halves the window: what is lost between two hosts was mostly lost in
// a full socket buffer, and going back N packets fills the buffer again.
func (c *congestionWindow) loss() {
	c.ssthresh = max(c.size/2, min(minCwnd, c.limit))
	c.size = c.ssthresh
	c.acked = 0
}
