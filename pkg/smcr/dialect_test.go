// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"sync"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// rfcDevice is a fake device that takes the bits for no RMBE eye catcher out
// of each CONFIRM LINK: to its peer the stack is one that speaks as RFC 7609
// has it, and so it is itself once the peer has answered.
type rfcDevice struct {
	rdma.Device
	f *fakeFabric
}

func (d rfcDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return rfcContext{c, d.f}, err
}

type rfcContext struct {
	rdma.Context
	f *fakeFabric
}

func (c rfcContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return rfcPD{p, c.f}, err
}

type rfcPD struct {
	rdma.PD
	f *fakeFabric
}

func (p rfcPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := p.PD.CreateQP(cfg)
	return rfcQP{q, p.f}, err
}

type rfcQP struct {
	rdma.QP
	f *fakeFabric
}

func (q rfcQP) PostSend(wrs []rdma.SendWR) (int, error) {
	for i := range wrs {
		if wrs[i].Op != rdma.OpSend {
			continue
		}
		g := wrs[i].SGL[0]
		q.f.mu.Lock()
		m := q.f.mrs[rdma.RKey(g.LKey)]
		if b := m.mem[g.Addr-m.addr:][:g.Length]; b[0] == byte(llc.TypeConfirmLink) {
			b[3] &^= byte(llc.NoRMBEEyecatcher)
		}
		q.f.mu.Unlock()
	}
	return q.QP.PostSend(wrs)
}

// Streams that wrap, closes and the reuse of an RMBE in RFC 7609's dialect,
// with eye catchers and cursors from 4.
func TestConn_rfcDialect(t *testing.T) {
	f := newFakeFabric()
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1), small, versions(smcr.VersionsV1)), server: newStack(t, rfcDevice{f.device("s", 2), f}, small)}
	var err error
	if p.l, err = smcr.Listen(t.Context(), p.server, "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	defer p.l.Close()
	for range 3 {
		a, b := p.dial(t)
		for _, s := range []*smcr.Stack{p.client, p.server} {
			if g := s.LinkGroups(); len(g) != 1 || g[0].Dialect != llc.DialectRFC.String() {
				t.Fatalf("groups: %+v", g)
			}
		}
		var wg sync.WaitGroup
		for _, d := range []struct{ from, to *smcr.Conn }{{a, b}, {b, a}} {
			wg.Go(func() {
				if _, err := d.from.ReadFrom(io.LimitReader(&pattern{seed: 9}, 200_000)); err != nil {
					t.Error(err)
				}
				if err := d.from.CloseWrite(); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				if n, err := d.to.WriteTo(&pattern{seed: 9}); err != nil || n != 200_000 {
					t.Errorf("read %d: %v", n, err)
				}
			})
		}
		wg.Wait()
		_, _ = a.Close(), b.Close()
		waitFor(t, "closed", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
	}
}
