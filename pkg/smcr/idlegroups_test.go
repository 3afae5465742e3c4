// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A link group without connections gives its memory back, but for the slots of its
// queue pairs, and the next connection works without a first contact.
func TestGroup_idleGivesMemoryBack(t *testing.T) {
	const rmbe = 512 << 10
	p := newPair(t)
	var conns []*smcr.Conn
	for range 5 {
		a, b := p.dial(t)
		exchange(t, a, b)
		conns = append(conns, a, b)
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		if n := s.Stats().MemoryBytes; n < 10*rmbe {
			t.Fatalf("%d bytes for five connections", n)
		}
	}
	for _, c := range conns {
		_ = c.Close()
	}
	waitFor(t, "less memory", func() bool {
		return p.client.Stats().MemoryBytes < 64<<10 && p.server.Stats().MemoryBytes < 64<<10
	})
	a, b := p.dial(t)
	if i := a.Info(); i.Mode != smcr.ModeSMCR || i.FirstContact {
		t.Errorf("the next connection: %v, first contact %v", i.Mode, i.FirstContact)
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// Idle link groups give way where memory is short: a server may have more clients
// one after the other than it has memory for at once.
func TestStack_idleGroupsGiveWay(t *testing.T) {
	const rmbe = 512 << 10
	f := newFakeFabric()
	server := newStack(t, f.device("s", 200), func(c *smcr.Config) { c.MemoryBytes = 6 * rmbe })
	for i := range 20 {
		p := &pair{fabric: f, client: newStack(t, f.device(fmt.Sprint("c", i), byte(i+1))), server: server}
		p.listen(t)
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("client %d is on %v: %v", i, a.Mode(), a.Reason())
		}
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
		waitFor(t, "end of the connection", func() bool { return server.Stats().Conns == 0 })
		if n := server.Stats().MemoryBytes; n > 6*rmbe {
			t.Fatalf("%d bytes are registered", n)
		}
	}
	if st := server.Stats(); st.GroupsGaveWay == 0 {
		t.Error("no group gave way")
	}
}
