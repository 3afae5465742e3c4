// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// The memory of a packet is the program's again when its work request has completed, and not when it is acknowledged
// in part; that of a response to a READ only in ERR. The PSNs wrap meanwhile.
func TestQP_lends(t *testing.T) {
	b := newBench(t, nil)
	b.in(ReadRequest, 0, readReq(b, 0, 200))
	b.send(b.wr(1, rdma.OpWrite, 256), b.wr(2, rdma.OpWrite, 3*256), b.wr(3, rdma.OpSend, 200))
	tx := make([]TxPacket, 8)
	if n := b.q.PollTx(b.now, tx); n != 6 {
		t.Fatalf("%d packets, want 6", n)
	}
	want := func(when string, lent ...bool) {
		t.Helper()
		for i := range lent {
			if got := b.q.Lends(&tx[i]); got != lent[i] {
				t.Errorf("%s: packet %d is lent: %v, want %v", when, i, got, lent[i])
			}
		}
	}
	want("at first", true, true, true, true, true, true)
	b.in(Acknowledge, 2, ackPacket)
	want("acknowledged in part", true, false, true, true, true, true)
	b.in(Acknowledge, 3, ackPacket)
	want("two acknowledged", true, false, false, false, false, true)
	b.in(Acknowledge, 4, ackPacket)
	want("all acknowledged", true, false, false, false, false, false)
	if err := b.q.Modify(b.now, rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	want("in ERR", false, false, false, false, false, false)
}
