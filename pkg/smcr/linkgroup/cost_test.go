// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// fill opens connections until there are n.
func fill(tb testing.TB, n int) *rig {
	tb.Helper()
	r := ready(tb, linkgroup.Client)
	r.elements = 26
	for i := 1; i < n; i++ {
		if err := r.open(fmt.Sprint("c", i)); err != nil {
			tb.Fatal(err)
		}
	}
	r.poll()
	return r
}

var crowds = []int{3, 250}

// What comes with each message must not look at all connections: the time is
// the same with few and with many that wait for the peer's close.
func BenchmarkGroup_nextTimeoutWhileClosing(b *testing.B) {
	for _, n := range crowds {
		b.Run(fmt.Sprintf("%d closing", n), func(b *testing.B) {
			r := fill(b, n)
			for _, c := range r.conns {
				c.Close(r.now)
			}
			b.ReportAllocs()
			for b.Loop() {
				r.g.NextTimeout()
			}
		})
	}
}

// Opening finds a free place and a free RMBE.
func BenchmarkGroup_openAndRelease(b *testing.B) {
	for _, n := range crowds {
		b.Run(fmt.Sprintf("beside %d", n), func(b *testing.B) {
			r := fill(b, n)
			var outs []linkgroup.Output
			b.ReportAllocs()
			for b.Loop() {
				c, err := r.g.OpenConn(rmbeSize, sendBuffer)
				if err != nil {
					b.Fatal(err)
				}
				c.Abandon(r.now, true)
				outs = r.g.Poll(r.now, outs[:0])
				c.Release(r.now)
			}
		})
	}
}
