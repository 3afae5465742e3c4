// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// A link group without connections stays, so that the next one needs no first contact.
// It gives its RMBs and send buffers back soon, which the next connection gets anew for
// an exchange of CONFIRM RKEY; what is left are queue pairs and their message slots. And
// it gives way to others: where memory, queue pairs or the like are short, the one that
// has been idle for the longest time ends.
const (
	// releaseTimeout is how long it keeps its memory: longer than a client takes to
	// reconnect.
	releaseTimeout = 3 * time.Second
	// maxIdleGroups bounds the link groups without connections when another one is
	// made: peers may be thousands in the ten minutes that idle groups stay.
	maxIdleGroups = 256
)

// noteIdle keeps the list of idle groups, the one with the oldest idleness first.
func (g *group) noteIdle() {
	idle := g.ready && g.lg.State() == linkgroup.Active && g.lg.Conns() == 0
	switch {
	case idle == (g.idle != nil):
	case idle:
		g.idle = g.s.idle.PushBack(g)
	default:
		g.s.idle.Remove(g.idle)
		g.idle = nil
	}
	if idle && len(g.rmbs) == 0 {
		g.mem.trim()
	}
}

// boundIdle ends groups while there are too many idle ones. The caller holds the turn,
// here and below, and carries out nobody's outputs.
func (s *Stack) boundIdle() {
	for range 2 { // more than come
		if s.idle.Len() >= maxIdleGroups {
			s.giveWay(nil, nil)
		}
	}
}

// giveWay ends the group that has been idle for the longest time, but for one, because
// of an error of somebody who needs something. It reports whether there is more memory
// now. Queue pairs come back later, when the peer has heard of the end.
func (s *Stack) giveWay(but *group, why error) bool {
	short := isShort(why)
	if why != nil && !short && !errors.Is(why, rdma.ErrNoResources) {
		return false
	}
	for e := s.idle.Front(); e != nil; e = e.Next() {
		g := e.Value.(*group) //nolint:forcetypeassert // nothing else is in there
		if g == but || g.lg.Conns() != 0 || short && len(g.rmbs) == 0 && len(g.mem.arenas) == 0 {
			continue
		}
		before := s.account.bytes
		g.endIdle()
		return s.account.bytes < before
	}
	return false
}

// endIdle ends a group without connections, and gives its memory back at once: nobody
// uses it, and the peer need not have heard of it.
func (g *group) endIdle() {
	now := time.Now()
	g.lg.Terminate(now, llc.DeleteInactivity)
	g.flush(now)
	for id := range g.rmbs {
		g.freeRMB(id)
	}
	g.mem.trim()
	g.s.stats.GroupsGaveWay++
}
