// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"
	"time"
)

// ends returns both ends of a connection; one that was released is nil.
func (c *pair) ends() [2]end {
	var e [2]end
	if c.path != nil {
		for i, n := range c.path.nodes {
			e[i] = n.end(c.name)
		}
	}
	return e
}

// do runs f on one end of a connection that has been opened.
func (w *World) do(name string, side int, f func(end)) {
	c := w.conns[name]
	if c == nil || !c.stands[side] || c.failed != nil {
		return
	}
	if e := c.ends()[side]; e != nil {
		f(e)
		w.pump()
	}
}

// Write writes up to n bytes at one end and returns how many fitted.
func (w *World) Write(name string, side, n int) (done int) {
	w.do(name, side, func(e end) { done = e.write(n) })
	return done
}

// Read reads up to n bytes at one end, compares them with what was written,
// and returns how many there were.
func (w *World) Read(name string, side, n int) (done int) {
	w.do(name, side, func(e end) { done = e.read(w, n) })
	return done
}

// Shutdown ends the stream that one end writes.
func (w *World) Shutdown(name string, side int) { w.do(name, side, func(e end) { e.shutdown() }) }

// Close closes one end.
func (w *World) Close(name string, side int) {
	w.do(name, side, func(e end) { w.conns[name].ended = true; e.close(w.conns[name].path.clock(side)) })
}

// Abort resets a connection from one end.
func (w *World) Abort(name string, side int) {
	w.do(name, side, func(e end) { w.conns[name].ended = true; e.abort(w.conns[name].path.clock(side)) })
}

// Finish lets everything end: both applications read what there is to read,
// end their streams, read the rest and close. Then it waits for the machines
// and reports what was lost, what is stuck and what was not given back.
func (w *World) Finish() error {
	w.healAll()
	w.Run(3 * patience)
	w.checkWaiting()
	w.drain(func(e end) { e.shutdown() })
	for _, name := range w.Names() {
		w.checkStreams(name)
	}
	w.checkOpen()
	if w.multiLink() {
		w.Run(2 * time.Minute) // links are tried again less and less often
		w.checkRedundancy()
	}
	for _, name := range w.Names() {
		for side := range 2 {
			w.Close(name, side)
		}
	}
	w.Run(4 * time.Minute) // twice the time a close may take
	w.checkLeaks()
	w.checkAgreement()
	return w.Check()
}

// drain reads everywhere until nothing comes any more.
func (w *World) drain(after func(end)) {
	for _, last := range []bool{false, true} {
		for idle := 0; idle < 3 && !w.halted; {
			moved := 0
			for _, name := range w.Names() {
				for side := range 2 {
					moved += w.Read(name, side, 1<<30)
				}
			}
			w.Run(50 * time.Millisecond)
			if idle++; moved > 0 {
				idle = 0
			}
		}
		if !last {
			for _, name := range w.Names() {
				for side := range 2 {
					w.do(name, side, after)
				}
			}
		}
	}
}

// checkStreams compares what one end wrote with what the other one read.
func (w *World) checkStreams(name string) {
	c := w.conns[name]
	ends := c.ends()
	if !c.opened || c.failed != nil || ends[0] == nil || ends[1] == nil {
		return
	}
	a, b := ends[0].progress(), ends[1].progress()
	for side, p := range [2][2]progress{{a, b}, {b, a}} {
		from, to := p[0], p[1]
		switch {
		case from.aborted || to.aborted:
			if to.consumed > from.produced {
				w.fault("%s: peer %d read %d bytes of %d", name, 1-side, to.consumed, from.produced)
			}
		case to.closed: // nobody reads any more
		case from.produced != to.consumed:
			w.fault("%s is stuck: peer %d wrote %d bytes and is %s, peer %d read %d and is %s",
				name, side, from.produced, from.state, 1-side, to.consumed, to.state)
		case !to.eof:
			w.fault("%s: peer %d is %s and has not seen the end of the stream of peer %d, which is %s", name, 1-side, to.state, side, from.state)
		}
	}
	for _, p := range [2][2]progress{{a, b}, {b, a}} {
		// One that was closed may be reset alone, when the other never closes.
		if p[0].aborted && !p[0].closed && !p[1].aborted && !c.path.dead[0] && !c.path.dead[1] && c.path.excused == "" {
			w.fault("%s: reset at one end only: %s, %s", name, a.state, b.state)
		}
	}
}

// Describe says how far a connection has come, at peer 0 and at peer 1.
func (w *World) Describe(name string) string {
	c := w.conns[name]
	switch {
	case c == nil:
		return name + ": unknown"
	case c.failed != nil:
		return fmt.Sprintf("%s: failed: %v", name, c.failed)
	case !c.opened:
		return name + ": opening"
	}
	s := name
	for side, e := range c.ends() {
		if e == nil {
			s += fmt.Sprintf("; %d: gone", side)
			continue
		}
		p := e.progress()
		s += fmt.Sprintf("; %d: %s, wrote %d, read %d, unread %d", side, p.state, p.produced, p.consumed, p.unread)
		if p.eof {
			s += ", end seen"
		}
		if p.aborted {
			s += ", reset"
		}
	}
	return s
}

// Groups describes the paths between the peers.
func (w *World) Groups() []string {
	var s []string
	for _, p := range w.paths {
		c := p.client
		line := fmt.Sprintf("group %d of peer %d: %v, %v, %d RDMA writes so far", p.id, p.peers[c],
			p.nodes[c].condition(), p.nodes[1-c].condition(), w.writes)
		if w.multiLink() {
			for side, n := range p.nodes {
				line += fmt.Sprintf("\n  peer %d:%s", p.peers[side], describeLinks(n))
			}
		}
		s = append(s, line)
	}
	return s
}

// multiLink reports whether groups may have more than one link.
func (w *World) multiLink() bool {
	for _, h := range w.peers {
		if len(h.rnics) > 1 {
			return true
		}
	}
	return false
}

func describeLinks(n node) string {
	s := ""
	for _, l := range n.links() {
		state := "forming"
		if l.active {
			state = "active"
		}
		s += fmt.Sprintf(" link %d (%d to %d) %s;", l.id, l.local.GID[14], l.peer.GID[14], state)
	}
	if s == "" {
		return " no link"
	}
	return s
}
