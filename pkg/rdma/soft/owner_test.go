// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// TestOwner_losesNoRequest has one poster, which never waits, and several
// lockers. What the poster leaves in the ring must be taken without another
// event, and two must never own at once.
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
	// Nobody is left who could take it by chance.
	if taken != posts || !ring.empty() || o.word.Load() != 0 {
		t.Errorf("%d of %d requests taken, word %d", taken, posts, o.word.Load())
	}
}

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
				w := rocev2.Completion{WC: rdma.WC{ID: uint64(p)<<32 | i}, Wake: i%2 == 0}
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
	if n := int(unsafe.Sizeof(rdma.WC{})); n != 40 {
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
			return c.push(&rocev2.Completion{WC: rdma.WC{ID: pushed - 1}})
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
	if c.push(&rocev2.Completion{}); len(c.notify) == 0 {
		t.Error("a solicited-only Arm took back one for any completion")
	}
}

func TestSendRing(t *testing.T) {
	var r sendRing
	r.init(5, 2) // 8 slots
	buf := []byte("inline")
	sgl := []rdma.SGE{{Addr: 1}, {Addr: 2}}
	for i := range uint64(8) {
		if n := r.push([]rdma.SendWR{{ID: i, SGL: sgl, Inline: buf}}); n != 1 {
			t.Fatalf("push %d took %d", i, n)
		}
	}
	if n := r.push(make([]rdma.SendWR, 1)); n != 0 {
		t.Errorf("a full ring took %d", n)
	}
	clear(buf) // the caller's again
	clear(sgl)
	r.pop(3)
	if n := r.push([]rdma.SendWR{{ID: 8}, {ID: 9}}); n != 2 {
		t.Errorf("a ring with room for 3 took %d of 2", n)
	}
	want := uint64(3)
	for !r.empty() {
		for _, w := range r.front() {
			if w.ID != want {
				t.Errorf("request %d, want %d", w.ID, want)
			}
			if want < 8 && (string(w.Inline) != "inline" || len(w.SGL) != 2 || w.SGL[1].Addr != 2) {
				t.Errorf("request %d lost its payload: %+v", want, w)
			}
			want++
		}
		r.pop(len(r.front()))
	}
	if want != 10 {
		t.Errorf("popped up to %d", want)
	}
}

func TestMR_span(t *testing.T) {
	const base, size = 0x7000_0000_0000, 8192
	mem, err := provider.MapMemory(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Drop() })
	m := &mr{mem: mem, addr: base}
	for _, c := range []struct {
		name string
		addr uint64
		n    uint32
		ok   bool
	}{
		{"all", base, size, true},
		{"last byte", base + size - 1, 1, true},
		{"nothing at the end", base + size, 0, true},
		{"one too far", base + 1, size, false},
		{"behind", base + size + 1, 0, false},
		{"before", base - 1, 2, false},
		{"zero", 0, 1, false},
		{"wraps", ^uint64(0), 2, false},
		{"longest", base, ^uint32(0), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, ok := m.span(c.addr, c.n)
			if ok != c.ok || ok && (len(b) != int(c.n) || cap(b) != int(c.n)) {
				t.Errorf("span(%#x, %d) = %d bytes of %d, %v", c.addr, c.n, len(b), cap(b), ok)
			}
		})
	}
}

func TestRun(t *testing.T) {
	pkt := func(sizes ...int) (p []rocev2.TxPacket) {
		for _, s := range sizes {
			p = append(p, rocev2.TxPacket{HdrLen: 12, PayloadLen: s - 12 - rocev2.ICRCLen})
		}
		return p
	}
	for _, c := range []struct {
		name  string
		sizes []int
		most  int
		want  int
	}{
		{"one", []int{100}, 64, 1},
		{"equal", []int{100, 100, 100}, 64, 3},
		{"last shorter", []int{100, 100, 60, 60}, 64, 3},
		{"next longer", []int{100, 116}, 64, 1},
		{"limit", []int{100, 100, 100}, 2, 2},
		{"no segmentation", []int{100, 100}, 1, 1},
		{"bytes", []int{4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112}, 64, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := run(pkt(c.sizes...), c.most); got != c.want {
				t.Errorf("run of %v is %d, want %d", c.sizes, got, c.want)
			}
		})
	}
}

func TestPathMTU(t *testing.T) {
	for bytes, want := range map[int]rdma.MTU{
		0: rdma.MTU256, 1280: rdma.MTU1024, 1500: rdma.MTU1024, 2200: rdma.MTU2048, 4200: rdma.MTU4096, 9000: rdma.MTU4096, 65536: rdma.MTU4096,
	} {
		if got := pathMTU(bytes); got != want {
			t.Errorf("interface MTU %d: path MTU %v, want %v", bytes, got, want)
		}
	}
}
