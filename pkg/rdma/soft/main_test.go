// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine, descriptor or mapping.
func TestMain(m *testing.M) {
	if dir := os.Getenv(holdDirEnv); dir != "" {
		if err := hold(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
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
