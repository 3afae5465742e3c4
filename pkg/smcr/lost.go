// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

const (
	// lostFor is how long a stack knows a link group that was lost. Whoever looks between two calls of an
	// API server sees it, though each may take 10 s.
	lostFor = 30 * time.Second
	// maxLost bounds them. Of more, the latest are known.
	maxLost = 64
)

// lostGroups are the link groups of a stack that were lost a short while ago, the latest last. They are guarded by the stack's
// turn.
type lostGroups []lostGroup

type lostGroup struct {
	at   time.Time
	info GroupInfo
}

// note keeps a dead group if it was lost: it carried connections, or could, and neither side ended it, nor does the end of the
// stack.
func (t *lostGroups) note(g *group) {
	if err := g.lg.Err(); !g.ready || g.s.closed || err == nil || errors.Is(err, linkgroup.ErrPeerDeleted) {
		return
	}
	t.add(time.Now(), g.info())
}

func (t *lostGroups) add(now time.Time, info GroupInfo) {
	t.forget(now)
	if n := len(*t) - maxLost + 1; n > 0 {
		*t = slices.Delete(*t, 0, n)
	}
	*t = append(*t, lostGroup{now, info})
}

// forget drops those that were lost long ago.
func (t *lostGroups) forget(now time.Time) {
	*t = slices.DeleteFunc(*t, func(l lostGroup) bool { return now.Sub(l.at) >= lostFor })
}

// LostGroups describes the link groups that were lost in the last seconds, each with the reason in Err. They have no links any
// more. A group that one of the two sides ended is not lost.
func (s *Stack) LostGroups() []GroupInfo {
	s.lock()
	defer s.unlock()
	s.groups.lost.forget(time.Now())
	infos := make([]GroupInfo, len(s.groups.lost))
	for i, l := range s.groups.lost {
		infos[i] = l.info
	}
	return infos
}
