// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
)

// next waits for a completion. It allocates nothing.
func next(t testing.TB, q rdma.CQ, wc []rdma.WC) {
	t.Helper()
	for armed := false; ; {
		n, err := q.Poll(wc[:1])
		if err != nil || n > 0 && wc[0].Status != rdma.StatusSuccess {
			t.Fatalf("%+v (%v), %v", wc[0], wc[0].Status, err)
		}
		switch {
		case n > 0:
			return
		case armed:
			<-q.Notify()
			armed = false
		default:
			if err := q.Arm(false); err != nil {
				t.Fatal(err)
			}
			armed = true
		}
	}
}

// pingPong sends a message there and back, and returns what does that once more.
func pingPong(t testing.TB, o softvi.Options, n int) func() {
	t.Helper()
	x, y, _, _ := ends(t)
	connect(t, x, y, o, o)
	recv := func(e *rdmatest.End) func() {
		wr := []rdma.RecvWR{{SGE: e.SGE(0, n)}}
		return func() {
			if _, err := e.QP.PostRecv(wr); err != nil {
				t.Fatal(err)
			}
		}
	}
	send := func(e *rdmatest.End) func() {
		wr := []rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(n, n)}}}
		return func() {
			if _, err := e.QP.PostSend(wr); err != nil {
				t.Fatal(err)
			}
		}
	}
	recvX, recvY, sendX, sendY := recv(x), recv(y), send(x), send(y)
	wc := make([]rdma.WC, 1)
	recvX()
	recvY()
	return func() {
		sendX()
		next(t, y.RecvCQ, wc)
		recvY()
		sendY()
		next(t, x.RecvCQ, wc)
		recvX()
		next(t, x.SendCQ, wc)
		next(t, y.SendCQ, wc)
	}
}

// TestMessage_allocatesNothing: not when it is posted, sent, received or acknowledged.
func TestMessage_allocatesNothing(t *testing.T) {
	for _, n := range []int{64, 64 << 10} {
		once := pingPong(t, softvi.Options{}, n)
		for range 100 {
			once()
		}
		if allocs := testing.AllocsPerRun(200, once); allocs != 0 {
			t.Errorf("%d bytes: %v allocations for two messages", n, allocs)
		}
	}
}

// BenchmarkPingPong sends a message there and back, and waits until both are acknowledged.
func BenchmarkPingPong(b *testing.B) {
	for _, unreliable := range []bool{false, true} {
		for _, n := range []int{64, 16 << 10} {
			b.Run(fmt.Sprintf("unreliable=%t/%d", unreliable, n), func(b *testing.B) {
				once := pingPong(b, softvi.Options{Unreliable: unreliable}, n)
				b.ReportAllocs()
				for b.Loop() {
					once()
				}
			})
		}
	}
}

// BenchmarkStream moves 64 KiB per operation, by WRITEs of which 16 are outstanding.
func BenchmarkStream(b *testing.B) {
	const size, depth = 64 << 10, 16
	x, y, _, _ := ends(b)
	connect(b, x, y, softvi.Options{}, softvi.Options{})
	wc := make([]rdma.WC, 1)
	wr := []rdma.SendWR{{
		Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, size)}, RemoteAddr: y.MR.Addr(), RKey: y.MR.RKey(),
	}}
	outstanding := 0
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		if outstanding == depth {
			next(b, x.SendCQ, wc)
			outstanding--
		}
		if _, err := x.QP.PostSend(wr); err != nil {
			b.Fatal(err)
		}
		outstanding++
	}
	for range outstanding {
		next(b, x.SendCQ, wc)
	}
}
