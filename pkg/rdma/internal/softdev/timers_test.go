// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// testTimers are timers without a device; the test says what time it is.
type testTimers struct {
	timers
	qps []*QP
}

func newTimers(n int) *testTimers {
	t := &testTimers{}
	t.init()
	t.timer = time.NewTimer(time.Hour) // nobody looks at it
	for range n {
		t.qps = append(t.qps, new(QP))
	}
	return t
}

// taken returns the indexes of the queue pairs whose time has come, those that expire
// would handle.
func (t *testTimers) taken(at int64) (got []int) {
	now := t.epoch.Add(time.Duration(at))
	for _, q := range t.take(now, nil) {
		switch d := q.timeout.deadline.Load(); {
		case d == 0:
		case d > at:
			t.schedule(q, d)
		default:
			got = append(got, slices.Index(t.qps, q))
			t.set(q, 0)
		}
	}
	slices.Sort(got)
	return got
}

func TestTimers(t *testing.T) {
	tm := newTimers(4)
	want := func(at int64, qps ...int) {
		t.Helper()
		if got := tm.taken(at); !slices.Equal(got, qps) {
			t.Errorf("at %d: %v, want %v", at, got, qps)
		}
	}
	tm.set(tm.qps[0], 100)
	tm.set(tm.qps[1], 50)
	tm.set(tm.qps[2], 200)
	want(49)
	want(50, 1)
	want(50)

	tm.set(tm.qps[0], 300) // later: its place stays
	if at := tm.qps[0].timeout.at.Load(); at != 100 {
		t.Errorf("a later deadline moved the place to %d", at)
	}
	want(150)
	tm.set(tm.qps[0], 160) // earlier than its new place
	want(160, 0)

	tm.set(tm.qps[2], 0) // none: its place is for nothing
	tm.set(tm.qps[3], 210)
	want(220, 3)

	tm.set(tm.qps[1], 230)
	tm.set(tm.qps[3], 240)
	tm.set(tm.qps[1], 0)
	tm.remove(tm.qps[1])
	tm.remove(tm.qps[1])
	want(1000, 3)
	if len(tm.due) != 0 {
		t.Errorf("%d queue pairs are left", len(tm.due))
	}
}

// Whatever deadlines do, each queue pair is handled at its deadline, and no other one is.
func TestTimers_random(t *testing.T) {
	const n = 50
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		tm := newTimers(n)
		deadlines := make([]int64, n)
		for now := int64(1); now < 500; now++ {
			for range r.IntN(5) {
				i := r.IntN(n)
				deadlines[i] = 0
				if r.IntN(4) > 0 {
					deadlines[i] = now + 1 + r.Int64N(60)
				}
				tm.set(tm.qps[i], deadlines[i])
				if deadlines[i] == 0 && r.IntN(2) == 0 {
					tm.remove(tm.qps[i])
				}
			}
			var want []int
			for i, d := range deadlines {
				if d != 0 && d <= now {
					want = append(want, i)
					deadlines[i] = 0
				}
			}
			if got := tm.taken(now); !slices.Equal(got, want) {
				t.Fatalf("seed %d, at %d: %v, want %v", seed, now, got, want)
			}
		}
	}
}

// The timer of a device fires for a queue pair whose deadline came earlier than the one that it runs for.
func TestTimers_fires(t *testing.T) {
	tm := newTimers(2)
	later, sooner := tm.qps[0], tm.qps[1]
	tm.set(later, tm.since(time.Now().Add(time.Hour)))
	tm.set(sooner, tm.since(time.Now().Add(time.Millisecond)))
	fired := <-tm.timer.C
	if got := tm.take(fired.Add(time.Millisecond), nil); len(got) != 1 || got[0] != sooner {
		t.Errorf("%d queue pairs, want the one", len(got))
	}
	tm.set(sooner, tm.since(time.Now())) // not the heap's only one
	<-tm.timer.C
}

// What one expiry takes beside others that wait.
func BenchmarkTimers(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		b.Run(fmt.Sprintf("queue pairs=%d", n), func(b *testing.B) {
			tm := newTimers(n)
			for i, q := range tm.qps {
				tm.set(q, 1<<40+int64(i))
			}
			var due []*QP
			b.ReportAllocs()
			for at := int64(1); b.Loop(); at++ {
				tm.set(tm.qps[n/2], at)
				due = tm.take(tm.epoch.Add(time.Duration(at)), due[:0])
				if len(due) != 1 {
					b.Fatalf("%d are due", len(due))
				}
			}
		})
	}
}
