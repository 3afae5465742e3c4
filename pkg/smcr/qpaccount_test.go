// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// testQPs is an account with so many queue pairs of each device.
type testQPs struct {
	each int

	mu   sync.Mutex // guards what is below
	used map[string]int
}

func (a *testQPs) TakeQP(_ netip.Addr, device string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.used == nil {
		a.used = map[string]int{}
	}
	if a.used[device] == a.each {
		return errors.New("no more")
	}
	a.used[device]++
	return nil
}

func (a *testQPs) GiveQP(_ netip.Addr, device string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used[device]--
}

func (a *testQPs) on(device string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used[device]
}

// A stack that has its share of queue pairs declines further first contacts with MEM. Idle
// link groups end for new peers, and queue pairs that only wait for a late word of a peer
// that has gone are there at once.
func TestStack_queuePairShare(t *testing.T) {
	const share, peers = 4, 3 // a first contact needs two for a moment
	qps := &testQPs{each: share}
	f := newFakeFabric()
	server := newStack(t, f.device("s", 200), func(c *smcr.Config) { c.QueuePairs = qps })
	var conns, clients []io.Closer
	closeAll := func(of *[]io.Closer) {
		for _, c := range *of {
			_ = c.Close()
		}
		*of = nil
	}
	peer := func() *smcr.Conn {
		t.Helper()
		c := newStack(t, f.device("c", byte(len(clients)+1)))
		clients = append(clients, c)
		p := &pair{fabric: f, client: c, server: server}
		p.listen(t)
		a, b := p.dial(t)
		exchange(t, a, b)
		conns = append(conns, a, b)
		return b
	}
	for i := range 2 * peers {
		c, want := peer(), smcr.ModeSMCR
		if i >= peers {
			want = smcr.ModeTCP
		}
		if c.Mode() != want || want == smcr.ModeTCP && c.Reason() != clc.ReasonMem {
			t.Errorf("peer %d is on %v because of %v, want %v", i, c.Mode(), c.Reason(), want)
		}
	}
	if n := qps.on("s"); n != peers {
		t.Errorf("%d queue pairs are charged, want %d", n, peers)
	}

	closeAll(&conns)
	waitFor(t, "end of the connections", func() bool { return server.Stats().Conns == 0 })
	waitFor(t, "a queue pair of an idle link group", func() bool { return peer().Mode() == smcr.ModeSMCR })
	if n := server.Stats().GroupsGaveWay; n == 0 {
		t.Error("no link group gave way")
	}

	closeAll(&conns)
	closeAll(&clients)
	waitFor(t, "end of the link groups", func() bool { return server.Stats().Groups == 0 })
	if n := qps.on("s"); n == 0 {
		t.Error("no queue pair lingers")
	}
	for i := range peers {
		if c := peer(); c.Mode() != smcr.ModeSMCR {
			t.Errorf("peer %d after the others is on %v because of %v", i, c.Mode(), c.Reason())
		}
	}
	closeAll(&conns)
	_ = server.Close()
	if n := qps.on("s"); n != 0 {
		t.Errorf("%d queue pairs are charged after the end", n)
	}
}

// A link group whose second device has no queue pair left has links over the first one
// only.
func TestStack_queuePairShareOfOneDevice(t *testing.T) {
	f := newFakeFabric()
	two := func(name string, last byte) func(*smcr.Config) {
		return func(c *smcr.Config) {
			c.Devices = []rdma.Device{f.device(name+"0", last), f.device(name+"1", last+1)}
		}
	}
	qps := &testQPs{each: 2}
	for qps.TakeQP(netip.Addr{}, "s1") == nil { // somebody else's
	}
	p := &pair{fabric: f, client: newStack(t, nil, two("c", 1)), server: newStack(t, nil, two("s", 10), func(c *smcr.Config) { c.QueuePairs = qps })}
	p.listen(t)
	a, b := p.dial(t)
	exchange(t, a, b)
	g := p.server.LinkGroups()
	if len(g) != 1 || slices.ContainsFunc(g[0].Links, func(l smcr.LinkInfo) bool { return l.Device != "s0" }) {
		t.Errorf("link groups %+v, want one with links over s0", g)
	}
	_, _ = a.Close(), b.Close()
}

// lateQPs has somebody else take the last queue pairs after a stack looked how many there are.
type lateQPs struct{ testQPs }

func (a *lateQPs) GiveQP(client netip.Addr, device string) {
	a.testQPs.GiveQP(client, device)
	_ = a.TakeQP(client, device)
}

// A server that has no queue pair for the offer of a second link declines the first
// contact. Without an offer its client would wait, and have its connection reset then.
func TestServer_noQueuePairForOffer(t *testing.T) {
	qps := &lateQPs{testQPs{each: 2}}
	f := newFakeFabric()
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1)), server: newStack(t, f.device("s", 2), func(c *smcr.Config) { c.QueuePairs = qps })}
	p.listen(t)
	a, b := p.dial(t)
	exchange(t, a, b)
	if i := a.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonMem || !i.PeerDeclined {
		t.Errorf("the client is on %v because of %v, declined by the peer %v; want TCP and the peer's MEM", i.Mode, i.Reason, i.PeerDeclined)
	}
	_, _ = a.Close(), b.Close()
}
