// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// BenchmarkQP is the machines alone, back to back: the stream is a copy in memory.
func BenchmarkQP(b *testing.B) {
	for _, c := range []struct {
		name string
		op   rdma.Opcode
		n    int
	}{{"send 44", rdma.OpSend, 44}, {"write 64KiB", rdma.OpWrite, 64 << 10}, {"read 64KiB", rdma.OpRead, 64 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			d := newDuo(b, duoConfig{})
			d.x.quiet, d.y.quiet, d.x.tap, d.y.tap = true, true, nil, nil
			d.x.in, d.y.in = make([]byte, 0, 1<<20), make([]byte, 0, 1<<20)
			sends := []rdma.SendWR{{
				Op: c.op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d.x.mr.sge(0, c.n)}, RemoteAddr: d.y.mr.addr, RKey: d.y.mr.rkey,
			}}
			recvs := []rdma.RecvWR{{SGE: d.y.mr.sge(0, 100)}}
			b.ReportAllocs()
			b.SetBytes(int64(c.n))
			for b.Loop() {
				if c.op == rdma.OpSend {
					if _, err := d.y.PostRecv(recvs); err != nil {
						b.Fatal(err)
					}
				}
				if _, err := d.x.PostSend(d.now, sends); err != nil {
					b.Fatal(err)
				}
				d.allocRun()
			}
		})
	}
}
