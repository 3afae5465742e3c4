// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// dyingDevice is a fake device whose completion queue fails from some moment
// on, as one that overran, or whose device was closed, does.
type dyingDevice struct {
	rdma.Device
	dead atomic.Bool
}

func (d *dyingDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return dyingContext{c, d}, err
}

type dyingContext struct {
	rdma.Context
	d *dyingDevice
}

func (c dyingContext) CreateCQ(n int) (rdma.CQ, error) {
	q, err := c.Context.CreateCQ(n)
	return dyingCQ{q, c.d}, err
}

func (c dyingContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return dyingPD{p}, err
}

type dyingPD struct{ rdma.PD }

func (p dyingPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	cfg.SendCQ, cfg.RecvCQ = cfg.SendCQ.(dyingCQ).CQ, cfg.RecvCQ.(dyingCQ).CQ
	return p.PD.CreateQP(cfg)
}

type dyingCQ struct {
	rdma.CQ
	d *dyingDevice
}

func (q dyingCQ) Poll(wcs []rdma.WC) (int, error) {
	if q.d.dead.Load() {
		return 0, rdma.ErrCQOverrun
	}
	return q.CQ.Poll(wcs)
}

// Of more link groups than a stack has room for connections, idle ones that peers left, all queue pairs fail at once, as
// when the peers' node does. What completes then has room, and does not end the use of the device.
func TestStack_manyLinksFailAtOnce(t *testing.T) {
	const groups = 150
	p := newSoftPair(t, rdma.MTU1024, func(c *smcr.Config) {
		c.MaxConns, c.RMBESizeBytes, c.SendBufferBytes, c.RMBEsPerRMB = 8, 16<<10, 16<<10, 1
	})
	reach := func(i int) {
		p.dialFrom = netip.AddrFrom4([4]byte{127, 1, 1, byte(i)}) // a TCP address is a peer
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("connection %d is on %v: %v", i, a.Mode(), a.Reason())
		}
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
		waitFor(t, "end of the connection", func() bool { return p.server.Stats().Conns+p.client.Stats().Conns == 0 })
	}
	for i := range groups {
		reach(i)
	}
	if n, err := smcr.FailLinks(p.server); n != groups || err != nil {
		t.Fatalf("%d links failed, want %d: %v", n, groups, err)
	}
	waitFor(t, "end of the groups", func() bool { return p.server.Stats().Groups == 0 })
	reach(groups)
}

func TestStack_deadCompletionQueue(t *testing.T) {
	f := newFakeFabric()
	d := &dyingDevice{Device: f.device("c", 1)}
	p := &pair{fabric: f, client: newStack(t, d), server: newStack(t, f.device("s", 2))}
	var err error
	if p.l, err = smcr.Listen(t.Context(), p.server, "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	defer p.l.Close()
	a, b := p.dial(t)
	exchange(t, a, b)
	d.dead.Store(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := a.Write(make([]byte, 100)); err != nil {
				return
			}
		}
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("a write spins forever")
		d.dead.Store(false)
	}
	_, _ = a.Close(), b.Close()
}
