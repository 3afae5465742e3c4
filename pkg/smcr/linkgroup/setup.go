// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
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
//	  waitAddLinkReply  ---- ADD LINK ------->  waitAddLink
//	     |               <-- ADD LINK rsp ------  | rejected: no second RNIC
//	     | accepted: DELETE LINK ------------->   |
//	  waitDeleteReply   <-- DELETE LINK rsp ---   |
//	  setupDone                                setupDone
type setupStep uint8

const (
	waitPeer setupStep = iota
	waitConfirmLinkReply
	waitAddLinkReply
	waitDeleteReply
	waitConfirmLink
	waitAddLink
	setupDone
)

// spareLinkID and firstLinkID are the link numbers that a server gives.
const (
	firstLinkID llc.LinkID = 1
	spareLinkID llc.LinkID = 2
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
	if g.cfg.Role == Server {
		l.id = firstLinkID
	}
	return l.index
}

// OfferSpare gives a server the endpoint that it offers as second link. With
// one RNIC it has the same GID and MAC as the first, which asks for an
// asymmetric link (§3.5.1.6).
func (g *Group) OfferSpare(e Endpoint) { g.spare, g.hasSpare = e, true }

// ConnectPeer gives the peer's half of the first link, from its Accept or
// Confirm, and starts the LLC part.
func (g *Group) ConnectPeer(now time.Time, peer Endpoint) {
	l := g.firstLink()
	invariant.Must(g.state == Forming && l.state == linkForming, "peer connected without a forming link")
	l.peer = peer
	l.peer.MTU = min(peer.MTU, l.local.MTU)
	g.out = append(g.out, Output{Kind: OutReceive, Link: l.index, Peer: l.peer})
	g.deadline = now.Add(ConfirmLinkTimeout)
	if g.cfg.Role == Client {
		g.step = waitConfirmLink
		return
	}
	g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
	g.step = waitConfirmLinkReply
	l.send(g.confirmLink(l, noEyeCatcher, false))
}

func (g *Group) confirmLink(l *link, flags llc.ConfirmLinkFlags, response bool) llc.ConfirmLink {
	return llc.ConfirmLink{
		Header:   llc.Header{Response: response},
		Flags:    flags,
		MAC:      l.local.MAC,
		GID:      l.local.GID,
		QPN:      l.local.QPN,
		Link:     l.id,
		UserID:   g.cfg.UserID,
		MaxLinks: g.maxLinks,
	}
}

// checkConfirmLink compares what the peer echoes with what its CLC message
// said (C.7.1: incorrect link information is a protocol error).
func checkConfirmLink(l *link, m llc.ConfirmLink) error {
	p := &l.peer
	if m.QPN != p.QPN || m.GID != p.GID {
		return fmt.Errorf("%w: CONFIRM LINK names QP %v of %v, expected QP %v of %v", ErrProtocol, m.QPN, m.GID, p.QPN, p.GID)
	}
	if m.MaxLinks == 0 {
		return fmt.Errorf("%w: CONFIRM LINK allows no links", ErrProtocol)
	}
	return nil
}

// settleDialect takes the peer's flags; false when it wants what we do not
// allow, or one of the two directions only.
func (g *Group) settleDialect(flags llc.ConfirmLinkFlags) bool {
	if flags.Has(noEyeCatcher) {
		g.dialect = llc.DialectLinux
		return true
	}
	g.dialect = llc.DialectRFC
	return g.cfg.AllowRFC && flags&noEyeCatcher == 0
}

// handleConfirmLink takes the server's request at the client.
func (g *Group) handleConfirmLink(now time.Time, l *link, m llc.ConfirmLink) error {
	if g.step != waitConfirmLink {
		return fmt.Errorf("%w: CONFIRM LINK in step %d", ErrProtocol, g.step)
	}
	if err := checkConfirmLink(l, m); err != nil {
		return err
	}
	if !g.settleDialect(m.Flags) {
		g.fail(FaultEyeCatcher, nil)
		return nil
	}
	l.id = m.Link
	l.peerUserID = m.UserID
	g.out = append(g.out, Output{Kind: OutTransmit, Link: l.index})
	var flags llc.ConfirmLinkFlags
	if g.dialect == llc.DialectLinux {
		flags = noEyeCatcher
	}
	l.send(g.confirmLink(l, flags, true))
	g.step = waitAddLink
	g.deadline = now.Add(FlowTimeout)
	return nil
}

// handleConfirmLinkReply takes the client's answer at the server.
func (g *Group) handleConfirmLinkReply(now time.Time, l *link, m llc.ConfirmLink) error {
	if g.step != waitConfirmLinkReply {
		return fmt.Errorf("%w: CONFIRM LINK response in step %d", ErrProtocol, g.step)
	}
	if err := checkConfirmLink(l, m); err != nil {
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
	if !g.hasSpare {
		g.becomeActive(now)
		return nil
	}
	g.event(EventPointOfNoReturn, nil)
	l.send(llc.AddLink{
		Dialect: g.dialect,
		MAC:     g.spare.MAC,
		GID:     g.spare.GID,
		QPN:     g.spare.QPN,
		Link:    spareLinkID,
		MTU:     g.spare.MTU,
		PSN:     g.spare.PSN,
	})
	g.step = waitAddLinkReply
	g.deadline = now.Add(FlowTimeout)
	return nil
}

// handleAddLink takes the server's request at the client. There is no second
// RNIC here, so the answer is always no, and at once: a kernel server waits
// for it with a lock held.
func (g *Group) handleAddLink(now time.Time, l *link, m llc.AddLink) error {
	if g.cfg.Role == Server {
		g.Discarded++ // a suggestion (§3.5.5.1.2) that cannot be followed with one RNIC
		return nil
	}
	if g.state == Forming && g.step != waitAddLink {
		return fmt.Errorf("%w: ADD LINK in step %d", ErrProtocol, g.step)
	}
	m.Dialect = g.dialect
	m.Response, m.Reject, m.Reason = true, true, llc.RejectNoAlternatePath
	if !m.MTU.Valid() {
		m.Reason = llc.RejectInvalidMTU
	}
	if g.state == Forming {
		g.event(EventPointOfNoReturn, nil)
	}
	l.send(m)
	if g.state == Forming {
		g.becomeActive(now)
	}
	return nil
}

// handleAddLinkReply takes the client's answer at the server.
func (g *Group) handleAddLinkReply(now time.Time, l *link, m llc.AddLink) error {
	if g.step != waitAddLinkReply {
		return fmt.Errorf("%w: ADD LINK response in step %d", ErrProtocol, g.step)
	}
	if m.Link != spareLinkID && !m.Reject {
		return fmt.Errorf("%w: ADD LINK response for link %d, expected %d", ErrProtocol, m.Link, spareLinkID)
	}
	if m.Reject {
		g.becomeActive(now)
		return nil
	}
	// The client has a second RNIC and would take an asymmetric link. The
	// group stays with one link; no data flows until the client has agreed
	// (C.7.1, second link of the first contact).
	l.send(llc.DeleteLink{Link: spareLinkID, Orderly: true, Reason: llc.DeleteAsymmetric})
	g.step = waitDeleteReply
	g.deadline = now.Add(FlowTimeout)
	if g.dialect == llc.DialectLinux {
		g.deadline = now.Add(ResendInterval) // as long as Linux waits; see setupExpired
	}
	return nil
}

// setupExpired is what a missing answer means at each step (C.7.1).
func (g *Group) setupExpired(now time.Time) {
	switch g.step {
	case waitConfirmLinkReply, waitConfirmLink:
		g.fail(FaultConfirmLinkTimeout, nil)
	case waitAddLinkReply, waitAddLink:
		g.fail(FaultAddLinkTimeout, nil)
	case waitDeleteReply:
		if g.dialect == llc.DialectLinux {
			// Linux drops the DELETE LINK when it comes in place of ADD LINK
			// CONTINUATION, and goes on with one link by itself (C.8).
			g.becomeActive(now)
			return
		}
		g.fail(FaultAddLinkTimeout, nil)
	case waitPeer, setupDone:
	}
}

// LocalEndpoint returns our half of the link, for CLC messages.
func (g *Group) LocalEndpoint() Endpoint { return g.firstLink().local }

// MatchesPeer reports whether an Accept with F=0 means this group: it names
// the peer's half of one of its links (§3.5.2.3).
func (g *Group) MatchesPeer(qpn rdma.QPN, gid rdma.GID, mac rdma.MAC) bool {
	p := &g.firstLink().peer
	return g.state == Active && p.QPN == qpn && p.GID == gid && p.MAC == mac
}
