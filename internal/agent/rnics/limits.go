// SPDX-License-Identifier: Apache-2.0

package rnics

import "time"

const (
	// sharePoll is how often Open tries a software device that two earlier agents still have open.
	sharePoll = 200 * time.Millisecond
	// lookEvery is the pause before a missing device is opened again: a driver that is loaded again
	// takes a few seconds.
	lookEvery = time.Second
	// lookMost bounds that pause, which doubles each time for a device of the node.
	lookMost = 10 * time.Second
)
