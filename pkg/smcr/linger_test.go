// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
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
	msg := llc.DeleteLink{All: true}.Append(nil)
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

// hear tells of each LLC message that a queue pair sends. If hear reports true, the
// peer acknowledges the message and then loses it.
func (f *fakeFabric) hear(from rdma.QPN, hear func(m llc.Message) (drop bool)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drops = func(q rdma.QPN, b []byte) bool {
		m, err := llc.Parse(llc.DialectLinux, llc.Version2, b)
		return q == from && err == nil && hear(m)
	}
}

// A Linux that waits for an answer drops DELETE LINK, which it has acknowledged. Close
// says it again, and is through as soon as the peer has heard it.
func TestStack_closeIsSaidAgain(t *testing.T) {
	for _, role := range []string{"server", "client"} {
		t.Run(role, func(t *testing.T) {
			inTime(t, func() bool {
				p := newPair(t)
				a, b := p.dial(t)
				exchange(t, a, b)
				s := map[string]*smcr.Stack{"server": p.server, "client": p.client}[role]
				said := 0
				p.fabric.hear(s.LinkGroups()[0].Links[0].LocalQPN, func(m llc.Message) bool {
					if d, ok := m.(llc.DeleteLink); ok && d.All && !d.Response {
						said++
						return said < 3
					}
					return false
				})
				start := time.Now()
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				d := time.Since(start)
				_, _ = a.Close(), b.Close()
				if d < 2*linkgroup.DeleteAllInterval {
					t.Errorf("Close took %v, and the third DELETE LINK is heard", d)
				}
				p.fabric.mu.Lock()
				defer p.fabric.mu.Unlock()
				return said == 3 && d < smcr.LingerTime
			})
		})
	}
}

// Who asks a group that is over gets an answer, so that its exchange ends.
func TestGroup_answersAfterItsEnd(t *testing.T) {
	for _, tc := range []struct {
		name string
		ask  llc.Message
		want string
	}{
		{"CONFIRM RKEY", llc.ConfirmRKey{This: llc.RToken{RKey: 7}}, "CONFIRM RKEY response negative=true retry=false this=0x00000007@0x0000000000000000 others=0 []"},
		{"DELETE RKEY", llc.DeleteRKey{Count: 1, RKeys: [8]rdma.RKey{7}}, "DELETE RKEY response negative=false errors=00000000 rkeys=[0x7]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inTime(t, func() bool {
				p := newPair(t, idle)
				a, b := p.dial(t)
				exchange(t, a, b)
				link := p.server.LinkGroups()[0].Links[0]
				peer := p.fabric.qp(link.PeerQPN)
				answers := make(chan string, 100)
				p.fabric.hear(link.LocalQPN, func(m llc.Message) bool {
					if m.IsResponse() {
						answers <- m.String()
					}
					return false
				})
				start := time.Now()
				_, _ = a.Close(), b.Close()
				waitFor(t, "the group's end", func() bool { return p.server.Stats().Groups == 0 })
				for len(answers) > 0 {
					<-answers // of its life
				}
				peer.late(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled}, tc.ask.Append(nil))
				select {
				case got := <-answers:
					if got != tc.want {
						t.Errorf("the answer is %s, want %s", got, tc.want)
					}
					return true
				case <-time.After(time.Until(start.Add(smcr.LingerTime))):
					return false
				}
			})
		})
	}
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
		}, true},
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

// The queue pair of a link that a living group gave up stays, in ERR: a peer that
// repeats its requests for ever hears that they are refused.
func TestGroup_lostLinkRefuses(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		f := softtest.NewFabric(t, 1)
		c, _, p := multiPair(t, f, v, twoClients, twoServers)
		a, b := p.dial(t)
		exchange(t, a, b)
		lost := waitGroup(t, p.client, "SYMMETRIC", 2).Links[0].LocalQPN
		waitGroup(t, p.server, "SYMMETRIC", 2)
		there := func() bool {
			_, ok := c.devices[0].QPStats(lost)
			return ok
		}
		// Nothing of the server's arrives on the first link, and what it sends there
		// is under way until the client has given the link up.
		client, server := netip.MustParseAddr(twoClients[0]), netip.MustParseAddr(twoServers[0])
		f.Cut(server, client, true)
		exchange(t, a, b)
		waitFor(t, "the client gives the link up", func() bool {
			n, _ := smcr.Lingering(p.client)
			return n == 1
		})
		if !there() {
			t.Error("the queue pair is gone")
		}
		_, _ = a.Close(), b.Close()
		_ = p.client.Close()
		if there() {
			t.Error("the queue pair is left behind by the stack")
		}
	})
}

// silentDevice is one whose queue pairs say nothing in ERR unless they are told to
// refuse, at which they do not succeed at once.
type silentDevice struct {
	rdma.Device
	fail  atomic.Int32 // how often Refuse does
	asked chan rdma.QPN
}

type silentContext struct {
	rdma.Context
	d *silentDevice
}

type silentPD struct {
	rdma.PD
	d *silentDevice
}

type silentQP struct {
	rdma.QP
	d      *silentDevice
	closed atomic.Bool
}

func (d *silentDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return silentContext{c, d}, err
}

func (c silentContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return silentPD{p, c.d}, err
}

func (p silentPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := p.PD.CreateQP(cfg)
	return &silentQP{QP: q, d: p.d}, err
}

func (q *silentQP) Close() error {
	q.closed.Store(true)
	return q.QP.Close()
}

// Silence implements [rdma.Refuser].
func (q *silentQP) Silence() {}

// Refuse implements [rdma.Refuser].
func (q *silentQP) Refuse() error {
	switch {
	case q.closed.Load():
		return rdma.ErrClosed
	case q.State() != rdma.QPError:
		return rdma.ErrState
	}
	q.d.asked <- q.Num()
	if q.d.fail.Add(-1) >= 0 {
		return errors.New("no answer for the peer's MAC address")
	}
	return nil
}

// silentPair is a pair whose client has a device whose queue pairs say nothing in ERR.
func silentPair(t *testing.T) (*pair, *silentDevice) {
	t.Helper()
	f := newFakeFabric()
	d := &silentDevice{Device: f.device("c1", 1), asked: make(chan rdma.QPN, 10)}
	return &pair{fabric: f, client: newStack(t, d), server: newStack(t, f.device("s1", 2))}, d
}

// twoLinks connects the pair, and gives the client another device and the group a
// second link.
func (p *pair) twoLinks(t *testing.T, redundancy string) (a, b *smcr.Conn) {
	t.Helper()
	p.listen(t)
	a, b = p.dial(t)
	exchange(t, a, b)
	if err := p.client.AddDevice(p.fabric.device("c2", 11)); err != nil {
		t.Fatal(err)
	}
	waitGroup(t, p.client, redundancy, 2)
	return a, b
}

// RFC 7609 C.7.1: DELETE LINK for the group counts on a link that was given up, too. A device hands it over behind the end of its queue
// pair's work; Linux, whose queue pair has had the acknowledgement, says it over no other link.
func TestGroup_endsByMessageOfLostLink(t *testing.T) {
	p, _ := silentPair(t)
	a, b := p.twoLinks(t, "ASYMMETRIC PEER")
	lost := p.client.LinkGroups()[0].Links[0]
	peer := p.fabric.qp(lost.PeerQPN)
	smcr.LoseLink(p.client, lost.LocalQPN)
	waitFor(t, "the link's end", func() bool {
		n, _ := smcr.Lingering(p.client)
		return n == 1
	})
	if !peer.late(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled}, llc.DeleteLink{All: true}.Append(nil)) {
		t.Fatal("the queue pair has no receive buffer")
	}
	waitFor(t, "the group's end", func() bool { return p.client.Stats().Groups == 0 })
	_, _ = a.Close(), b.Close()
}

// A device whose queue pairs say nothing in ERR is told to refuse what comes over a
// lost link, until it can, and once more, because the refusal may be lost too.
func TestGroup_lostLinkIsToldToRefuse(t *testing.T) {
	for _, fail := range []int32{0, 2, 1000} {
		t.Run(fmt.Sprintf("after %d errors", fail), func(t *testing.T) {
			p, first := silentPair(t)
			first.fail.Store(fail)
			a, b := p.twoLinks(t, "ASYMMETRIC PEER")
			lost := p.client.LinkGroups()[0].Links[0].LocalQPN
			smcr.LoseLink(p.client, lost)
			for range min(fail, 2) + 2 {
				if got := <-first.asked; got != lost {
					t.Errorf("queue pair %v was told to refuse, want %v", got, lost)
				}
			}
			exchange(t, a, b)
			_, _ = a.Close(), b.Close()
			if err := p.client.Close(); err != nil { // also while it is being tried
				t.Error(err)
			}
		})
	}
}

// The peer hears of the loss by DELETE LINK first, if it can: what it sends is refused
// when it has said that it knows, after a while, or when there is nothing else to lose.
func TestGroup_lostLinkRefusesLater(t *testing.T) {
	for _, tc := range []struct {
		name string
		then func(p *pair, other rdma.QPN)
		wait time.Duration // at least; 0: less than that while
	}{
		{"the peer is silent", func(*pair, rdma.QPN) {}, smcr.RefuseDelay},
		{"the group ends", func(p *pair, other rdma.QPN) { smcr.LoseLink(p.client, other) }, 0},
		{"the stack ends", func(p *pair, _ rdma.QPN) { _ = p.client.Close() }, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, first := silentPair(t)
			a, b := p.twoLinks(t, "ASYMMETRIC PEER")
			links := p.client.LinkGroups()[0].Links
			p.fabric.qp(links[1].PeerQPN).silence()
			start := time.Now()
			smcr.LoseLink(p.client, links[0].LocalQPN)
			tc.then(p, links[1].LocalQPN)
			<-first.asked
			if d := time.Since(start); d < tc.wait || tc.wait == 0 && d >= smcr.RefuseDelay {
				t.Errorf("it was told to refuse after %v", d)
			}
			_, _ = a.Close(), b.Close()
		})
	}
}

// A link that we only ask for is none at the peer: all that the peer has end at one of its RNICs.
func TestGroup_lostLinkRefusesLaterWhileWeAsk(t *testing.T) {
	p, first := silentPair(t)
	a, b := p.twoLinks(t, "ASYMMETRIC PEER")
	links := p.client.LinkGroups()[0].Links
	for _, l := range links {
		p.fabric.qp(l.PeerQPN).silence()
	}
	if asking := waitGroup(t, p.client, "ASYMMETRIC PEER", 3).Links[2]; asking.State != "FORMING" {
		t.Fatalf("we ask with %+v", asking)
	}
	start := time.Now()
	smcr.LoseLink(p.client, links[0].LocalQPN)
	<-first.asked
	if d := time.Since(start); d < smcr.RefuseDelay {
		t.Errorf("it was told to refuse after %v", d)
	}
	_, _ = a.Close(), b.Close()
}

// A peer with another RNIC loses no group by a refusal.
func TestGroup_lostLinkRefusesAtOnce(t *testing.T) {
	p, first := silentPair(t)
	if err := p.server.AddDevice(p.fabric.device("s2", 12)); err != nil {
		t.Fatal(err)
	}
	a, b := p.twoLinks(t, "SYMMETRIC")
	links := p.client.LinkGroups()[0].Links
	lost, other := links[0], links[1]
	if lost.Device != "c1" {
		lost, other = other, lost
	}
	p.fabric.qp(other.PeerQPN).silence()
	start := time.Now()
	smcr.LoseLink(p.client, lost.LocalQPN)
	<-first.asked
	if d := time.Since(start); d >= smcr.RefuseDelay {
		t.Errorf("it was told to refuse after %v", d)
	}
	_, _ = a.Close(), b.Close()
}
