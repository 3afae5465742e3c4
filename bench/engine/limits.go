// SPDX-License-Identifier: Apache-2.0

package engine

import "time"

const (
	// maxRounds and the two durations keep a typing error from taking days.
	maxRounds   = 1000
	minDuration = time.Millisecond
	maxDuration = 10 * time.Second
	// lineLimit is far above what is written in one line.
	lineLimit = 1 << 20
	// profileTimes is how much longer than in a round a job runs under the
	// profiler: the more samples, the better, and package load ends a load that
	// takes too long.
	profileTimes = 3
	// slowLimit is from when on a path with a StartCost is measured once only:
	// rstream takes half a minute for 1 MiB each way, so that the other rounds
	// would take longer than all else together.
	slowLimit = 4 * time.Second
)
