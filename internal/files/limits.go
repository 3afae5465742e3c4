// SPDX-License-Identifier: Apache-2.0

package files

import "time"

// lockPoll is the time between the attempts of LockWithin and LockDirWithin: a context
// cannot end a blocking flock. An attempt costs some 10 microseconds. A process has a lock
// for milliseconds, or, as an agent does, for its whole life.
const lockPoll = 10 * time.Millisecond
