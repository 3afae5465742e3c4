// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"math"

	"golang.org/x/sys/unix"
)

// FileLimit returns how many files the process may have open. The Go runtime raises the
// soft limit to the hard limit when the process starts.
func FileLimit() uint64 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil || l.Cur == unix.RLIM_INFINITY {
		return math.MaxUint64
	}
	return l.Cur
}
