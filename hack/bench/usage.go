// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// Usage is what a measurement cost, of the whole path: all its processes and
// their network namespaces. Cost tells it per operation or per MiB.
type Usage struct {
	CPU      time.Duration
	Switches int64 // context switches
	UDPSends int64 // datagrams given to the kernel; one with UDP_SEGMENT counts once
	TCPSends int64 // TCP segments, as the network counts them: after segmentation
}

func (u Usage) minus(v Usage) Usage {
	return Usage{u.CPU - v.CPU, u.Switches - v.Switches, u.UDPSends - v.UDPSends, u.TCPSends - v.TCPSends}
}

func (u Usage) per(what string, n float64) report.Cost {
	n = max(n, 1)
	return report.Cost{
		Per: what, CPUMicros: micros(u.CPU) / n,
		Counted: true, Switches: float64(u.Switches) / n, UDPSends: float64(u.UDPSends) / n, TCPSends: float64(u.TCPSends) / n,
	}
}

// usageOf reads what processes have used so far. Threads that have ended are
// not counted.
func usageOf(pids []int) Usage {
	var u Usage
	seen := map[string]bool{}
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d", pid)
		tasks, _ := filepath.Glob(dir + "/task/*") // none: it has ended
		for _, t := range tasks {
			u.CPU += time.Duration(firstNumber(readAll(t + "/schedstat")))
			u.Switches += switches(readAll(t + "/status"))
		}
		ns, _ := os.Readlink(dir + "/ns/net")
		if !seen[ns] {
			seen[ns] = true
			snmp := readAll(dir + "/net/snmp")
			u.UDPSends += snmpCounter(snmp, "Udp", "OutDatagrams")
			u.TCPSends += snmpCounter(snmp, "Tcp", "OutSegs")
		}
	}
	return u
}

// readAll returns nothing for what has just gone.
func readAll(name string) string {
	b, _ := os.ReadFile(name)
	return string(b)
}

func firstNumber(s string) int64 {
	fields := strings.Fields(s)
	if len(fields) == 0 {
		return 0
	}
	n, _ := strconv.ParseInt(fields[0], 10, 64)
	return n
}

// switches adds up both kinds of context switches in a status file.
func switches(status string) (sum int64) {
	for line := range strings.Lines(status) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.HasSuffix(name, "voluntary_ctxt_switches") {
			sum += firstNumber(value)
		}
	}
	return sum
}

// snmpCounter finds a counter in /proc/net/snmp: a line of names, then one of
// values.
func snmpCounter(snmp, protocol, name string) int64 {
	var names []string
	for line := range strings.Lines(snmp) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0] != protocol+":":
		case names == nil:
			names = f
		default:
			for i := range min(len(f), len(names)) {
				if names[i] == name {
					return firstNumber(f[i])
				}
			}
		}
	}
	return 0
}
