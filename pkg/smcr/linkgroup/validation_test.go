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
	if r.g.AwaitsEarlier(0, data.Append(nil)) || r.g.AwaitsEarlier(0, check.Append(nil)[:40]) || r.g.AwaitsEarlier(0, nil) {
		t.Error("only validation messages wait")
	}
	if !r.g.AwaitsEarlier(0, check.Append(nil)) {
		t.Error("does not wait for message 1")
	}
	r.recv(data)
	if r.g.AwaitsEarlier(0, check.Append(nil)) {
		t.Error("waits for message 1, which came")
	}
	check.Token++
	check.Seq = 9
	if r.g.AwaitsEarlier(0, check.Append(nil)) {
		t.Error("waits for a connection that is not")
	}
}

// A message over another link than before that leaves numbers out may overtake what waits in the completion queue of the link before.
func TestSection4_6_1_AwaitsLeftOut(t *testing.T) {
	r := newRigOf(t, 2, linkgroup.Config{Role: linkgroup.Client}, false)
	r.two = true
	r.form(llc.DialectLinux)
	r.second(false)
	c := r.conns["a"]
	ring := c.Ring()
	message := func(seq uint16, prod uint64) cdc.Message {
		return cdc.Message{Seq: seq, Token: c.Token(), Prod: ring.Cursor(prod), Cons: ring.Start()}
	}
	r.recv(message(1, 10))
	for _, tt := range []struct {
		name string
		link linkgroup.LinkIndex
		m    cdc.Message
		want bool
	}{
		{"the next one", 1, message(2, 20), false},
		{"one that leaves message 2 out", 1, message(3, 20), true},
		{"one that announces nothing", 1, message(3, 10), false},
		{"one over the link of the message before", 0, message(3, 20), false},
	} {
		if got := r.g.AwaitsEarlier(tt.link, tt.m.Append(nil)); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
	r.recv(message(2, 15))
	if r.g.AwaitsEarlier(1, message(3, 20).Append(nil)) {
		t.Error("waits for message 2, which came")
	}
	r.recvOn(1, cdc.Message{Seq: 2, Token: c.Token(), Flags: cdc.Flags(0).WithFailoverValidation()}.Append(nil))
	if r.g.AwaitsEarlier(1, message(5, 30).Append(nil)) {
		t.Error("waits though all is written anew after a validation message")
	}
}
