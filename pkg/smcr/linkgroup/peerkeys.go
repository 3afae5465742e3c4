// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// peerKeys takes the peer's messages about its RMBs.
type peerKeys struct {
	token *rtoken // of a CONFIRM RKEY that continues; nil: none does
	left  int
}

// handleConfirm remembers a new RMB of the peer and echoes the message.
func (p *peerKeys) handleConfirm(g *Group, now time.Time, from *link, m llc.ConfirmRKey) {
	m.Response = true
	*p = peerKeys{}
	if g.side.refusesKeys(g) {
		m.Negative, m.Retry = true, true
		from.send(m)
		return
	}
	t := g.keys.learn(from.index, RToken(m.This))
	if t == nil {
		m.Negative = true
		from.send(m)
		return
	}
	p.learnOthers(g, t, m.Other[:m.N()])
	from.send(m)
	if int(m.Others) > m.N() {
		*p = peerKeys{token: t, left: int(m.Others) - m.N()}
		return
	}
	p.check(g, now, t)
}

// refusesKeys: only the server changes links.
func (c *client) refusesKeys(*Group) bool { return false }

// refusesKeys while the server changes the links (§3.5.5.3): the client has to compute its
// RKeys anew when that is over. A Linux client would decline its connection instead; it tells
// the key for a new link in ADD LINK CONTINUATION anyway.
func (s *server) refusesKeys(g *Group) bool {
	return g.changing() && g.adding.step != addWantEndpoint && g.dialect == llc.DialectRFC
}

// namesLinks: the client's Confirm names the link of the Accept.
func (c *client) namesLinks() bool { return false }

func (s *server) namesLinks() bool { return true }

func (p *peerKeys) handleCont(g *Group, now time.Time, from *link, m llc.ConfirmRKeyContinuation) {
	m.Response = true
	if p.token == nil || int(m.Remaining) != p.left {
		m.Negative = m.Remaining > 0 // it continues nothing
		from.send(m)
		return
	}
	t := p.token
	p.learnOthers(g, t, m.Other[:m.N()])
	from.send(m)
	if p.left -= m.N(); p.left > 0 {
		return
	}
	*p = peerKeys{}
	p.check(g, now, t)
}

// learnOthers takes the RTokens for other links. That includes a link that is gone here, because a
// Confirm may still name it.
func (p *peerKeys) learnOthers(g *Group, t *rtoken, list []llc.LinkRToken) {
	for _, o := range list {
		if l := g.links.lastWithID(o.Link); l != nil {
			g.keys.set(t, l.index, RToken(o.RToken))
		} else {
			g.Discarded++ // a link that is not there yet, or not any more
		}
	}
}

// check finds links for which the peer gave no RToken. In the RFC's dialect such a link counts as
// failed (C.7.1): mostly it has failed at the peer. In Linux's dialect the link goes on: Linux may
// have sent CONFIRM RKEY before it knew of a new link, and then connections with this RMB do not
// use that link.
func (p *peerKeys) check(g *Group, now time.Time, t *rtoken) {
	if g.dialect != llc.DialectRFC {
		return
	}
	for i := range g.links.at {
		if l := &g.links.at[i]; l.state == linkActive && !t.knows(l.index) {
			err := fmt.Errorf("%w: CONFIRM RKEY without an RToken for link %d", ErrProtocol, l.id)
			g.loseLink(now, l, llc.DeleteProtocolViolation, FaultLink, err)
		}
	}
}

// handleDelete forgets RMBs of the peer and echoes the message, with a mask of the RKeys that were
// not known.
func (p *peerKeys) handleDelete(g *Group, from *link, m llc.DeleteRKey) {
	m.Response = true
	m.ErrorMask = 0
	for i := range min(int(m.Count), len(m.RKeys)) {
		if !p.forget(g, from.index, m.RKeys[i]) {
			m.Negative = true
			m.ErrorMask |= 0x80 >> i
		}
	}
	from.send(m)
}

// handleDeleteV2 forgets RMBs of the peer and sends the message back, with the number of the RKeys
// that were not known.
func (p *peerKeys) handleDeleteV2(g *Group, from *link, m llc.DeleteRKeyV2) {
	unknown := uint8(0)
	for _, k := range m.RKeys {
		if !p.forget(g, from.index, k) {
			unknown++
		}
	}
	from.send(answerDeleteV2(m, unknown))
}

// answerDeleteV2 is the response to a DELETE RKEY with so many unknown keys.
func answerDeleteV2(m llc.DeleteRKeyV2, unknown uint8) llc.DeleteRKeyV2 {
	m.Response, m.Negative, m.Invalid = true, unknown > 0, unknown
	if n := len(m.RKeys); n > llc.ShortDeleteRKeysV2 {
		m.Omitted = uint8(n - llc.ShortDeleteRKeysV2)
		m.RKeys = m.RKeys[:llc.ShortDeleteRKeysV2]
	}
	return m
}

// forget drops an RMB that the peer takes back. It reports false if the RMB was not known.
func (p *peerKeys) forget(g *Group, link LinkIndex, key rdma.RKey) bool {
	t := g.keys.forget(link, key)
	if t == nil {
		return false
	}
	for _, c := range g.conns.list {
		if c == nil || c.peerRMB != t || c.done || c.data.PeerReleased() {
			continue
		}
		switch {
		case !c.data.HasSentClose():
			// The peer has given up the connection, and its message about that was lost.
			// Another write into the RMB would break the link.
			c.raise(c.data.Abort())
			c.enqueue()
		case c.data.WasAborted() && c.data.PeerIsDone():
			// Linux does not answer the reset of a connection that both sides have half closed, we first. All
			// that it wrote came before its D, so nobody writes our RMBE any more.
			c.replace()
		}
	}
	return true
}

// learnPairs takes the RTokens of the peer's RMBs on a new link.
func (p *peerKeys) learnPairs(g *Group, from *link, l LinkIndex, pairs []llc.RTokenPair) {
	for _, pair := range pairs {
		if t := g.keys.peer(from.index, pair.Reference); t != nil {
			g.keys.set(t, l, RToken(pair.New))
		} else {
			g.Discarded++ // an RMB that the peer has not told us about, or has deleted meanwhile
		}
	}
}
