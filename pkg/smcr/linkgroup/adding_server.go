// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// handleContinuation takes the client's answer to ours.
func (s *server) handleContinuation(g *Group, now time.Time, from *link, m llc.AddLinkContinuation) error {
	a := &g.adding
	if a.step != addWaitCont || !m.Response {
		g.Discarded++ // of an exchange that is over
		return nil
	}
	if ok, err := a.takeContinuation(g, from, m); !ok {
		return err
	}
	if a.isTold() {
		s.confirmNew(g, now, &g.links.at[a.link])
		return nil
	}
	a.sendContinuation(g, false)
	a.becomeWaiting(now, addWaitCont, ExchangeTimeout)
	return nil
}

// handleConfirmNew takes the client's answer over a new link.
func (s *server) handleConfirmNew(g *Group, now time.Time, l *link, m llc.ConfirmLink) error {
	if !m.Response {
		return errNotAdded(l)
	}
	if err := g.adding.takeConfirm(l, m, addWaitConfirm); err != nil {
		return err
	}
	g.adding.confirmed(g, now, l)
	return nil
}

// added goes on with another link if there may be one. A symmetric link replaces the
// asymmetric one (§2.2.1). If that is across subnets, the RNICs that only it has may be in one.
func (s *server) added(g *Group, now time.Time) {
	switch symmetric, odd := g.links.count(); {
	case symmetric > 1 && odd != nil:
		g.drain(now, odd, llc.DeleteLink{Link: odd.id, Orderly: true, Reason: llc.DeleteAsymmetric})
	case odd == nil, odd.crosses() && !g.links.allCross():
		s.addIfUseful(g)
	}
}

func (s *server) notAdded(g *Group, now time.Time) { g.growth.schedule(g, now) }

// ended refuses the wish of a client that asked for a link and did not get one.
func (s *server) ended(g *Group) { s.reject(g) }

// declined: the client has not heard of the link.
func (s *server) declined(*Group, time.Time) bool { return false }

// abandoned tells a Linux client of this link before any other. While the client waits for
// CONFIRM LINK, it takes the first DELETE LINK for the end of the new link and says yes. If that
// DELETE LINK names another link, the client goes on with a link that we have given up.
func (s *server) abandoned(g *Group, m llc.DeleteLink) {
	if g.dialect == llc.DialectLinux {
		g.requests.hasten(m.Link)
	}
}

func (s *server) abandonedEnd(*Group, time.Time) {}

// groupEnds tells a Linux client that has agreed to the new link of that first, for the same
// reason: the client would say yes to the end of the group, and go on.
func (s *server) groupEnds(g *Group) {
	if g.dialect == llc.DialectLinux && g.adding.step > addWaitReply {
		l := &g.links.at[g.adding.link]
		g.adding.viaLink(g).send(llc.DeleteLink{Header: g.header(false), Link: l.id, Reason: llc.DeleteLostPath})
	}
}

// begin starts the server's exchange.
func (s *server) begin(g *Group, now time.Time, via *link, fresh bool) {
	g.adding.becomeWanted(now, via)
	g.adding.fresh = fresh
	if g.growth.isForbidden() {
		g.adding.end(g, now, false)
		return
	}
	l, ok := g.adding.want(g, Endpoint{GID: s.asked.gid}, fresh)
	if !ok {
		g.adding.end(g, now, false)
		return
	}
	g.adding.link = l.index
}

// offered sends ADD LINK.
func (s *server) offered(g *Group, now time.Time, l *link) {
	forming := g.state == Forming
	if !forming && !s.mayOffer(g, l) {
		g.closeLink(l)
		g.adding.end(g, now, false)
		return
	}
	if forming {
		g.out.event(EventPointOfNoReturn, nil)
	}
	l.id = g.links.nextID(g.isDeleting)
	m := g.addLink(l)
	m.Link, m.Ext = l.id, g.adding.extension(g, g.adding.viaLink(g), l)
	g.adding.viaLink(g).send(m)
	s.asked = wish{} // this is the answer
	g.adding.becomeWaiting(now, addWaitReply, ExchangeTimeout)
}

// notOffered: there is no RNIC.
func (s *server) notOffered(g *Group, now time.Time) { g.adding.end(g, now, false) }

// wished: a server wishes for no link that it does not offer.
func (s *server) wished(g *Group, _ time.Time, l *link) { g.closeLink(l) }

// mayOffer reports whether a further link through l's RNIC can be of use: a
// second asymmetric link is not set up (§3.5.5.1.1), and none beside two
// symmetric ones.
func (s *server) mayOffer(g *Group, l *link) bool {
	symmetric, odd := g.links.count()
	if g.RNICsInUse()&(1<<l.local.RNIC) == 0 {
		return true
	}
	return !g.adding.fresh && symmetric < 2 && odd == nil
}

// handleAddLink takes the client's answer, or its hint that it has another RNIC.
func (s *server) handleAddLink(g *Group, now time.Time, from *link, m llc.AddLink) error {
	if m.Response {
		return s.handleAddLinkReply(g, now, from, m)
	}
	s.handleHint(g)
	return nil
}

// handleHint takes a client's ADD LINK request (§3.5.5.1.2). It needs
// no answer. During the exchange that adds a link it has crossed with ours,
// and counts as answered (§3.5.5.3.1); during another one it waits. So it does
// if the exchange is over for the client, whose last answer may arrive after it
// on another link.
func (s *server) handleHint(g *Group) {
	if g.state == Active && s.clientHasAdded(g) {
		g.growth.peerAllows()
		g.adding.tryAgain()
		return
	}
	if g.state != Active || g.adding.isUnderWay() {
		g.Discarded++
		return
	}
	g.growth.peerAllows()
	if !s.addIfUseful(g) {
		g.Discarded++
	}
}

// clientHasAdded reports whether the client is through with our ADD LINK, as far
// as we can see, when it asks for another link.
func (s *server) clientHasAdded(g *Group) bool {
	return g.adding.step == addWaitConfirm
}

// addIfUseful starts the exchange at the server if the group may have another
// link and gains from it.
func (s *server) addIfUseful(g *Group) bool {
	symmetric, odd := g.links.count()
	if g.state != Active || symmetric >= int(g.maxLinks) || g.growth.isForbidden() {
		return false
	}
	if !g.requests.has(exchangeAddLink) {
		g.requests.add(exchange{kind: exchangeAddLink, fresh: symmetric > 1 || odd != nil})
	}
	return true
}

// handleAddLinkReply takes the client's answer.
func (s *server) handleAddLinkReply(g *Group, now time.Time, from *link, m llc.AddLink) error {
	l := &g.links.at[g.adding.link]
	m.Reject = m.Reject || isSentBack(m, l)
	switch {
	case g.adding.step > addWaitReply && m.Reject && g.adding.hasNumber(g, m.Link):
		// A Linux client takes its yes back when the set-up has failed later on.
		g.closeLink(l)
		g.adding.end(g, now, false)
		return nil
	case g.adding.step != addWaitReply || from.place() != g.adding.via:
		return g.adding.handleStrayReply(g, now)
	}
	switch {
	case m.Link == l.id || m.Reject && (m.Link == 0 || g.state != Active):
	case g.state == Active:
		g.Discarded++ // answers one that we have given up
		return nil
	default:
		return fmt.Errorf("%w: ADD LINK response for link %d, expected %d", ErrProtocol, m.Link, l.id)
	}
	if m.Reject {
		g.closeLink(l)
		g.adding.end(g, now, false)
		return nil
	}
	l.peer = Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: min(m.MTU, l.local.MTU)}
	symmetric, odd := g.links.count()
	switch {
	case g.maxLinks < 2:
		// We offered it only because Linux waits for the offer. No data flows
		// until the client has agreed that there is no second link.
		g.adding.abandon(g, now, llc.DeleteAsymmetric, true)
	case !m.MTU.Valid():
		g.adding.abandon(g, now, llc.DeleteProtocolViolation, false)
	case g.links.isParallel(l, g.state == Forming):
		// C.7.1: parallel links are not permitted.
		g.adding.abandon(g, now, llc.DeleteProtocolViolation, false)
	case (odd != nil || symmetric > 1) && !g.links.gainsBy(l):
		g.adding.abandon(g, now, llc.DeleteAsymmetric, true)
	default:
		g.out.put(Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
		if g.isV2() {
			g.peerKeys.learnPairs(g, from, l.index, m.Ext.Pairs)
			s.confirmNew(g, now, l)
			break
		}
		g.adding.rmbs = g.keys.announced()
		g.adding.sendContinuation(g, false)
		g.adding.becomeWaiting(now, addWaitCont, ExchangeTimeout)
	}
	return nil
}

// isSentBack reports whether the client's answer to the offer of a link is the offer itself. A Linux
// client that waits for CONFIRM LINK on another new link answers so, and has given both up:
//
//	server                                 Linux client
//	  ADD LINK, link 3 ------------------>
//	          (lost) <------------------- ADD LINK rsp, waits for CONFIRM LINK on link 3
//	  (no answer in time)
//	  ADD LINK, link 4 ------------------>
//	        <---------------------------- ADD LINK of link 4 with the response bit
//	        <---------------------------- ADD LINK rsp, link 3 rejected
func isSentBack(m llc.AddLink, l *link) bool {
	return m.QPN == l.local.QPN && m.GID == l.local.GID && m.MAC == l.local.MAC
}

// confirmNew proves the path of a new link at the server.
func (s *server) confirmNew(g *Group, now time.Time, l *link) {
	g.out.put(Output{Kind: OutTransmit, Link: l.index})
	l.send(g.confirmLink(l, g.eyeCatcherFlags(), false))
	g.adding.becomeWaiting(now, addWaitConfirm, ConfirmLinkTimeout)
}

// A client of version 2 asks for a link with REQUEST ADD LINK. A Linux client
// starts no other exchange before it has an answer, which is the server's ADD
// LINK, or the request sent back without GIDs when none will come.

// handleRequestAddLink takes REQUEST ADD LINK.
func (s *server) handleRequestAddLink(g *Group, _ time.Time, from *link, m llc.RequestAddLink) {
	switch {
	case m.Response || g.state != Active:
		g.Discarded++
		return
	case s.clientHasAdded(g):
		g.adding.tryAgain()
	case g.adding.step > addWantEndpoint:
		g.Discarded++ // it has crossed with our ADD LINK, which is the answer
		return
	}
	g.growth.peerAllows()
	s.asked = wish{via: from.place(), gid: s.meant(g, m.GIDs)}
	if !g.adding.isUnderWay() && !s.addIfUseful(g) {
		s.reject(g)
	}
}

// meant is the RNIC for which a client asks for a link. Linux lists the one of the
// link that carries the request, too, and before the others.
func (s *server) meant(g *Group, gids []rdma.GID) rdma.GID {
	for _, gid := range gids {
		if !slices.ContainsFunc(g.links.at[:], func(l link) bool { return l.isUp() && !l.asymmetric && l.peer.GID == gid }) {
			return gid
		}
	}
	return rdma.GID{}
}

// wish is a client's REQUEST ADD LINK that waits for our answer.
type wish struct {
	via place // noPlace: there is none
	gid rdma.GID
}

// reject tells the client that asked for a link that it gets none.
func (s *server) reject(g *Group) {
	via := g.links.in(s.asked.via)
	if via == nil {
		return
	}
	s.asked = wish{}
	if !via.isUp() {
		via = g.links.other(nil)
	}
	if via != nil {
		via.send(llc.RequestAddLink{Header: g.header(true)})
	}
}

func (s *server) retry(g *Group) {
	if !s.addIfUseful(g) {
		s.reject(g)
	}
}

func (s *server) dropSpare(*Group) bool { return false }

func (s *server) spareIn(place) bool { return false }

func (s *server) spareTimeout() time.Time { return time.Time{} }

func (s *server) forget() { s.asked = wish{} }
