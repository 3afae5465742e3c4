// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

func TestTellsOfLinks(t *testing.T) {
	for _, m := range []llc.Message{llc.DeleteLink{Link: 1}, llc.DeleteLink{Header: llc.Header{Response: true}, All: true}} {
		if !linkgroup.TellsOfLinks(m.Append(nil)) {
			t.Errorf("%+v tells of no link", m)
		}
	}
	for _, b := range [][]byte{nil, llc.TestLink{}.Append(nil), llc.AddLink{}.Append(nil), cdc.Message{Token: 1}.Append(nil)} {
		if linkgroup.TellsOfLinks(b) {
			t.Errorf("%x tells of links", b)
		}
	}
}

// A validation message may overtake what waits in the completion queue of the
// lost link.
func TestSection4_6_1_AwaitsEarlier(t *testing.T) {
	r := newRig(t, linkgroup.Client, false, false)
	r.form(llc.DialectLinux)
	c := r.conns["a"]
	ring := c.Ring()
	data := cdc.Message{Seq: 1, Token: c.Token(), Prod: ring.Cursor(10), Cons: ring.Start()}
	check := cdc.Message{Seq: 1, Token: c.Token(), Flags: cdc.Flags(0).WithFailoverValidation()}
	if r.g.AwaitsEarlier(data.Append(nil)) || r.g.AwaitsEarlier(check.Append(nil)[:40]) || r.g.AwaitsEarlier(nil) {
		t.Error("only validation messages wait")
	}
	if !r.g.AwaitsEarlier(check.Append(nil)) {
		t.Error("does not wait for message 1")
	}
	r.recv(data)
	if r.g.AwaitsEarlier(check.Append(nil)) {
		t.Error("waits for message 1, which came")
	}
	check.Token++
	check.Seq = 9
	if r.g.AwaitsEarlier(check.Append(nil)) {
		t.Error("waits for a connection that is not")
	}
}
