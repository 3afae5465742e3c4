// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// firstRMBEs is how many connections the first RMB of a link group has room for; each
// further one has as many elements as there are by then, up to Config.RMBEsPerRMB.
const firstRMBEs = 2

// nextRMBEs is how many elements the next RMB is to have.
func (g *group) nextRMBEs() int { return min(max(g.rmbes(), firstRMBEs), g.s.cfg.RMBEsPerRMB) }

// rmbes counts the elements of all RMBs.
func (g *group) rmbes() int {
	n := 0
	for _, r := range g.rmbs {
		n += len(r.mem) / g.s.cfg.RMBESizeBytes
	}
	return n
}

// addRMB registers a new RMB of the configured element size.
func (g *group) addRMB(elements int) (linkgroup.RMBID, error) {
	r, err := g.mem.register(g.s.cfg.RMBESizeBytes*elements, rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		return 0, err
	}
	id, err := g.lg.AddRMB(uint32(g.s.cfg.RMBESizeBytes), elements, r.tokens())
	if err != nil {
		return 0, errors.Join(err, r.close())
	}
	r.countWrites(g.s.cfg.RMBESizeBytes)
	g.rmbs[id] = r
	return id, nil
}

// openConn gives a connection its RMBE, with a new RMB if need be.
func (g *group) openConn() (*linkgroup.Conn, error) {
	size := uint32(g.s.cfg.RMBESizeBytes)
	lc, err := g.lg.OpenConn(size)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if _, err = g.addRMB(g.nextRMBEs()); isShort(err) {
			_, err = g.addRMB(1)
		}
		if err != nil {
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
	cfg, have := &g.s.cfg, &g.s.account
	size := uint32(cfg.RMBESizeBytes)
	next := g.nextRMBEs()
	if !g.lg.Usable() || 2*g.lg.FreeRMBEs(size) >= next {
		return
	}
	id, ok := g.lg.UnconfirmedRMB(size) // the peer refused it, or its connection was given up
	if !ok {
		if have.bytes+cfg.RMBESizeBytes*next > have.budget/4*3 {
			return
		}
		var err error
		if id, err = g.addRMB(next); err != nil {
			return // the rendezvous that needs it says so
		}
	}
	g.lg.ConfirmRMB(id)
}

func (g *group) freeRMB(id linkgroup.RMBID) {
	if r := g.rmbs[id]; r != nil {
		_ = r.close() // nothing uses it any more
		delete(g.rmbs, id)
	}
}

// rmbe returns the memory of an RMBE.
func (g *group) rmbe(e linkgroup.RMBE) []byte {
	off := int(e.Size) * int(e.Index-1)
	return g.rmbs[e.RMB].mem[off : off+int(e.Size) : off+int(e.Size)]
}
