// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// firstRMBEs is how many connections the first RMB of a link group has room for; each
// further one has as many elements as there are by then, up to Config.RMBEsPerRMB. All elements
// of an RMB have the same size: see ringSizes.
const firstRMBEs = 2

// nextRMBEs is how many elements the next RMB is to have.
func (g *group) nextRMBEs() int { return min(max(g.rmbes(), firstRMBEs), g.s.cfg.RMBEsPerRMB) }

// rmbes counts the elements of all RMBs.
func (g *group) rmbes() int {
	n := 0
	for _, r := range g.rmbs {
		n += len(r.mem) / r.block
	}
	return n
}

// addRMB registers a new RMB of elements of a size.
func (g *group) addRMB(size, elements int) (linkgroup.RMBID, error) {
	r, err := g.mem.register(size*elements, rdma.LocalWrite|rdma.RemoteWrite)
	if err != nil {
		return 0, err
	}
	id, err := g.lg.AddRMB(uint32(size), elements, r.tokens())
	if err != nil {
		return 0, errors.Join(err, r.close())
	}
	r.countWrites(size)
	g.rmbs[id] = r
	return id, nil
}

// openConn gives a connection its send buffer and its RMBE.
func (g *group) openConn() (*linkgroup.Conn, *sendBuffer, error) {
	if !g.mayGrow() {
		g.shrinkRings()
	}
	lc, buf, err := g.takeRings()
	if isShort(err) && g.shrinkRings() {
		g.mem.trim() // it may have been a send buffer for which there was memory
		lc, buf, err = g.takeRings()
	}
	return lc, buf, err
}

func (g *group) takeRings() (*linkgroup.Conn, *sendBuffer, error) {
	buf, err := g.mem.takeSend(g.sendSizes.of(g.lg.Conns()))
	if err != nil {
		return nil, nil, err
	}
	lc, err := g.takeRMBE(uint32(len(buf.mem)))
	if err != nil {
		return nil, nil, errors.Join(err, g.mem.giveSend(buf))
	}
	g.prepareRMB()
	return lc, buf, nil
}

// takeRMBE gives a connection its RMBE, with a new RMB if need be or, if there is no more memory, one of another
// size that is free.
func (g *group) takeRMBE(sendBuffer uint32) (*linkgroup.Conn, error) {
	size := g.rmbeSizes.of(g.lg.Conns())
	lc, err := g.lg.OpenConn(uint32(size), sendBuffer)
	if !errors.Is(err, linkgroup.ErrNeedRMB) {
		return lc, err
	}
	if _, err = g.addRMB(size, g.nextRMBEs()); isShort(err) {
		_, err = g.addRMB(size, 1)
	}
	if err == nil {
		return g.lg.OpenConn(uint32(size), sendBuffer)
	}
	most := g.rmbeSizes.configured
	for other := max(most, largeRing); isShort(err) && other >= min(most, smallRing); other /= 2 {
		if lc, err := g.lg.OpenConn(uint32(other), sendBuffer); err == nil {
			return lc, nil
		}
	}
	return nil, err
}

// prepareRMB tells the peer of another RMB before the last element is taken, so
// that no rendezvous waits for CONFIRM RKEY (RFC 7609 §3.5.2). The group gives
// one back when twice as many elements are free (§4.4). The last quarter of the
// budget is left for connections that are here already.
func (g *group) prepareRMB() {
	if !g.lg.Usable() {
		return
	}
	next := g.nextRMBEs()
	size, missing := g.missingRMBE((next + 1) / 2)
	if !missing {
		return
	}
	id, ok := g.lg.UnconfirmedRMB(uint32(size)) // the peer refused it, or its connection was given up
	if !ok {
		have := &g.s.account
		if have.bytes+have.whole(size*next) > have.budget/4*3 {
			return
		}
		var err error
		if id, err = g.addRMB(size, next); err != nil {
			return // the rendezvous that needs it says so
		}
	}
	g.lg.ConfirmRMB(id)
}

// missingRMBE finds the size of the first of the next connections for which no element is free.
func (g *group) missingRMBE(next int) (size int, missing bool) {
	conns, free := g.lg.Conns(), 0
	for n := conns; n < conns+next; n++ {
		if is := g.rmbeSizes.of(n); is != size {
			size, free = is, g.lg.FreeRMBEs(uint32(is))
		}
		if free--; free < 0 {
			return size, true
		}
	}
	return 0, false
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
