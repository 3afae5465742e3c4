// SPDX-License-Identifier: Apache-2.0

package leaktest

import (
	"fmt"
	"os"
)

// allowed is how many descriptors more there may be after the tests: the network poller may have opened its own, a profile another.
const allowed = 3

// Run runs tests, as [testing.M] does, and returns their exit code. If the tests pass, it is 1 nevertheless if descriptors are left, or if one of
// left finds something that is.
func Run(m interface{ Run() int }, left ...func() error) (code int) {
	before := Descriptors()
	if code = m.Run(); code != 0 {
		return code
	}
	for _, find := range left {
		if err := find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if after := Descriptors(); after > before+allowed {
		fmt.Fprintf(os.Stderr, "%d file descriptors before the tests, %d after\n", before, after)
		code = 1
	}
	return code
}

// Descriptors returns how many file descriptors the process has open; 0: it cannot be told.
func Descriptors() int {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(e)
}
