// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

func TestMR_span(t *testing.T) {
	const base, size = 0x7000_0000_0000, 8192
	mem, err := provider.MapMemory(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Drop() })
	m := &mr{mem: mem.All(), addr: base}
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

// Discard empties a range and nothing else, gives the whole pages in it back, and refuses what is not in the
// region.
func TestMR_Discard(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	page := os.Getpagesize()
	all, err := o.pd.AllocMR(4*page, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	const at = 100 // of the part
	part, err := o.pd.RegMR(all, at, 3*page, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name   string
		mr     rdma.MR
		start  int // of mr in all
		off, n int
		gone   string // which of the pages take no memory
		want   error
	}{
		{"all", all, 0, 0, 4 * page, "yyyy", nil},
		{"a page", all, 0, page, page, "nynn", nil},
		{"parts of pages", all, 0, page - 1, page, "nnnn", nil},
		{"a page and parts", all, 0, page - 1, page + 2, "nynn", nil},
		{"less than a page", all, 0, page + 1, 2, "nnnn", nil},
		{"nothing", all, 0, page, 0, "nnnn", nil},
		{"of a part", part, at, 0, 3 * page, "nyyn", nil},
		{"too long", all, 0, page, 4 * page, "nnnn", rdma.ErrInvalid},
		{"behind", all, 0, 5 * page, 0, "nnnn", rdma.ErrInvalid},
		{"before", all, 0, -1, 2, "nnnn", rdma.ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := all.Bytes()
			for i := range b {
				b[i] = 1
			}
			if err := tc.mr.(rdma.Discarder).Discard(tc.off, tc.n); !errors.Is(err, tc.want) {
				t.Errorf("Discard = %v, want %v", err, tc.want)
			}
			if got := absent(t, all.(*mr)); got != tc.gone {
				t.Errorf("pages that take no memory: %s, want %s", got, tc.gone)
			}
			for i := range b {
				want := byte(1)
				if in := i - tc.start - tc.off; tc.want == nil && 0 <= in && in < tc.n {
					want = 0
				}
				if b[i] != want {
					t.Fatalf("byte %d is %d, want %d", i, b[i], want)
				}
			}
		})
	}
	if err := errors.Join(part.Close(), all.Close()); err != nil {
		t.Fatal(err)
	}
	if err := all.(rdma.Discarder).Discard(0, page); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("Discard of a region that is closed = %v", err)
	}
}

// absent says of each page of a region whether it takes no memory, by the process' page map.
func absent(t *testing.T, m *mr) string {
	t.Helper()
	const entry = 8 // bytes of a page, whose highest bit says that the page is there
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	page := os.Getpagesize()
	entries := make([]byte, entry*len(m.Bytes())/page)
	if _, err := f.ReadAt(entries, int64(m.mem.Addr())/int64(page)*entry); err != nil {
		t.Fatal(err)
	}
	var out []byte
	for ; len(entries) > 0; entries = entries[entry:] {
		out = append(out, "yn"[binary.NativeEndian.Uint64(entries)>>63])
	}
	return string(out)
}

// Remote says what is wrong with a peer's request, and an invalidated key opens nothing to
// peers any more, while the program goes on with the region.
func TestMemory_Remote(t *testing.T) {
	c := silent(t)
	o, two := c.objects(t), c.objects(t)
	const all = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	m, err := o.pd.AllocMR(4096, rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	part, err := o.pd.RegMR(m, 100, 50, all)
	if err != nil {
		t.Fatal(err)
	}
	own, other := pdMemory{o.pd.(*pd)}, pdMemory{two.pd.(*pd)}
	remote := func(name string, v pdMemory, m rdma.MR, off int, n uint32, acc rdma.Access, want rdma.Status) {
		t.Helper()
		b, got := v.Remote(m.RKey(), m.Addr()+uint64(off), n, acc)
		if got != want || want == rdma.StatusSuccess && (len(b) != int(n) || &b[0] != &m.Bytes()[off]) {
			t.Errorf("%s: %d bytes, %v, want %v", name, len(b), got, want)
		}
	}
	remote("write", own, m, 0, 4096, rdma.RemoteWrite, rdma.StatusSuccess)
	remote("read without right", own, m, 0, 1, rdma.RemoteRead, rdma.StatusRemoteAccess)
	remote("one byte too far", own, m, 1, 4096, rdma.RemoteWrite, rdma.StatusRemoteOp)
	remote("another domain", other, m, 0, 1, rdma.RemoteWrite, rdma.StatusRemoteInvalid)
	remote("the part", own, part, 0, 50, all, rdma.StatusSuccess)
	remote("behind the part", own, part, 0, 51, rdma.RemoteWrite, rdma.StatusRemoteOp)
	remote("before the part", own, part, -1, 2, rdma.RemoteWrite, rdma.StatusRemoteOp)

	if other.Invalidate(part.RKey()) {
		t.Error("another domain invalidated the key")
	}
	remote("the part, still", own, part, 0, 50, all, rdma.StatusSuccess)
	if !own.Invalidate(part.RKey()) || own.Invalidate(part.RKey()) || own.Invalidate(0) {
		t.Error("the key is not invalidated once")
	}
	remote("invalidated", own, part, 0, 50, all, rdma.StatusRemoteInvalid)
	remote("the region that it is of", own, m, 0, 4096, rdma.RemoteWrite, rdma.StatusSuccess)
	if _, s := own.Local(rdma.SGE{Addr: part.Addr(), Length: 50, LKey: part.LKey()}, true); s != rdma.StatusSuccess {
		t.Errorf("local: %v", s)
	}
	if err := part.Close(); err != nil {
		t.Error(err)
	}
	if _, s := own.Local(rdma.SGE{Addr: part.Addr(), Length: 50, LKey: part.LKey()}, false); s != rdma.StatusLocalProtect {
		t.Errorf("local after Close: %v", s)
	}
	if d := c.dev; d.lkeys.used != 3 || d.rkeys.used != 3 {
		t.Errorf("%d and %d keys are left, want 3", d.lkeys.used, d.rkeys.used)
	}
}

// Peers' WRITEs are counted by blocks, as a whole when they begin, and nothing else is.
func TestMR_Written(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	const block = 4096
	m, err := o.pd.AllocMR(3*block-100, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	w, mem := m.(rdma.WriteCounter), pdMemory{o.pd.(*pd)}
	remote := func(off, n int, acc rdma.Access) { _, _ = mem.Remote(m.RKey(), m.Addr()+uint64(off), uint32(n), acc) }
	remote(0, 10, rdma.RemoteWrite) // before anybody counts
	w.CountWrites(block)
	remote(0, 10, rdma.RemoteRead)
	remote(0, 4*block, rdma.RemoteWrite) // is refused
	for _, tc := range []struct {
		off, n int
		want   [3]uint64
	}{
		{0, 1, [3]uint64{1, 0, 0}},
		{block - 1, 1, [3]uint64{2, 0, 0}},
		{block, 100, [3]uint64{2, 100, 0}},
		{block - 2, block + 5, [3]uint64{4, 100 + block, 3}},
		{10, 0, [3]uint64{4, 100 + block, 3}},
	} {
		remote(tc.off, tc.n, rdma.RemoteWrite)
		if got := [3]uint64{w.Written(0), w.Written(1), w.Written(2)}; got != tc.want {
			t.Errorf("after %d bytes at %d: %v, want %v", tc.n, tc.off, got, tc.want)
		}
	}
	if n := testing.AllocsPerRun(100, func() { remote(1, 100, rdma.RemoteWrite) }); n != 0 {
		t.Errorf("a write allocates %v times", n)
	}
}

// While a domain is held nobody owns its queue pairs, whose work is done afterwards.
func TestPD_Hold(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	q := o.qp.(Carrier)
	inside := false
	o.pd.(rdma.Holder).Hold(func() {
		inside = true
		if q.base().own.tryLock() {
			t.Error("somebody else can own a queue pair")
		}
	})
	if !inside || !q.base().own.tryLock() {
		t.Error("the queue pair is not free again")
	}
	q.base().own.unlock()
}
