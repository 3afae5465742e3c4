// SPDX-License-Identifier: Apache-2.0

package cniinstall

import "time"

const (
	// maxConfBytes bounds a configuration that is read. Real ones have a few
	// thousand bytes.
	maxConfBytes = 1 << 20
	// maxFiles bounds the configurations that are looked at. A node has a
	// handful; a directory that was filled by accident must not fill memory.
	maxFiles = 256
	// maxBinaryBytes bounds the plugin; it has a few million bytes.
	maxBinaryBytes = 64 << 20
	// maxRepairsPerMinute is how often the configuration is written before its
	// owner, or another program, is taken to be against it. Owners write it at
	// their start, which takes one repair, and some a second time soon after.
	maxRepairsPerMinute = 5
	// maxAttempts is how often a change is tried again at once because the file
	// changed under it. Then the next check does it.
	maxAttempts = 3
	// maxSwaps bounds the exchanges that put back what an owner wrote meanwhile.
	// Each takes another write by the owner within microseconds, so that the
	// bound is not met; stopping early would lose the last one.
	maxSwaps = 1000

	// defaultInterval is the time between checks while all is well: the watch
	// reports changes, this is for the ones that it misses.
	defaultInterval = 30 * time.Second
	// troubleInterval is the same while something is missing, such as space on
	// the disk, and where the watch does not work.
	troubleInterval = 5 * time.Second
	// settle is how long a directory has to be quiet before it is read, and
	// maxSettle the most that is waited for that: files that are written in
	// place, not renamed, are whole after a moment.
	settle    = 100 * time.Millisecond
	maxSettle = time.Second
	// invalidGrace is how long a file that is not valid stands in the way of
	// the next one: it may be under construction.
	invalidGrace = 10 * time.Second
	// linger is how long a file that was exchanged is kept to see whether an
	// owner writes into it that had opened it before: a few turns of a busy
	// scheduler.
	linger = 30 * time.Millisecond
	// lockPoll is how often a lock that another installer holds is tried.
	lockPoll = 500 * time.Millisecond
	// lockTimeout is how long Uninstall waits for an installer that should have
	// stopped.
	lockTimeout = 15 * time.Second
	// reloadGrace is between the removal of the plugin from the configuration
	// and of its binary. Runtimes read a changed configuration within
	// milliseconds; a pod that is being made still has the old one.
	reloadGrace = 2 * time.Second
)
