// SPDX-License-Identifier: Apache-2.0

package testenv_test

import (
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestSeed(t *testing.T) {
	t.Setenv(testenv.SeedEnv, "")
	if a, b := testenv.Seed(t), testenv.Seed(t); a == b {
		t.Errorf("the seed %d is drawn twice", a)
	}
	t.Setenv(testenv.SeedEnv, "18446744073709551615")
	if got := testenv.Seed(t); got != 1<<64-1 {
		t.Errorf("seed %d, want that of the environment", got)
	}
}
