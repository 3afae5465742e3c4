// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"unsafe"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/provider"
)

// A region that could not be deregistered went with its context: nothing of it is asked of libibverbs, whose
// memory is free by then.
func TestMR_closeAfterContext(t *testing.T) {
	d := &Device{name: "hangs0", contexts: make(map[*deviceContext]struct{})}
	calls := make(map[string]int)
	d.Fail(func(call string) error {
		calls[call]++
		return syscall.ETIMEDOUT // of firmware that hangs
	})
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = r.Close(), w.Close() }()
	c := &deviceContext{dev: d, pds: make(map[*pd]struct{}), cqs: make(map[uint64]*cq), events: provider.NewEvents()}
	if c.async, err = newWaiter(int(r.Fd()), d.name); err != nil {
		t.Fatal(err)
	}
	mem, err := provider.AllocMR(4096, 4096, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	p := &pd{ctx: c}
	m := &mr{pd: p, mem: mem, handle: ibvMR(unsafe.Pointer(new([512]byte)))}
	p.mrs = map[*mr]struct{}{m: {}}
	c.pds[p] = struct{}{}

	if err := m.Close(); !errors.Is(err, syscall.ETIMEDOUT) || calls["dereg_mr"] != 1 {
		t.Errorf("close the region: %v after %d calls", err, calls["dereg_mr"])
	}
	if err := c.shut(); !errors.Is(err, syscall.ETIMEDOUT) || calls["dereg_mr"] != 2 || calls["close"] != 1 {
		t.Errorf("end the context: %v after %v", err, calls)
	}
	m.Bytes()[0] = 1 // still mapped
	if err := m.Close(); err != nil || calls["dereg_mr"] != 2 || len(p.mrs) != 0 {
		t.Errorf("close the region after its context: %v after %d calls, %d regions are left", err, calls["dereg_mr"], len(p.mrs))
	}
	if err := c.Close(); !errors.Is(err, syscall.ETIMEDOUT) || len(c.pds) != 0 {
		t.Errorf("close the context: %v, %d domains are left", err, len(c.pds))
	}
}
