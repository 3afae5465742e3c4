// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// announcement is how the peer is told of one of our RMBs (CONFIRM RKEY), or that
// several go (DELETE RKEY). It has the RTokens that go into CONFIRM RKEY and its
// continuations besides the one for the link that carries them.
type announcement struct {
	list      [MaxLinks]llc.LinkRToken
	n, told   int
	continued bool  // the last message was a continuation
	links     uint8 // bit set of the links that are covered
}

// begin tells of an RMB on all links (A.3.5).
func (a *announcement) begin(t *terms, links *linkTable, via *link, r *rmb) {
	*a = announcement{links: 1 << via.index}
	for i := range links.at {
		if l := &links.at[i]; l != via && l.isUp() {
			a.links |= 1 << l.index
			a.list[a.n] = llc.LinkRToken{Link: l.id, RToken: llc.RToken(r.token(l))}
			a.n++
		}
	}
	m := llc.ConfirmRKey{Header: t.header(false), This: llc.RToken(r.token(via)), Others: uint8(a.n)}
	a.told = copy(m.Other[:], a.list[:a.n])
	via.send(m)
}

// goOn sends what did not fit (A.3.6); false if everything did.
// Linux does not know this message, but has no more than three links.
func (a *announcement) goOn(t *terms, via *link) bool {
	if a.told == a.n {
		return false
	}
	m := llc.ConfirmRKeyContinuation{Header: t.header(false), Remaining: uint8(a.n - a.told)}
	a.told += copy(m.Other[:], a.list[a.told:a.n])
	a.continued = true
	via.send(m)
	return true
}

func (a *announcement) handleReply(g *Group, now time.Time, m llc.ConfirmRKey) {
	if !g.requests.is(exchangeConfirmRKey) || a.continued ||
		g.keys.rmb(g.requests.current().rmbs[0]).token(g.links.in(g.requests.via)).RKey != m.This.RKey {
		g.Discarded++ // answers a request that was sent again, or none
		return
	}
	a.end(g, now, m.Negative, m.Retry)
}

func (a *announcement) handleContReply(g *Group, now time.Time, m llc.ConfirmRKeyContinuation) {
	if !g.requests.is(exchangeConfirmRKey) || !a.continued {
		g.Discarded++
		return
	}
	a.end(g, now, m.Negative, false)
}

// end acts on an answer to our CONFIRM RKEY or its continuation.
func (a *announcement) end(g *Group, now time.Time, negative, retry bool) {
	if !negative && a.goOn(&g.terms, g.links.in(g.requests.via)) {
		return
	}
	f := g.requests.end()
	r := g.keys.rmb(f.rmbs[0])
	ev := EventRMBConfirmed
	switch {
	case !negative && a.hasOutrun(g) && f.tries < maxRKeyRetries:
		f.tries++
		g.requests.add(f)
		return
	case !negative:
		r.becomeConfirmed()
	case retry && f.tries < maxRKeyRetries:
		// The peer's configuration is changing: again at once, or after the
		// exchange that changes it (A.3.5, C bit). The peer may see its end
		// later than we do, so further tries come more slowly.
		f.tries++
		if f.tries > 1 {
			f.notBefore = now.Add(RKeyRetryInterval)
		}
		g.requests.add(f)
		return
	default:
		r.becomeNew()
		ev = EventRMBRefused
	}
	g.out.rmb(ev, r.id)
}

// hasOutrun reports whether a link came up, or may come up without the peer
// knowing the RMB on it, while the peer was told about the RMB. §3.5.5.3.1 has
// the server refuse a CONFIRM RKEY that crosses with its ADD LINK. Linux takes
// it afterwards, when it has dropped what ADD LINK CONTINUATION said of an RMB
// that it did not know yet: it is told once more, with the new link.
func (a *announcement) hasOutrun(g *Group) bool {
	for i := range g.links.at {
		if l := &g.links.at[i]; l.state == linkActive && a.links&(1<<l.index) == 0 {
			return true
		}
	}
	// What we say of our RMBs for the link under way may have come first.
	return g.adding.step > addWantEndpoint || g.adding.isUnderWay() && g.adding.via != g.requests.via
}

// sendDelete takes RMBs back.
func (a *announcement) sendDelete(g *Group, via *link) {
	via.send(g.deleteRKeys(&g.keys, via, g.requests.current().rmbs))
}

func (a *announcement) handleDeleteReply(g *Group, keys []rdma.RKey) {
	if !a.answersDelete(g, keys) {
		g.Discarded++
		return
	}
	// A negative answer means that the peer did not know a key: harmless
	// (A.3.7).
	f := g.requests.end()
	for _, id := range f.rmbs {
		g.keys.forgotten(g, id)
	}
}

// answersDelete reports whether a response may be the one to the DELETE RKEY
// under way. Linux sends zeros back for keys, and only as many as fit into the
// shortest message.
func (a *announcement) answersDelete(g *Group, keys []rdma.RKey) bool {
	if !g.requests.is(exchangeDeleteRKey) || len(keys) == 0 {
		return false
	}
	if g.isV2() && !slices.ContainsFunc(keys, func(k rdma.RKey) bool { return k != 0 }) {
		return true
	}
	return g.keys.rmb(g.requests.current().rmbs[0]).token(g.links.in(g.requests.via)).RKey == keys[0]
}

// pair tells an RMB's RToken on the link l.
func (r *rmb) pair(via, l *link) llc.RTokenPair {
	return llc.RTokenPair{Reference: r.token(via).RKey, New: llc.RToken(r.token(l))}
}

func confirmExchange(id RMBID) exchange {
	return exchange{kind: exchangeConfirmRKey, rmbs: []RMBID{id}}
}

// ConfirmRMB tells the peer about an RMB (RFC 7609 §3.5.5.2.1); EventRMBConfirmed
// or EventRMBRefused follows, at once if it is confirmed already.
func (g *Group) ConfirmRMB(id RMBID) {
	r := g.keys.rmb(id)
	switch {
	case r == nil || r.state == rmbDeleting || g.state != Active:
		g.out.rmb(EventRMBRefused, id)
	case r.state == rmbConfirmed:
		g.out.rmb(EventRMBConfirmed, id)
	case r.state == rmbNew:
		r.becomeConfirming()
		g.requests.add(confirmExchange(id))
	}
}

// IsConfirmed reports whether the peer knows the RMB.
func (g *Group) IsConfirmed(id RMBID) bool {
	r := g.keys.rmb(id)
	return r != nil && r.state == rmbConfirmed
}
