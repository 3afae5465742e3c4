// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// watch looks at a path after each step: a group may die only for a reason.
func (w *World) watch(p *path) {
	p.stood = p.stood || p.nodes[0].condition() == active && p.nodes[1].condition() == active
	for side, n := range p.nodes {
		if p.dead[side] || n.condition() != dead {
			continue
		}
		p.dead[side] = true
		if p.lostSound[side].Equal(w.now) && p.excused == "" && !w.cfg.Linux[p.peers[0]] && !w.cfg.Linux[p.peers[1]] {
			w.fault("%v died with a sound link and connections", n)
		}
		if !w.faulted && p.excused == "" && p.stood && p.isUsed() && !w.cfg.Linux[p.peers[0]] && !w.cfg.Linux[p.peers[1]] {
			w.fault("%v died with connections, though nothing was lost", n)
		}
	}
}

// isSound reports whether nothing has ever happened to an established link.
func (q *qp) isSound() bool {
	t := q.target()
	return q.state == qpTransmit && q.active && !q.tainted && t != nil && t.state == qpTransmit && t.active && !t.tainted &&
		q.w.passes(q.rnic, t.rnic) && q.w.passes(t.rnic, q.rnic)
}

// isUsed reports whether applications hold connections of the path at both
// ends.
func (p *path) isUsed() bool {
	for _, c := range p.w.conns {
		if c.path != p || !c.opened || c.failed != nil {
			continue
		}
		ends := c.ends()
		if ends[0] != nil && ends[1] != nil && !ends[0].progress().closed && !ends[1].progress().closed {
			return true
		}
	}
	return false
}

// checkOpen finds connections that did not come about, and ones that were
// reset, with nobody to blame.
func (w *World) checkOpen() {
	for _, name := range w.Names() {
		c := w.conns[name]
		switch {
		case c.failed != nil:
			// Two kernels drop requests that cross, and give up.
			linux := w.cfg.Linux[c.peers[0]] || w.cfg.Linux[c.peers[1]]
			// One that drops our refusal of a second link makes us wait for 2 s
			// at each first contact.
			mayFail := w.version(c.peers[c.client], c.peers[1-c.client]) == 0 || errors.Is(c.failed, errWish) ||
				errors.Is(c.failed, linkgroup.ErrFull) || c.path != nil && c.path.excused != "" || errors.Is(c.failed, clc.ErrTimeout) && linux
			if !w.faulted && !w.slowed && !mayFail && (!w.cfg.Linux[c.peers[0]] || !w.cfg.Linux[c.peers[1]]) {
				w.fault("rendezvous of %s: %w", name, c.failed)
			}
		case w.cfg.Linux[c.peers[0]] && w.cfg.Linux[c.peers[1]]:
			// They lose RKeys when CONFIRM RKEY and ADD LINK cross.
		case c.ended || c.lost || !c.opened || c.path.excused != "" || c.path.dead[0] || c.path.dead[1]:
		default:
			for side, e := range c.ends() {
				if e != nil && e.progress().aborted {
					w.fault("%s was reset at peer %d, though its group lives", name, c.peers[side])
				}
			}
		}
	}
}

// checkWaiting finds writers that wait for room, long after their reader has made
// some (§4.5.1).
func (w *World) checkWaiting() {
	for _, name := range w.Names() {
		c := w.conns[name]
		if !c.opened || c.failed != nil || c.path.dead[0] || c.path.dead[1] {
			continue
		}
		for side, e := range c.ends() {
			r, ok := e.(*engineConn)
			v := c.path.voices[1-side][name]
			if !ok || v == nil || !v.blocked || r.aborted || r.closed {
				continue
			}
			if d := r.lc.Data(); r.consumed > d.Announced() && !d.HasSentClose() && !d.PeerIsDone() && !d.WasAborted() {
				w.fault("%s: peer %d waits for room, peer %d has read %d bytes and told of %d", name, c.peers[1-side], c.peers[side],
					r.consumed, d.Announced())
			}
		}
	}
}

// checkRedundancy finds groups with connections and without a second link that they
// could have, long after everything was mended. Nobody hears of the end of a blackhole,
// and the server tries less and less often.
func (w *World) checkRedundancy() {
	if w.holed {
		return
	}
	for _, p := range w.paths {
		if !p.isUsed() {
			continue
		}
		want := 2
		for side, peer := range p.peers {
			if w.cfg.Linux[peer] || p.nodes[side].condition() == dead {
				want = 0
			}
			limit := w.cfg.MaxLinks[peer]
			if limit == 0 {
				limit = 2
			}
			want = min(want, limit, len(w.peers[peer].rnics))
		}
		for side, n := range p.nodes {
			got := 0
			for _, l := range n.links() {
				if l.active {
					got++
				}
			}
			if got < want {
				w.fault("group %d: peer %d could have %d links and has%s", p.id, p.peers[side], want, describeLinks(n))
			}
		}
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
				return n.condition() != dead && (c.failed != nil && (c.opened || c.kept) || p.excused != "")
			}
			for _, l := range n.leaks(excused) {
				w.fault("%s", l)
			}
			live := map[int]bool{}
			for _, l := range n.links() {
				live[l.index] = true
			}
			for i, q := range p.qps[side] {
				if q != nil && !q.lingers && (!live[i] || n.condition() == dead) {
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
