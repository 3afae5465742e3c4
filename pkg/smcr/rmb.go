// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// addRMB registers a new RMB of the configured element size.
func (g *group) addRMB() (linkgroup.RMBID, error) {
	r, err := g.s.mem.register(g.s.cfg.rmbBytes(), rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		return 0, err
	}
	id, err := g.lg.AddRMB(uint32(g.s.cfg.RMBESizeBytes), g.s.cfg.RMBEsPerRMB, r.tokens())
	if err != nil {
		return 0, errors.Join(err, g.s.mem.unregister(r))
	}
	g.rmbs[id] = r
	return id, nil
}

func (c *Config) rmbBytes() int { return c.RMBESizeBytes * c.RMBEsPerRMB }

// openConn gives a connection its RMBE, with a new RMB if need be.
func (g *group) openConn() (*linkgroup.Conn, error) {
	size := uint32(g.s.cfg.RMBESizeBytes)
	lc, err := g.lg.OpenConn(size)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if _, err := g.addRMB(); err != nil {
			return nil, err
		}
		lc, err = g.lg.OpenConn(size)
	}
	if err == nil {
		g.prepareRMB()
	}
	return lc, err
}

// prepareRMB tells the peer of another RMB before the last element is taken, so
// that no rendezvous waits for CONFIRM RKEY (RFC 7609 §3.5.2). The group gives
// one back when twice as many elements are free (§4.4). The last quarter of the
// budget is left for connections that are here already.
func (g *group) prepareRMB() {
	cfg, mem := &g.s.cfg, &g.s.mem
	size := uint32(cfg.RMBESizeBytes)
	if !g.lg.Usable() || 2*g.lg.FreeRMBEs(size) >= cfg.RMBEsPerRMB {
		return
	}
	id, ok := g.lg.UnconfirmedRMB(size) // the peer refused it, or its connection was given up
	if !ok {
		if mem.bytes+cfg.rmbBytes() > mem.budget/4*3 {
			return
		}
		var err error
		if id, err = g.addRMB(); err != nil {
			return // the rendezvous that needs it says so
		}
	}
	g.lg.ConfirmRMB(id)
}

func (g *group) freeRMB(id linkgroup.RMBID) {
	if r := g.rmbs[id]; r != nil {
		_ = g.s.mem.unregister(r) // nothing uses it any more
		delete(g.rmbs, id)
	}
}

// rmbe returns the memory of an RMBE.
func (g *group) rmbe(e linkgroup.RMBE) []byte {
	off := int(e.Size) * int(e.Index-1)
	return g.rmbs[e.RMB].mem[off : off+int(e.Size) : off+int(e.Size)]
}
