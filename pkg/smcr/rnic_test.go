// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// dyingDevice is a device whose completion queue fails from some moment
// on, as one that overran, or whose device was closed, does; or whose queues have little room, or cannot be changed.
type dyingDevice struct {
	rdma.Device
	dead  atomic.Bool
	most  int // of completions in a queue, if not 0
	stiff bool
}

func (d *dyingDevice) Attr() rdma.DeviceAttr {
	a := d.Device.Attr()
	if d.most != 0 {
		a.MaxCQE = d.most
	}
	return a
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

func (q dyingCQ) Resize(n int) error {
	if q.d.stiff {
		return fmt.Errorf("resize: %w", rdma.ErrNotSupported)
	}
	if n > q.d.Attr().MaxCQE {
		return fmt.Errorf("resize: %w", rdma.ErrInvalid)
	}
	return q.CQ.Resize(n)
}

func (q dyingCQ) Poll(wcs []rdma.WC) (int, error) {
	if q.d.dead.Load() {
		return 0, rdma.ErrCQOverrun
	}
	return q.CQ.Poll(wcs)
}

// Of more link groups than a stack has room for connections, idle ones that peers left, all queue pairs fail at once, as
// when the peers' node does. What completes then has room, and does not end the use of the device. Where queues cannot have
// room for more links, there are no more.
func TestStack_manyLinksFailAtOnce(t *testing.T) {
	for _, tt := range []struct {
		name          string
		device        *dyingDevice
		groups, links int // that are asked for, and that there can be: one less than there is room for, as a client is offered a second one
	}{
		{"queues that grow", &dyingDevice{}, 150, 150},
		{"queues that cannot be changed", &dyingDevice{stiff: true}, 40, 23},
		{"small queues", &dyingDevice{most: 20 * 128}, 40, 19},
	} {
		t.Run(tt.name, func(t *testing.T) {
			small := func(c *smcr.Config) {
				c.MaxConns, c.RMBESizeBytes, c.SendBufferBytes, c.RMBEsPerRMB = 8, 16<<10, 16<<10, 1
			}
			d := tt.device
			d.Device = openSoft(t, "127.92.0.2", rdma.MTU1024)
			p := &pair{client: newStack(t, openSoft(t, "127.92.0.1", rdma.MTU1024), small), server: newStack(t, d, small)}
			p.listen(t)
			reach := func(i int) smcr.Mode {
				p.dialFrom = netip.AddrFrom4([4]byte{127, 1, 1, byte(i)}) // a TCP address is a peer
				a, b := p.dial(t)
				exchange(t, a, b)
				_, _ = a.Close(), b.Close()
				waitFor(t, "end of the connection", func() bool { return p.server.Stats().Conns+p.client.Stats().Conns == 0 })
				return a.Mode()
			}
			for i := range tt.groups {
				if mode := reach(i); mode != smcr.ModeSMCR && i < tt.links {
					t.Fatalf("connection %d is on %v", i, mode)
				}
			}
			if n, err := smcr.FailLinks(p.server); n > tt.links || n < tt.links/2 || err != nil {
				t.Fatalf("%d links failed, want %d or a few less: %v", n, tt.links, err)
			}
			waitFor(t, "end of the groups", func() bool { return p.server.Stats().Groups == 0 })
			waitFor(t, "SMC-R again: the device is in use", func() bool { return reach(tt.groups) == smcr.ModeSMCR })
		})
	}
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
