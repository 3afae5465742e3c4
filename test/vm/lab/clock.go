// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
)

// A guest's time stamp counter is this machine's. Its kernel measures how fast that is
// by a timer that QEMU emulates, and on a busy machine takes a fifth of it for the
// truth: then all its clocks and timeouts run five times too fast. So it is told.

// khzPerBogoMIPS: what Linux calls BogoMIPS is two loops per tick of the counter, in
// millions.
const khzPerBogoMIPS = 500

// counterArguments tell a guest's kernel the rate of the time stamp counter, as this
// machine's /proc/cpuinfo has it. Where that does not tell, nothing does, and the
// guest measures.
func counterArguments(cpuinfo string) []string {
	if !strings.Contains(cpuinfo, " constant_tsc ") {
		return nil // another architecture, or a counter that nobody measures by
	}
	for line := range strings.Lines(cpuinfo) {
		name, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "bogomips" {
			continue
		}
		mips, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil || mips <= 0 {
			return nil
		}
		return []string{fmt.Sprintf("tsc_early_khz=%d", int64(math.Round(mips*khzPerBogoMIPS)))}
	}
	return nil
}

// cpuinfo is this machine's; "" where there is none.
func cpuinfo() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	return string(text)
}
