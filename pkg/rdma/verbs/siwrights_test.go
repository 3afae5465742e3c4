// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// TestSIW_rights: what siw lets a peer do with memory that was not registered for that, and what
// softiwarp lets siw do. siw asks for no right where it is read: who has one of its keys can read what it
// names (docs/iwarp.md, R5040.5.2.1-1). test/vm/siw runs it in a guest.
func TestSIW_rights(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	const size, off = 4096, 1000
	for _, c := range []struct {
		name   string
		access rdma.Access
		op     rdma.Opcode
		beyond int        // bytes behind the end that are asked for, too
		siw    bool       // siw allows it
		soft   iwarp.Code // of softiwarp's Terminate; 0: it allows it
		told   iwarp.Code // of siw's Terminate, where it does not allow it
	}{
		{"READ with the right", rdma.RemoteRead, rdma.OpRead, 0, true, 0, 0},
		{"READ of what may be written", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpRead, 0, true, iwarp.CodeAccess, 0},
		{"READ of what nobody may", 0, rdma.OpRead, 0, true, iwarp.CodeAccess, 0},
		{"READ beyond the end", rdma.RemoteRead, rdma.OpRead, 1, false, iwarp.CodeReadBounds, iwarp.CodeReadBounds},
		{"WRITE with the right", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpWrite, 0, true, 0, 0},
		{"WRITE to what may be read", rdma.RemoteRead, rdma.OpWrite, 0, false, iwarp.CodeAccess, iwarp.CodeTaggedSTag},
		{"WRITE to what nobody may", 0, rdma.OpWrite, 0, false, iwarp.CodeAccess, iwarp.CodeTaggedSTag},
		{"WRITE beyond the end", rdma.LocalWrite | rdma.RemoteWrite, rdma.OpWrite, 1, false, iwarp.CodeTaggedBounds, iwarp.CodeTaggedBounds},
	} {
		try := func(t *testing.T, x, y *rdmatest.End, allowed bool) {
			t.Helper()
			connect(t, x, y)
			m, err := y.PD.RegMR(y.MR, off, size, c.access)
			if err != nil {
				t.Fatal(err)
			}
			from, to := m.Bytes(), x.MR.Bytes()[:size]
			if c.op == rdma.OpWrite {
				from, to = to, from
			}
			for i := range from {
				from[i] = byte(i%251 + 1)
			}
			before := bytes.Clone(to)
			x.Send(t, rdma.SendWR{
				ID: 1, Op: c.op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, size)}, RemoteAddr: m.Addr() + uint64(c.beyond), RKey: m.RKey(),
			})
			// A READ behind it says what became of a WRITE.
			x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpRead, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(2*size, 8)}, RemoteAddr: y.MR.Addr(), RKey: y.MR.RKey()})
			if _, ok := y.Dev.(*softiwarp.Device); ok && !allowed { // siw does not complete all that is told off by a Terminate
				var term *iwarp.TerminateError
				if e := rdmatest.AwaitEvent(t, y.Ctx, rdma.EventQPFatal); !errors.As(e.Err, &term) || !term.Sent || term.Terminate.Code != c.soft {
					t.Errorf("softiwarp says %v, want a Terminate: %v", e.Err, c.soft)
				}
			} else if w := rdmatest.Await(t, x.SendCQ, 2); (w[1].Status == rdma.StatusSuccess) != allowed {
				t.Errorf("%v with rights %v: %v, and %v of what was behind it; want it allowed: %t", c.op, c.access, w[0].Status, w[1].Status, allowed)
			}
			if _, ok := y.Dev.(*softiwarp.Device); !ok && !allowed {
				var term *iwarp.TerminateError
				if e := rdmatest.AwaitEvent(t, x.Ctx, rdma.EventQPFatal); !errors.As(e.Err, &term) || term.Sent || term.Terminate.Code != c.told {
					t.Errorf("siw says %v, want a Terminate: %v", e.Err, c.told)
				}
			}
			want := before
			if allowed {
				want = from
			}
			if !bytes.Equal(to, want) {
				t.Error("other bytes are there")
			}
		}
		opt := rdmatest.Options{MRBytes: 4 * size}
		t.Run(c.name, func(t *testing.T) {
			t.Run("of siw", func(t *testing.T) {
				try(t, rdmatest.NewEnd(t, openSoft(t), opt), rdmatest.NewEnd(t, openSIW(t), opt), c.siw)
			})
			t.Run("of softiwarp", func(t *testing.T) {
				try(t, rdmatest.NewEnd(t, openSIW(t), opt), rdmatest.NewEnd(t, openSoft(t), opt), c.soft == 0)
			})
		})
	}
}
