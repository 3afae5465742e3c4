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

// noEyeCatcher are both flags that say: no RMBE eye catchers, in either
// direction. Linux demands them.
const noEyeCatcher = llc.NoRMBEEyecatcher

// AddFirstLink gives the group its first queue pair, in state RESET or INIT.
func (g *Group) AddFirstLink(local Endpoint) LinkIndex {
	invariant.Must(g.state == Forming && g.firstLink().state == linkDown, "first link added twice")
	l := g.firstLink()
	l.local = local
	l.state = linkForming
	g.present |= 1 << l.index
	if g.cfg.Role == Server {
		l.id = g.nextLinkID()
	}
	return l.index
}

// ConnectPeer gives the peer's half of the first link, from its Accept or
// Confirm, and starts the LLC part.
func (g *Group) ConnectPeer(now time.Time, peer Endpoint) {
	l := g.firstLink()
	invariant.Must(g.state == Forming && l.state == linkForming, "peer connected without a forming link")
	l.peer = peer
	l.peer.MTU = min(peer.MTU, l.local.MTU)
	g.out = append(g.out, Output{Kind: OutReceive, Link: l.index, Peer: l.peerHalf()})
	if g.cfg.Role == Client {
		g.deadline = now.Add(ConfirmLinkTimeout)
		g.step = waitConfirmLink
		return
	}
	g.deadline = now.Add(ConfirmLinkReplyTimeout)
	g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
	g.step = waitConfirmLinkReply
	l.send(g.confirmLink(l, noEyeCatcher, false))
}

func (g *Group) confirmLink(l *link, flags llc.ConfirmLinkFlags, response bool) llc.ConfirmLink {
	m := llc.ConfirmLink{
		Header:   g.header(response),
		Flags:    flags,
		MAC:      l.local.MAC,
		GID:      l.local.GID,
		QPN:      l.local.QPN,
		Link:     l.id,
		UserID:   g.userID(l),
		MaxLinks: g.maxLinks,
	}
	if g.hasLimits() {
		m.MaxConns = uint8(g.maxConns)
	}
	return m
}

// checkConfirmLink compares what the peer echoes with what its CLC message
// said (C.7.1: incorrect link information is a protocol error).
func checkConfirmLink(l *link, m llc.ConfirmLink) error {
	p := &l.peer
	if m.QPN != p.QPN || m.GID != p.GID {
		return fmt.Errorf("%w: CONFIRM LINK names QP %v of %v, expected QP %v of %v", ErrProtocol, m.QPN, m.GID, p.QPN, p.GID)
	}
	return nil
}

// settleLimits takes the peer's largest numbers of links and connections: the
// smaller ones hold for the life of the group. A client may leave the links to
// the server (§2.2.2).
func (g *Group) settleLimits(m llc.ConfirmLink) error {
	if m.MaxLinks == 0 && g.cfg.Role == Client {
		return fmt.Errorf("%w: CONFIRM LINK allows no links", ErrProtocol)
	}
	if m.MaxLinks != 0 {
		g.maxLinks = min(g.maxLinks, m.MaxLinks)
	}
	if g.hasLimits() && m.MaxConns != 0 {
		g.maxConns = min(g.maxConns, int(m.MaxConns))
	}
	return nil
}

// offersSecond reports whether the first contact includes the offer of a second
// link. Linux waits for it even if it can have none, unless CLC has said so.
func (g *Group) offersSecond() bool {
	if g.hasLimits() {
		return g.cfg.MaxLinks > 1
	}
	return g.maxLinks > 1 || g.dialect == llc.DialectLinux
}

// eyeCatcherFlags are the flags of CONFIRM LINK once the dialect is settled.
func (g *Group) eyeCatcherFlags() llc.ConfirmLinkFlags {
	if g.dialect == llc.DialectLinux {
		return noEyeCatcher
	}
	return 0
}

// settleDialect takes the peer's flags; false when it wants what we do not
// allow, or one of the two directions only.
func (g *Group) settleDialect(flags llc.ConfirmLinkFlags) bool {
	if flags.Has(noEyeCatcher) {
		g.dialect = llc.DialectLinux
		return true
	}
	if !g.cfg.AllowRFC || g.isV2() || flags&noEyeCatcher != 0 {
		return false
	}
	g.dialect = llc.DialectRFC
	return true
}

// handleConfirmLink takes the server's request at the client.
func (g *Group) handleConfirmLink(now time.Time, l *link, m llc.ConfirmLink) error {
	if g.step == setupDone || l != g.firstLink() {
		return g.confirmSecond(now, l, m)
	}
	if g.step != waitConfirmLink {
		return fmt.Errorf("%w: CONFIRM LINK in step %d", ErrProtocol, g.step)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if err := g.settleLimits(m); err != nil {
		return err
	}
	if !g.settleDialect(m.Flags) {
		g.fail(FaultEyeCatcher, nil)
		return nil
	}
	l.id = m.Link
	l.peerUserID = m.UserID
	g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
	l.send(g.confirmLink(l, g.eyeCatcherFlags(), true))
	if !g.offersSecond() {
		g.becomeActive(now)
		return nil
	}
	g.step = waitAddLink
	g.deadline = now.Add(FlowTimeout)
	return nil
}

// handleConfirmLinkReply takes the client's answer at the server.
func (g *Group) handleConfirmLinkReply(now time.Time, l *link, m llc.ConfirmLink) error {
	if g.step == setupDone || l != g.firstLink() {
		return g.confirmSecond(now, l, m)
	}
	if g.step != waitConfirmLinkReply {
		return fmt.Errorf("%w: CONFIRM LINK response in step %d", ErrProtocol, g.step)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if err := g.settleLimits(m); err != nil {
		return err
	}
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
	g.step = waitSecondLink
	g.deadline = time.Time{}
	g.beginAdd(now, l, false)
	return nil
}

// setupExpired is what a missing answer means at each step (C.7.1).
func (g *Group) setupExpired(now time.Time) {
	switch g.step {
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
