// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// idle makes groups end soon after their last connection.
func idle(c *smcr.Config) { c.IdleGroupTimeout = 10 * time.Millisecond }

// qp returns a queue pair; nil if it is gone.
func (f *fakeFabric) qp(num rdma.QPN) *fakeQP {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.qps[num]
}

// late posts something behind the stack's back; it reports whether the other
// end has taken all.
func (q *fakeQP) late(wr rdma.SendWR, data []byte) bool {
	q.f.mu.Lock()
	q.waiting = append(q.waiting, fakeSend{wr: wr, data: data})
	q.deliver()
	q.f.mu.Unlock()
	return q.isDone()
}

// isDone reports whether the other end has taken all.
func (q *fakeQP) isDone() bool {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	return len(q.waiting) == 0
}

// silence lets nothing arrive and nothing leave.
func (q *fakeQP) silence() {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.mute = true
}

// inTime repeats what a busy machine may be too slow for; f reports whether it
// was.
func inTime(t *testing.T, f func() bool) {
	t.Helper()
	for range 10 {
		if f() {
			return
		}
	}
	t.Error("not once in time")
}

// A peer may speak after our end of a group: it is acknowledged for a while,
// but its writes meet no memory.
func TestGroup_acknowledgesAfterItsEnd(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		inTime(t, func() bool { return speakLate(t, v) })
	})
}

func speakLate(t *testing.T, v smcr.VersionSet) (inTime bool) {
	p := newPair(t, versions(v), idle)
	a, b := p.dial(t)
	exchange(t, a, b)
	link := p.server.LinkGroups()[0].Links[0]
	peer := p.fabric.qp(link.PeerQPN)
	gone := func() bool { return p.fabric.qp(link.PeerQPN) == nil || p.fabric.qp(link.LocalQPN) == nil }
	p.fabric.mu.Lock()
	var rmb *fakeMR
	for _, m := range p.fabric.mrs {
		if &m.mem[0] == &smcr.RMBE(b)[0] {
			rmb = m
		}
	}
	p.fabric.mu.Unlock()
	start := time.Now()
	_, _ = a.Close(), b.Close()
	for _, s := range []*smcr.Stack{p.client, p.server} {
		waitFor(t, "the group's end", func() bool { return s.Stats().Groups == 0 })
	}
	msg := make([]byte, llc.Size)
	msg[0] = byte(llc.TypeDeleteLink)
	for range 100 { // more than the link had receive slots
		if !peer.late(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled}, msg) {
			waitFor(t, "room for a late message", func() bool { return peer.isDone() || gone() })
		}
	}
	if gone() {
		if d := time.Since(start); d < smcr.LingerTime {
			t.Errorf("the queue pairs were gone %v after the connections", d)
		}
		return false
	}
	if _, awaited := smcr.Lingering(p.server); awaited {
		t.Error("Close would wait for a peer that has spoken")
	}
	write := rdma.SendWR{Op: rdma.OpWrite, RemoteAddr: rmb.addr, RKey: rdma.RKey(rmb.key)}
	if peer.late(write, []byte("late")) {
		t.Error("a late write found memory")
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		waitFor(t, "the end of the queue pairs", func() bool {
			n, _ := smcr.Lingering(s)
			return n == 0
		})
	}
	if p.fabric.qp(link.PeerQPN) != nil || p.fabric.qp(link.LocalQPN) != nil {
		t.Error("a queue pair is left")
	}
	return true
}

// Close waits for the peer's last word where one can come, and not for long.
func TestStack_closeAwaitsPeers(t *testing.T) {
	for _, tc := range []struct {
		name   string
		before func(t *testing.T, p *pair, peer, ours *fakeQP, b *smcr.Conn)
		waits  bool
	}{
		{"peer answers", func(*testing.T, *pair, *fakeQP, *fakeQP, *smcr.Conn) {}, false},
		{"peer is silent", func(_ *testing.T, _ *pair, peer, _ *fakeQP, _ *smcr.Conn) { peer.silence() }, true},
		{"link is dead", func(t *testing.T, p *pair, _, _ *fakeQP, _ *smcr.Conn) {
			p.fabric.cut()
			waitFor(t, "the group's end", func() bool { return p.server.Stats().Groups == 0 })
		}, false},
		{"data is on its way", func(t *testing.T, _ *pair, peer, ours *fakeQP, b *smcr.Conn) {
			peer.silence()
			if _, err := b.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "data on its way", func() bool { return !ours.isDone() })
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inTime(t, func() bool {
				p := newPair(t)
				a, b := p.dial(t)
				exchange(t, a, b)
				link := p.server.LinkGroups()[0].Links[0]
				tc.before(t, p, p.fabric.qp(link.PeerQPN), p.fabric.qp(link.LocalQPN), b)
				start := time.Now()
				if err := p.server.Close(); err != nil {
					t.Fatal(err)
				}
				d := time.Since(start)
				if tc.waits && d < smcr.LingerTime {
					t.Errorf("Close took %v", d)
				}
				if p.fabric.qp(link.LocalQPN) != nil {
					t.Error("the queue pair is left")
				}
				_, _ = a.Close(), b.Close()
				return tc.waits || d < smcr.LingerTime
			})
		})
	}
}
