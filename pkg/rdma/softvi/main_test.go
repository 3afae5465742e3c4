// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine or descriptor.
func TestMain(m *testing.M) {
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
