// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestOwner_losesNoRequest has one poster, which never waits, and several lockers. A request that the poster
// leaves in the ring must be taken without another event, and no two goroutines may be the owner at once.
func TestOwner_losesNoRequest(t *testing.T) {
	const posts, lockers = 100_000, 3
	var o owner
	o.init()
	var ring recvRing
	ring.init(64)
	var inside atomic.Int32
	taken := uint64(0) // owned
	drain := func() {
		if inside.Add(1) != 1 {
			t.Error("two owners")
		}
		for !ring.empty() {
			w := ring.front()
			for _, r := range w {
				if r.ID != taken {
					t.Errorf("request %d, want %d", r.ID, taken)
				}
				taken++
			}
			ring.pop(len(w))
		}
		inside.Add(-1)
	}
	release := func() {
		for !o.unlock() {
			drain()
		}
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range lockers {
		wg.Go(func() {
			for !stop.Load() {
				o.lock()
				drain()
				release()
				runtime.Gosched()
			}
		})
	}
	for i := uint64(0); i < posts; {
		n := ring.push([]rdma.RecvWR{{ID: i}})
		i += uint64(n)
		if n == 0 {
			runtime.Gosched()
			continue
		}
		if o.ask() {
			drain()
			release()
		}
	}
	stop.Store(true)
	wg.Wait()
	// No goroutine is left that could take a forgotten request by chance.
	if taken != posts || !ring.empty() || o.word.Load() != 0 {
		t.Errorf("%d of %d requests taken, word %d", taken, posts, o.word.Load())
	}
}
