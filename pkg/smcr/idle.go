// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// A link group without connections stays, so that the next connection needs no first contact.
// The idle group gives its RMBs and send buffers back soon, which the next connection gets anew
// for an exchange of CONFIRM RKEY; what is left are queue pairs and their message slots. And
// idle groups give way to others: where memory, queue pairs or the like are short, the group
// that has been idle for the longest time ends.
const (
	// releaseTimeout is how long an idle group keeps its memory: longer than a client takes
	// to reconnect.
	releaseTimeout = 3 * time.Second
	// maxIdleGroups bounds the link groups without connections: peers may be thousands
	// in the ten minutes that idle groups stay.
	maxIdleGroups = 256
)

// noteIdle keeps the list of idle groups, with the group that has been idle for the longest time first.
func (g *group) noteIdle() {
	idle := g.ready && g.lg.State() == linkgroup.Active && g.lg.Conns() == 0
	switch {
	case idle == (g.idle != nil):
	case idle:
		g.idle = g.s.groups.idle.PushBack(g)
		if g.s.groups.idle.Len() > maxIdleGroups {
			g.s.alarm.poke() // runTimers calls boundIdle: here another group's outputs may be under way
		}
	default:
		g.s.groups.idle.Remove(g.idle)
		g.idle = nil
	}
	if idle && len(g.rmbs) == 0 {
		g.mem.trim()
	}
}

// boundIdle ends the groups that have been idle for the longest time while there are
// more idle ones than maxIdleGroups. The caller holds the turn, here and below, and
// carries out nobody's outputs.
func (s *Stack) boundIdle() {
	for range s.groups.idle.Len() - maxIdleGroups {
		s.giveWay(nil, nil, nil)
	}
}

// giveWay ends the group that has been idle for the longest time, except the group but, because
// of an error: why says what was short. It reports whether there is more memory
// now. Queue pairs come back later, when the peer has heard of the end: so giveWay reports
// false for them, and no further group ends for the sake of the same queue pair. Where the client
// of a contact has its share, only its own groups end.
func (s *Stack) giveWay(with *contact, but *group, why error) bool {
	var lack *queuePairError
	short, unpaired := isShort(why), errors.As(why, &lack)
	if why != nil && !short && !unpaired && !errors.Is(why, rdma.ErrNoResources) {
		return false
	}
	own := errors.Is(why, ErrClientShare)
	for e := s.groups.idle.Front(); e != nil; e = e.Next() {
		g := e.Value.(*group) //nolint:forcetypeassert // nothing else is in there
		if g == but || g.lg.Conns() != 0 || short && len(g.rmbs) == 0 && len(g.mem.arenas) == 0 || unpaired && !g.uses(lack.rnic) || own && g.client() != with.client() {
			continue
		}
		before := s.account.bytes
		g.endIdle()
		return !unpaired && s.account.bytes < before
	}
	return false
}

// endIdle ends a group without connections, and gives its memory back at once: nobody
// uses the memory, and the peer need not have heard of the end.
func (g *group) endIdle() {
	now := time.Now()
	g.lg.Terminate(now, llc.DeleteInactivity)
	g.flush(now)
	for id := range g.rmbs {
		g.freeRMB(id)
	}
	g.mem.trim()
	g.s.counters.past.GroupsGaveWay++
}

// uses reports whether a link of the group is over a device.
func (g *group) uses(r *rnic) bool {
	return slices.ContainsFunc(g.links[:], func(l *link) bool { return l != nil && l.rnic == r })
}
