// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// SeedEnv is the environment variable with the seed that [Seed] returns. A test that failed is played again by what its
// output names: KUBE_SMCR_SEED=7.
const SeedEnv = "KUBE_SMCR_SEED"

// Seed draws a seed for what the test does at random, and logs it. A test that failed is run with the same one again, also by
// tools/again: another one may not find what the first one did.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(SeedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", SeedEnv, err)
		}
	}
	t.Logf("%s=%d", SeedEnv, seed)
	return seed
}
