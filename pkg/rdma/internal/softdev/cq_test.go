// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"errors"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// TestCQ_losesNoWake has several producers and a consumer that sleeps
// whenever the queue is empty.
func TestCQ_losesNoWake(t *testing.T) {
	const producers, each = 4, 20_000
	c := newCQ(nil, 16*firstCQE)
	var room atomic.Int64
	room.Store(int64(c.depth))
	var wg sync.WaitGroup
	for p := range producers {
		wg.Go(func() {
			for i := uint64(0); i < each; {
				if room.Add(-1) < 0 {
					room.Add(1)
					runtime.Gosched()
					continue
				}
				w := wq.Completion{WC: rdma.WC{ID: uint64(p)<<32 | i}, Wake: i%2 == 0}
				if !c.push(&w) {
					t.Error("overrun with room")
					return
				}
				i++
			}
		})
	}
	var next [producers]uint64
	wcs := make([]rdma.WC, 7)
	for got := 0; got < producers*each; {
		n, err := c.Poll(wcs)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			if err := c.Arm(false); err != nil {
				t.Fatal(err)
			}
			if n, err = c.Poll(wcs); err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				<-c.Notify()
				continue
			}
		}
		for _, w := range wcs[:n] {
			p := w.ID >> 32
			if w.ID&0xffffffff != next[p] {
				t.Fatalf("producer %d: completion %d, want %d", p, w.ID&0xffffffff, next[p])
			}
			next[p]++
		}
		got += n
		room.Add(int64(n))
	}
	wg.Wait()
}

// TestCQ_grows: a queue has room for its depth and not for one more, in whatever steps it
// gets there, costs next to nothing before, and allocates no more afterwards.
func TestCQ_grows(t *testing.T) {
	if n := int(reflect.TypeFor[rdma.WC]().Size()); n != 40 {
		t.Errorf("an entry has %d bytes; limits.go says 40", n)
	}
	for _, depth := range []int{1, 3, firstCQE - 1, firstCQE, firstCQE + 1, 1000, 1 << 16} {
		c := newCQ(nil, depth)
		if n := len(*c.slots.Load()); n > firstCQE {
			t.Errorf("depth %d: %d entries at first", depth, n)
		}
		var pushed, polled uint64
		wcs := make([]rdma.WC, 7)
		poll := func() {
			t.Helper()
			n, err := c.Poll(wcs)
			if err != nil {
				t.Fatalf("depth %d: %v", depth, err)
			}
			for _, w := range wcs[:n] {
				if w.ID != polled {
					t.Fatalf("depth %d: completion %d, want %d", depth, w.ID, polled)
				}
				polled++
			}
		}
		push := func() bool {
			pushed++
			return c.push(&wq.Completion{WC: rdma.WC{ID: pushed - 1}})
		}
		for i := 0; pushed-polled < uint64(c.depth); i++ {
			if !push() {
				t.Fatalf("depth %d: overrun with %d entries", depth, pushed-polled)
			}
			if i%20 == 0 { // so that the ring wraps while it grows
				poll()
			}
		}
		for polled < pushed {
			poll()
		}
		if n := testing.AllocsPerRun(100, func() { push(); poll() }); n != 0 {
			t.Errorf("depth %d: %v allocations for a completion", depth, n)
		}
		for range c.depth {
			if !push() {
				t.Fatalf("depth %d: overrun with %d entries", depth, pushed-polled)
			}
		}
		if push() {
			t.Errorf("depth %d: no overrun with %d entries", depth, pushed-polled)
		}
		if _, err := c.Poll(wcs); !errors.Is(err, rdma.ErrCQOverrun) {
			t.Errorf("depth %d: poll %v", depth, err)
		}
	}
}

func TestCQ_armAnyStaysAny(t *testing.T) {
	c := newCQ(nil, 4)
	_ = c.Arm(false)
	_ = c.Arm(true)
	if c.push(&wq.Completion{}); len(c.notify) == 0 {
		t.Error("a solicited-only Arm took back one for any completion")
	}
}
