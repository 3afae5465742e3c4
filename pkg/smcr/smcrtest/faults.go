// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"time"
)

// Why queue pairs fail.
var (
	errRetries = errors.New("retries exceeded")
	errAccess  = errors.New("remote access error")
	errKilled  = errors.New("killed")
	errRemoved = errors.New("device removed")
)

// taint marks the queue pairs that a fault of an RNIC may break.
func (w *World) taint(r *rnic) {
	w.faulted = true
	for _, q := range w.qps {
		if t := w.qps[q.peer.QPN]; q.rnic == r || t != nil && t.rnic == r || q.peerIsOn(r) {
			q.tainted = true
		}
	}
}

// peerIsOn reports whether the other end is, or was, on an RNIC.
func (q *qp) peerIsOn(r *rnic) bool {
	return int(q.peer.GID[15]) == r.peer+1 && int(q.peer.GID[14]) == r.index
}

// rnic finds a peer's RNIC; nil when it never had it.
func (w *World) rnic(peer, index int) *rnic {
	if peer >= len(w.peers) || index >= len(w.peers[peer].rnics) {
		return nil
	}
	return w.peers[peer].rnics[index]
}

// nodesOf calls f for each link group of a peer.
func (w *World) nodesOf(peer int, f func(p *path, side int)) {
	for _, p := range w.paths {
		for side := range p.nodes {
			if p.peers[side] == peer {
				f(p, side)
			}
		}
	}
}

// Port takes the port of an RNIC down or up; its peer notices at once.
func (w *World) Port(peer, index int, up bool) {
	r := w.rnic(peer, index)
	if r == nil || !r.present || r.up == up {
		return
	}
	r.up = up
	w.taint(r)
	w.trace("%v port of %v: up=%t", w.Elapsed(), r, up)
	w.nodesOf(peer, func(p *path, side int) { p.nodes[side].port(p.clock(side), index, up) })
	w.pump()
}

// Remove takes an RNIC away: its queue pairs fail.
func (w *World) Remove(peer, index int) {
	r := w.rnic(peer, index)
	if r == nil || !r.present {
		return
	}
	w.taint(r)
	w.trace("%v %v is removed", w.Elapsed(), r)
	r.present, r.up = false, false
	w.nodesOf(peer, func(p *path, side int) {
		for _, q := range append([]*qp(nil), p.qps[side]...) {
			if q != nil && q.rnic == r {
				q.fail(errRemoved)
			}
		}
		p.nodes[side].port(p.clock(side), index, false)
	})
	w.pump()
}

// Insert brings a removed RNIC back.
func (w *World) Insert(peer, index int) {
	r := w.rnic(peer, index)
	if r == nil || r.present {
		return
	}
	r.present, r.up = true, true
	r.life++
	w.trace("%v %v is back", w.Elapsed(), r)
	w.nodesOf(peer, func(p *path, side int) { p.nodes[side].port(p.clock(side), index, true) })
	w.pump()
}

// endTime is how soon both sides must be through with a link group that one of them
// ends in order: a kernel may wait for an answer for 2 s before it acts on the end.
// Where an RNIC was slow, the peer may have given up the link that carried the only message in
// which the kernel says that the group ends.
const endTime = 4 * time.Second

// End has a peer end its link groups in order, as one does that is shut down. A first
// contact goes on: its end is that of the rendezvous.
func (w *World) End(peer int) {
	w.nodesOf(peer, func(p *path, side int) {
		n, other := p.nodes[side], p.nodes[1-side]
		if n.condition() != active || other.condition() != active {
			return
		}
		p.excused = "a peer ended it"
		n.terminate(p.clock(side))
		w.after(endTime, func() {
			if !w.faulted && !w.slowed && (n.condition() != dead || other.condition() != dead) {
				w.fault("group %d: %v after peer %d has ended it, peer %d says %v, peer %d says %v",
					p.id, endTime, peer, p.peers[side], n.condition(), p.peers[1-side], other.condition())
			}
		})
	})
	w.pump()
}

// Direction says which packets of an RNIC are lost.
type Direction uint8

// Directions of a blackhole.
const (
	Both Direction = iota
	Outgoing
	Incoming
)

// Blackhole makes the network swallow what an RNIC sends, what is sent to it,
// or both. Nobody is told.
func (w *World) Blackhole(peer, index int, dir Direction) { w.hole(peer, index, dir, true) }

// Heal ends the blackholes of an RNIC.
func (w *World) Heal(peer, index int) { w.hole(peer, index, Both, false) }

func (w *World) hole(peer, index int, dir Direction, on bool) {
	r := w.rnic(peer, index)
	if r == nil {
		return
	}
	w.taint(r)
	w.holed = w.holed || on
	w.trace("%v blackhole %d at %v: %t", w.Elapsed(), dir, r, on)
	for i, h := range w.peers {
		if i == peer {
			continue
		}
		for _, o := range h.rnics {
			for _, x := range []wire{{r, o}, {o, r}} {
				if dir == Outgoing && x.from != r || dir == Incoming && x.to != r {
					continue
				}
				delete(w.holes, x)
				if on {
					w.holes[x] = true
				}
			}
		}
	}
}

// Slow makes an RNIC take nothing in for a while, as software does that gets no
// processor. What it sends goes out, and nothing is lost: no group may end for that.
func (w *World) Slow(peer, index int, d time.Duration) {
	r := w.rnic(peer, index)
	if r == nil {
		return
	}
	r.slowUntil = w.now.Add(d)
	w.slowed = true
	w.trace("%v %v takes nothing in for %v", w.Elapsed(), r, d)
}

// KillLink breaks the queue pairs of a link index in the groups that a peer
// began, at one side or, with side -1, at both.
func (w *World) KillLink(client, side, index int) {
	w.faulted = true
	for _, p := range w.paths {
		if p.peers[p.client] != client {
			continue
		}
		for i := range p.nodes {
			if q := p.qp(i, index); q != nil {
				q.tainted = true
				if t := q.target(); t != nil {
					t.tainted = true
				}
				if side < 0 || side == i {
					q.fail(errKilled)
				}
			}
		}
	}
	w.pump()
}

// Restart makes a peer's process forget everything. Its queue pairs are
// destroyed with it; the others must find out.
func (w *World) Restart(peer int) {
	w.faulted = true
	w.trace("%v peer %d restarts", w.Elapsed(), peer)
	w.peers[peer].instance++
	for _, t := range w.talks {
		for side, p := range t.c.peers {
			if p == peer {
				t.die(side)
			}
		}
	}
	w.nodesOf(peer, func(p *path, side int) {
		p.excused = "a peer restarted"
		for _, q := range append([]*qp(nil), p.qps[side]...) {
			if q != nil {
				q.close()
			}
		}
		p.nodes[side] = &gone{state: dead, dialectOf: p.nodes[side].dialect(), name: p.nodes[side].String()}
	})
	w.pump()
}

// JumpClock moves a peer's clock forward.
func (w *World) JumpClock(peer int, d time.Duration) {
	w.trace("%v the clock of peer %d jumps by %v", w.Elapsed(), peer, d)
	w.faulted = true
	w.peers[peer].skew += d
	w.nodesOf(peer, func(p *path, _ int) { p.excused = "a clock jumped" })
	w.runTimers()
	w.pump()
}

// healAll ends all faults that can end.
func (w *World) healAll() {
	clear(w.holes)
	for peer, h := range w.peers {
		for i, r := range h.rnics {
			switch {
			case !r.present:
				w.Insert(peer, i)
			case !r.up:
				w.Port(peer, i, true)
			}
		}
	}
}

func (d Direction) String() string {
	switch d {
	case Outgoing:
		return "out"
	case Incoming:
		return "in"
	case Both:
	}
	return "both"
}
