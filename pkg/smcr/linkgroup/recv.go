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
		g.last.handle(now, &g.terms, g.side, &g.out, index, b)
		return nil
	}
	l := &g.links.at[index]
	isCDC := len(b) > 0 && b[0] == cdc.Type
	if l.state <= linkWanted && (!isCDC || g.state != Active) {
		g.handleLate(now, l, b)
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
	m, err := llc.Parse(g.dialect, g.version, b)
	var unknown *llc.UnknownTypeError
	switch {
	case errors.As(err, &unknown) && (unknown.Optional || g.dialect == llc.DialectLinux):
		// Optional opcodes are discarded (A.3); Linux discards all unknown
		// ones, and so do we towards it.
		g.Discarded++
		return nil
	case err != nil:
		err = fmt.Errorf("%w (begins with % x)", err, b[:min(len(b), 4)])
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

// handleLate takes a message of a link that was closed while the message was on its way here. It means
// nothing any more, but that the peer ends the group (C.7.1): that is answered over another link. Of a link that
// was never ACTIVE nobody knows that its other end is the peer's.
func (g *Group) handleLate(now time.Time, l *link, b []byte) {
	parsed, err := llc.Parse(g.dialect, g.version, b)
	m, ok := parsed.(llc.DeleteLink)
	if err != nil || !ok || !m.All || m.Response || g.state == Forming || l.state != linkDown || l.born == 0 {
		g.Discarded++
		return
	}
	g.ending.handleDeleteAll(g, now, g.links.other(nil), m)
}

func (g *Group) handleCDC(now time.Time, l *link, b []byte) error {
	m, err := cdc.Parse(b)
	if err != nil {
		g.Discarded++ // as Linux does; the link itself is sound
		return err
	}
	c := g.conns.byToken(m.Token)
	if c == nil || c.done {
		g.Discarded++ // a late message for a connection that is gone
		return nil
	}
	if g.state == Forming {
		if err := g.setup.handleData(g, now); err != nil {
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
	if _, ok := m.(llc.ConfirmLink); !ok && l.state == linkForming && (g.state != Forming || l != g.links.first()) {
		return fmt.Errorf("%w: %v on a link that is not confirmed", ErrProtocol, m.Type())
	}
	if !g.fits(m) {
		g.Discarded++
		return nil
	}
	switch m := m.(type) {
	case llc.ConfirmLink:
		return g.side.handleConfirmLink(g, now, l, m)
	case llc.AddLink:
		return g.side.handleAddLink(g, now, l, m)
	case llc.AddLinkContinuation:
		return g.side.handleContinuation(g, now, l, m)
	case llc.DeleteLink:
		return g.handleDeleteLink(now, l, m)
	case llc.ConfirmRKey:
		if m.Response {
			g.ourKeys.handleReply(g, now, m)
		} else {
			g.peerKeys.handleConfirm(g, now, l, m)
		}
	case llc.ConfirmRKeyContinuation:
		if m.Response {
			g.ourKeys.handleContReply(g, now, m)
		} else {
			g.peerKeys.handleCont(g, now, l, m)
		}
	case llc.DeleteRKey:
		if m.Response {
			g.ourKeys.handleDeleteReply(g, m.RKeys[:m.N()])
		} else {
			g.peerKeys.handleDelete(g, l, m)
		}
	case llc.DeleteRKeyV2:
		if m.Response {
			g.ourKeys.handleDeleteReply(g, m.RKeys)
		} else {
			g.peerKeys.handleDeleteV2(g, l, m)
		}
	case llc.RequestAddLink:
		g.side.handleRequestAddLink(g, now, l, m)
	case llc.TestLink:
		return l.handleTest(g, now, m)
	}
	return nil
}

// handleTest answers TEST LINK, or takes the answer to ours.
func (l *link) handleTest(g *Group, now time.Time, m llc.TestLink) error {
	if !m.Response {
		m.Response = true
		l.send(m)
		return nil
	}
	asked, err := l.testAnswered(now, m.UserData)
	if !asked {
		g.Discarded++
	}
	return err
}
