// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

func newTestMemory(tb testing.TB, size, budget int) *memory {
	tb.Helper()
	d := rdmatest.NewFabric(tb, 1).Open(tb, soft.Config{Name: "m", Addr: netip.MustParseAddr("192.0.2.1"), MTU: rdma.MTU4096})
	ctx, err := d.Open()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := ctx.Close(); err != nil {
			tb.Error(err)
		}
	})
	pd, err := ctx.AllocPD()
	if err != nil {
		tb.Fatal(err)
	}
	return &memory{rnics: []*rnic{{dev: d, ctx: ctx, pd: pd}}, budget: budget, size: size}
}

// Buffers are handed out once, and arenas go when enough others are free.
func TestMemory_sendBuffers(t *testing.T) {
	const size = 16 << 10
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	m := newTestMemory(t, size, 100*sendBuffersPerArena*size)
	var taken []*sendBuffer
	seen := map[*byte]bool{}
	most := 0
	for range 5000 {
		if grow := r.IntN(1000) < 1000-len(taken)*3; grow {
			b, err := m.takeSend()
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if seen[&b.mem[0]] || len(b.mem) != size || &b.mem[0] != &b.region.mem[b.off] {
				t.Fatalf("seed %d: buffer at %d of %d bytes is taken twice", seed, b.off, len(b.mem))
			}
			seen[&b.mem[0]] = true
			taken = append(taken, b)
		} else if len(taken) > 0 {
			i := r.IntN(len(taken))
			b := taken[i]
			taken[i] = taken[len(taken)-1]
			taken = taken[:len(taken)-1]
			delete(seen, &b.mem[0])
			if err := m.giveSend(b); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		most = max(most, len(taken))
		if m.nfree != len(m.arenas)*sendBuffersPerArena-len(taken) {
			t.Fatalf("seed %d: %d free, %d arenas, %d taken", seed, m.nfree, len(m.arenas), len(taken))
		}
		for i, a := range m.roomy {
			if a.roomy != i || a.free == 0 {
				t.Fatalf("seed %d: arena at %d thinks it is at %d with %08b free", seed, i, a.roomy, a.free)
			}
		}
	}
	if most < 50 {
		t.Errorf("seed %d: only %d buffers at once", seed, most)
	}
	for _, b := range taken {
		if err := m.giveSend(b); err != nil {
			t.Fatal(err)
		}
	}
	if len(m.arenas) != 1 {
		t.Errorf("seed %d: %d arenas without users", seed, len(m.arenas))
	}
	m.close()
	if m.bytes != 0 {
		t.Errorf("seed %d: %d bytes are left", seed, m.bytes)
	}
}

func TestMemory_budget(t *testing.T) {
	const size = 16 << 10
	m := newTestMemory(t, size, 2*sendBuffersPerArena*size)
	defer m.close()
	for i := range 2 * sendBuffersPerArena {
		if _, err := m.takeSend(); err != nil {
			t.Fatalf("buffer %d: %v", i, err)
		}
	}
	var full *errMemory
	if _, err := m.takeSend(); !errors.As(err, &full) {
		t.Errorf("beyond the budget: %v", err)
	}
}

// The time of one does not depend on how many there are.
func BenchmarkMemory_sendBuffers(b *testing.B) {
	for _, n := range []struct {
		name string
		open int
	}{{"10 taken", 10}, {"10000 taken", 10000}} {
		b.Run(n.name, func(b *testing.B) {
			m := newTestMemory(b, 16<<10, 1<<30)
			defer m.close()
			var taken []*sendBuffer
			for range n.open {
				s, err := m.takeSend()
				if err != nil {
					b.Fatal(err)
				}
				taken = append(taken, s)
			}
			for i := 0; i < len(taken); i += 2 { // holes everywhere
				_ = m.giveSend(taken[i])
			}
			b.ReportAllocs()
			for b.Loop() {
				s, err := m.takeSend()
				if err != nil {
					b.Fatal(err)
				}
				_ = m.giveSend(s)
			}
		})
	}
}
