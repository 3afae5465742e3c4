// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// watch looks at a path after each step: a group may die only for a reason.
func (w *World) watch(p *path) {
	for side, n := range p.nodes {
		if p.dead[side] || n.condition() != dead {
			continue
		}
		p.dead[side] = true
	}
}

// checkLeaks finds what is still held when all connections are over.
func (w *World) checkLeaks() {
	for _, p := range w.paths {
		for side, n := range p.nodes {
			// A connection whose rendezvous failed after the client could write
			// keeps its RMBE as long as the group lives.
			excused := func(name string) bool {
				c := w.conns[name]
				return c.failed != nil && c.opened && n.condition() != dead
			}
			for _, l := range n.leaks(excused) {
				w.fault("%s", l)
			}
			live := map[int]bool{}
			for _, l := range n.links() {
				live[l.index] = true
			}
			for i, q := range p.qps[side] {
				if q != nil && (!live[i] || n.condition() == dead) {
					w.fault("%v: %v of link index %d is not destroyed", n, q, i)
				}
			}
		}
	}
}

// agreed is what both sides must say of a link when nothing happens.
type agreed struct {
	id   llc.LinkID
	a, b rdma.QPN
}

// checkAgreement compares what both sides say of their groups.
func (w *World) checkAgreement() {
	for _, p := range w.paths {
		if c := p.nodes[0].condition(); c != p.nodes[1].condition() {
			w.fault("group %d: peer %d says %v, peer %d says %v", p.id, p.peers[0], c, p.peers[1], p.nodes[1].condition())
			continue
		} else if c == dead {
			continue
		}
		views := [2]map[agreed]bool{{}, {}}
		for side, n := range p.nodes {
			for _, l := range n.links() {
				k := agreed{l.id, l.local.QPN, l.peer.QPN}
				if side == 1 {
					k.a, k.b = k.b, k.a
				}
				views[side][k] = l.active
			}
		}
		if fmt.Sprint(views[0]) != fmt.Sprint(views[1]) {
			w.fault("group %d: peer %d has%s peer %d has%s", p.id, p.peers[0], describeLinks(p.nodes[0]), p.peers[1], describeLinks(p.nodes[1]))
		}
	}
}
