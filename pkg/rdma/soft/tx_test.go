// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

func TestSegmentable(t *testing.T) {
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
			if got := segmentable(pkt(c.sizes...), c.most); got != c.want {
				t.Errorf("of %v %d make one message, want %d", c.sizes, got, c.want)
			}
		})
	}
}

// An acknowledgement leaves behind the few packets beside it, which the peer waits for, but does not
// wait for many.
func TestBatch_answerFirst(t *testing.T) {
	ack, data := rocev2.Acknowledge, rocev2.SendOnly
	many := []rocev2.OpCode{ack, data, data, data, data}
	for _, c := range []struct {
		name      string
		ops, want []rocev2.OpCode
	}{
		{"alone", []rocev2.OpCode{ack}, []rocev2.OpCode{ack}},
		{"an answer", []rocev2.OpCode{ack, data}, []rocev2.OpCode{data, ack}},
		{"no acknowledgement", []rocev2.OpCode{data, ack}, []rocev2.OpCode{data, ack}},
		{"a few", many[:4], []rocev2.OpCode{data, data, data, ack}},
		{"many", many, many},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := new(batch)
			for i, op := range c.ops {
				b.pkts[i].Hdr[0] = byte(op)
			}
			b.answerFirst(len(c.ops))
			for i, op := range c.want {
				if got := rocev2.OpCode(b.pkts[i].Hdr[0]); got != op {
					t.Errorf("packet %d is %v, want %v", i, got, op)
				}
			}
		})
	}
}

// Batches are used again, a few of them.
func TestDevice_batches(t *testing.T) {
	d := &Device{batches: make(chan *batch, 1)}
	a, b := d.getBatch(), d.getBatch()
	if a == b {
		t.Fatal("one batch for two")
	}
	d.putBatch(a)
	d.putBatch(b) // there is no room
	if d.getBatch() != a || d.getBatch() == b {
		t.Error("the batch that was given back is not used again, or one that there was no room for is")
	}
}
