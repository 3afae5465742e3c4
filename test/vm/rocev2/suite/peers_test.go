// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package suite

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
)

// transitions are a queue pair's way to RTS.
type transitions = [3]rdma.QPAttr

// TestPeers has queue pairs that do not do what they have announced. The one that
// keeps to it ends with an error that says so; another pair of the same devices
// goes on.
func TestPeers(t *testing.T) {
	for _, c := range []struct {
		name string
		// edit changes what the first does; the second keeps to what was announced.
		edit func(first *transitions)
		op   rdma.Opcode
		want []rdma.Status // of the first's request
		// rxe is what else it may be if rxe is the first.
		rxe []rdma.Status
	}{
		{
			"PSN ahead",
			func(a *transitions) { a[2].SQPSN = a[2].SQPSN.Add(100) },
			rdma.OpWrite,
			[]rdma.Status{rdma.StatusRetryExceeded},
			nil,
		},
		{
			"PSN ahead, READ",
			func(a *transitions) { a[2].SQPSN = a[2].SQPSN.Add(100) },
			rdma.OpRead,
			[]rdma.Status{rdma.StatusRetryExceeded},
			nil,
		},
		{
			// The packets look like old ones and are acknowledged as such, up to
			// one that was not sent yet. rxe takes that for an answer.
			"PSN behind",
			func(a *transitions) { a[2].SQPSN = a[2].SQPSN.Add(-100) },
			rdma.OpWrite,
			[]rdma.Status{rdma.StatusRetryExceeded},
			[]rdma.Status{rdma.StatusSuccess},
		},
		{
			"path MTU above",
			func(a *transitions) { a[1].MTU = rdma.MTU2048 },
			rdma.OpWrite,
			[]rdma.Status{rdma.StatusRemoteInvalid},
			nil,
		},
		{
			// A WRITE without immediate data goes in pieces, of which ours may have any length.
			"path MTU below",
			func(a *transitions) { a[1].MTU = rdma.MTU512 },
			rdma.OpWriteImm,
			[]rdma.Status{rdma.StatusRemoteInvalid},
			nil,
		},
		{
			"path MTU above, READ",
			func(a *transitions) { a[1].MTU = rdma.MTU2048 },
			rdma.OpRead,
			[]rdma.Status{rdma.StatusRetryExceeded},
			nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			bothWays(t, func(t *testing.T, a, b rdma.Device) {
				o := rdmatest.Options{MTU: rdma.MTU1024, Timeout: emulated, RetryCount: 2}
				x, y := rdmatest.NewEnd(t, a, o), rdmatest.NewEnd(t, b, o)
				first := x.Attrs(y)
				c.edit(&first)
				for _, attr := range first {
					if err := x.QP.Modify(attr); err != nil {
						t.Fatal(err)
					}
				}
				y.Connect(t, x)
				untouched(t, a, b, func() {
					w := x.Write(1, y, 0, 5000)
					w.Op = c.op
					for i := range x.MR.Bytes() {
						x.MR.Bytes()[i] = 0xaa
					}
					before := bytes.Clone(y.MR.Bytes())
					x.Send(t, w)
					got := rdmatest.Await(t, x.SendCQ, 1)[0]
					t.Logf("%v ends with %v; queue pairs in %v and %v", w.Op, got.Status, x.QP.State(), y.QP.State())
					want := c.want
					if a.Attr().Provider == "verbs" {
						want = append(slices.Clip(want), c.rxe...)
					}
					if !slices.Contains(want, got.Status) {
						t.Errorf("%v ends with %v, want %v", w.Op, got.Status, want)
					}
					if !bytes.Equal(before, y.MR.Bytes()) {
						t.Error("the memory of the second changed")
					}
				})
			})
		})
	}
}

// untouched runs f beside another pair of queue pairs, whose data must move
// meanwhile and afterwards.
func untouched(t *testing.T, a, b rdma.Device, f func()) {
	t.Helper()
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{Timeout: emulated})
	move := func(id uint64) {
		t.Helper()
		x.MR.Bytes()[0], x.MR.Bytes()[20_000] = byte(id), byte(id)
		x.Send(t, x.Write(id, y, 0, 20_001))
		rdmatest.AwaitOne(t, x.SendCQ, id, rdma.StatusSuccess)
		if y.MR.Bytes()[0] != byte(id) || y.MR.Bytes()[20_000] != byte(id) {
			t.Errorf("write %d beside it is not in the memory", id)
		}
	}
	move(1)
	f()
	move(2)
}

// storm is how long a peer without receive buffers is asked for one: at least so long, and until leastBeside writes were done
// beside it, each of which is awaited.
const (
	storm       = 500 * time.Millisecond
	leastBeside = 3
)

// TestRNRStorm: a peer has no receive buffer for long and wants the sender to try
// again at once, every time. Other queue pairs go on, and the message arrives
// when the buffer is there.
func TestRNRStorm(t *testing.T) {
	bothWays(t, func(t *testing.T, a, b rdma.Device) {
		x, y := rdmatest.Pair(t, a, b, rdmatest.Options{MinRNRTimer: 1, RNRRetry: 7, Timeout: emulated})
		u, v := rdmatest.Pair(t, a, b, rdmatest.Options{Timeout: emulated})
		x.Send(t, rdma.SendWR{ID: 1, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 3000)}})
		moved := uint64(0)
		began := time.Now()
		for ; moved < leastBeside || time.Since(began) < storm; moved++ {
			u.Send(t, u.Write(moved, v, 0, 20_000))
			rdmatest.AwaitOne(t, u.SendCQ, moved, rdma.StatusSuccess)
		}
		t.Logf("%d writes beside the storm in %v", moved, time.Since(began).Round(time.Millisecond))
		y.Recv(t, 2, 0, 4000)
		rdmatest.AwaitOne(t, y.RecvCQ, 2, rdma.StatusSuccess)
		rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
	})
}
