// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// receive moves the queue pair to RTR. Where the device would wait for the MAC
// address of a peer that may be dead, with the turn of all, the address is found
// out first, without the turn.
func (l *link) receive(now time.Time, peer linkgroup.Endpoint) {
	r, ok := l.rnic.ctx.(rdma.PathResolver)
	if !ok {
		l.check(now, "queue pair to RTR", l.toRTR(now, peer))
		return
	}
	path, s := l.path(peer), l.g.s
	l.resolving = true
	l.g.resolving++
	s.wg.Go(func() {
		err := r.ResolvePath(path)
		s.lock()
		l.resolved(peer, err)
		s.unlock()
	})
}

// waits reports whether an output is for when the way to the peer is known: all
// that the link itself shall do, and LLC messages, which tell the peer that it
// may send there. Connections go on over the other links.
func (g *group) waits(l *link, o *linkgroup.Output) bool {
	switch {
	case g.resolving == 0 || o.Kind == linkgroup.OutCloseLink:
		return false
	case l.resolving:
		return true
	}
	return o.Kind == linkgroup.OutSend && o.Conn == nil && g.lg.State() < linkgroup.Draining
}

// resolved goes on with the link, unless that was closed meanwhile, and with what waited.
func (l *link) resolved(peer linkgroup.Endpoint, err error) {
	now, g := time.Now(), l.g
	if l.resolving {
		l.stopResolving()
		if err == nil {
			err = l.toRTR(now, peer)
		}
		l.check(now, "queue pair to RTR", err)
	}
	g.doLater(now)
	for _, l := range g.links {
		if l != nil {
			l.post(now)
		}
	}
	g.flush(now)
}

// stopResolving notes that the link waits for the way to its peer no more.
func (l *link) stopResolving() {
	if l.resolving {
		l.resolving = false
		l.g.resolving--
	}
}

// doLater does what waited for the way to a peer. What has to wait for another one waits again.
func (g *group) doLater(now time.Time) {
	later := g.later
	g.later = nil
	for i := range later {
		g.do(now, &later[i])
	}
}

// path is how packets get to a peer's RNIC.
func (l *link) path(peer linkgroup.Endpoint) rdma.Path {
	hops := uint8(hopLimitRouted)
	if l.row.OnLink(peer.GID) {
		hops = hopLimitDirect
	}
	return rdma.Path{SGIDIndex: l.row.Index, DGID: peer.GID, DMAC: peer.NextHop(), HopLimit: hops}
}
