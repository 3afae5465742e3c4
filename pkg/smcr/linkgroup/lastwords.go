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
//	  DELETE LINK for all         -->     nothing: the peer knows
//
// The queue pair has delivered our DELETE LINK, but that does not say that the peer acted
// on it. Linux deals with one exchange at a time. While Linux waits for the answer to its
// own request, it keeps one request of ours for later and loses the next one. If ours are
// ADD LINK and then DELETE LINK, Linux keeps the group until a TEST LINK fails, 34 s later.
// So we answer Linux's request, and send DELETE LINK again when Linux can keep a request.
type lastWords struct {
	known  bool // the peer has said that the group ends, or that it has heard so
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
func (g *Group) PeerKnows() bool { return g.last.known }

// owe notes that DELETE LINK for all is said.
func (w *lastWords) owe(reason llc.DeleteReason) { w.owed, w.reason = true, reason }

// forgive ends what owe began: nobody takes it.
func (w *lastWords) forgive() { w.owed = false }

// handleSent takes the completion of a SEND.
func (w *lastWords) handleSent(index LinkIndex) { w.inflight[index] = max(w.inflight[index]-1, 0) }

// heardEnd notes that the peer has said that the group ends, or that it has heard so.
func (w *lastWords) heardEnd() {
	w.known = true
	w.owed = false
}

// say sends a message over a link of a dead group.
func (w *lastWords) say(out *outbox, index LinkIndex, m llc.Message) {
	if w.links>>index&1 == 0 || w.inflight[index] >= SendBudget {
		return
	}
	w.inflight[index]++
	o := Output{Kind: OutSend, Link: index}
	m.Append(o.Msg[:0]) // all of them have llc.Size bytes
	out.put(o)
}

// repeat says DELETE LINK for all again, over each link that nothing is under way
// on: what is, arrives in its time.
func (w *lastWords) repeat(now time.Time, t *terms, out *outbox) {
	w.again = now.Add(DeleteAllInterval)
	for i := range w.inflight {
		if w.inflight[i] == 0 {
			w.say(out, LinkIndex(i), t.deleteAll(w.reason))
		}
	}
}

// timeout is when a dead group has something to say by itself.
func (w *lastWords) timeout() (time.Time, bool) {
	return w.again, w.owed && !w.again.IsZero() && w.again.Before(w.until)
}

// begin starts the clock of the last words.
func (w *lastWords) begin(now time.Time) {
	if w.owed && w.again.IsZero() {
		w.again, w.until = now.Add(DeleteAllInterval), now.Add(lastWordsTime)
	}
}

// expired repeats DELETE LINK for all if it is time.
func (w *lastWords) expired(now time.Time, t *terms, out *outbox) {
	if at, ok := w.timeout(); ok && !now.Before(at) {
		w.repeat(now, t, out)
	}
}

// handle takes a message that arrives after the end of the group. What makes no
// sense does no harm any more.
func (w *lastWords) handle(now time.Time, t *terms, s side, out *outbox, index LinkIndex, b []byte) {
	if len(b) == 0 || b[0] == cdc.Type {
		return
	}
	parsed, err := llc.Parse(t.dialect, t.version, b)
	if err != nil {
		return
	}
	switch m := parsed.(type) {
	case llc.ConfirmRKey:
		if !m.Response {
			m.Response, m.Negative, m.Retry = true, true, false
			w.say(out, index, m)
		}
	case llc.ConfirmRKeyContinuation:
		if !m.Response {
			m.Response, m.Negative = true, true
			w.say(out, index, m)
		}
	case llc.DeleteRKey:
		if !m.Response {
			m.Response, m.Negative, m.ErrorMask = true, false, 0
			w.say(out, index, m)
		}
	case llc.DeleteRKeyV2:
		if !m.Response {
			w.say(out, index, answerDeleteV2(m, 0))
		}
	case llc.RequestAddLink:
		if !m.Response {
			w.say(out, index, llc.RequestAddLink{Header: t.header(true)})
		}
	case llc.AddLink:
		w.handleAddLink(now, t, s, out, index, m)
	case llc.DeleteLink:
		w.handleDeleteLink(s, out, index, m)
	case llc.ConfirmLink, llc.AddLinkContinuation, llc.TestLink:
		// Who tests the link shall hear nothing.
	}
}

// handleAddLink refuses a link that the peer offers. The peer's exchange, or the place
// that ours took, is over then.
func (w *lastWords) handleAddLink(now time.Time, t *terms, s side, out *outbox, index LinkIndex, m llc.AddLink) {
	if !m.Response && s.answersOrders() {
		m.Dialect = t.dialect
		m.Response, m.Reject, m.Reason, m.Ext = true, true, llc.RejectNoAlternatePath, llc.AddLinkExt{}
		w.say(out, index, m)
	}
	if w.owed {
		w.again = now.Add(DeleteAllInterval)
		w.say(out, index, t.deleteAll(w.reason))
	}
}

// handleDeleteLink takes DELETE LINK: for all, the peer knows. The server's, for one
// link, gets the answer that it waits for.
func (w *lastWords) handleDeleteLink(s side, out *outbox, index LinkIndex, m llc.DeleteLink) {
	switch {
	case m.All:
		w.heardEnd()
	case !m.Response && s.answersOrders():
		m.Response, m.Reason = true, llc.DeleteUnknownLink
		w.say(out, index, m)
	}
}
