// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
)

// usageOf reads what processes have used so far, and what was sent in their network
// namespaces. Threads that have ended are
// not counted.
func usageOf(pids []int) engine.Usage {
	u := engine.Usage{Counted: true}
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
