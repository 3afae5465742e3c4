// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// HandleRecv takes a message that arrived on a link. The error, if any, is
// for logs and counters: the group has already done what follows from it.
func (g *Group) HandleRecv(now time.Time, index LinkIndex, b []byte) error {
	if g.state == Dead {
		g.handleLate(now, index, b)
		return nil
	}
	l := &g.links[index]
	isCDC := len(b) > 0 && b[0] == cdc.Type
	if l.state <= linkWanted && (!isCDC || g.state != Active) {
		g.Discarded++ // it was closed while the message was on its way here
		return nil
	}
	l.heard = now
	if isCDC {
		// Also of a link that is closed by now: the peer has had the
		// acknowledgement and will not send it again (§4.6.1).
		return g.handleCDC(now, l, b)
	}
	if len(l.queue) >= maxLLCQueue {
		err := fmt.Errorf("%w: %d LLC answers wait for the peer to take them", ErrProtocol, len(l.queue))
		g.loseLink(now, l, llc.DeleteProtocolViolation, FaultProtocol, err)
		return err
	}
	m, err := llc.Parse(g.dialect, g.cfg.Version, b)
	var unknown *llc.UnknownTypeError
	switch {
	case errors.As(err, &unknown) && (unknown.Optional || g.dialect == llc.DialectLinux):
		// Optional opcodes are discarded (A.3); Linux discards all unknown
		// ones, and so do we towards it.
		g.Discarded++
		return nil
	case err != nil:
		g.loseLink(now, l, llc.DeleteProtocolViolation, FaultProtocol, err)
		return err
	}
	if err := g.handleLLC(now, l, m); err != nil {
		// C.7.1: a link whose messages make no sense counts as failed.
		err = fmt.Errorf("link %d: %w", l.id, err)
		g.loseLink(now, l, llc.DeleteProtocolViolation, FaultProtocol, err)
		return err
	}
	return nil
}

func (g *Group) handleCDC(now time.Time, l *link, b []byte) error {
	m, err := cdc.Parse(b)
	if err != nil {
		g.Discarded++ // as Linux does; the link itself is sound
		return err
	}
	c := g.conn(m.Token)
	if c == nil || c.done {
		g.Discarded++ // a late message for a connection that is gone
		return nil
	}
	if g.state == Forming {
		// Data may not flow before the set-up is complete (§3.5.1.6), but
		// the end of the set-up may be the peer's to decide.
		switch g.step {
		case waitAddLink:
			g.event(EventPointOfNoReturn, nil)
			g.becomeActive(now)
		case waitDeleteReply:
			g.becomeActive(now)
		case waitSecondLink:
			if g.dataInSetup(now) {
				break
			}
			err := fmt.Errorf("%w: CDC message during first contact", ErrProtocol)
			g.fail(FaultProtocol, err)
			return err
		case waitPeer, waitConfirmLinkReply, waitConfirmLink, setupDone:
			err := fmt.Errorf("%w: CDC message during first contact", ErrProtocol)
			g.fail(FaultProtocol, err)
			return err
		}
	}
	if err := c.handleMessage(now, l, m); err != nil {
		return fmt.Errorf("connection 0x%08x: %w", uint32(c.token), err)
	}
	return nil
}

// handleLLC acts on one LLC message.
func (g *Group) handleLLC(now time.Time, l *link, m llc.Message) error {
	if _, ok := m.(llc.ConfirmLink); !ok && l.state == linkForming && (g.state != Forming || l != g.firstLink()) {
		return fmt.Errorf("%w: %v on a link that is not confirmed", ErrProtocol, m.Type())
	}
	if !g.fits(m) {
		g.Discarded++
		return nil
	}
	switch m := m.(type) {
	case llc.ConfirmLink:
		if m.Response {
			return g.handleConfirmLinkReply(now, l, m)
		}
		return g.handleConfirmLink(now, l, m)
	case llc.AddLink:
		if m.Response {
			return g.handleAddLinkReply(now, l, m)
		}
		return g.handleAddLink(now, l, m)
	case llc.AddLinkContinuation:
		return g.handleContinuation(now, l, m)
	case llc.DeleteLink:
		return g.handleDeleteLink(now, l, m)
	case llc.ConfirmRKey:
		if m.Response {
			g.handleConfirmRKeyReply(now, m)
		} else {
			g.handleConfirmRKey(now, l, m)
		}
	case llc.ConfirmRKeyContinuation:
		if m.Response {
			g.handleConfirmContReply(now, m)
		} else {
			g.handleConfirmCont(now, l, m)
		}
	case llc.DeleteRKey:
		if m.Response {
			g.handleDeleteRKeyReply(m.RKeys[:m.N()])
		} else {
			g.handleDeleteRKey(l, m)
		}
	case llc.DeleteRKeyV2:
		if m.Response {
			g.handleDeleteRKeyReply(m.RKeys)
		} else {
			g.handleDeleteRKeyV2(l, m)
		}
	case llc.RequestAddLink:
		g.handleRequestAddLink(l, m)
	case llc.TestLink:
		return g.handleTestLink(now, l, m)
	}
	return nil
}

// dataInSetup deals with data that arrives while the second link is being set
// up. A server that sends has ended the set-up with one link; a client that
// sends has confirmed the second one, and its CONFIRM LINK is still to come
// over that. A Linux client that sends earlier has given the second link up,
// without a word about it.
func (g *Group) dataInSetup(now time.Time) bool {
	confirmed := g.cfg.Role == Server && g.adding.step == addWaitConfirm
	switch {
	case confirmed:
	case g.cfg.Role == Client || g.dialect == llc.DialectLinux:
		g.dropSecond()
	default:
		return false
	}
	g.becomeActive(now)
	if g.cfg.Role == Server && !confirmed {
		g.scheduleRetry(now) // C.8
	}
	return true
}

func (g *Group) handleTestLink(now time.Time, l *link, m llc.TestLink) error {
	if !m.Response {
		m.Response = true
		l.send(m)
		return nil
	}
	if l.testSent.IsZero() {
		g.Discarded++
		return nil
	}
	if m.UserData != l.testData {
		return fmt.Errorf("%w: user data differs", ErrTestLink)
	}
	l.testSent, l.proven, l.answer = time.Time{}, l.testSent, now.Sub(l.testSent)
	return nil
}
