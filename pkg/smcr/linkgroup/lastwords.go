// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// lastWords are what a group that is DEAD still says over those of its links whose
// queue pairs linger, until the peer knows of the end:
//
//	the peer                            we
//	  CONFIRM RKEY, CONT          -->     negative: nothing will be written there
//	  DELETE RKEY                 -->     positive: nothing is written there any more
//	  REQUEST ADD LINK            -->     negative
//	  ADD LINK, DELETE LINK of one -->    negative
//	  ADD LINK or its response    -->     DELETE LINK for all, again
//	  nothing for DeleteAllInterval -->   DELETE LINK for all, again
//	  DELETE LINK for all         -->     nothing: it knows
//
// The queue pair has delivered our DELETE LINK, but that does not say that it was
// heeded. Linux deals with one exchange at a time. While it waits for the answer to its
// own, one request of ours is kept for later, and the next one is lost. If ours are ADD
// LINK and then DELETE LINK, Linux keeps the group until a TEST LINK fails, 34 s later.
// So its exchange gets an answer, and DELETE LINK comes again when its place is free.
type lastWords struct {
	owed   bool // DELETE LINK for all was said, and the peer has not said that it knows
	reason llc.DeleteReason
	again  time.Time // when that is repeated; zero: not yet decided
	until  time.Time
	links  uint8 // bit set of those that could carry messages when the group ended
	// inflight counts the SENDs of each link that have not completed: an answer for
	// which there is no room is not given.
	inflight [MaxLinks]int
}

// keep remembers a link that is about to be closed with its group.
func (w *lastWords) keep(l *link) {
	if l.isUp() {
		w.links |= 1 << l.index
		w.inflight[l.index] = l.inflight
	}
}

// PeerKnows reports whether the peer of a group that ends has said that it knows:
// nobody needs to wait for it.
func (g *Group) PeerKnows() bool { return g.peerKnows }

// heardEnd notes that the peer has said so.
func (g *Group) heardEnd() {
	g.peerKnows = true
	g.last.owed = false
}

// sayLate sends a message over a link of a dead group.
func (g *Group) sayLate(index LinkIndex, m llc.Message) {
	w := &g.last
	if w.links>>index&1 == 0 || w.inflight[index] >= SendBudget {
		return
	}
	w.inflight[index]++
	o := Output{Kind: OutSend, Link: index}
	m.Append(o.Msg[:0]) // all of them have llc.Size bytes
	g.out = append(g.out, o)
}

// repeatLate says DELETE LINK for all again, over each link that nothing is under way
// on: what is, arrives in its time.
func (g *Group) repeatLate(now time.Time) {
	g.last.again = now.Add(DeleteAllInterval)
	for i := range g.links {
		if g.last.inflight[i] == 0 {
			g.sayLate(LinkIndex(i), g.deleteAll(g.last.reason))
		}
	}
}

// lateTimeout is when a dead group has something to say by itself.
func (g *Group) lateTimeout() (time.Time, bool) {
	w := &g.last
	return w.again, w.owed && !w.again.IsZero() && w.again.Before(w.until)
}

// beginLate starts the clock of the last words.
func (g *Group) beginLate(now time.Time) {
	if w := &g.last; w.owed && w.again.IsZero() {
		w.again, w.until = now.Add(DeleteAllInterval), now.Add(lastWordsTime)
	}
}

// lateExpired repeats DELETE LINK for all if it is time.
func (g *Group) lateExpired(now time.Time) {
	if at, ok := g.lateTimeout(); ok && !now.Before(at) {
		g.repeatLate(now)
	}
}

// handleLate takes a message that arrives after the end of the group. What makes no
// sense does no harm any more.
func (g *Group) handleLate(now time.Time, index LinkIndex, b []byte) {
	if len(b) == 0 || b[0] == cdc.Type {
		return
	}
	parsed, err := llc.Parse(g.dialect, g.cfg.Version, b)
	if err != nil {
		return
	}
	switch m := parsed.(type) {
	case llc.ConfirmRKey:
		if !m.Response {
			m.Response, m.Negative, m.Retry = true, true, false
			g.sayLate(index, m)
		}
	case llc.ConfirmRKeyContinuation:
		if !m.Response {
			m.Response, m.Negative = true, true
			g.sayLate(index, m)
		}
	case llc.DeleteRKey:
		if !m.Response {
			m.Response, m.Negative, m.ErrorMask = true, false, 0
			g.sayLate(index, m)
		}
	case llc.DeleteRKeyV2:
		if !m.Response {
			g.sayLate(index, answerDeleteV2(m, 0))
		}
	case llc.RequestAddLink:
		if !m.Response {
			g.sayLate(index, llc.RequestAddLink{Header: g.header(true)})
		}
	case llc.AddLink:
		g.lateAddLink(now, index, m)
	case llc.DeleteLink:
		g.lateDeleteLink(index, m)
	case llc.ConfirmLink, llc.AddLinkContinuation, llc.TestLink:
		// Who tests the link shall hear nothing.
	}
}

// lateAddLink refuses a link that the peer offers. The peer's exchange, or the place
// that ours took, is over then.
func (g *Group) lateAddLink(now time.Time, index LinkIndex, m llc.AddLink) {
	if !m.Response && g.cfg.Role == Client {
		m.Dialect = g.dialect
		m.Response, m.Reject, m.Reason, m.Ext = true, true, llc.RejectNoAlternatePath, llc.AddLinkExt{}
		g.sayLate(index, m)
	}
	if g.last.owed {
		g.last.again = now.Add(DeleteAllInterval)
		g.sayLate(index, g.deleteAll(g.last.reason))
	}
}

// lateDeleteLink takes DELETE LINK: for all, the peer knows. The server's, for one
// link, gets the answer that it waits for.
func (g *Group) lateDeleteLink(index LinkIndex, m llc.DeleteLink) {
	switch {
	case m.All:
		g.heardEnd()
	case !m.Response && g.cfg.Role == Client:
		m.Response, m.Reason = true, llc.DeleteUnknownLink
		g.sayLate(index, m)
	}
}

// deleteAll is our DELETE LINK for all links.
func (g *Group) deleteAll(why llc.DeleteReason) llc.DeleteLink {
	return llc.DeleteLink{Header: g.header(false), All: true, Orderly: true, Reason: why}
}
