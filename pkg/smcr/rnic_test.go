// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
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
