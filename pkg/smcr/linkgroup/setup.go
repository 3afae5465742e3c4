// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// setupStep is where the LLC part of the first contact stands (RFC 7609
// §3.5.1.5, §3.5.1.6).
//
//	server                                   client
//	  waitPeer                                 waitPeer
//	     | Confirm (CLC)                          | Accept (CLC), queue pair RTR
//	  waitConfirmLinkReply -- CONFIRM LINK -->  waitConfirmLink
//	     |               <-- CONFIRM LINK rsp --  | queue pair RTS
//	  waitSecondLink    ==== see addStep ====>  waitAddLink, waitSecondLink
//	     | failed: DELETE LINK <------------->    |
//	  waitDeleteReply                          waitDeleteReply
//	  setupDone                                setupDone
type setupStep uint8

const (
	waitPeer setupStep = iota
	waitConfirmLinkReply
	waitConfirmLink
	waitAddLink
	waitSecondLink  // ADD LINK was sent or received
	waitDeleteReply // the second link failed: until both agree about that
	setupDone
)

func (s setupStep) String() string {
	names := [...]string{
		"the peer's half", "the response to CONFIRM LINK", "CONFIRM LINK", "ADD LINK", "the second link", "the response to DELETE LINK", "nothing",
	}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("setupStep(%d)", uint8(s))
}

// setup is the LLC part of the first contact.
type setup struct {
	step     setupStep
	deadline time.Time  // zero: what comes next has one of its own
	failed   llc.LinkID // waitDeleteReply: the second link
}

// becomeWaiting goes on to what must come next.
func (s *setup) becomeWaiting(step setupStep, until time.Time) { s.step, s.deadline = step, until }

// becomeSecond begins to set up the second link, which has deadlines of its own.
func (s *setup) becomeSecond() { s.becomeWaiting(waitSecondLink, time.Time{}) }

// becomeFailed waits until both sides agree that there is no second link (C.7.1).
func (s *setup) becomeFailed(second llc.LinkID, until time.Time) {
	s.becomeWaiting(waitDeleteReply, until)
	s.failed = second
}

// becomeDone ends the set-up. It reports whether the second link had failed.
func (s *setup) becomeDone() (failed bool) {
	failed = s.step == waitDeleteReply
	*s = setup{step: setupDone}
	return failed
}

// unexpected refuses a CONFIRM LINK that nothing waits for.
func (s *setup) unexpected(m llc.ConfirmLink) error {
	if m.Response {
		return fmt.Errorf("%w: CONFIRM LINK response while %v is awaited", ErrProtocol, s.step)
	}
	return fmt.Errorf("%w: CONFIRM LINK while %v is awaited", ErrProtocol, s.step)
}

// noEyeCatcher are both flags that say: no RMBE eye catchers, in either
// direction. Linux demands them.
const noEyeCatcher = llc.NoRMBEEyecatcher

// AddFirstLink gives the group its first queue pair, in state RESET or INIT.
func (g *Group) AddFirstLink(local Endpoint) LinkIndex {
	invariant.Must(g.state == Forming && g.links.first().state == linkDown, "first link added twice")
	l := g.links.first()
	g.links.becomeForming(l, local)
	l.id = g.side.firstNumber(g)
	return l.index
}

// ConnectPeer gives the peer's half of the first link, from its Accept or
// Confirm, and starts the LLC part.
func (g *Group) ConnectPeer(now time.Time, peer Endpoint) {
	l := g.links.first()
	invariant.Must(g.state == Forming && l.state == linkForming, "peer connected without a forming link")
	l.peer = peer
	l.peer.MTU = min(peer.MTU, l.local.MTU)
	g.out.put(Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
	g.side.connected(g, now, l)
}

// connected waits for the server's CONFIRM LINK.
func (c *client) connected(g *Group, now time.Time, _ *link) {
	g.setup.becomeWaiting(waitConfirmLink, now.Add(ConfirmLinkTimeout))
}

// connected sends CONFIRM LINK.
func (s *server) connected(g *Group, now time.Time, l *link) {
	g.out.put(Output{Kind: OutTransmit, Link: l.index})
	g.setup.becomeWaiting(waitConfirmLinkReply, now.Add(ConfirmLinkReplyTimeout))
	l.send(g.confirmLink(l, noEyeCatcher, false))
}

// firstNumber: the server numbers links.
func (c *client) firstNumber(*Group) llc.LinkID { return 0 }

func (s *server) firstNumber(g *Group) llc.LinkID { return g.links.nextID(g.isDeleting) }

// checkConfirmLink compares what the peer echoes with what its CLC message
// said (C.7.1: incorrect link information is a protocol error).
func checkConfirmLink(l *link, m llc.ConfirmLink) error {
	p := &l.peer
	if m.QPN != p.QPN || m.GID != p.GID {
		return fmt.Errorf("%w: CONFIRM LINK names QP %v of %v, expected QP %v of %v", ErrProtocol, m.QPN, m.GID, p.QPN, p.GID)
	}
	return nil
}

// handleConfirmLink takes the server's request.
func (c *client) handleConfirmLink(g *Group, now time.Time, l *link, m llc.ConfirmLink) error {
	if g.setup.step == setupDone || l != g.links.first() {
		return c.handleConfirmNew(g, now, l, m)
	}
	if m.Response || g.setup.step != waitConfirmLink {
		return g.setup.unexpected(m)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if err := g.settleLimits(m); err != nil {
		return err
	}
	g.bigEndian = m.BigEndian
	if !g.settleDialect(m.Flags) {
		g.fail(FaultEyeCatcher, nil)
		return nil
	}
	l.id = m.Link
	l.peerUserID = m.UserID
	g.out.put(Output{Kind: OutTransmit, Link: l.index})
	l.send(g.confirmLink(l, g.eyeCatcherFlags(), true))
	if !g.offersSecond() {
		g.becomeActive(now)
		return nil
	}
	g.setup.becomeWaiting(waitAddLink, now.Add(ExchangeTimeout))
	return nil
}

// handleConfirmLink takes the client's answer.
func (s *server) handleConfirmLink(g *Group, now time.Time, l *link, m llc.ConfirmLink) error {
	if g.setup.step == setupDone || l != g.links.first() {
		return s.handleConfirmNew(g, now, l, m)
	}
	if !m.Response || g.setup.step != waitConfirmLinkReply {
		return g.setup.unexpected(m)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if err := g.settleLimits(m); err != nil {
		return err
	}
	g.bigEndian = m.BigEndian
	if m.Link != l.id {
		return fmt.Errorf("%w: CONFIRM LINK response for link %d, expected %d", ErrProtocol, m.Link, l.id)
	}
	if !g.settleDialect(m.Flags) {
		g.fail(FaultEyeCatcher, nil)
		return nil
	}
	l.peerUserID = m.UserID
	if !g.offersSecond() {
		g.becomeActive(now)
		return nil
	}
	g.setup.becomeSecond()
	s.begin(g, now, l, false)
	return nil
}

// expired is what a missing answer means at each step (C.7.1).
func (s *setup) expired(g *Group, now time.Time) {
	switch s.step {
	case waitConfirmLinkReply, waitConfirmLink:
		g.fail(FaultConfirmLinkTimeout, nil)
	case waitAddLink:
		g.fail(FaultAddLinkTimeout, nil)
	case waitDeleteReply:
		if g.dialect == llc.DialectLinux {
			// Linux drops the DELETE LINK when it comes in place of what it
			// waits for, and goes on with one link by itself (C.8).
			g.becomeActive(now)
			return
		}
		g.fail(FaultAddLinkTimeout, nil)
	case waitPeer, waitSecondLink, setupDone:
	}
}

// handleData takes data that arrives before the set-up is complete. It may not (§3.5.1.6), but
// the end of the set-up may be the peer's to decide.
func (s *setup) handleData(g *Group, now time.Time) error {
	switch s.step {
	case waitAddLink:
		g.out.event(EventPointOfNoReturn, nil)
		g.becomeActive(now)
		return nil
	case waitDeleteReply:
		g.becomeActive(now)
		return nil
	case waitSecondLink:
		if g.side.dataInSetup(g, now) {
			return nil
		}
	case waitPeer, waitConfirmLinkReply, waitConfirmLink, setupDone:
	}
	return fmt.Errorf("%w: CDC message during first contact", ErrProtocol)
}

// dataInSetup: a server that sends has ended the set-up with one link.
func (c *client) dataInSetup(g *Group, now time.Time) bool {
	g.adding.drop(g)
	g.becomeActive(now)
	g.growth.schedule(g, now)
	return true
}

// dataInSetup: a client that sends has confirmed the second link, and its CONFIRM LINK is
// still to come over that. A Linux client that sends earlier has given the second link up,
// without a word about it.
func (s *server) dataInSetup(g *Group, now time.Time) bool {
	confirmed := g.adding.step == addWaitConfirm
	switch {
	case confirmed:
	case g.dialect == llc.DialectLinux:
		g.adding.drop(g)
	default:
		return false
	}
	g.becomeActive(now)
	if !confirmed {
		g.growth.schedule(g, now) // C.8
	}
	return true
}

// handleDeleteReply takes the answer to DELETE LINK during first contact.
func (s *setup) handleDeleteReply(g *Group, now time.Time) {
	if s.step != waitDeleteReply {
		g.Discarded++
		return
	}
	g.becomeActive(now)
}

// handleDeleteLink takes a request during first contact: it may be about
// the second link only.
func (s *setup) handleDeleteLink(g *Group, now time.Time, from *link, m llc.DeleteLink) error {
	switch {
	case !m.All && g.adding.hasNumber(g, m.Link):
		g.side.addDeleted(g, now, from, m)
		return nil
	case !m.All && s.step == waitDeleteReply && m.Link == s.failed:
		g.side.handleDeleteSecond(g, now, from, m)
		return nil
	case !m.All && m.Link != g.links.first().id:
		answerUnknown(from, m)
		return nil
	}
	m.Response = true
	from.send(m)
	return fmt.Errorf("%w: DELETE LINK during first contact", ErrProtocol)
}
