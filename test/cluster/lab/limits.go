// SPDX-License-Identifier: Apache-2.0

package lab

import "time"

const (
	// maxNodes is what the address plan has room for, and more than two cores
	// carry.
	maxNodes = 9

	// maxNameLen keeps the path of the control socket under the 108 bytes that
	// the kernel takes.
	maxNameLen = 24

	// startTimeout is how long a part of a cluster may take to become ready.
	// Alone on two cores, 3 s is usual; beside a build it was 40 s.
	startTimeout = 6 * time.Minute

	// stopTimeout is how long a cluster may take to go.
	stopTimeout = 2 * time.Minute

	// requestTimeout is how long the API server may take for one answer.
	requestTimeout = 10 * time.Second

	// maxResponse is how much of an answer is read: a Node object has about
	// 10 kB.
	maxResponse = 1 << 20

	// pollInterval is how often a condition that nothing announces is looked at.
	pollInterval = 50 * time.Millisecond

	// certificateAge is how far back certificates are valid, for clocks that
	// jump; certificateLife is longer than any cluster of a test.
	certificateAge  = time.Hour
	certificateLife = 365 * 24 * time.Hour

	// lostAfter is how long a kubelet may be silent before its node is lost: less than the 50 s
	// that are usual, for tests that wait for that. externalLostAfter is for kubelets that are
	// emulated, and that a busy machine holds up for longer.
	lostAfter         = 20 * time.Second
	externalLostAfter = time.Minute

	// maxLogTail is how much of a log goes into an error.
	maxLogTail = 2048
)
