// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// addStep is where the exchange that adds a link stands (RFC 7609 §3.5.1.6,
// §3.5.5.1.1). There is one at a time, and the server starts it.
//
//	server                                        client
//	  addWantEndpoint (an RNIC here?)
//	  addWaitReply   ---- ADD LINK ----------------> addWantEndpoint (an RNIC here?)
//	     |          <--- ADD LINK rsp --------------  | new queue pair RTR
//	  addWaitCont    ---- ADD LINK CONTINUATION ---> addWaitCont
//	     |          <--- ADD LINK CONTINUATION rsp -  | until neither has RTokens left
//	  addWaitConfirm ==== CONFIRM LINK ============> addWaitConfirm
//	     |          <=== CONFIRM LINK rsp ==========  | over the new link
//	  addNone                                       addNone
type addStep uint8

const (
	addNone addStep = iota
	addWantEndpoint
	addWaitReply
	addWaitCont
	addWaitConfirm
)

func (s addStep) String() string {
	names := [...]string{"no link", "an RNIC", "the response to ADD LINK", "ADD LINK CONTINUATION", "CONFIRM LINK"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("addStep(%d)", uint8(s))
}

// adding is the exchange under way.
type adding struct {
	step     addStep
	link     LinkIndex   // the new link
	via      place       // the link that carries the exchange
	fresh    bool        // server: only an RNIC that is not in use will do
	request  llc.AddLink // client: what the server sent
	rmbs     []RMBID     // ours, still to be told
	peerLeft int         // pairs that the peer announced beyond its last message; -1: not known yet
	since    time.Time
	deadline time.Time
	again    bool // a port came up meanwhile, ours or the peer's
}

// isUnderWay reports whether a link is being added.
func (a *adding) isUnderWay() bool { return a.step != addNone }

// isAbout reports whether the exchange is about the link in a place.
func (a *adding) isAbout(i LinkIndex) bool { return a.isUnderWay() && a.link == i }

// becomeWanted starts the exchange over a link: an RNIC is to be found.
func (a *adding) becomeWanted(now time.Time, via *link) {
	*a = adding{step: addWantEndpoint, via: via.place(), since: now, deadline: now.Add(ExchangeTimeout), peerLeft: -1}
}

// becomeWaiting goes on to what must come next, within a time.
func (a *adding) becomeWaiting(now time.Time, s addStep, d time.Duration) {
	a.step = s
	a.since = now
	a.deadline = now.Add(d)
}

// tryAgain has another link tried once the exchange is over, whatever comes of it.
func (a *adding) tryAgain() { a.again = true }

// becomeNone ends the exchange.
func (a *adding) becomeNone() { *a = adding{} }

// want asks the shell for a queue pair for another link.
func (a *adding) want(g *Group, peer Endpoint, fresh bool) (*link, bool) {
	l := a.freePlace(g)
	if l == nil {
		return nil, false
	}
	g.links.becomeWanted(l)
	g.out.put(Output{Kind: OutEvent, Event: EventWantLink, Link: l.index, Peer: &peer, Fresh: fresh})
	return l, true
}

// freePlace finds a place for another link. What the peer said of the last link there is
// kept for a while.
func (a *adding) freePlace(g *Group) *link {
	l := g.links.free()
	if l != nil {
		g.keys.retire(l.index)
	}
	return l
}

// OfferLink answers EventWantLink with a queue pair in state INIT. It is false
// if the group does not want it any more; the shell then destroys it. All RMBs
// must be registered with its RNIC before.
func (g *Group) OfferLink(now time.Time, index LinkIndex, local Endpoint) bool {
	l := &g.links.at[index]
	if l.state != linkWanted {
		return false
	}
	g.links.becomeForming(l, local)
	if g.adding.step == addWantEndpoint && g.adding.link == index {
		g.side.offered(g, now, l)
	} else {
		g.side.wished(g, now, l)
	}
	return true
}

// NoLink answers EventWantLink when there is no RNIC.
func (g *Group) NoLink(now time.Time, index LinkIndex) {
	l := &g.links.at[index]
	if l.state != linkWanted {
		return
	}
	g.closeLink(l)
	if g.adding.step == addWantEndpoint && g.adding.link == index {
		g.side.notOffered(g, now)
	} else {
		g.growth.schedule(g, now)
	}
}

// viaLink is the link that carries the exchange.
func (a *adding) viaLink(g *Group) *link { return g.links.in(a.via) }

// linkLost moves the exchange off a lost link for what must still be said; the rest times out.
func (a *adding) linkLost(lost, other *link) {
	if a.via == lost.place() {
		a.via = other.place()
	}
}

// hasNumber reports whether the exchange under way is about this link. At the
// client the link has no number of its own before there is a queue pair.
func (a *adding) hasNumber(g *Group, id llc.LinkID) bool {
	switch {
	case !a.isUnderWay():
		return false
	case a.step == addWantEndpoint:
		return a.request.Link == id
	}
	return g.links.at[a.link].id == id
}

// drop forgets a link that is being added.
func (a *adding) drop(g *Group) {
	if a.isUnderWay() {
		g.closeLink(&g.links.at[a.link])
		a.becomeNone()
	}
}

// extension is the part of ADD LINK that only version 2 has: what it tells in
// place of ADD LINK CONTINUATION, about all our RMBs at once. The target GID is
// our own, as Linux has it.
func (a *adding) extension(g *Group, via, l *link) llc.AddLinkExt {
	if !g.isV2() {
		return llc.AddLinkExt{}
	}
	x := llc.AddLinkExt{Direct: l.local.Router == rdma.MAC{}, TargetGID: l.local.GID}
	for _, id := range g.keys.announced() {
		x.Pairs = append(x.Pairs, g.keys.rmb(id).pair(via, l))
	}
	return x
}

// sendContinuation tells the next RTokens, or none (A.3.3). At least one such
// message is sent in each direction, as Linux does.
func (a *adding) sendContinuation(g *Group, response bool) {
	l, via := &g.links.at[a.link], a.viaLink(g)
	m := llc.AddLinkContinuation{Header: g.header(response), Link: l.id}
	n := 0
	for ; n < llc.PairsPerContinuation && n < len(a.rmbs); n++ {
		if r := g.keys.rmb(a.rmbs[n]); r != nil {
			m.Pairs[n] = r.pair(via, l)
		}
	}
	m.Remaining = uint8(len(a.rmbs))
	a.rmbs = a.rmbs[n:]
	via.send(m)
}

// takeContinuation takes RTokens for the new link; false: the message belongs to an exchange
// that is over.
func (a *adding) takeContinuation(g *Group, from *link, m llc.AddLinkContinuation) (bool, error) {
	if from.place() != a.via || m.Link != g.links.at[a.link].id {
		g.Discarded++
		return false, nil
	}
	if a.peerLeft >= 0 && int(m.Remaining) != a.peerLeft && g.dialect == llc.DialectRFC {
		// C.7.1: the numbers must count down. Linux counts connections first
		// and corrects itself later.
		return false, fmt.Errorf("%w: %d RTokens remain in ADD LINK CONTINUATION, expected %d", ErrProtocol, m.Remaining, a.peerLeft)
	}
	a.peerLeft = max(0, int(m.Remaining)-llc.PairsPerContinuation)
	g.peerKeys.learnPairs(g, from, a.link, m.Pairs[:m.N()])
	return true, nil
}

// isTold reports whether neither side has RTokens left to tell.
func (a *adding) isTold() bool { return len(a.rmbs) == 0 && a.peerLeft <= 0 }

// takeConfirm takes CONFIRM LINK over a new link: it proves the path.
func (a *adding) takeConfirm(l *link, m llc.ConfirmLink, want addStep) error {
	if a.step != want || a.link != l.index {
		return errNotAdded(l)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if m.Link != l.id {
		return fmt.Errorf("%w: CONFIRM LINK names link %d on link %d", ErrProtocol, m.Link, l.id)
	}
	l.peerUserID = m.UserID
	return nil
}

func errNotAdded(l *link) error {
	return fmt.Errorf("%w: CONFIRM LINK on link %d, which is not being added", ErrProtocol, l.id)
}

// confirmed says that both sides have proven the path of the new link.
func (a *adding) confirmed(g *Group, now time.Time, l *link) {
	if g.state == Forming {
		g.becomeActive(now)
	}
	g.links.becomeActive(now, l)
	g.out.link(l, nil)
	a.end(g, now, true)
}

// end ends the exchange, whether or not there is a new link.
func (a *adding) end(g *Group, now time.Time, added bool) {
	again := a.again
	if again {
		defer g.growth.retry(g)
	}
	a.becomeNone()
	if g.requests.is(exchangeAddLink) {
		g.requests.end()
	}
	g.requests.keptUntil(now)
	if !again {
		g.side.ended(g)
	}
	if g.state == Forming {
		g.becomeActive(now)
	}
	if !added {
		g.side.notAdded(g, now)
		return
	}
	g.growth.reset()
	g.links.balance(&g.conns)
	g.side.added(g, now)
	if g.Redundancy() == AsymmetricPeer {
		// We have an RNIC for a better link. The peer may have got another one, too, and missed it: Linux heeds no
		// port that comes up while a link is added.
		g.growth.schedule(g, now)
	}
}

// abandon gives the new link up and tells the peer, which may wait longer
// than we do.
func (a *adding) abandon(g *Group, now time.Time, why llc.DeleteReason, orderly bool) {
	l := &g.links.at[a.link]
	known := l.state == linkForming && (a.step != addWantEndpoint)
	id := l.id
	g.closeLink(l)
	if !known {
		if !g.side.declined(g, now) {
			a.end(g, now, false)
		}
		return
	}
	m := llc.DeleteLink{Header: g.header(false), Link: id, Orderly: orderly, Reason: why}
	if g.state == Forming {
		// C.7.1: no data on the first link until both agree that there is no
		// second one.
		a.becomeNone()
		g.links.first().send(m)
		wait := ExchangeTimeout
		if g.dialect == llc.DialectLinux {
			wait = ResendInterval // as long as Linux waits; see setup.expired
		}
		g.setup.becomeFailed(id, now.Add(wait))
		return
	}
	if g.state == Active {
		g.requests.tellDeleted(g, m)
		g.side.abandoned(g, m)
	}
	a.end(g, now, false)
	g.side.abandonedEnd(g, now)
}

// expired is what silence means at each step (C.7.1).
func (a *adding) expired(g *Group, now time.Time) {
	via := a.viaLink(g)
	switch a.step {
	case addWantEndpoint:
		g.NoLink(now, a.link)
	case addWaitReply, addWaitCont:
		// A Linux server that cannot ready the new link after our yes says nothing, and goes on with one.
		silent := g.dialect == llc.DialectLinux && a.step == addWaitCont
		if g.state == Forming && !silent {
			g.fail(FaultAddLinkTimeout, nil)
			return
		}
		// The link that carried the exchange has failed, unless it is a
		// Linux that drops what comes at the wrong time.
		alive := g.dialect == llc.DialectLinux && via.heard.After(a.since)
		a.abandon(g, now, llc.DeleteLostPath, false)
		if !alive && g.state == Active {
			g.doubt(now, via, fmt.Errorf("%w: ADD LINK", ErrExchangeTimeout))
		}
	case addWaitConfirm:
		a.abandon(g, now, llc.DeleteLostPath, false)
	case addNone:
	}
}

// handleStrayReply takes an ADD LINK response that nothing waits for.
func (a *adding) handleStrayReply(g *Group, now time.Time) error {
	if g.state != Forming || g.setup.step == waitDeleteReply {
		g.Discarded++ // we had given up
		g.requests.repeatDeleteAll(g, now)
		return nil
	}
	return fmt.Errorf("%w: ADD LINK response while %v is awaited", ErrProtocol, g.setup.step)
}
