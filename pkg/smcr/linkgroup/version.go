// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

func (g *Group) isV2() bool { return g.cfg.Version == llc.Version2 }

// hasLimits reports whether CLC negotiated the limits of the group.
func (g *Group) hasLimits() bool { return g.isV2() && g.cfg.Release >= release1 }

// header begins a message of our own; an answer keeps the header of what it
// answers.
func (g *Group) header(response bool) llc.Header {
	return llc.Header{Version: g.cfg.Version, Response: response}
}

// userID is the link's number for displays, another one for each link (RFC 7609
// A.3.1): the group's, with the link's place in the highest byte.
func (g *Group) userID(l *link) uint32 { return g.cfg.UserID&(1<<24-1) | uint32(l.index)<<24 }

// fits reports whether a group of version 2 can use a message. It takes those of
// version 1 as well, as Linux does, but not those that offer a link without its
// RTokens.
func (g *Group) fits(m llc.Message) bool {
	switch m := m.(type) {
	case llc.AddLink:
		return !g.isV2() || m.Version == llc.Version2 || m.Reject
	case llc.AddLinkContinuation:
		return !g.isV2()
	}
	return true
}

// extension is the part of ADD LINK that only version 2 has: what it tells in
// place of ADD LINK CONTINUATION, about all our RMBs at once. The target GID is
// our own, as Linux has it.
func (g *Group) extension(via, l *link) llc.AddLinkExt {
	if !g.isV2() {
		return llc.AddLinkExt{}
	}
	x := llc.AddLinkExt{Direct: l.local.Router == rdma.MAC{}, TargetGID: l.local.GID}
	for _, id := range g.announcedRMBs() {
		x.Pairs = append(x.Pairs, g.rmb(id).pair(via, l))
	}
	return x
}

// pair tells an RMB's RToken on the link l.
func (r *rmb) pair(via, l *link) llc.RTokenPair {
	return llc.RTokenPair{Reference: r.token(via).RKey, New: llc.RToken(r.token(l))}
}

// learnPairs takes the RTokens of the peer's RMBs on a new link.
func (g *Group) learnPairs(from *link, l LinkIndex, pairs []llc.RTokenPair) {
	for _, p := range pairs {
		if t := g.peerToken(from.index, p.Reference); t != nil {
			g.setToken(t, l, RToken(p.New))
		} else {
			g.Discarded++ // an RMB that it has not told us about, or has deleted meanwhile
		}
	}
}

// A client of version 2 asks for a link with REQUEST ADD LINK. A Linux client
// starts no other exchange before it has an answer, which is the server's ADD
// LINK, or the request sent back without GIDs when none will come.

// handleRequestAddLink takes REQUEST ADD LINK at the server, and its rejection at
// the client.
func (g *Group) handleRequestAddLink(from *link, m llc.RequestAddLink) {
	switch {
	case m.Response != (g.cfg.Role == Client) || g.state != Active:
		g.Discarded++
		return
	case m.Response:
		if g.spare == nil {
			g.Discarded++
			return
		}
		g.closeLink(g.spare)
		g.spare = nil
		return
	case g.clientHasAdded():
		g.adding.again = true
	case g.adding.step > addWantEndpoint:
		g.Discarded++ // it has crossed with our ADD LINK, which is the answer
		return
	}
	g.peerReleases()
	g.asked = request{via: from, gid: g.meant(m.GIDs)}
	if g.adding.step == addNone && !g.addIfUseful() {
		g.rejectRequest()
	}
}

// meant is the RNIC for which a client asks for a link. Linux lists the one of the
// link that carries the request, too, and before the others.
func (g *Group) meant(gids []rdma.GID) rdma.GID {
	for _, gid := range gids {
		if !slices.ContainsFunc(g.links[:], func(l link) bool { return l.isUp() && !l.asymmetric && l.peer.GID == gid }) {
			return gid
		}
	}
	return rdma.GID{}
}

// request is a client's REQUEST ADD LINK that waits for our answer.
type request struct {
	via *link // nil: there is none
	gid rdma.GID
}

// rejectRequest tells the client that asked for a link that it gets none.
func (g *Group) rejectRequest() {
	via := g.asked.via
	if via == nil {
		return
	}
	g.asked = request{}
	if !via.isUp() {
		via = g.otherLink(nil)
	}
	if via != nil {
		via.send(llc.RequestAddLink{Header: g.header(true)})
	}
}

// A peer of version 2 has little room for messages of more than 44 bytes: Linux one
// place for all links of a group, in which the next one overwrites the last. So
// one of ours is under way at a time. The server's are requests, which wait for
// each other; the client's one is the answer to ADD LINK, so it asks and answers
// for anything else in 44 bytes.

// maxDelete is how many RMBs one DELETE RKEY of ours may be about.
func (g *Group) maxDelete() int {
	switch {
	case !g.isV2():
		return llc.MaxDeleteRKeys
	case g.cfg.Role == Client:
		return llc.ShortDeleteRKeysV2
	}
	return llc.MaxDeleteRKeysV2
}

// deleteRKeys is DELETE RKEY for the given RMBs.
func (g *Group) deleteRKeys(via *link, ids []RMBID) llc.Message {
	var keys []rdma.RKey
	for _, id := range ids {
		keys = append(keys, g.rmb(id).token(via).RKey)
	}
	if g.isV2() {
		return llc.DeleteRKeyV2{Header: g.header(false), RKeys: keys}
	}
	m := llc.DeleteRKey{Header: g.header(false), Count: uint8(len(keys))}
	copy(m.RKeys[:], keys)
	return m
}

// handleDeleteRKeyV2 forgets RMBs of the peer and sends the message back, with
// the number of those it did not know.
func (g *Group) handleDeleteRKeyV2(from *link, m llc.DeleteRKeyV2) {
	unknown := uint8(0)
	for _, k := range m.RKeys {
		if !g.forgetToken(from.index, k) {
			unknown++
		}
	}
	from.send(answerDeleteV2(m, unknown))
}

// answerDeleteV2 is the response to a DELETE RKEY, of which that many keys are unknown.
func answerDeleteV2(m llc.DeleteRKeyV2, unknown uint8) llc.DeleteRKeyV2 {
	m.Response, m.Negative, m.Invalid = true, unknown > 0, unknown
	if n := len(m.RKeys); n > llc.ShortDeleteRKeysV2 {
		m.Omitted = uint8(n - llc.ShortDeleteRKeysV2)
		m.RKeys = m.RKeys[:llc.ShortDeleteRKeysV2]
	}
	return m
}

// answersDelete reports whether a response may be the one to the DELETE RKEY
// under way. Linux sends zeros back for keys, and only as many as fit into the
// shortest message.
func (g *Group) answersDelete(keys []rdma.RKey) bool {
	if !g.flowSent || g.flows[0].kind != flowDeleteRKey || len(keys) == 0 {
		return false
	}
	if g.isV2() && !slices.ContainsFunc(keys, func(k rdma.RKey) bool { return k != 0 }) {
		return true
	}
	return g.rmb(g.flows[0].rmbs[0]).token(g.flowVia).RKey == keys[0]
}

// holder says whose operator took a link out of service: no other one takes its
// place until that side allows it, or one of its ports comes up. A client need not
// remember what the server's operator did: it can only ask.
type holder uint8

const (
	heldByNobody holder = iota
	heldByPeer
	heldByUs
)

// hold stops the group from adding links if an operator has deleted one.
func (g *Group) hold(why llc.DeleteReason, h holder) {
	if why == llc.DeleteOperator {
		g.held = max(g.held, h)
		g.retryAt = time.Time{}
	}
}

// peerReleases ends at the server what the client's operator began: it asks for a
// link.
func (g *Group) peerReleases() {
	if g.held == heldByPeer {
		g.held = heldByNobody
	}
}

// AllowLinks lets the group add links again after an operator has taken one out
// of service with DeleteLink.
func (g *Group) AllowLinks() {
	g.held = heldByNobody
	g.retryWait = 0
	if g.adding.step != addNone {
		g.adding.again = true // the exchange may have had to do without a port that is up now
		return
	}
	g.retryAdd()
}
