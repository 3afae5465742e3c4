// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lockLimit returns why n more bytes cannot be locked into memory, nil if the
// limit of the process is not the reason. A device reaches registered memory by
// its physical address, so the kernel locks it, and counts.
func lockLimit(n int) error {
	l := unix.Rlimit{Cur: unix.RLIM_INFINITY}
	_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) // does not fail
	if l.Cur == unix.RLIM_INFINITY || mayLock() {
		return nil
	}
	pinned := pinnedBytes()
	if pinned+uint64(n) <= l.Cur {
		return nil
	}
	return fmt.Errorf("%d bytes are locked already and RLIMIT_MEMLOCK is %d: give the container the capability IPC_LOCK, "+
		"or raise the limit (LimitMEMLOCK=infinity for the container runtime's systemd unit, ulimit -l for a shell)", pinned, l.Cur)
}

// mayLock reports whether the process has CAP_IPC_LOCK.
func mayLock() bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	return unix.Capget(&h, &d[0]) == nil && d[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0
}

// pinnedBytes is what the process has locked for devices.
func pinnedBytes() uint64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmPin:"); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err == nil {
				return kib << 10
			}
		}
	}
	return 0
}
