// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A peer that has lost one link group (S bit of a Decline) has not lost the
// others: their connections live on.
func TestStack_outOfSyncEndsOneGroup(t *testing.T) {
	p := newPair(t)
	other, err := smcr.Listen(t.Context(), p.client, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	back := &pair{fabric: p.fabric, client: p.server, server: p.client, l: other}
	x, y := back.dial(t) // the other way round: a group of its own
	a, b := p.dial(t)
	if g := p.server.LinkGroups(); len(g) != 2 {
		t.Fatalf("%d groups, want 2", len(g))
	}
	_, _ = a.Close(), b.Close()
	waitFor(t, "closed", func() bool { return p.client.Stats().Conns == 1 && p.server.Stats().Conns == 1 })
	// The server's half of the first group goes on while the client's dies.
	p.fabric.breakSender(p.client, a.Info().GroupID)
	waitFor(t, "client's group gone", func() bool { return len(p.client.LinkGroups()) == 1 })
	c, d := p.dial(t)
	t.Logf("new connection: %v, %v", c.Mode(), c.Reason())
	exchange(t, c, d)
	exchange(t, x, y)
	for _, c := range []*smcr.Conn{c, d, x, y} {
		_ = c.Close()
	}
}

// breakSender makes one stack see a broken link; the other one does not know.
func (f *fakeFabric) breakSender(s *smcr.Stack, group uint32) {
	for _, g := range s.LinkGroups() {
		if g.ID == group {
			f.mu.Lock()
			q := f.qps[g.Links[0].LocalQPN]
			q.mute = true
			q.state = rdma.QPError
			q.scq.push(rdma.WC{Op: rdma.OpSend, Status: rdma.StatusRetryExceeded, QPN: q.num})
			f.mu.Unlock()
		}
	}
}
