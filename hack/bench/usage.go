// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Usage is what a measurement cost, of the whole path: all its processes and
// their network namespaces. Cost tells it per operation or per MiB.
type Usage struct {
	CPU      time.Duration
	Switches int64 // context switches
	UDPSends int64 // datagrams given to the kernel; one with UDP_SEGMENT counts once
	TCPSends int64 // TCP segments, as the network counts them: after segmentation
}

// Cost is a Usage per operation or per MiB.
type Cost struct {
	Per       string  `json:"per"` // "round trip", "MiB", "connection"
	CPUMicros float64 `json:"cpuMicros"`
	Switches  float64 `json:"contextSwitches"`
	UDPSends  float64 `json:"udpSends"`
	TCPSends  float64 `json:"tcpSends"`
}

func (u Usage) minus(v Usage) Usage {
	return Usage{u.CPU - v.CPU, u.Switches - v.Switches, u.UDPSends - v.UDPSends, u.TCPSends - v.TCPSends}
}

func (u Usage) per(what string, n float64) Cost {
	n = max(n, 1)
	return Cost{what, micros(u.CPU) / n, float64(u.Switches) / n, float64(u.UDPSends) / n, float64(u.TCPSends) / n}
}

// text is the cost for the table.
func (c Cost) text() string {
	if c.Per == "" {
		return ""
	}
	return fmt.Sprintf("CPU %s us, %s switches, %s UDP sends per %s", number(c.CPUMicros), number(c.Switches), number(c.UDPSends), c.Per)
}

// medianCost takes the median of each figure.
func medianCost(costs []Cost) Cost {
	if len(costs) == 0 {
		return Cost{}
	}
	pick := func(f func(Cost) float64) float64 {
		v := make([]float64, len(costs))
		for i, c := range costs {
			v[i] = f(c)
		}
		return spreadOf(v).Median
	}
	return Cost{
		Per:       costs[0].Per,
		CPUMicros: pick(func(c Cost) float64 { return c.CPUMicros }),
		Switches:  pick(func(c Cost) float64 { return c.Switches }),
		UDPSends:  pick(func(c Cost) float64 { return c.UDPSends }),
		TCPSends:  pick(func(c Cost) float64 { return c.TCPSends }),
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
