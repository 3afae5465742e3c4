// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// carrier moves bytes between both sides without allocating.
type carrier struct {
	*twoSides
	tx, rx [][]byte
	wcs    [8]wq.Completion
}

func newCarrier(tb testing.TB, s Startup) *carrier {
	c := &carrier{twoSides: newTwoSides(tb), tx: make([][]byte, 0, 512), rx: make([][]byte, 0, 8)}
	answer := s
	answer.PeerToPeer = false
	s.PeerToPeer = true
	c.connect(s, answer)
	return c
}

// carry moves what one side has to send, and reports whether there was something.
func (c *carrier) carry(from, to *side) bool {
	total := 0
	tx := from.q.TxBuffers(c.now, c.tx[:0])
	for len(tx) > 0 {
		n := 0
		for _, p := range to.q.RxBuffers(c.rx[:0]) {
			for len(p) > 0 && len(tx) > 0 {
				k := copy(p, tx[0])
				p, n = p[k:], n+k
				if tx[0] = tx[0][k:]; len(tx[0]) == 0 {
					tx = tx[1:]
				}
			}
		}
		if err := to.q.HandleRx(c.now, n); err != nil {
			c.tb.Fatal(err)
		}
		total += n
	}
	from.q.HandleTx(c.now, total)
	return total > 0
}

// round runs until nothing moves and drops the completions.
func (c *carrier) round() {
	for c.carry(c.a, c.b) || c.carry(c.b, c.a) {
	}
	for _, s := range []*side{c.a, c.b} {
		for s.q.PollWC(c.wcs[:]) == len(c.wcs) {
		}
	}
}

func TestQP_allocatesNothing(t *testing.T) {
	for _, crc := range []bool{true, false} {
		for _, max := range []int{1442, MaxOwnULPDU} {
			for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpRead} {
				t.Run(fmt.Sprintf("%v/CRC %t/%d", op, crc, max), func(t *testing.T) {
					c := newCarrier(t, Startup{NoCRC: !crc, MaxULPDU: max})
					wrs := []rdma.SendWR{{Op: op, Flags: rdma.SendSignaled, RKey: c.b.mr.rkey, RemoteAddr: c.b.mr.addr, SGL: []rdma.SGE{c.a.mr.sge(0, 200_000)}}}
					recvs := []rdma.RecvWR{{SGE: c.b.mr.sge(0, 200_000)}}
					if got := testing.AllocsPerRun(20, func() {
						if op == rdma.OpSend {
							if _, err := c.b.q.PostRecv(recvs); err != nil {
								t.Fatal(err)
							}
						}
						if _, err := c.a.q.PostSend(c.now, wrs); err != nil {
							t.Fatal(err)
						}
						c.round()
					}); got != 0 {
						t.Errorf("%v allocations per message", got)
					}
					if n := c.a.q.Stats().TxFPDUs; n < 20 {
						t.Errorf("only %d FPDUs were sent", n)
					}
				})
			}
		}
	}
}

// TestQP_offers: so many bytes go to TCP at a time.
func TestQP_offers(t *testing.T) {
	for _, tt := range []struct {
		crc    bool
		enough int
	}{{true, maxSummed}, {false, maxOffered}} {
		c := newCarrier(t, Startup{NoCRC: !tt.crc, MaxULPDU: MaxOwnULPDU})
		write := rdma.SendWR{Op: rdma.OpWrite, RKey: c.b.mr.rkey, RemoteAddr: c.b.mr.addr, SGL: []rdma.SGE{c.a.mr.sge(0, testRegion)}}
		if _, err := c.a.q.PostSend(c.now, []rdma.SendWR{write, write}); err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, p := range c.a.q.TxBuffers(c.now, nil) {
			n += len(p)
		}
		if n < tt.enough || n >= tt.enough+fpduLen(MaxOwnULPDU) {
			t.Errorf("CRC %t: %d bytes are offered, want %d and at most an FPDU more", tt.crc, n, tt.enough)
		}
	}
}

// BenchmarkWrite moves 1 MiB from memory to memory: framing, copies between the queue
// pairs' buffers in place of TCP's, checking and placing.
func BenchmarkWrite(b *testing.B) { benchMove(b, rdma.OpWrite, 0) }

// BenchmarkRead is the same with the bytes in responses, which with CRC are copied first.
func BenchmarkRead(b *testing.B) { benchMove(b, rdma.OpRead, 0) }

// BenchmarkRead_stable is the same without that copy.
func BenchmarkRead_stable(b *testing.B) { benchMove(b, rdma.OpRead, rdma.StableRead) }

func benchMove(b *testing.B, op rdma.Opcode, more rdma.Access) {
	b.Helper()
	for _, max := range []int{1442, MaxOwnULPDU} {
		for _, crc := range []bool{true, false} {
			b.Run(fmt.Sprintf("ULPDU=%d/CRC=%t", max, crc), func(b *testing.B) {
				c := newCarrier(b, Startup{NoCRC: !crc, MaxULPDU: max})
				c.b.mr.access |= more
				wrs := []rdma.SendWR{{Op: op, RKey: c.b.mr.rkey, RemoteAddr: c.b.mr.addr, SGL: []rdma.SGE{c.a.mr.sge(0, testRegion)}}}
				b.SetBytes(testRegion)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := c.a.q.PostSend(c.now, wrs); err != nil {
						b.Fatal(err)
					}
					c.round()
				}
			})
		}
	}
}

// BenchmarkFrame is framing alone.
func BenchmarkFrame(b *testing.B) {
	for _, max := range []int{1442, MaxOwnULPDU} {
		for _, crc := range []bool{true, false} {
			b.Run(fmt.Sprintf("ULPDU=%d/CRC=%t", max, crc), func(b *testing.B) {
				c := newCarrier(b, Startup{NoCRC: !crc, MaxULPDU: max})
				wrs := []rdma.SendWR{{Op: rdma.OpWrite, RKey: c.b.mr.rkey, RemoteAddr: c.b.mr.addr, SGL: []rdma.SGE{c.a.mr.sge(0, testRegion)}}}
				b.SetBytes(testRegion)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := c.a.q.PostSend(c.now, wrs); err != nil {
						b.Fatal(err)
					}
					for {
						n := 0
						for _, p := range c.a.q.TxBuffers(c.now, c.tx[:0]) {
							n += len(p)
						}
						if n == 0 {
							break
						}
						c.a.q.HandleTx(c.now, n)
					}
				}
			})
		}
	}
}
