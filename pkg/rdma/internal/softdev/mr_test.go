// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

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
