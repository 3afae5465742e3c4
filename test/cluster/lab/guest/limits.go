// SPDX-License-Identifier: Apache-2.0

package guest

import "time"

const (
	// maxNameLen is what package test/vm/lab takes, without our prefix.
	maxNameLen = 18

	// memoryMiB is what a guest has: 335 MiB are used in one with the agent and two pods. The images
	// and kubelet's files are on a disk.
	memoryMiB = 1024

	// qemuMiB is what its QEMU takes besides: translated code, most of it.
	qemuMiB = 640

	// processors is how many a guest has. With two, two guests on two cores take twice the time
	// until they are ready: one emulated processor spins for a lock that the other one holds, which
	// waits for a core.
	processors = 1

	// diskMiB is the size of a node's disk. What is in it at first is a quarter of that.
	diskMiB = 8192

	// keptDisks is how many disks the cache keeps: those of a checkout and of the one
	// before it. One takes up to 2 GiB.
	keptDisks = 2

	// importTimeout is how long the import of all images may take on a busy machine. Alone it
	// takes 3 s.
	importTimeout = 6 * time.Minute

	// loadTimeout is how long a guest may take to import an image: the product's takes half a minute
	// alone, and has taken more than two on a busy machine.
	loadTimeout = 10 * time.Minute

	// unfinishedAge is when nobody works any more on a disk that is not finished.
	unfinishedAge = time.Hour

	// bootTimeout is how long a guest may take from its kernel to its kubelet. Alone on two cores
	// it takes 10 s.
	bootTimeout = 6 * time.Minute

	// pollInterval is how often a condition that nothing announces is looked at.
	pollInterval = 50 * time.Millisecond
)
