// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
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
	os.Exit(leaktest.Run(m, func() error { return goleak.Find() }))
}
