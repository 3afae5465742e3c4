// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// CPU is the processor time that this machine has spent on the guest so far. The
// guest's own account of its time is no good measure where much else runs: it
// counts the time in which its processor had to wait.
func (g *Guest) CPU() (time.Duration, error) {
	pid, err := os.ReadFile(filepath.Join(g.dir(), pidFile))
	if err != nil {
		return 0, fmt.Errorf("processor time of %s: %w", g.Name(), err)
	}
	stat, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(pid)), "stat"))
	if err != nil {
		return 0, fmt.Errorf("processor time of %s: %w", g.Name(), err)
	}
	return cpuOf(string(stat))
}

// cpuOf reads a process's time in user mode and in the kernel, in ticks that are
// 100 per second for programs (proc_pid_stat(5), fields 14 and 15).
func cpuOf(stat string) (time.Duration, error) {
	f := strings.Fields(stat[strings.LastIndex(stat, ")")+1:]) // after the name: from field 3 on
	if len(f) < 13 {
		return 0, fmt.Errorf("/proc/PID/stat is %q", stat)
	}
	var ticks int64
	for _, s := range f[11:13] {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/stat: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}
