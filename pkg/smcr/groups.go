// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"container/heap"
	"slices"
	"time"
)

// A stack may have thousands of link groups. What is done for each message,
// timer or rendezvous must not look at all of them.

// addGroup puts a group on the stack; the caller holds the turn, here and
// below.
func (s *Stack) addGroup(g *group) {
	s.groups[g.id] = g
	k := g.party()
	s.byParty[k] = append(s.byParty[k], g)
}

// removeGroup takes it off again, with its timer.
func (s *Stack) removeGroup(g *group) {
	delete(s.groups, g.id)
	s.forgetParty(g)
	if g.timer > 0 {
		heap.Remove(&s.timers, g.timer-1)
	}
}

func (s *Stack) forgetParty(g *group) {
	k := g.party()
	i := slices.Index(s.byParty[k], g)
	if i < 0 {
		return
	}
	if s.byParty[k] = slices.Delete(s.byParty[k], i, i+1); len(s.byParty[k]) == 0 {
		delete(s.byParty, k)
	}
}

// groupsWith are the groups with a peer, the oldest first: the youngest are the
// first to become empty.
func (s *Stack) groupsWith(p party) []*group { return s.byParty[p] }

// timers are the groups with something to do later, the earliest first. A group
// that has it later than it was put in for is put in again when its turn comes:
// most messages move a timer, few timers expire.
type timers []*group

// Len implements heap.Interface, as the others do.
func (t timers) Len() int { return len(t) }

// Less orders by time.
func (t timers) Less(i, j int) bool { return t[i].due.Before(t[j].due) }

// Swap keeps the groups' places.
func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i+1, j+1
}

// Push adds a group.
func (t *timers) Push(x any) {
	g := x.(*group) //nolint:forcetypeassert // nothing else is in there
	*t = append(*t, g)
	g.timer = len(*t)
}

// Pop removes the last one.
func (t *timers) Pop() any {
	last := len(*t) - 1
	g := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	g.timer = 0
	return g
}

// schedule wakes the stack's goroutine for a group at a time, or before.
func (s *Stack) schedule(g *group) {
	at, ok := g.lg.NextTimeout()
	if !ok {
		return
	}
	switch {
	case g.timer == 0:
		g.due = at
		heap.Push(&s.timers, g)
	case at.Before(g.due):
		g.due = at
		heap.Fix(&s.timers, g.timer-1)
	}
	s.wakeAt(at)
}

// wakeAt wakes the stack's goroutine at a time, or before.
func (s *Stack) wakeAt(at time.Time) {
	if at.Before(s.alarm) {
		s.alarm = at // once is enough
		s.poke()
	}
}

// expire lets groups do what is due.
func (s *Stack) expire(now time.Time) {
	for len(s.timers) > 0 && !now.Before(s.timers[0].due) {
		s.expired = append(s.expired, heap.Pop(&s.timers).(*group)) //nolint:forcetypeassert // see Push
	}
	for i, g := range s.expired {
		if t, ok := g.lg.NextTimeout(); ok && !now.Before(t) {
			g.lg.HandleTimeout(now)
			g.flush(now)
		} else {
			s.schedule(g)
		}
		s.expired[i] = nil
	}
	s.expired = s.expired[:0]
}

// nextTimeout is how long the stack's goroutine may sleep.
func (s *Stack) nextTimeout(now time.Time) time.Duration {
	next := now.Add(idleWait)
	if len(s.timers) > 0 && s.timers[0].due.Before(next) {
		next = s.timers[0].due
	}
	if !s.sweepAt.IsZero() && s.sweepAt.Before(next) {
		next = s.sweepAt
	}
	for _, l := range s.lingering {
		if l.until.Before(next) {
			next = l.until
		}
	}
	return max(next.Sub(now), 0)
}
