// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
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
	os.Exit(leaktest.Run(m, func() error { return goleak.Find() }))
}
