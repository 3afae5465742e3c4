// SPDX-License-Identifier: Apache-2.0

package smcr

import "time"

// tcpEndGrace is how long a peer may say nothing in the link group after the end of
// the TCP connection. A peer that is silent for longer has gone, and cannot end SMC-R in
// order. A peer that ends hundreds of connections at once, or is short of processors, says
// other things first, and has CloseTimeout.
const tcpEndGrace = 2 * time.Second

// watched is what a stack's tcpWatch knows of one connection: when its TCP connection has ended
// in order, and the grace that the connection above has then. It is guarded by the stack's turn.
//
//	end       heard         grace over   grace over
//	 |----------|--------------|------------|
//	 |<----- tcpEndGrace ----->|<- another->| the peer was silent in this one: reset
type watched struct {
	id      uint64      // in tcpWatch.conns
	grace   *time.Timer // since the TCP connection has ended; nil: it has not
	endedAt time.Time   // when the TCP connection did
	since   time.Time   // the peer must have spoken since then when the grace is over
}

// inGrace reports whether the TCP connection has ended.
func (w *watched) inGrace() bool { return w.grace != nil }

// begin notes that the TCP connection has ended, and has over called when the grace is over.
func (w *watched) begin(now time.Time, over func()) {
	w.endedAt, w.since = now, now
	w.grace = time.AfterFunc(tcpEndGrace, over)
}

// extend begins another grace if the peer was heard in this one, and limit has not passed
// since the end of the TCP connection.
func (w *watched) extend(now, heard time.Time, limit time.Duration) bool {
	if !heard.After(w.since) || now.Sub(w.endedAt) >= limit {
		return false
	}
	w.since = now
	w.grace.Reset(tcpEndGrace)
	return true
}

// stop ends the grace; true: there was one, and its end does not come any more.
func (w *watched) stop() bool { return w.grace != nil && w.grace.Stop() }

// tcpEnded is called when the grace is over.
func (c *Conn) tcpEnded() {
	s := c.stack
	defer s.wg.Done()
	s.lock()
	defer s.unlock()
	now := time.Now()
	s.devices.drain(now, nil) // this process may be what was slow
	s.groups.flushTouched(now, unbounded)
	switch {
	case c.streams.has(flagPeerDone) || c.life.isOver():
		return // the peer closed in order; its close timer does the rest
	case !s.closed && c.watched.extend(now, c.lc.Heard(), s.cfg.CloseTimeout):
		s.wg.Add(1) // of the next grace
	default:
		c.abortLocked()
	}
}
