// SPDX-License-Identifier: Apache-2.0

package apps

import "time"

const (
	// readyTimeout bounds the start of an agent on a loaded machine; it takes
	// some 100 ms.
	readyTimeout = time.Minute
	// buildTimeout bounds the download and the build of all suites, most of
	// which is curl's configure: a minute.
	buildTimeout = 10 * time.Minute
	// partTimeout bounds a part of a suite; the longest of redis' take some two
	// minutes on a quiet machine.
	partTimeout = 8 * time.Minute
	// lookTime is how long before that it is looked at what a part may wait for.
	lookTime = 10 * time.Second
	// repeats is how often a part is run again whose tests do not say the same
	// in all modes.
	repeats = 3
	// enough is how many failures in a mode are one of ours, if there is none
	// over plain TCP.
	enough = 2
)
