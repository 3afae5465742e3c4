// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
)

// TestMain fails when a test leaves a goroutine or descriptor.
func TestMain(m *testing.M) {
	os.Exit(leaktest.Run(m, func() error { return goleak.Find() }))
}
