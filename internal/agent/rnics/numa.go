// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// nearNodes reports for a NUMA node whether the agent may use one of its processors. If nothing is
// known, all nodes are near.
func nearNodes() func(node int) bool {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return func(int) bool { return true }
	}
	_, rest, _ := strings.Cut(string(status), "\nCpus_allowed_list:")
	mine, _, _ := strings.Cut(rest, "\n")
	return nodesOf("/sys/devices/system/node", strings.TrimSpace(mine))
}

// nodesOf reads from a directory of sysfs which NUMA nodes have a processor of the list mine, such
// as 0-3,8.
func nodesOf(dir, mine string) func(node int) bool {
	far := map[int]bool{}
	lists, err := filepath.Glob(filepath.Join(dir, "node[0-9]*", "cpulist"))
	if err != nil || mine == "" {
		lists = nil
	}
	for _, path := range lists {
		node, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "node"))
		text, rerr := os.ReadFile(path)
		if err == nil && rerr == nil {
			far[node] = !overlap(strings.TrimSpace(string(text)), mine)
		}
	}
	return func(node int) bool { return !far[node] }
}

// overlap reports whether two lists of processors have one in common.
func overlap(a, b string) bool {
	for x := range strings.SplitSeq(a, ",") {
		for y := range strings.SplitSeq(b, ",") {
			first, last, ok := span(x)
			from, to, okToo := span(y)
			if ok && okToo && first <= to && from <= last {
				return true
			}
		}
	}
	return false
}

// span parses "4-7" or "4".
func span(s string) (first, last int, ok bool) {
	from, to, ranged := strings.Cut(s, "-")
	if !ranged {
		to = from
	}
	first, err := strconv.Atoi(from)
	last, lerr := strconv.Atoi(to)
	return first, last, err == nil && lerr == nil
}
