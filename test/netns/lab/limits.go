// SPDX-License-Identifier: Apache-2.0

package lab

import "time"

const (
	// defaultMTU is what RoCE networks use: a packet with 4096 bytes of
	// payload, the largest path MTU, fits.
	defaultMTU = 9000
	// defaultRNICs is what link groups need to survive the loss of one.
	defaultRNICs = 2
	// maxRNICs is what a node agent can use.
	maxRNICs = 8
	// toggleTimeout bounds a program that changes a node's network; it takes
	// some 10 ms.
	toggleTimeout = 10 * time.Second

	// stopTimeout is how long a process may take to end after SIGTERM.
	stopTimeout = 3 * time.Second
	// killTimeout is how long the kernel may take to end a killed process
	// that holds much memory on a loaded machine.
	killTimeout = 10 * time.Second
	// cniTimeout bounds the plugins of one pod; they take some 50 ms.
	cniTimeout = 30 * time.Second
	// pollEvery is the pause between two looks at something that takes a few
	// of them.
	pollEvery = 10 * time.Millisecond

	// maxOutput bounds what is kept of a process's output; what is over it is
	// dropped.
	maxOutput = 1 << 20

	// nobody is the user and group of pods' processes.
	nobody = 65534
)
