// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"container/heap"
	"container/list"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// groupTable are the link groups of a stack. A stack may have thousands of them: what is done
// for each message, timer or rendezvous must not look at all, so the table finds groups by
// their peer, by time, by idleness and by having something to do. It is guarded by the stack's
// turn.
type groupTable struct {
	byID    map[uint32]*group
	byParty map[party][]*group
	timers  timers
	lost    lostGroups
	idle    list.List // of groups, see noteIdle
	touched []*group  // those that have something to do, see flushTouched
	expired []*group  // those whose timers are being seen to
	// outs are what a group's machine wants, while it is carried out: of one group at a time.
	outs []linkgroup.Output
}

func (t *groupTable) init() { t.byID, t.byParty = map[uint32]*group{}, map[party][]*group{} }

func (t *groupTable) add(g *group) {
	t.byID[g.id] = g
	k := g.party()
	t.byParty[k] = append(t.byParty[k], g)
}

// remove takes a group off again, with its timer.
func (t *groupTable) remove(g *group) {
	delete(t.byID, g.id)
	t.forgetParty(g)
	if g.timer > 0 {
		heap.Remove(&t.timers, g.timer-1)
	}
}

func (t *groupTable) forgetParty(g *group) {
	k := g.party()
	i := slices.Index(t.byParty[k], g)
	if i < 0 {
		return
	}
	if t.byParty[k] = slices.Delete(t.byParty[k], i, i+1); len(t.byParty[k]) == 0 {
		delete(t.byParty, k)
	}
}

// with are the groups with a peer, the oldest first: the youngest are the
// first to become empty.
func (t *groupTable) with(p party) []*group { return t.byParty[p] }

// touch puts a group on the list of those that have something to do.
func (t *groupTable) touch(g *group) {
	if !g.touched {
		g.touched = true
		t.touched = append(t.touched, g)
	}
}

// flushTouched carries out what the groups on that list want, so many of them at most, and returns how
// many there were. The others stay, ahead of those that come.
func (t *groupTable) flushTouched(now time.Time, most int) int {
	n := 0
	for ; n < len(t.touched) && n < most; n++ { // a group may put another one there
		g := t.touched[n]
		g.touched = false
		g.flush(now)
	}
	left := copy(t.touched, t.touched[n:])
	clear(t.touched[left:])
	t.touched = t.touched[:left]
	return n
}

// schedule notes when a group has something to do, which it returns; false: never.
func (t *groupTable) schedule(g *group) (time.Time, bool) {
	at, ok := g.lg.NextTimeout()
	switch {
	case !ok:
	case g.timer == 0:
		g.due = at
		heap.Push(&t.timers, g)
	case at.Before(g.due):
		g.due = at
		heap.Fix(&t.timers, g.timer-1)
	}
	return at, ok
}

// nextDue is when the first timer is due; false: there is none.
func (t *groupTable) nextDue() (time.Time, bool) {
	if len(t.timers) == 0 {
		return time.Time{}, false
	}
	return t.timers[0].due, true
}

// expire lets groups do what is due.
func (t *groupTable) expire(now time.Time) {
	for len(t.timers) > 0 && !now.Before(t.timers[0].due) {
		t.expired = append(t.expired, heap.Pop(&t.timers).(*group)) //nolint:forcetypeassert // see Push
	}
	for i, g := range t.expired {
		if due, ok := g.lg.NextTimeout(); ok && !now.Before(due) {
			g.lg.HandleTimeout(now)
			g.endAbandoned(now)
			g.flush(now)
		} else {
			g.schedule()
		}
		t.expired[i] = nil
	}
	t.expired = t.expired[:0]
}

// schedule wakes the stack's goroutine when the group has something to do, or before.
func (g *group) schedule() {
	if at, ok := g.s.groups.schedule(g); ok {
		g.s.alarm.wakeAt(at)
	}
}

// timers are a heap of the groups with something to do later, the earliest first. Most messages
// move a timer to a later time, and few timers expire: so a group stays at its old place, and
// when its time comes is put in again for the new one.
type timers []*group

// Len, like the other methods, implements heap.Interface.
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
