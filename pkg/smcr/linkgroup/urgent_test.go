// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

func TestSection4_7_5_UrgentThroughTheGroup(t *testing.T) {
	r := newRig(t, linkgroup.Client, false, false)
	r.form(llc.DialectLinux)
	r.log = nil
	expect := func(want ...string) {
		t.Helper()
		r.poll()
		if diff := cmp.Diff(want, r.log); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		r.log = nil
	}
	c := r.conns["a"]
	if !c.Urgent(10) {
		t.Fatal("too late before anything was sent")
	}
	c.Produce(20)
	expect(
		"WRITE a [{0 10} {0 0}] to 0x10000000000 rkey 0x2000",
		"SEND CDC seq=1 token=0x00000abc prod=0:10 cons=0:0 flags=PU",
		"event: connection a writable",
	)
	if c.Urgent(10) {
		t.Error("urgent after it was sent")
	}
	c.RequestUpdate()
	expect("SEND CDC seq=2 token=0x00000abc prod=0:10 cons=0:0 flags=R")
	ring := c.Ring()
	r.recv(cdc.Message{Seq: 1, Token: c.Token(), Prod: ring.Start(), Cons: ring.Cursor(10), Flags: cdc.Flags(0).WithUrgentPending()})
	expect(
		"event: connection a readable, peer urgent",
		"WRITE a [{10 10} {0 0}] to 0x1000000000a rkey 0x2000",
		"SEND CDC seq=3 token=0x00000abc prod=0:20 cons=0:0 flags=-",
		"event: connection a writable",
	)
	if !c.Data().PeerUrgentPending() {
		t.Error("the peer's urgent data is not announced")
	}
}
