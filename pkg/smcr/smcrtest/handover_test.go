// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// handovers is how many schedules are played with handovers without HANDOVER_SCHEDULES.
const handovers = 300

// outcome is what a schedule leads to: each message and event on the way, and the end.
type outcome struct {
	trace hash.Hash64
	err   string
	moved int
}

func outcomeOf(s smcrtest.Schedule) (o outcome) {
	defer func() {
		if p := recover(); p != nil {
			o.err = fmt.Sprint("panic: ", p)
		}
	}()
	o.trace = fnv.New64a()
	w := smcrtest.New(s.Config)
	w.Trace(func(format string, args ...any) { fmt.Fprintf(o.trace, format, args...) })
	defer func() { o.moved = w.Handovers() }()
	for _, op := range s.Ops {
		w.Do(op)
		if err := w.Check(); err != nil {
			return outcome{trace: o.trace, err: err.Error()}
		}
	}
	if err := w.Finish(); err != nil {
		o.err = err.Error()
	}
	return o
}

// Each schedule is the same, message by message, when the groups of this project are
// replaced by what is restored from their snapshots, after each step or now and then.
func TestHandover_simulation(t *testing.T) {
	n, base := howMany(t, "HANDOVER_SCHEDULES", handovers), newBase()
	s := &seeds{rng: rand.New(rand.NewPCG(base, 3)), left: n}
	began, moved := time.Now(), 0
	var wg sync.WaitGroup
	var mu sync.Mutex // guards moved
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for {
				seed, ok := s.next()
				if !ok {
					return
				}
				without := smcrtest.Random(seed)
				with := without
				with.Config.Handover = 1 + int(seed>>1)%3
				a, b := outcomeOf(without), outcomeOf(with)
				mu.Lock()
				moved += b.moved
				mu.Unlock()
				if a.err != b.err || a.trace.Sum64() != b.trace.Sum64() {
					s.stop()
					t.Errorf("-sim.base %d, seed %d: %q without, %q with %d handovers, or another trace:\n%v", base, seed, a.err, b.err, b.moved, with)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d schedules of -sim.base %d with %d handovers in %v", n, base, moved, time.Since(began).Round(time.Millisecond))
	if int64(moved) < 100*n && !t.Failed() {
		t.Errorf("%d handovers in %d schedules are too few", moved, n)
	}
}
