// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"slices"
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

// adding is the exchange under way.
type adding struct {
	step     addStep
	link     LinkIndex   // the new link
	via      *link       // the link that carries the exchange
	fresh    bool        // server: only an RNIC that is not in use will do
	request  llc.AddLink // client: what the server sent
	rmbs     []RMBID     // ours, still to be told
	peerLeft int         // pairs that the peer announced beyond its last message; -1: not known yet
	since    time.Time
	deadline time.Time
	again    bool // a port came up meanwhile, ours or the peer's
}

// wantSlot asks the shell for a queue pair for another link.
func (g *Group) wantSlot(peer Endpoint, fresh bool) (*link, bool) {
	l := g.freeSlot()
	if l == nil {
		return nil, false
	}
	l.state = linkWanted
	g.present |= 1 << l.index
	g.out = append(g.out, Output{Kind: OutEvent, Event: EventWantLink, Link: l.index, Peer: &peer, Fresh: fresh})
	return l, true
}

// beginAdd starts the server's exchange.
func (g *Group) beginAdd(now time.Time, via *link, fresh bool) {
	g.adding = adding{step: addWantEndpoint, via: via, fresh: fresh, since: now, deadline: now.Add(FlowTimeout), peerLeft: -1}
	if g.held != heldByNobody {
		g.endAdd(now, false)
		return
	}
	l, ok := g.wantSlot(Endpoint{GID: g.asked.gid}, fresh)
	if !ok {
		g.endAdd(now, false)
		return
	}
	g.adding.link = l.index
}

// OfferLink answers EventWantLink with a queue pair in state INIT. It is false
// if the group does not want it any more; the shell then destroys it. All RMBs
// must be registered with its RNIC before.
func (g *Group) OfferLink(now time.Time, index LinkIndex, local Endpoint) bool {
	l := &g.links[index]
	if l.state != linkWanted {
		return false
	}
	l.local = local
	l.state = linkForming
	switch {
	case g.adding.step != addWantEndpoint || g.adding.link != index:
		g.askForLink(now, l)
	case g.cfg.Role == Server:
		g.offerToClient(now, l)
	default:
		g.acceptFromServer(now, l)
	}
	return true
}

// NoLink answers EventWantLink when there is no RNIC.
func (g *Group) NoLink(now time.Time, index LinkIndex) {
	l := &g.links[index]
	if l.state != linkWanted {
		return
	}
	g.closeLink(l)
	switch {
	case g.adding.step != addWantEndpoint || g.adding.link != index: // a client's wish
		g.scheduleRetry(now)
	case g.cfg.Role == Server:
		g.endAdd(now, false)
	default:
		g.rejectLink(now, llc.RejectNoAlternatePath)
	}
}

// offerToClient sends ADD LINK.
func (g *Group) offerToClient(now time.Time, l *link) {
	forming := g.state == Forming
	if !forming && !g.mayOffer(l) {
		g.closeLink(l)
		g.endAdd(now, false)
		return
	}
	if forming {
		g.event(EventPointOfNoReturn, nil)
	}
	l.id = g.nextLinkID()
	m := g.addLink(l)
	m.Link, m.Ext = l.id, g.extension(g.adding.via, l)
	g.adding.via.send(m)
	g.asked = request{} // this is the answer
	g.stepAdd(now, addWaitReply, FlowTimeout)
}

// addLink is ADD LINK with our half of a link.
func (g *Group) addLink(l *link) llc.AddLink {
	return llc.AddLink{
		Header: g.header(false), Dialect: g.dialect,
		MAC: l.local.MAC, GID: l.local.GID, QPN: l.local.QPN, MTU: l.local.MTU, PSN: l.local.PSN,
	}
}

// mayOffer reports whether a further link through l's RNIC can be of use: a
// second asymmetric link is not set up (§3.5.5.1.1), and none beside two
// symmetric ones.
func (g *Group) mayOffer(l *link) bool {
	symmetric, odd := g.countLinks()
	if g.RNICsInUse()&(1<<l.local.RNIC) == 0 {
		return true
	}
	return !g.adding.fresh && symmetric < 2 && odd == nil
}

// isAdding reports whether the exchange under way is about this link. At the
// client the link has no number of its own before there is a queue pair.
func (g *Group) isAdding(id llc.LinkID) bool {
	switch {
	case g.adding.step == addNone:
		return false
	case g.adding.step == addWantEndpoint && g.cfg.Role == Client:
		return g.adding.request.Link == id
	}
	return g.links[g.adding.link].id == id
}

func (g *Group) stepAdd(now time.Time, s addStep, d time.Duration) {
	g.adding.step = s
	g.adding.since = now
	g.adding.deadline = now.Add(d)
}

// handleAddLink takes ADD LINK: at the client the server's request, at the
// server a client's hint that it has another RNIC.
func (g *Group) handleAddLink(now time.Time, from *link, m llc.AddLink) error {
	if g.cfg.Role == Server {
		g.handleAddLinkHint()
		return nil
	}
	if (g.step == waitSecondLink && m.Link != g.adding.request.Link) || (g.step == waitDeleteReply && m.Link != g.deleting) {
		// The server gave the second link up, went on with one, and tries
		// again.
		g.dropSecond()
		g.becomeActive(now)
	}
	switch {
	case g.state == Draining:
		g.Discarded++
		g.repeatDeleteAll(now)
		return nil
	case g.adding.step != addNone && m.Link == g.adding.request.Link:
		g.Discarded++ // the same once more
		return nil
	case g.state == Forming && g.step != waitAddLink && g.step != waitSecondLink:
		return fmt.Errorf("%w: ADD LINK in step %d", ErrProtocol, g.step)
	case m.Link == 0 || g.linkByID(m.Link) != nil:
		return fmt.Errorf("%w: ADD LINK with number %d, which is in use", ErrProtocol, m.Link)
	}
	if g.state == Forming {
		g.event(EventPointOfNoReturn, nil)
		g.step = waitSecondLink
		g.deadline = time.Time{}
	}
	g.dropSecond() // the server gave up the last one without a word
	m.Dialect = g.dialect
	g.adding = adding{step: addWantEndpoint, via: from, request: m, since: now, deadline: now.Add(FlowTimeout), peerLeft: -1}
	symmetric, _ := g.countLinks()
	switch {
	case !m.MTU.Valid():
		g.rejectLink(now, llc.RejectInvalidMTU)
	case g.maxLinks < 2 || symmetric >= int(g.maxLinks) || g.held != heldByNobody:
		g.rejectLink(now, llc.RejectNoAlternatePath)
	case g.spare != nil: // the queue pair that our hint was about
		l := g.spare
		g.spare = nil
		g.adding.link = l.index
		g.acceptFromServer(now, l)
	default:
		l, ok := g.wantSlot(Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: m.MTU}, false)
		if !ok {
			g.rejectLink(now, llc.RejectNoAlternatePath)
			return nil
		}
		g.adding.link = l.index
	}
	return nil
}

// dropSecond forgets a link that is being added.
func (g *Group) dropSecond() {
	if g.adding.step != addNone {
		g.closeLink(&g.links[g.adding.link])
		g.adding = adding{}
	}
}

// rejectLink answers ADD LINK in the negative, at once: a kernel server waits
// for the answer with a lock held.
func (g *Group) rejectLink(now time.Time, why llc.RejectReason) {
	m := g.adding.request
	m.Response, m.Reject, m.Reason = true, true, why
	g.adding.via.send(m)
	g.endAdd(now, false)
}

// acceptFromServer answers ADD LINK at the client, if the new link would be
// good for anything (§3.5.1.6.1): a link between two RNICs that are joined
// already is not permitted, and neither is a second asymmetric one.
func (g *Group) acceptFromServer(now time.Time, l *link) {
	m := g.adding.request
	l.peer = Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: min(m.MTU, l.local.MTU)}
	symmetric, odd := g.countLinks()
	first := g.firstLink()
	parallel := g.isParallel(l) || (g.state == Forming && first.local.RNIC == l.local.RNIC && first.samePeer(l.peer))
	if parallel || (g.sharesRNIC(l) && (odd != nil || symmetric > 1)) {
		g.closeLink(l)
		g.rejectLink(now, llc.RejectNoAlternatePath)
		return
	}
	l.id = m.Link
	g.out = append(g.out, Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
	g.learnPairs(g.adding.via, l.index, m.Ext.Pairs)
	m.Response = true
	m.QPN, m.GID, m.MAC, m.PSN, m.MTU = l.local.QPN, l.local.GID, l.local.MAC, l.local.PSN, l.local.MTU
	m.Ext = g.extension(g.adding.via, l)
	g.adding.via.send(m)
	if g.isV2() {
		g.stepAdd(now, addWaitConfirm, FlowTimeout)
		return
	}
	g.adding.rmbs = g.announcedRMBs()
	g.stepAdd(now, addWaitCont, FlowTimeout)
}

// handleAddLinkReply takes the client's answer at the server.
func (g *Group) handleAddLinkReply(now time.Time, from *link, m llc.AddLink) error {
	if g.adding.step != addWaitReply || from != g.adding.via {
		if g.state != Forming || g.step == waitDeleteReply {
			g.Discarded++ // we had given up
			g.repeatDeleteAll(now)
			return nil
		}
		return fmt.Errorf("%w: ADD LINK response in step %d", ErrProtocol, g.step)
	}
	l := &g.links[g.adding.link]
	if m.Link != l.id && !m.Reject {
		if g.state == Active {
			g.Discarded++ // answers one that we have given up
			return nil
		}
		return fmt.Errorf("%w: ADD LINK response for link %d, expected %d", ErrProtocol, m.Link, l.id)
	}
	if m.Reject {
		g.closeLink(l)
		g.endAdd(now, false)
		return nil
	}
	l.peer = Endpoint{QPN: m.QPN, GID: m.GID, MAC: m.MAC, PSN: m.PSN, MTU: min(m.MTU, l.local.MTU)}
	symmetric, odd := g.countLinks()
	first := g.firstLink()
	switch {
	case g.maxLinks < 2:
		// We offered it only because Linux waits for the offer. No data flows
		// until the client has agreed that there is no second link.
		g.abandonAdd(now, llc.DeleteAsymmetric, true)
	case !m.MTU.Valid():
		g.abandonAdd(now, llc.DeleteProtocolViolation, false)
	case g.isParallel(l) || (g.state == Forming && first.local.RNIC == l.local.RNIC && first.samePeer(l.peer)):
		// C.7.1: parallel links are not permitted.
		g.abandonAdd(now, llc.DeleteProtocolViolation, false)
	case g.sharesRNIC(l) && (odd != nil || symmetric > 1):
		g.abandonAdd(now, llc.DeleteAsymmetric, true)
	default:
		g.out = append(g.out, Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
		if g.isV2() {
			g.learnPairs(from, l.index, m.Ext.Pairs)
			g.confirmNewLink(now, l)
			break
		}
		g.adding.rmbs = g.announcedRMBs()
		g.sendContinuation(false)
		g.stepAdd(now, addWaitCont, FlowTimeout)
	}
	return nil
}

// confirmNewLink proves the path of a new link at the server.
func (g *Group) confirmNewLink(now time.Time, l *link) {
	g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
	l.send(g.confirmLink(l, g.eyeCatcherFlags(), false))
	g.stepAdd(now, addWaitConfirm, ConfirmLinkTimeout)
}

// announcedRMBs lists the RMBs that the peer knows or is being told about:
// it needs their RTokens on the new link (§3.5.5.2.3).
func (g *Group) announcedRMBs() []RMBID {
	var ids []RMBID
	for _, r := range g.rmbs {
		if r.state != rmbNew {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// sendContinuation tells the next RTokens, or none (A.3.3). At least one such
// message is sent in each direction, as Linux does.
func (g *Group) sendContinuation(response bool) {
	a := &g.adding
	l := &g.links[a.link]
	m := llc.AddLinkContinuation{Header: g.header(response), Link: l.id}
	n := 0
	for ; n < llc.PairsPerContinuation && n < len(a.rmbs); n++ {
		if r := g.rmb(a.rmbs[n]); r != nil {
			m.Pairs[n] = r.pair(a.via, l)
		}
	}
	m.Remaining = uint8(len(a.rmbs))
	a.rmbs = a.rmbs[n:]
	a.via.send(m)
}

// handleContinuation takes RTokens for the new link: requests at the client,
// responses at the server.
func (g *Group) handleContinuation(now time.Time, from *link, m llc.AddLinkContinuation) error {
	a := &g.adding
	late := a.step == addWaitConfirm && g.cfg.Role == Client
	if (a.step != addWaitCont && !late) || m.Response != (g.cfg.Role == Server) || from != a.via || m.Link != g.links[a.link].id {
		g.Discarded++ // of an exchange that is over
		return nil
	}
	if a.peerLeft >= 0 && int(m.Remaining) != a.peerLeft && g.dialect == llc.DialectRFC {
		// C.7.1: the numbers must count down. Linux counts connections first
		// and corrects itself later.
		return fmt.Errorf("%w: %d RTokens remain in ADD LINK CONTINUATION, expected %d", ErrProtocol, m.Remaining, a.peerLeft)
	}
	a.peerLeft = max(0, int(m.Remaining)-llc.PairsPerContinuation)
	g.learnPairs(from, a.link, m.Pairs[:m.N()])
	more := len(a.rmbs) > 0 || a.peerLeft > 0
	if g.cfg.Role == Client {
		g.sendContinuation(true)
		more = len(a.rmbs) > 0 || a.peerLeft > 0
		if !more && !late {
			g.stepAdd(now, addWaitConfirm, FlowTimeout)
		}
		return nil
	}
	if more {
		g.sendContinuation(false)
		g.stepAdd(now, addWaitCont, FlowTimeout)
		return nil
	}
	g.confirmNewLink(now, &g.links[a.link])
	return nil
}

// confirmSecond takes CONFIRM LINK over a new link, in both roles: it proves
// the path.
func (g *Group) confirmSecond(now time.Time, l *link, m llc.ConfirmLink) error {
	want := addWaitConfirm
	if g.cfg.Role == Client && g.adding.step == addWaitCont {
		want = addWaitCont // a server without RMBs may skip the continuation
	}
	if g.adding.step != want || g.adding.link != l.index || m.Response != (g.cfg.Role == Server) {
		return fmt.Errorf("%w: CONFIRM LINK on link %d, which is not being added", ErrProtocol, l.id)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if m.Link != l.id {
		return fmt.Errorf("%w: CONFIRM LINK names link %d on link %d", ErrProtocol, m.Link, l.id)
	}
	l.peerUserID = m.UserID
	if g.cfg.Role == Client {
		g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
		l.send(g.confirmLink(l, g.eyeCatcherFlags(), true))
	}
	if g.state == Forming {
		g.becomeActive(now)
	}
	g.linkUp(now, l)
	g.linkEvent(l, nil)
	g.endAdd(now, true)
	return nil
}

// endAdd ends the exchange, whether or not there is a new link.
func (g *Group) endAdd(now time.Time, added bool) {
	again := g.adding.again
	if again {
		defer g.retryAdd()
	}
	g.adding = adding{}
	switch {
	case g.flowSent && g.flows[0].kind == flowAddLink:
		g.popFlow()
	case g.isKept():
		g.flowExpiry = now.Add(FlowTimeout)
	}
	if !again {
		g.rejectRequest()
	}
	if g.state == Forming {
		g.becomeActive(now)
	}
	if !added {
		if g.cfg.Role == Server {
			g.scheduleRetry(now)
		}
		return
	}
	g.retryWait = 0
	g.retryAt = time.Time{}
	g.balance()
	if g.cfg.Role == Client {
		return
	}
	switch symmetric, odd := g.countLinks(); {
	case symmetric > 1 && odd != nil:
		// §2.2.1: the symmetric link replaces the asymmetric one.
		g.drain(now, odd, llc.DeleteLink{Link: odd.id, Orderly: true, Reason: llc.DeleteAsymmetric})
	case odd == nil:
		g.addIfUseful()
	}
}

// abandonAdd gives the new link up and tells the peer, which may wait longer
// than we do.
func (g *Group) abandonAdd(now time.Time, why llc.DeleteReason, orderly bool) {
	a := g.adding
	l := &g.links[a.link]
	known := l.state == linkForming && (a.step != addWantEndpoint)
	id := l.id
	g.closeLink(l)
	if !known {
		if g.cfg.Role == Client && g.state != Draining && a.via.isUp() {
			g.rejectLink(now, llc.RejectNoAlternatePath)
			return
		}
		g.endAdd(now, false)
		return
	}
	m := llc.DeleteLink{Header: g.header(false), Link: id, Orderly: orderly, Reason: why}
	if g.state == Forming {
		// C.7.1: no data on the first link until both agree that there is no
		// second one.
		g.adding = adding{}
		g.firstLink().send(m)
		g.step = waitDeleteReply
		g.deadline = now.Add(FlowTimeout)
		if g.dialect == llc.DialectLinux {
			g.deadline = now.Add(ResendInterval) // as long as Linux waits; see setupExpired
		}
		g.deleting = id
		return
	}
	if g.state == Active {
		g.tellDeleted(m)
		g.tellAbandoned(m)
	}
	g.endAdd(now, false)
	if g.cfg.Role == Client {
		g.scheduleRetry(now) // C.7.1: another RNIC of ours may do better
	}
}

// tellAbandoned tells the server at once that a client has given a new link up,
// although another request of the client is under way or about to be: that one may be a
// DELETE LINK, which the server keeps until the exchange is over (§3.5.5.3.1), and the
// exchange would not be over before this one is told. It stays in line, too, for
// a server that drops what crosses.
func (g *Group) tellAbandoned(m llc.DeleteLink) {
	waits := g.flowSent || (len(g.flows) > 0 && g.flows[0].deletion.Link != m.Link)
	if via := g.otherLink(nil); g.cfg.Role == Client && waits && via != nil {
		via.send(m)
	}
}

// addExpired is what silence means at each step (C.7.1).
func (g *Group) addExpired(now time.Time) {
	a := g.adding
	switch a.step {
	case addWantEndpoint:
		g.NoLink(now, a.link)
	case addWaitReply, addWaitCont:
		if g.state == Forming {
			g.fail(FaultAddLinkTimeout, nil)
			return
		}
		// The link that carried the exchange has failed, unless it is a
		// Linux that drops what comes at the wrong time.
		alive := g.dialect == llc.DialectLinux && a.via.heard.After(a.since)
		g.abandonAdd(now, llc.DeleteLostPath, false)
		if !alive {
			g.loseLink(now, a.via, llc.DeleteLostPath, FaultLink, fmt.Errorf("%w: ADD LINK", ErrFlowTimeout))
		}
	case addWaitConfirm:
		g.abandonAdd(now, llc.DeleteLostPath, false)
	case addNone:
	}
}

// handleAddLinkHint takes a client's ADD LINK request (§3.5.5.1.2). It needs
// no answer. During the exchange that adds a link it has crossed with ours,
// and counts as answered (§3.5.5.3.1); during another one it waits. So it does
// if the exchange is over for the client, whose last answer may arrive after it
// on another link.
func (g *Group) handleAddLinkHint() {
	if g.state == Active && g.clientHasAdded() {
		g.adding.again = true
		return
	}
	if g.state != Active || (g.adding.step != addNone && g.cfg.Role == Server) {
		g.Discarded++
		return
	}
	g.peerReleases()
	if !g.addIfUseful() {
		g.Discarded++
	}
}

// clientHasAdded reports whether the client is through with our ADD LINK, as far
// as we can see, when it asks for another link.
func (g *Group) clientHasAdded() bool {
	return g.cfg.Role == Server && g.adding.step == addWaitConfirm
}

// addIfUseful starts the exchange at the server if the group may have another
// link and gains from it.
func (g *Group) addIfUseful() bool {
	symmetric, odd := g.countLinks()
	if g.state != Active || g.cfg.Role != Server || symmetric >= int(g.maxLinks) || g.held != heldByNobody {
		return false
	}
	for _, f := range g.flows {
		if f.kind == flowAddLink {
			return true
		}
	}
	g.startFlow(flow{kind: flowAddLink, fresh: symmetric > 1 || odd != nil})
	return true
}

// askForLink sends a client's ADD LINK or, in version 2, REQUEST ADD LINK: it has another RNIC. The queue pair is
// kept for the server's answer, for a while.
func (g *Group) askForLink(now time.Time, l *link) {
	via := g.otherLink(l)
	symmetric, _ := g.countLinks()
	if g.state != Active || g.cfg.Role != Client || via == nil || g.spare != nil || g.adding.step != addNone ||
		symmetric >= int(g.maxLinks) || g.RNICsInUse()&(1<<l.local.RNIC) != 0 || g.held != heldByNobody {
		g.closeLink(l)
		return
	}
	g.spare = l
	g.spareUntil = now.Add(FlowTimeout)
	if g.isV2() {
		via.send(llc.RequestAddLink{GIDs: []rdma.GID{l.local.GID}})
		return
	}
	via.send(g.addLink(l))
}

// wishLink makes a client ask for another link if it has an RNIC for it.
func (g *Group) wishLink() {
	if symmetric, _ := g.countLinks(); g.state == Active && g.held == heldByNobody && g.adding.step == addNone && g.spare == nil && symmetric < int(g.maxLinks) {
		g.wantSlot(Endpoint{}, true)
	}
}

// scheduleRetry sets the timer after which a failed second link is tried once
// more (C.8), each time later.
func (g *Group) scheduleRetry(now time.Time) {
	r := g.Redundancy()
	if g.state != Active || g.maxLinks < 2 || g.held != heldByNobody || r == Symmetric {
		return
	}
	if g.cfg.Role == Client && r == AsymmetricPeer {
		return // it is the server that lacks an RNIC, and will know when it has one
	}
	g.retryWait = min(max(2*g.retryWait, AddLinkRetryMin), AddLinkRetryMax)
	g.retryAt = now.Add(g.retryWait)
}

// asksToDelete reports whether a DELETE LINK of a client's has no answer yet.
func (g *Group) asksToDelete() bool {
	return slices.ContainsFunc(g.flows, func(f flow) bool { return f.kind == flowAskDelete })
}

func (g *Group) retryAdd() {
	g.retryAt = time.Time{}
	if g.cfg.Role == Client {
		g.wishLink()
	} else if !g.addIfUseful() {
		g.rejectRequest()
	}
}
