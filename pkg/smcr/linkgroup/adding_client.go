// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// handleContinuation takes the server's message and answers it, also when the server says
// more than we waited for.
func (c *client) handleContinuation(g *Group, now time.Time, from *link, m llc.AddLinkContinuation) error {
	a := &g.adding
	late := a.step == addWaitConfirm
	if (a.step != addWaitCont && !late) || m.Response {
		g.Discarded++ // of an exchange that is over
		return nil
	}
	if ok, err := a.takeContinuation(g, from, m); !ok {
		return err
	}
	a.sendContinuation(g, true)
	if a.isTold() && !late {
		a.becomeWaiting(now, addWaitConfirm, ExchangeTimeout)
	}
	return nil
}

// handleConfirmNew takes the server's CONFIRM LINK over a new link.
func (c *client) handleConfirmNew(g *Group, now time.Time, l *link, m llc.ConfirmLink) error {
	want := addWaitConfirm
	if g.adding.step == addWaitCont {
		want = addWaitCont // a server without RMBs may skip the continuation
	}
	if m.Response {
		return errNotAdded(l)
	}
	if err := g.adding.takeConfirm(l, m, want); err != nil {
		return err
	}
	g.out.put(Output{Kind: OutTransmit, Link: l.index})
	l.send(g.confirmLink(l, g.eyeCatcherFlags(), true))
	g.adding.confirmed(g, now, l)
	return nil
}

func (c *client) added(*Group, time.Time) {}

// notAdded: the server's offer was no better than what there is, and our hint may have been answered by it.
func (c *client) notAdded(g *Group, now time.Time) {
	if g.Redundancy() == AsymmetricPeer && g.growth.at.IsZero() {
		g.growth.schedule(g, now)
	}
}

func (c *client) ended(*Group) {}

// declined refuses the server's link, if that can be said.
func (c *client) declined(g *Group, now time.Time) bool {
	if g.state == Draining || !g.adding.viaLink(g).isUp() {
		return false
	}
	c.reject(g, now, llc.RejectNoAlternatePath)
	return true
}

// abandoned tells the server at once that a new link is given up,
// although another request of the client is under way or about to be: that one may be a
// DELETE LINK, which the server keeps until the exchange is over (§3.5.5.3.1), and the
// exchange would not be over before this one is told. It stays in line, too, for
// a server that drops what crosses.
func (c *client) abandoned(g *Group, m llc.DeleteLink) {
	if via := g.links.other(nil); g.requests.delays(m.Link) && via != nil {
		via.send(m)
	}
}

// groupEnds: the server hears of the end of the group at any time.
func (c *client) groupEnds(*Group) {}

// abandonedEnd: another RNIC of ours may do better (C.7.1).
func (c *client) abandonedEnd(g *Group, now time.Time) { g.growth.schedule(g, now) }

// handleRequestAddLink takes the server's answer that we get no link now.
func (c *client) handleRequestAddLink(g *Group, now time.Time, _ *link, m llc.RequestAddLink) {
	if !m.Response || g.state != Active || !c.dropSpare(g) {
		g.Discarded++
		return
	}
	g.growth.schedule(g, now)
}

// handleAddLink takes the server's request.
func (c *client) handleAddLink(g *Group, now time.Time, from *link, m llc.AddLink) error {
	if m.Response {
		return g.adding.handleStrayReply(g, now)
	}
	if (g.setup.step == waitSecondLink && m.Link != g.adding.request.Link) || (g.setup.step == waitDeleteReply && m.Link != g.setup.failed) {
		// The server gave the second link up, went on with one, and tries
		// again.
		g.adding.drop(g)
		g.becomeActive(now)
	}
	switch {
	case g.state == Draining:
		g.Discarded++
		g.requests.repeatDeleteAll(g, now)
		return nil
	case g.adding.isUnderWay() && m.Link == g.adding.request.Link:
		g.Discarded++ // the same once more
		return nil
	case g.state == Forming && g.setup.step != waitAddLink && g.setup.step != waitSecondLink:
		return fmt.Errorf("%w: ADD LINK while %v is awaited", ErrProtocol, g.setup.step)
	case m.Link == 0 || g.links.byID(m.Link) != nil:
		return fmt.Errorf("%w: ADD LINK with number %d, which is in use", ErrProtocol, m.Link)
	}
	if g.state == Forming {
		g.out.event(EventPointOfNoReturn, nil)
		g.setup.becomeSecond()
	}
	g.adding.drop(g) // the server gave up the last one without a word
	m.Dialect = g.dialect
	g.adding.becomeWanted(now, from)
	g.adding.request = m
	symmetric, _ := g.links.count()
	switch {
	case !m.MTU.Valid():
		c.reject(g, now, llc.RejectInvalidMTU)
	case g.maxLinks < 2 || symmetric >= int(g.maxLinks) || g.growth.isForbidden():
		c.reject(g, now, llc.RejectNoAlternatePath)
	case c.spare != noPlace: // the queue pair that our hint was about
		l := g.links.in(c.spare)
		c.spare = noPlace
		g.adding.link = l.index
		c.offered(g, now, l)
	default:
		l, ok := g.adding.want(g, Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: m.MTU}, false)
		if !ok {
			c.reject(g, now, llc.RejectNoAlternatePath)
			return nil
		}
		g.adding.link = l.index
	}
	return nil
}

// reject answers ADD LINK in the negative, at once: a kernel server waits
// for the answer with a lock held.
func (c *client) reject(g *Group, now time.Time, why llc.RejectReason) {
	m := g.adding.request
	m.Response, m.Reject, m.Reason = true, true, why
	g.adding.viaLink(g).send(m)
	g.adding.end(g, now, false)
}

// offered answers ADD LINK at the client, if the new link would be
// good for anything (§3.5.1.6.1): a link between two RNICs that are joined
// already is not permitted, and neither is a second asymmetric one.
func (c *client) offered(g *Group, now time.Time, l *link) {
	m := g.adding.request
	l.peer = Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: min(m.MTU, l.local.MTU)}
	symmetric, odd := g.links.count()
	parallel := g.links.isParallel(l, g.state == Forming)
	if parallel || ((odd != nil || symmetric > 1) && !g.links.gainsBy(l)) {
		g.closeLink(l)
		c.reject(g, now, llc.RejectNoAlternatePath)
		return
	}
	l.id = m.Link
	g.out.put(Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
	g.peerKeys.learnPairs(g, g.adding.viaLink(g), l.index, m.Ext.Pairs)
	m.Response = true
	m.QPN, m.GID, m.MAC, m.PSN, m.MTU = l.local.QPN, l.local.GID, l.local.MAC, l.local.PSN, l.local.MTU
	m.Ext = g.adding.extension(g, g.adding.viaLink(g), l)
	g.adding.viaLink(g).send(m)
	if g.isV2() {
		g.adding.becomeWaiting(now, addWaitConfirm, ExchangeTimeout)
		return
	}
	g.adding.rmbs = g.keys.announced()
	g.adding.becomeWaiting(now, addWaitCont, ExchangeTimeout)
}

// notOffered: there is no RNIC.
func (c *client) notOffered(g *Group, now time.Time) { c.reject(g, now, llc.RejectNoAlternatePath) }

// wished sends a client's ADD LINK or, in version 2, REQUEST ADD LINK: the client has another
// RNIC. The queue pair is kept for the server's answer, for a while.
func (c *client) wished(g *Group, now time.Time, l *link) {
	via := g.links.other(l)
	symmetric, _ := g.links.count()
	if g.state != Active || via == nil || c.spare != noPlace || g.adding.isUnderWay() ||
		symmetric >= int(g.maxLinks) || g.RNICsInUse()&(1<<l.local.RNIC) != 0 || g.growth.isForbidden() {
		g.closeLink(l)
		return
	}
	c.spare = l.place()
	c.spareUntil = now.Add(ExchangeTimeout)
	if g.isV2() {
		via.send(llc.RequestAddLink{GIDs: []rdma.GID{l.local.GID}})
		return
	}
	via.send(g.addLink(l))
}

// retry makes a client ask for another link if it has an RNIC for it.
func (c *client) retry(g *Group) {
	if symmetric, _ := g.links.count(); g.state == Active && !g.growth.isForbidden() && !g.adding.isUnderWay() && c.spare == noPlace && symmetric < int(g.maxLinks) {
		g.adding.want(g, Endpoint{}, true)
	}
}

// addIfUseful: a client offers no links.
func (c *client) addIfUseful(*Group) bool { return false }

// dropSpare gives up the queue pair of our hint.
func (c *client) dropSpare(g *Group) bool {
	l := g.links.in(c.spare)
	if l == nil {
		return false
	}
	g.closeLink(l)
	c.spare = noPlace
	return true
}

func (c *client) spareIn(p place) bool { return c.spare != noPlace && c.spare == p }

// spareTimeout is when the server has no use for the spare link any more; zero: there is none.
func (c *client) spareTimeout() time.Time {
	if c.spare == noPlace {
		return time.Time{}
	}
	return c.spareUntil
}

func (c *client) forget() { c.spare = noPlace }

// begin: a client does not start the exchange.
func (c *client) begin(*Group, time.Time, *link, bool) {}
