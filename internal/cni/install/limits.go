// SPDX-License-Identifier: Apache-2.0

package install

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
	// maxRepairsPerMinute is how often the configuration is written in a minute before
	// another program is assumed to take the plugin out on purpose. Owners write their
	// file when they start, some a second time soon after: each takes one repair.
	maxRepairsPerMinute = 5
	// maxAttempts is how often a change is tried at once if the file is changed by
	// another program in between. After that the next check tries again.
	maxAttempts = 3
	// maxSwaps bounds the exchanges that put back what an owner wrote in between. Each
	// further exchange needs another write by the owner within microseconds, so the bound
	// is never reached in practice; stopping there would lose the owner's last write.
	maxSwaps = 1000

	// checkInterval is the time between checks while the plugin is installed: they
	// find changes that the watch misses.
	checkInterval = 30 * time.Second
	// troubleInterval is the time between checks while the plugin is not installed, for
	// example because the disk is full, and where the watch does not work.
	troubleInterval = 5 * time.Second
	// debounce is how long nothing must change in a directory before it is read, and
	// maxDebounce bounds that wait: a file that is written in place, and not renamed,
	// is incomplete for a moment.
	debounce    = 100 * time.Millisecond
	maxDebounce = time.Second
	// invalidGrace is how long a file that is not valid may be one that its owner is
	// still writing: until then nothing is changed.
	invalidGrace = 10 * time.Second
	// overlapWait is how long the old file is kept after an exchange, to see whether an
	// owner writes into it that opened it before: a few time slices of a busy scheduler.
	overlapWait = 30 * time.Millisecond
	// lockPoll is the time between attempts to take a lock that another installer has.
	lockPoll = 500 * time.Millisecond
	// lockTimeout is how long Uninstall waits for an installer that should have
	// stopped.
	lockTimeout = 15 * time.Second
	// reloadGrace is the time between taking the plugin out of the configuration and
	// removing its binary. Runtimes read a changed configuration within milliseconds,
	// but a pod that is being made still uses the old one.
	reloadGrace = 2 * time.Second
)
