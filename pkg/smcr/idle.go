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

// giveWay ends the group that has been idle for the longest time, but for one; false if
// there is none. The caller holds the turn, and carries out nobody's outputs.
func (s *Stack) giveWay(but *group) bool {
	e := s.idle.Front()
	if e != nil && e.Value == but {
		e = e.Next()
	}
	if e == nil {
		return false
	}
	g := e.Value.(*group) //nolint:forcetypeassert // nothing else is in there
	now := time.Now()
	g.lg.Terminate(now, llc.DeleteInactivity)
	g.flush(now)
	for id := range g.rmbs { // no connection uses them; the peer need not have heard of it
		g.freeRMB(id)
	}
	g.mem.trim()
	s.stats.GroupsGaveWay++
	return true
}

// isScarce reports whether an error may go away when an idle group does.
func isScarce(err error) bool { return isShort(err) || errors.Is(err, rdma.ErrNoResources) }
