// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine or descriptor. Of the second process of a test it is
// the main function.
func TestMain(m *testing.M) {
	if role := os.Getenv(secondProcess); role != "" {
		if err := runSecondProcess(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
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
