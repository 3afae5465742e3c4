// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails when a test leaves a goroutine.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
