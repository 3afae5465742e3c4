// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// ConfirmRMB tells the peer about an RMB (RFC 7609 §3.5.5.2.1); EventRMBConfirmed
// or EventRMBRefused follows, at once if it is confirmed already.
func (g *Group) ConfirmRMB(id RMBID) {
	r := g.rmb(id)
	switch {
	case r == nil || r.state == rmbDeleting || g.state != Active:
		g.out = append(g.out, Output{Kind: OutEvent, Event: EventRMBRefused, RMB: id})
	case r.state == rmbConfirmed:
		g.out = append(g.out, Output{Kind: OutEvent, Event: EventRMBConfirmed, RMB: id})
	case r.state == rmbNew:
		r.state = rmbConfirming
		g.startFlow(confirmFlow(id))
	}
}

func confirmFlow(id RMBID) flow {
	return flow{kind: flowConfirmRKey, rmbs: []RMBID{id}}
}

// IsConfirmed reports whether the peer knows the RMB.
func (g *Group) IsConfirmed(id RMBID) bool {
	r := g.rmb(id)
	return r != nil && r.state == rmbConfirmed
}

// otherTokens are the RTokens that go into CONFIRM RKEY and its continuations
// besides the one for the link that carries them.
type otherTokens struct {
	list      [MaxLinks]llc.LinkRToken
	n, told   int
	continued bool  // the last message was a continuation
	links     uint8 // bit set of the links that are covered
}

// sendConfirmRKey announces an RMB on all links (A.3.5).
func (g *Group) sendConfirmRKey(via *link, r *rmb) {
	o := otherTokens{links: 1 << via.index}
	for i := range g.links {
		if l := &g.links[i]; l != via && l.isUp() {
			o.links |= 1 << l.index
			o.list[o.n] = llc.LinkRToken{Link: l.id, RToken: llc.RToken(r.token(l))}
			o.n++
		}
	}
	m := llc.ConfirmRKey{Header: g.header(false), This: llc.RToken(r.token(via)), Others: uint8(o.n)}
	o.told = copy(m.Other[:], o.list[:o.n])
	g.others = o
	via.send(m)
}

// continueConfirm sends what did not fit (A.3.6); false if everything did.
// Linux does not know this message, but has no more than three links.
func (g *Group) continueConfirm(via *link) bool {
	o := &g.others
	if o.told == o.n {
		return false
	}
	m := llc.ConfirmRKeyContinuation{Header: g.header(false), Remaining: uint8(o.n - o.told)}
	o.told += copy(m.Other[:], o.list[o.told:o.n])
	o.continued = true
	via.send(m)
	return true
}

func (g *Group) handleConfirmRKeyReply(now time.Time, m llc.ConfirmRKey) {
	if !g.flowSent || g.flows[0].kind != flowConfirmRKey || g.others.continued ||
		g.rmb(g.flows[0].rmbs[0]).token(g.flowVia).RKey != m.This.RKey {
		g.Discarded++ // answers a request that was sent again, or none
		return
	}
	g.endConfirm(now, m.Negative, m.Retry)
}

func (g *Group) handleConfirmContReply(now time.Time, m llc.ConfirmRKeyContinuation) {
	if !g.flowSent || g.flows[0].kind != flowConfirmRKey || !g.others.continued {
		g.Discarded++
		return
	}
	g.endConfirm(now, m.Negative, false)
}

// endConfirm acts on an answer to our CONFIRM RKEY or its continuation.
func (g *Group) endConfirm(now time.Time, negative, retry bool) {
	if !negative && g.continueConfirm(g.flowVia) {
		return
	}
	f := g.popFlow()
	r := g.rmb(f.rmbs[0])
	ev := EventRMBConfirmed
	switch {
	case !negative && g.hasOutrun() && f.tries < maxRKeyRetries:
		f.tries++
		g.startFlow(f)
		return
	case !negative:
		r.state = rmbConfirmed
	case retry && f.tries < maxRKeyRetries:
		// The peer's configuration is changing: again at once, or after the
		// exchange that changes it (A.3.5, C bit). The peer may see its end
		// later than we do, so further tries come more slowly.
		f.tries++
		if f.tries > 1 {
			f.holdUntil = now.Add(RKeyRetryInterval)
		}
		g.startFlow(f)
		return
	default:
		r.state = rmbNew
		ev = EventRMBRefused
	}
	g.out = append(g.out, Output{Kind: OutEvent, Event: ev, RMB: r.id})
}

// hasOutrun reports whether a link came up, or may come up without the peer
// knowing the RMB on it, while the peer was told about the RMB. §3.5.5.3.1 has
// the server refuse a CONFIRM RKEY that crosses with its ADD LINK. Linux takes
// it afterwards, when it has dropped what ADD LINK CONTINUATION said of an RMB
// that it did not know yet: it is told once more, with the new link.
func (g *Group) hasOutrun() bool {
	for i := range g.links {
		if l := &g.links[i]; l.state == linkActive && g.others.links&(1<<l.index) == 0 {
			return true
		}
	}
	// What we say of our RMBs for the link under way may have come first.
	return g.adding.step > addWantEndpoint || g.adding.step != addNone && g.adding.via != g.flowVia
}

// sendDeleteRKey takes RMBs back, several at once if more wait for it (A.3.7).
func (g *Group) sendDeleteRKey(via *link, f *flow) {
	rest := g.flows[1:]
	for len(rest) > 0 && rest[0].kind == flowDeleteRKey && len(f.rmbs)+len(rest[0].rmbs) <= g.maxDelete() {
		f.rmbs = append(f.rmbs, rest[0].rmbs...)
		rest = rest[1:]
	}
	g.flows = append(g.flows[:1], rest...)
	via.send(g.deleteRKeys(via, f.rmbs))
}

func (g *Group) handleDeleteRKeyReply(keys []rdma.RKey) {
	if !g.answersDelete(keys) {
		g.Discarded++
		return
	}
	// A negative answer means that the peer did not know a key: harmless
	// (A.3.7).
	f := g.popFlow()
	for _, id := range f.rmbs {
		g.removeRMB(id)
	}
}

// handleConfirmRKey remembers a new RMB of the peer and echoes the message.
func (g *Group) handleConfirmRKey(now time.Time, from *link, m llc.ConfirmRKey) {
	m.Response = true
	g.confirming = confirming{}
	if g.cfg.Role == Server && g.changing() && g.adding.step != addWantEndpoint && g.dialect == llc.DialectRFC {
		// §3.5.5.3: the client has to compute its RKeys anew when the exchange
		// is over. A Linux client would decline its connection instead; it
		// tells the key for a new link in ADD LINK CONTINUATION anyway.
		m.Negative, m.Retry = true, true
		from.send(m)
		return
	}
	t := g.learnToken(from.index, RToken(m.This))
	if t == nil {
		m.Negative = true
		from.send(m)
		return
	}
	g.learnOthers(t, m.Other[:m.N()])
	from.send(m)
	if int(m.Others) > m.N() {
		g.confirming = confirming{token: t, left: int(m.Others) - m.N()}
		return
	}
	g.checkTokens(now, t)
}

// confirming is a CONFIRM RKEY of the peer that continues.
type confirming struct {
	token *rtoken
	left  int
}

func (g *Group) handleConfirmCont(now time.Time, from *link, m llc.ConfirmRKeyContinuation) {
	m.Response = true
	p := &g.confirming
	if p.token == nil || int(m.Remaining) != p.left {
		m.Negative = m.Remaining > 0 // it continues nothing
		from.send(m)
		return
	}
	t := p.token
	g.learnOthers(t, m.Other[:m.N()])
	from.send(m)
	if p.left -= m.N(); p.left > 0 {
		return
	}
	g.confirming = confirming{}
	g.checkTokens(now, t)
}

// learnOthers takes the RTokens for other links, also for one that is gone
// here: a Confirm may still name it.
func (g *Group) learnOthers(t *rtoken, list []llc.LinkRToken) {
	for _, o := range list {
		if l := g.lastWithID(o.Link); l != nil {
			g.setToken(t, l.index, RToken(o.RToken))
		} else {
			g.Discarded++ // a link that is not there yet, or not any more
		}
	}
}

// lastWithID is linkByID with links that are down, but whose place nobody has
// taken.
func (g *Group) lastWithID(id llc.LinkID) *link {
	if l := g.linkByID(id); l != nil || id == 0 {
		return l
	}
	for i := range g.links {
		if l := &g.links[i]; l.state == linkDown && l.id == id {
			return l
		}
	}
	return nil
}

// checkTokens finds links for which the peer gave no RToken: they count as
// failed (C.7.1), and for the peer they mostly have. From a Linux that crossed
// with a new link it only means that connections of this RMB do not use that
// link.
func (g *Group) checkTokens(now time.Time, t *rtoken) {
	if g.dialect != llc.DialectRFC {
		return
	}
	for i := range g.links {
		if l := &g.links[i]; l.state == linkActive && !t.knows(l.index) {
			err := fmt.Errorf("%w: CONFIRM RKEY without an RToken for link %d", ErrProtocol, l.id)
			g.loseLink(now, l, llc.DeleteProtocolViolation, FaultLink, err)
		}
	}
}

// handleDeleteRKey forgets RMBs of the peer and echoes the message, with a
// mask of those it did not know.
func (g *Group) handleDeleteRKey(from *link, m llc.DeleteRKey) {
	m.Response = true
	m.ErrorMask = 0
	for i := range min(int(m.Count), len(m.RKeys)) {
		if !g.forgetToken(from.index, m.RKeys[i]) {
			m.Negative = true
			m.ErrorMask |= 0x80 >> i
		}
	}
	from.send(m)
}
