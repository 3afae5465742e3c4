// SPDX-License-Identifier: Apache-2.0

package cdc

// The rules of urgent data (RFC 7609 §4.7.5, §4.7.6, A.4), with what Linux
// adds to them:
//
//   - P announces urgent data as soon as it is known, U goes with the write
//     that ends with the urgent byte, so that the producer cursor is one past
//     it.
//   - Nothing is written after the urgent byte until the peer has consumed it.
//   - Linux takes P without new data as the announcement of another urgent
//     byte and forgets the one that it has. So both flags go off after the
//     message with U, none announces the next byte before the last was
//     consumed, and a repetition after a failover has U without P.

// Urgent tells that the byte before position pos of our stream is urgent. It
// is to be called before Produce hands over that byte. It returns false if the
// byte was sent before, which makes it an ordinary one. As with TCP, there is
// one urgent byte at a time: a later one replaces one not announced yet.
func (c *Conn) Urgent(pos uint64) bool {
	if pos <= c.announcedTo {
		return false
	}
	c.urgent, c.urgentTold = pos, false
	return true
}

// PeerUrgent returns the position one past the last urgent byte that the peer
// has written, 0 if it has written none.
func (c *Conn) PeerUrgent() uint64 { return c.urgentEnd }

// PeerUrgentPending reports that the peer announced urgent data that is not
// written yet: the application should read on to make room for it.
func (c *Conn) PeerUrgentPending() bool { return c.peerUrgent }

// awaitsUrgentRead: nothing may follow the last urgent byte yet.
func (c *Conn) awaitsUrgentRead() bool { return c.peerConsumed < c.urgentSent }

// sendLimit is the position up to which data may be sent for urgent data's
// sake: none beyond an urgent byte that the peer has not consumed, and no
// write past one that is to be announced.
func (c *Conn) sendLimit() uint64 {
	if c.urgent == 0 && !c.awaitsUrgentRead() {
		return c.produced
	}
	if c.awaitsUrgentRead() {
		return c.urgentSent
	}
	return min(c.urgent, c.produced)
}

// urgentNoticeDue: urgent data waits for window and the peer does not know of
// it (§4.7.6).
func (c *Conn) urgentNoticeDue() bool {
	return c.urgent != 0 && !c.urgentTold && c.produced > c.sent && c.Window() == 0 &&
		!c.awaitsUrgentRead() && !c.peerFlags.Closed() && !c.sentFlags.Closed()
}

// urgentFlags are P and U of the message after a write of [from, c.sent).
func (c *Conn) urgentFlags(from uint64) Flags {
	var f Flags
	switch {
	case from < c.urgentSent && c.sent == c.urgentSent:
		return f.WithUrgentPresent() // again, after a failover
	case c.urgent == 0 || c.awaitsUrgentRead():
		return 0
	case c.sent == c.urgent:
		c.urgentSent, c.urgent = c.urgent, 0
		return f.WithUrgentPending().WithUrgentPresent()
	case c.produced > c.sent:
		c.urgentTold = true
		return f.WithUrgentPending()
	}
	return 0
}

// handleUrgent takes P and U of a message whose cursors were taken over.
func (c *Conn) handleUrgent(m Message) Events {
	pending := m.Flags.UrgentPending() && !m.Flags.UrgentPresent()
	ev := Events(0)
	if pending && !c.peerUrgent {
		ev = PeerUrgent
	}
	c.peerUrgent = pending
	// The same position again, or one before what was seen, is a repetition
	// (§4.6.2).
	if m.Flags.UrgentPresent() && c.peerProduced != c.urgentEnd && m.Prod == c.local.Cursor(c.peerProduced) {
		c.urgentEnd = c.peerProduced
		ev = PeerUrgent
	}
	return ev
}
