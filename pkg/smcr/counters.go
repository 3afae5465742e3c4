// SPDX-License-Identifier: Apache-2.0

package smcr

import "sync/atomic"

// counters count what a stack has done. A live link group or connection has counts of its own;
// when it ends, its counts are added to past.
type counters struct {
	past    Stats         // guarded by the turn; without registered memory and live objects
	clcSent atomic.Uint64 // CLC messages, which are sent without the turn
}

// countGroup adds what a link group has done.
func (s *Stats) countGroup(g *group) {
	s.LLCSent += g.lg.LLCSent
	s.CDCSent += g.lg.CDCSent
}

// countConn adds what a connection has carried.
func (s *Stats) countConn(c *Conn) {
	s.BytesSentSMCR += c.streams.written()
	s.BytesRecvSMCR += c.streams.consumed.Load()
}

// Stats returns the stack's counters.
func (s *Stack) Stats() Stats {
	s.lock()
	defer s.unlock()
	st := s.counters.past
	st.MemoryBytes = uint64(s.account.bytes)
	st.Groups = len(s.groups.byID)
	st.Conns = len(s.conns)
	st.CLCSent = s.counters.clcSent.Load()
	st.AnswerPolls, st.AnswersPolled = s.dialogue.polls.Load(), s.dialogue.polled.Load()
	for _, g := range s.groups.byID {
		st.countGroup(g)
	}
	for c := range s.conns {
		st.countConn(c)
		if c.life.opened && c.life.closed.Load() && !c.streams.has(flagReset) {
			st.Closing++
		}
	}
	return st
}
