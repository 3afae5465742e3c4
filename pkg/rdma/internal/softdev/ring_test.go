// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

func TestSendRing(t *testing.T) {
	var r sendRing
	r.init(5, wq.Limits{SGEs: 2, Inline: 6}) // 8 slots
	buf := []byte("inline")
	sgl := []rdma.SGE{{Addr: 1}, {Addr: 2}}
	for i := range uint64(8) {
		if n := r.push([]rdma.SendWR{{ID: i, SGL: sgl, Inline: buf}}); n != 1 {
			t.Fatalf("push %d took %d", i, n)
		}
	}
	if n := r.push(make([]rdma.SendWR, 1)); n != 0 {
		t.Errorf("a full ring took %d", n)
	}
	clear(buf) // the caller's again
	clear(sgl)
	r.pop(3)
	if n := r.push([]rdma.SendWR{{ID: 8}, {ID: 9}}); n != 2 {
		t.Errorf("a ring with room for 3 took %d of 2", n)
	}
	want := uint64(3)
	for !r.empty() {
		for _, w := range r.front() {
			if w.ID != want {
				t.Errorf("request %d, want %d", w.ID, want)
			}
			if want < 8 && (string(w.Inline) != "inline" || len(w.SGL) != 2 || w.SGL[1].Addr != 2) {
				t.Errorf("request %d lost its payload: %+v", want, w)
			}
			want++
		}
		r.pop(len(r.front()))
	}
	if want != 10 {
		t.Errorf("popped up to %d", want)
	}
}

func TestRecvRing(t *testing.T) {
	var r recvRing
	r.init(3) // 4 slots
	if !r.empty() || len(r.front()) != 0 {
		t.Error("a new ring is not empty")
	}
	next, want := uint64(0), uint64(0)
	for range 10 { // round and round
		for range 2 {
			if n := r.push([]rdma.RecvWR{{ID: next}, {ID: next + 1}, {ID: next + 2}}); n > 0 {
				next += uint64(n)
			}
		}
		if n := int(next - want); n != 4 {
			t.Fatalf("a ring of 4 slots holds %d", n)
		}
		for range 3 {
			if got := r.front()[0].ID; got != want {
				t.Fatalf("request %d, want %d", got, want)
			}
			r.pop(1)
			want++
		}
	}
}

func TestRingSize(t *testing.T) {
	for n, want := range map[int]int{0: 2, 1: 2, 2: 2, 3: 4, 4: 4, 5: 8, 1024: 1024, 1025: 2048} {
		if got := ringSize(n); got != want {
			t.Errorf("%d requests: %d slots, want %d", n, got, want)
		}
	}
}
