// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"math"

	"golang.org/x/sys/unix"
)

// LockLimit returns how many bytes the process may lock into memory, as registering memory
// with an RDMA device does. free says that there is no limit: none is set, or the process
// has CAP_IPC_LOCK.
func LockLimit() (bytes uint64, free bool) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil || l.Cur == unix.RLIM_INFINITY {
		return math.MaxUint64, true
	}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	may := unix.Capget(&h, &d[0]) == nil && d[0].Effective>>unix.CAP_IPC_LOCK&1 != 0
	return l.Cur, may
}
