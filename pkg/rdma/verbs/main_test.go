// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine, descriptor or region.
func TestMain(m *testing.M) {
	if os.Getenv(lockedChild) != "" {
		os.Exit(locked())
	}
	before := descriptors()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		// The network poller may have opened its own, a profile another.
		if after := descriptors(); after > before+3 {
			fmt.Fprintf(os.Stderr, "%d file descriptors before the tests, %d after\n", before, after)
			code = 1
		}
		if n := regions(); n > 0 {
			fmt.Fprintf(os.Stderr, "%d memory regions are still mapped\n", n)
			code = 1
		}
	}
	os.Exit(code)
}

func descriptors() int {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(e)
}

// regions counts mappings of registered memory.
func regions() int {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0
	}
	return strings.Count(string(b), "memfd:kube-smcr-mr")
}
