// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
)

// TestMain fails when a test leaves a goroutine, descriptor or region.
func TestMain(m *testing.M) {
	if os.Getenv(lockedChild) != "" {
		os.Exit(locked())
	}
	os.Exit(leaktest.Run(m, func() error { return goleak.Find() }, regionsLeft))
}

// regionsLeft reports memory that is still registered.
func regionsLeft() error {
	if n := regions(); n > 0 {
		return fmt.Errorf("%d memory regions are still mapped", n)
	}
	return nil
}

// regions counts mappings of registered memory.
func regions() int {
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0
	}
	return strings.Count(string(b), "memfd:kube-smcr-mr")
}
