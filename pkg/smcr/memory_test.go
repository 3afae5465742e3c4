// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
)

func newTestMemory(tb testing.TB, budget int) *memory {
	tb.Helper()
	d := softtest.NewFabric(tb, 1).Open(tb, soft.Config{Name: "m", Addr: netip.MustParseAddr("192.0.2.1"), MTU: rdma.MTU4096})
	ctx, err := d.Open()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := ctx.Close(); err != nil {
			tb.Error(err)
		}
	})
	s := &Stack{devices: devices{list: []*rnic{{dev: d, ctx: ctx}}}, account: account{budget: budget, page: 4096}}
	tb.Cleanup(func() {
		if n := s.devices.list[0].domains; n != 0 {
			tb.Errorf("%d protection domains are left", n)
		}
	})
	return &memory{s: s}
}

// Buffers are handed out once, and arenas go when enough others are free.
func TestMemory_sendBuffers(t *testing.T) {
	const size = 16 << 10
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	m := newTestMemory(t, 1000*size)
	of := m.ofSize(size)
	var taken []*sendBuffer
	seen := map[*byte]bool{}
	most := 0
	for range 5000 {
		if grow := r.IntN(1000) < 1000-len(taken)*3; grow {
			b, err := m.takeSend(size)
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
		if bytes := m.s.account.bytes; of.nfree != of.nbufs-len(taken) || bytes != of.nbufs*size || of.nbufs > 3*len(taken)+2*maxArena {
			t.Fatalf("seed %d: %d buffers, %d free, %d taken, %d bytes", seed, of.nbufs, of.nfree, len(taken), bytes)
		}
		for i, a := range of.roomy {
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
	if of.nbufs == 0 || of.nbufs > 2*maxArena {
		t.Errorf("seed %d: %d buffers without users", seed, of.nbufs)
	}
	m.trim()
	if of.nbufs != 0 || of.nfree != 0 || len(m.arenas) != 0 || m.s.account.bytes != 0 {
		t.Errorf("seed %d: %d bytes are left", seed, m.s.account.bytes)
	}
}

// What is charged is what is mapped: whole pages, whatever their size.
func TestMemory_pages(t *testing.T) {
	const kib = 1024
	for _, tc := range []struct{ page, size, want int }{
		{4 * kib, 16 * kib, 16 * kib},
		{4 * kib, 4*kib + 1, 8 * kib},
		{64 * kib, 16 * kib, 64 * kib},
		{64 * kib, 64 * kib, 64 * kib},
		{64 * kib, 8 * 16 * kib, 128 * kib},
	} {
		m := newTestMemory(t, 1000*kib)
		m.s.account.page = tc.page
		outer := &TestAccount{Left: 1000 * kib}
		m.s.account.outer = outer
		r, err := m.register(tc.size, rdma.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if bytes := m.s.account.bytes; bytes != tc.want || outer.Left != 1000*kib-tc.want || len(r.mem) != tc.size {
			t.Errorf("%d bytes with pages of %d: %d are charged, %d left in the account, want %d charged", tc.size, tc.page, bytes, outer.Left, tc.want)
		}
		if err := r.close(); err != nil {
			t.Fatal(err)
		}
		m.s.devices.list[0].dead = true
		if _, err := m.register(tc.size, rdma.LocalWrite); !errors.Is(err, rdma.ErrNoResources) {
			t.Errorf("without a device: %v", err)
		}
		if bytes := m.s.account.bytes; bytes != 0 || outer.Left != 1000*kib {
			t.Errorf("%d bytes with pages of %d: %d are charged after all, %d left in the account", tc.size, tc.page, bytes, outer.Left)
		}
	}
}

func TestMemory_budget(t *testing.T) {
	const size = 16 << 10
	for _, tc := range []struct {
		name          string
		budget, outer int // buffers
		want          int
		share         bool // the account says why
	}{
		{"of the stack", 13, 20, 13, false},
		{"shared", 20, 13, 13, true},
		{"both", 13, 13, 13, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newTestMemory(t, tc.budget*size)
			outer := &TestAccount{Left: tc.outer * size}
			m.s.account.outer = outer
			var taken []*sendBuffer
			for i := range tc.want { // also the last ones, when there is no room for as many again
				b, err := m.takeSend(size)
				if err != nil {
					t.Fatalf("buffer %d: %v", i, err)
				}
				taken = append(taken, b)
			}
			if _, err := m.takeSend(size); !isShort(err) || errors.Is(err, ErrClientShare) != tc.share {
				t.Errorf("beyond the budget: %v", err)
			}
			if bytes := m.s.account.bytes; bytes != tc.want*size || outer.Left != (tc.outer-tc.want)*size {
				t.Errorf("%d bytes in use, %d left in the account after a refusal", bytes, outer.Left)
			}
			for _, b := range taken {
				if err := m.giveSend(b); err != nil {
					t.Fatal(err)
				}
			}
			m.trim()
			if outer.Left != tc.outer*size {
				t.Errorf("%d bytes were not given back", tc.outer*size-outer.Left)
			}
		})
	}
}

// Where there is no memory for a buffer of the wanted size, one of another size that is free does; and only there.
func TestMemory_otherSize(t *testing.T) {
	const large, small = 64 << 10, 16 << 10
	m := newTestMemory(t, 2*large)
	take := func(size, want int) *sendBuffer {
		t.Helper()
		b, err := m.takeSend(size)
		if err != nil {
			t.Fatal(err)
		}
		if len(b.mem) != want {
			t.Fatalf("a buffer of %d bytes for %d, want %d", len(b.mem), size, want)
		}
		return b
	}
	give := func(b *sendBuffer) {
		t.Helper()
		if err := m.giveSend(b); err != nil {
			t.Fatal(err)
		}
	}
	first, second := take(large, large), take(large, large)
	give(second)
	third := take(small, large)
	if _, err := m.takeSend(small); !isShort(err) {
		t.Fatalf("nothing is left: %v", err)
	}
	give(third)
	m.trim()
	bufs := []*sendBuffer{first}
	for range large / small {
		bufs = append(bufs, take(small, small))
	}
	give(bufs[4])
	bufs[4] = take(large, small)
	for _, b := range bufs {
		give(b)
	}
	m.trim()
	if m.s.account.bytes != 0 {
		t.Errorf("%d bytes are left", m.s.account.bytes)
	}
}

// TestAccount is an account with so many bytes left, all for one client.
type TestAccount struct{ Left int }

func (a *TestAccount) Take(_ netip.Addr, n int) error {
	if n > a.Left {
		return ErrClientShare
	}
	a.Left -= n
	return nil
}

func (a *TestAccount) Give(_ netip.Addr, n int) { a.Left += n }

func (a *TestAccount) Spare() int { return a.Left }

// The time of one does not depend on how many there are.
func BenchmarkMemory_sendBuffers(b *testing.B) {
	for _, n := range []struct {
		name string
		open int
	}{{"10 taken", 10}, {"10000 taken", 10000}} {
		b.Run(n.name, func(b *testing.B) {
			m := newTestMemory(b, 1<<30)
			var taken []*sendBuffer
			for range n.open {
				s, err := m.takeSend(16 << 10)
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
				s, err := m.takeSend(16 << 10)
				if err != nil {
					b.Fatal(err)
				}
				_ = m.giveSend(s)
			}
			for i := 1; i < len(taken); i += 2 {
				_ = m.giveSend(taken[i])
			}
			m.trim()
		})
	}
}
