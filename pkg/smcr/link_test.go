// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// chattyDevice is a fake device that puts further messages before each SEND of
// its stack: a peer that says more than it should.
type chattyDevice struct {
	rdma.Device
	f     *fakeFabric
	extra func() [][]byte // for the next SEND
}

func (d chattyDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return chattyContext{c, d}, err
}

type chattyContext struct {
	rdma.Context
	d chattyDevice
}

func (c chattyContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return chattyPD{p, c.d}, err
}

type chattyPD struct {
	rdma.PD
	d chattyDevice
}

func (p chattyPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := p.PD.CreateQP(cfg)
	return chattyQP{q, p.PD, p.d}, err
}

type chattyQP struct {
	rdma.QP
	pd rdma.PD
	d  chattyDevice
}

func (q chattyQP) PostSend(wrs []rdma.SendWR) (int, error) {
	for _, wr := range wrs {
		if wr.Op != rdma.OpSend {
			continue
		}
		for _, m := range q.d.extra() {
			mr, err := q.pd.AllocMR(len(m), rdma.LocalWrite)
			if err != nil {
				return 0, err
			}
			copy(mr.Bytes(), m)
			sge := rdma.SGE{Addr: mr.Addr(), Length: uint32(len(m)), LKey: mr.LKey()}
			if _, err := q.QP.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{sge}}}); err != nil {
				return 0, err
			}
			_ = mr.Close() // the fake device has copied it
		}
		break
	}
	return q.QP.PostSend(wrs)
}

// junk is a message of this size that no version has.
func junk(size int) []byte {
	b := bytes.Repeat([]byte{0xa5}, size)
	b[0] = 0x2f // an LLC type that is not in use
	return b
}

// chattyPair has a server and a client of version 2, with a connection, whose client sends messages of these
// sizes before each of its own from now on.
func chattyPair(t *testing.T, sizes ...int) (p *pair, a, b *smcr.Conn) {
	t.Helper()
	f := newFakeFabric()
	on := false // written before the stream begins, read in its calls: guarded by the fabric's lock
	extra := func() (out [][]byte) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if on {
			for _, n := range sizes {
				out = append(out, junk(n))
			}
		}
		return out
	}
	p = &pair{
		fabric: f, client: newStack(t, chattyDevice{f.device("c", 1), f, extra}, small, versions(smcr.VersionsV2)),
		server: newStack(t, f.device("s", 2), small, versions(smcr.VersionsV2)),
	}
	p.listen(t)
	a, b = p.dial(t)
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	exchange(t, a, b)
	f.mu.Lock()
	on = true
	f.mu.Unlock()
	return p, a, b
}

// TestAttack_longMessages: what a peer of version 2 sends beyond 44 bytes, as long
// and as often as it likes, changes no other message. They overwrite each other while
// they are read, which the race detector would report.
func TestAttack_longMessages(t *testing.T) {
	if underRaceDetector {
		t.Log("not with the race detector")
		return
	}
	for _, tc := range []struct {
		name  string
		sizes []int
	}{
		{"a little too long", []int{45, 46, 63, 64, 65}},
		{"as long as can be", []int{llc.MaxSizeV2}},
		{"many at once", []int{8192, 8000, 45, 8192, 100, 8192, 4096, 8192, 8192, 60}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, a, b := chattyPair(t, tc.sizes...)
			for range 20 { // each message takes some of the server's receive slots
				exchange(t, a, b)
			}
			if g := p.server.LinkGroups(); len(g) != 1 || g[0].State != "ACTIVE" {
				t.Errorf("groups %+v", g)
			}
		})
	}
}

// TestLink_longMessages: a message that is longer than any of version 2 costs the peer the link.
func TestLink_longMessages(t *testing.T) {
	p, a, _ := chattyPair(t, llc.MaxSizeV2+1)
	_, _ = a.Write([]byte("hello"))
	waitFor(t, "the link is lost", func() bool { return len(p.client.LinkGroups()) == 0 })
}
