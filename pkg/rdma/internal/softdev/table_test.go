// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestTable compares a table with a map while objects come and go.
func TestTable(t *testing.T) {
	var tab table[rdma.RKey, int]
	tab.init()
	rng := rand.New(rand.NewPCG(1, 2))
	draw := func() rdma.RKey { return rdma.RKey(rng.Uint32N(20_000)) } // so that numbers come again
	have := make(map[rdma.RKey]*int)
	var order []rdma.RKey
	most := 0
	for i := range 200_000 {
		target := 3000 * (i / 50_000 % 2) // grow, shrink to nothing, and again
		if len(have) <= target+rng.IntN(50) {
			k := tab.free(draw)
			if have[k] != nil || k == 0 {
				t.Fatalf("step %d: number %d is not free", i, k)
			}
			have[k] = &i
			order = append(order, k)
			tab.set(k, &i)
		} else {
			n := rng.IntN(len(order))
			k := order[n]
			order[n] = order[len(order)-1]
			order = order[:len(order)-1]
			delete(have, k)
			tab.clear(k)
			tab.clear(k) // harmless
		}
		most = max(most, len(have))
		if k := draw(); tab.get(k) != have[k] {
			t.Fatalf("step %d: wrong object for %d", i, k)
		}
		if tab.used != len(have) {
			t.Fatalf("step %d: %d objects, want %d", i, tab.used, len(have))
		}
	}
	for k, v := range have {
		if tab.get(k) != v {
			t.Errorf("%d is not found", k)
		}
	}
	if n := len(*tab.slots.Load()); n > 16*most {
		t.Errorf("%d slots for at most %d objects", n, most)
	}
}

// TestTable_readersSeeAll: what is in the table all the time is found at every moment,
// and what is gone is not found by who looks afterwards, while others come and go and
// the table grows.
func TestTable_readersSeeAll(t *testing.T) {
	const stay, rounds = 100, 20_000
	var tab table[rdma.RKey, rdma.RKey]
	tab.init()
	rng := rand.New(rand.NewPCG(3, 4))
	draw := func() rdma.RKey { return rdma.RKey(rng.Uint32()) }
	add := func() *rdma.RKey {
		k := new(rdma.RKey)
		*k = tab.free(draw)
		tab.set(*k, k)
		return k
	}
	var stays [stay]*rdma.RKey
	for i := range stays {
		stays[i] = add()
	}
	var gone atomic.Pointer[rdma.RKey]
	var done atomic.Bool
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := 0; !done.Load(); i++ {
				if k := stays[i%stay]; tab.get(*k) != k {
					t.Errorf("%v is not found", *k)
					return
				}
				if k := gone.Load(); k != nil && tab.get(*k) != nil {
					t.Errorf("%v is found after it went", *k)
					return
				}
			}
		})
	}
	var passing []*rdma.RKey
	for i := range rounds {
		passing = append(passing, add())
		if len(passing) > 1+i%500 {
			k := passing[0]
			passing = passing[1:]
			tab.clear(*k)
			gone.Store(k)
		}
	}
	done.Store(true)
	wg.Wait()
}

func BenchmarkTable_get(b *testing.B) {
	var tab table[rdma.RKey, mr]
	tab.init()
	rng := rand.New(rand.NewPCG(5, 6))
	var keys [1000]rdma.RKey
	for i := range keys {
		keys[i] = tab.free(func() rdma.RKey { return rdma.RKey(rng.Uint32()) })
		tab.set(keys[i], &mr{})
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if tab.get(keys[i]) == nil {
			b.Fatal("not found")
		}
		if i++; i == len(keys) {
			i = 0
		}
	}
}
