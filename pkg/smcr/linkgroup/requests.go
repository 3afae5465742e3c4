// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// exchange is an LLC exchange that we start. One is under way at a time, because
// Linux drops requests that cross (RFC 7609 §3.5.5.3 allows more).
type exchange struct {
	kind      exchangeKind
	rmbs      []RMBID        // CONFIRM RKEY: one; DELETE RKEY
	tries     int            // CONFIRM RKEY: answers that asked for a retry
	notBefore time.Time      // of the next try; zero: now
	deletion  llc.DeleteLink // DELETE LINK
	fresh     bool           // ADD LINK: only over an RNIC that is not in use
}

type exchangeKind uint8

const (
	exchangeConfirmRKey exchangeKind = iota
	exchangeDeleteRKey
	exchangeAddLink    // server
	exchangeDeleteLink // server
	exchangeAskDelete  // client: a request that the server delete a link
	exchangeDeleteAll
)

func (k exchangeKind) String() string {
	switch k {
	case exchangeConfirmRKey:
		return "CONFIRM RKEY"
	case exchangeDeleteRKey:
		return "DELETE RKEY"
	case exchangeAddLink:
		return "ADD LINK"
	case exchangeDeleteLink, exchangeAskDelete, exchangeDeleteAll:
		return "DELETE LINK"
	}
	return fmt.Sprintf("exchangeKind(%d)", uint8(k))
}

// deletes reports whether an exchange deletes a link.
func (k exchangeKind) deletes() bool { return k == exchangeDeleteLink || k == exchangeAskDelete }

// requests is the line of our LLC exchanges. Nobody else sees the list.
type requests struct {
	line   []exchange // the first one is under way once sent
	sent   bool
	began  time.Time
	expiry time.Time // zero: the exchange has deadlines of its own
	resend time.Time // zero: not sent again
	via    place     // the link that carried the request
}

// add puts an exchange in line. Deletions go before what has not begun:
// the peer should not use a dead link longer than it must.
func (q *requests) add(x exchange) {
	if len(q.line) >= maxExchanges {
		return // every RMB has at most two exchanges waiting, so this cannot be
	}
	at := len(q.line)
	if x.kind.deletes() {
		at = 0
		for at < len(q.line) && ((at == 0 && q.sent) || q.line[at].kind == x.kind) {
			at++
		}
	}
	q.line = slices.Insert(q.line, at, x)
}

// current is the exchange under way; nil: none is.
func (q *requests) current() *exchange {
	if !q.sent {
		return nil
	}
	return &q.line[0]
}

// is reports whether an exchange of this kind is under way.
func (q *requests) is(kind exchangeKind) bool { return q.sent && q.line[0].kind == kind }

// isKept reports whether the request under way is one that the server keeps
// while it adds a link (§3.5.5.3.1): the time for its answer begins when the link is added.
func (q *requests) isKept() bool { return q.is(exchangeAskDelete) }

// keptUntil has the time for the answer to such a request begin now: the link is added, or given up.
func (q *requests) keptUntil(now time.Time) {
	if q.isKept() {
		q.expiry = now.Add(ExchangeTimeout)
	}
}

// first is the one that is to start next; nil: one is under way, or there is none.
func (q *requests) first() *exchange {
	if q.sent || len(q.line) == 0 {
		return nil
	}
	return &q.line[0]
}

// begin says that the first one starts over a link.
func (q *requests) begin(now time.Time, via *link) *exchange {
	q.sent = true
	q.via = via.place()
	q.began, q.expiry, q.resend = now, now.Add(ExchangeTimeout), time.Time{}
	return &q.line[0]
}

// end ends the exchange under way.
func (q *requests) end() exchange {
	x := q.line[0]
	q.line = q.line[1:]
	q.sent = false
	return x
}

// clear ends all of them.
func (q *requests) clear() { q.line, q.sent = nil, false }

// linkLost has the request that a lost link carried sent again over another one (§2.3).
func (q *requests) linkLost(l *link) {
	if q.via == l.place() && q.sent && q.line[0].kind != exchangeAddLink {
		q.sent = false
	}
}

// has reports whether one of this kind is in line.
func (q *requests) has(kind exchangeKind) bool {
	return slices.ContainsFunc(q.line, func(x exchange) bool { return x.kind == kind })
}

// deletes reports whether the deletion of a link is in line.
func (q *requests) deletes(id llc.LinkID) bool {
	return slices.ContainsFunc(q.line, func(x exchange) bool { return x.kind.deletes() && x.deletion.Link == id })
}

// endDeletion takes the deletion of a link out of the line, also if it is under way; false: it
// is not there.
func (q *requests) endDeletion(id llc.LinkID) bool {
	i := slices.IndexFunc(q.line, func(x exchange) bool { return x.kind.deletes() && x.deletion.Link == id })
	if i < 0 {
		return false
	}
	q.line = slices.Delete(q.line, i, i+1)
	if i == 0 {
		q.sent = false
	}
	return true
}

// hasUntold reports whether the deletion of a link is in line that the peer has not been told of.
func (q *requests) hasUntold() bool {
	untold := q.line
	if q.sent {
		untold = untold[1:]
	}
	return slices.ContainsFunc(untold, func(x exchange) bool { return x.kind.deletes() })
}

// hasten puts the deletion of a link before all that has not begun.
func (q *requests) hasten(id llc.LinkID) {
	first := 0
	if q.sent {
		first = 1
	}
	for i := first; i < len(q.line); i++ {
		if x := q.line[i]; x.kind.deletes() && x.deletion.Link == id {
			copy(q.line[first+1:i+1], q.line[first:i])
			q.line[first] = x
			return
		}
	}
}

// cancelDeletion takes the deletion of a link that is in order out of the line if it has not begun,
// and reports whether it was there. What a client has asked for is taken back, too: the server, which
// may have lost the same link and keeps this one, would take the question, sent again, for the end of the
// group.
func (q *requests) cancelDeletion(id llc.LinkID) bool {
	for i := range q.line {
		x := &q.line[i]
		if begun := i == 0 && q.sent; !x.kind.deletes() || x.deletion.Link != id || isUrgent(x.deletion) || begun && x.kind != exchangeAskDelete {
			continue
		}
		return q.endDeletion(id)
	}
	return false
}

// delays reports whether something comes before the deletion of a link.
func (q *requests) delays(id llc.LinkID) bool {
	return q.sent || (len(q.line) > 0 && q.line[0].deletion.Link != id)
}

// joinDeletes makes the DELETE RKEY that begins include those that wait directly behind it,
// as far as one message goes (A.3.7). Once it is sent nothing joins it: an answer may be to what was
// sent first, and says nothing of what was sent again.
func (q *requests) joinDeletes(most int) {
	x, rest := &q.line[0], q.line[1:]
	for len(rest) > 0 && rest[0].kind == exchangeDeleteRKey && len(x.rmbs)+len(rest[0].rmbs) <= most {
		x.rmbs = append(x.rmbs, rest[0].rmbs...)
		rest = rest[1:]
	}
	q.line = append(q.line[:1], rest...)
}

// nextTimeout is when something is to be done about the first one.
func (q *requests) nextTimeout(earliest func(time.Time)) {
	if q.sent {
		earliest(q.expiry)
		earliest(q.resend)
	} else if len(q.line) > 0 {
		earliest(q.line[0].notBefore)
	}
}

// canStart reports whether the first waiting exchange can start. A client's
// requests to delete links can start at any time; all else waits for the end of
// the exchange that adds a link.
func (q *requests) canStart(g *Group) bool {
	x := q.first()
	if x == nil || !x.notBefore.IsZero() || (g.state != Active && g.state != Draining) {
		return false
	}
	return !g.adding.isUnderWay() || x.kind == exchangeAskDelete || x.kind == exchangeDeleteAll
}

// start sends the first waiting exchange's request.
func (q *requests) start(g *Group, now time.Time) {
	for q.canStart(g) {
		via := g.links.other(nil)
		if via == nil {
			return
		}
		switch x := q.begin(now, via); x.kind {
		case exchangeAddLink:
			q.expiry = time.Time{} // the exchange has deadlines of its own
			g.side.begin(g, now, via, x.fresh)
		case exchangeDeleteLink:
			g.side.sendDelete(g, now)
		case exchangeDeleteRKey:
			q.joinDeletes(g.maxDelete())
			q.sendRepeatedly(g, now, ResendInterval)
		case exchangeConfirmRKey, exchangeAskDelete:
			q.sendRepeatedly(g, now, ResendInterval)
		case exchangeDeleteAll:
			g.ending.becomeAsked(q.via)
			q.sendRepeatedly(g, now, DeleteAllInterval)
		}
	}
}

// sendRepeatedly sends the request of the exchange under way, and again after a time without an answer.
func (q *requests) sendRepeatedly(g *Group, now time.Time, interval time.Duration) {
	q.resend = now.Add(interval)
	q.send(g)
}

// send sends the request of the exchange under way.
func (q *requests) send(g *Group) {
	x, l := q.current(), g.links.in(q.via)
	switch x.kind {
	case exchangeConfirmRKey:
		g.ourKeys.begin(&g.terms, &g.links, l, g.keys.rmb(x.rmbs[0]))
	case exchangeDeleteRKey:
		g.ourKeys.sendDelete(g, l)
	case exchangeDeleteLink, exchangeAskDelete:
		m := x.deletion
		m.Header = g.header(false)
		l.send(m)
	case exchangeDeleteAll:
		l.send(g.deleteAll(x.deletion.Reason))
	case exchangeAddLink:
	}
}

// timeout looks after the request under way.
func (q *requests) timeout(g *Group, now time.Time, due func(time.Time) bool) {
	if x := q.first(); x != nil && due(x.notBefore) {
		x.notBefore = time.Time{}
	}
	switch x := q.current(); {
	case x == nil:
	case due(q.expiry):
		q.expired(g, now)
	case !due(q.resend):
	case x.kind == exchangeDeleteAll && g.links.in(q.via).isSending():
		q.resend = now.Add(DeleteAllInterval) // what is under way arrives in its time
	case x.kind == exchangeDeleteAll:
		q.repeatDeleteAll(g, now)
	default:
		q.sendRepeatedly(g, now, ResendInterval)
	}
}

// repeatDeleteAll says once more that the group ends: see lastWords for why the peer may
// not have acted on DELETE LINK the first time.
func (q *requests) repeatDeleteAll(g *Group, now time.Time) {
	if !q.is(exchangeDeleteAll) {
		return
	}
	q.resend = now.Add(max(DeleteAllInterval, now.Sub(q.began))) // less and less often
	if len(g.links.in(q.via).queue) == 0 {                       // else the last one has not left yet
		q.send(g)
	}
}

// expired is what a missing answer means (C.7.1): the link that carried
// the request has failed, and another one carries it again. But a Linux that
// is heard on the link is there: it drops what crosses with something of its
// own.
func (q *requests) expired(g *Group, now time.Time) {
	x, via := *q.current(), g.links.in(q.via)
	if x.kind == exchangeDeleteAll {
		if g.links.other(via) == nil {
			g.last.forgive() // it was repeated for long enough
			g.becomeDead(nil)
			return
		}
		g.dropLink(via, fmt.Errorf("%w: %v", ErrExchangeTimeout, x.kind))
		return
	}
	if q.isKept() && g.adding.isUnderWay() {
		q.expiry = now.Add(ExchangeTimeout)
		return
	}
	if g.dialect == llc.DialectLinux && via.heard.After(q.began) || g.doubt(now, via, fmt.Errorf("%w: %v", ErrExchangeTimeout, x.kind)) {
		q.giveUp(g, now, x)
	}
}

// giveUp ends an exchange that the peer does not answer although it is there.
func (q *requests) giveUp(g *Group, now time.Time, x exchange) {
	switch x.kind {
	case exchangeConfirmRKey:
		q.end()
		if r := g.keys.rmb(x.rmbs[0]); r != nil {
			r.becomeNew()
		}
		g.out.rmb(EventRMBRefused, x.rmbs[0])
	case exchangeDeleteRKey:
		q.end()
		for _, id := range x.rmbs {
			g.keys.forgotten(g, id)
		}
	case exchangeDeleteLink, exchangeAskDelete:
		g.requests.endDelete(g, now, x.deletion.Link)
	case exchangeAddLink, exchangeDeleteAll:
	}
}

// handleDeleteReply takes the answer to our DELETE LINK.
func (q *requests) handleDeleteReply(g *Group, now time.Time, m llc.DeleteLink) {
	if g.state == Forming {
		g.setup.handleDeleteReply(g, now)
		return
	}
	switch x := q.current(); {
	case x == nil:
		g.Discarded++
	case x.kind == exchangeDeleteAll && g.side.endsByAnswer(m):
		g.last.heardEnd()
		g.becomeDead(nil)
	case x.kind.deletes() && x.deletion.Link == m.Link:
		g.requests.endDelete(g, now, m.Link)
	default:
		g.Discarded++
	}
}
