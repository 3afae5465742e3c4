// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"flag"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// schedules is how many are played without SIM_SCHEDULES.
const schedules = 2000

var simSeed = flag.Uint64("sim.seed", 0, "play the schedule of this seed only, with a trace")

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		if err := smcrtest.Random(*simSeed).Run(t.Logf); err != nil {
			t.Fatal(err)
		}
		return
	}
	n := int64(schedules)
	if s := os.Getenv("SIM_SCHEDULES"); s != "" {
		var err error
		if n, err = strconv.ParseInt(s, 10, 64); err != nil {
			t.Fatalf("SIM_SCHEDULES: %v", err)
		}
	}
	if testing.Short() {
		n /= 10
	}
	var wg sync.WaitGroup
	var done atomic.Int64
	var failed atomic.Bool
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for done.Add(1) <= n && !failed.Load() {
				seed := rand.Uint64() | 1
				s := smcrtest.Random(seed)
				if err := s.Try(); err != nil && !failed.Swap(true) {
					s = s.Shorten(1000)
					t.Errorf("-sim.seed %d: %v\nshortened to %d events:\n\n%v\n%v", seed, err, len(s.Ops), s, s.Try())
				}
			}
		})
	}
	wg.Wait()
	if !failed.Load() {
		t.Logf("%d schedules", n)
	}
}
