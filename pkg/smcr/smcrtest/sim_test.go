// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"flag"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// schedules is how many are played without SIM_SCHEDULES, and how many of these with
// handovers, too, without HANDOVER_SCHEDULES.
const schedules = 2000

// shortening is how long a failing schedule may be made shorter.
const shortening = 20 * time.Second

var (
	simSeed = flag.Uint64("sim.seed", 0, "play the schedule of this seed only, with a trace")
	simBase = flag.Uint64("sim.base", 1, "play the schedules that this number stands for, in the order of their seeds; 0 draws one")
)

// seeds are those of the schedules of a number.
type seeds struct {
	mu   sync.Mutex
	rng  *rand.Rand
	left int64 // -1: stopped
	move int64 // how many of them are played with handovers, too: the first ones
}

func (s *seeds) next() (seed uint64, move, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left <= 0 {
		return 0, false, false
	}
	s.left--
	s.move--
	return s.rng.Uint64() | 1, s.move >= 0, true
}

// stop ends the sequence and tells how many there are left; false if it was
// stopped before.
func (s *seeds) stop() (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.left
	s.left = -1
	return left, left >= 0
}

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		if err := smcrtest.Random(*simSeed).Run(t.Logf); err != nil {
			t.Fatal(err)
		}
		if _, err := tryHandedOver(smcrtest.Random(*simSeed)); err != nil {
			t.Fatal(err)
		}
		return
	}
	n := howMany(t, "SIM_SCHEDULES", schedules)
	play(t, n, min(n, howMany(t, "HANDOVER_SCHEDULES", schedules)), newBase())
}

// howMany is the number of schedules to play: what the environment says, or n.
func howMany(t *testing.T, variable string, n int64) int64 {
	t.Helper()
	if s := os.Getenv(variable); s != "" {
		var err error
		if n, err = strconv.ParseInt(s, 10, 64); err != nil {
			t.Fatalf("%s: %v", variable, err)
		}
	}
	if testing.Short() {
		n /= 10
	}
	return n
}

// newBase is what the seeds come from: -sim.base, or another one each time.
func newBase() uint64 {
	if *simBase != 0 {
		return *simBase
	}
	return uint64(time.Now().UnixNano()) | 1
}

// play plays n schedules of a base on all processors, the first ones with handovers, too.
func play(t *testing.T, n, withHandovers int64, base uint64) {
	t.Helper()
	s := &seeds{rng: rand.New(rand.NewPCG(base, 1)), left: n, move: withHandovers}
	began := time.Now()
	var handovers atomic.Int64
	// A schedule leaves little behind and makes much.
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				seed, move, ok := s.next()
				if !ok {
					return
				}
				try := smcrtest.Schedule.Try
				if move {
					try = func(s smcrtest.Schedule) error {
						n, err := tryHandedOver(s)
						handovers.Add(int64(n))
						return err
					}
				}
				err := try(smcrtest.Random(seed))
				if err == nil {
					continue
				}
				left, first := s.stop()
				if !first {
					return
				}
				t.Errorf("-sim.seed %d, among the first %d of -sim.base %d: %v", seed, n-left, base, err)
				until := time.Now().Add(shortening)
				short := smcrtest.Random(seed).Shorten(try, func() bool { return time.Now().Before(until) })
				t.Errorf("shortened to %d events:\n\n%v\n%v", len(short.Ops), short, try(short))
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	t.Logf("%d schedules of -sim.base %d in %v, %d of them with %d handovers",
		n, base, time.Since(began).Round(time.Millisecond), withHandovers, handovers.Load())
	if handovers.Load() < 100*withHandovers {
		t.Errorf("%d handovers in %d schedules are too few", handovers.Load(), withHandovers)
	}
}
