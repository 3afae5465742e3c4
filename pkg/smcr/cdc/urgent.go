// SPDX-License-Identifier: Apache-2.0

package cdc

// The rules of urgent data (RFC 7609 §4.7.5, §4.7.6, A.4), with what Linux
// adds to them:
//
//   - P announces urgent data as soon as it is known, U goes with the write
//     that ends with the urgent byte, so that the producer cursor is one past
//     the urgent byte.
//   - Nothing is written after the urgent byte until the peer has consumed it.
//   - Linux takes P without new data as the announcement of another urgent
//     byte and forgets the byte announced before. So both flags go off after the
//     message with U, none announces the next byte before the last was
//     consumed, and a repetition after a failover has U without P.

// sentUrgent is our urgent data.
//
//	next != 0, told = false   the peer does not know of the urgent byte
//	next != 0, told = true    P was sent, the byte waits for window
//	next == 0                 U was sent with the byte before sent
type sentUrgent struct {
	next uint64 // one past our urgent byte that is not announced as present; 0: none
	told bool   // P was sent for that byte
	sent uint64 // one past our last urgent byte announced as present
}

// receivedUrgent is the peer's urgent data.
type receivedUrgent struct {
	pending bool   // the last message had P without U
	end     uint64 // one past the peer's last urgent byte
}

// Urgent tells that the byte before position pos of our stream is urgent. Urgent
// is to be called before Produce hands over that byte. Urgent returns false if the
// byte was sent before, as an ordinary one. As with TCP, there is
// one urgent byte at a time: a later one replaces one not announced yet.
func (c *Conn) Urgent(pos uint64) bool {
	if pos <= c.send.announcedTo {
		return false
	}
	c.urgentOut.next, c.urgentOut.told = pos, false
	return true
}

// PeerUrgent returns the position one past the last urgent byte that the peer
// has written, 0 if there was none.
func (c *Conn) PeerUrgent() uint64 { return c.urgentIn.end }

// PeerUrgentPending reports that the peer announced urgent data that is not
// written yet: the application should read on to make room for that data.
func (c *Conn) PeerUrgentPending() bool { return c.urgentIn.pending }

// awaitsRead reports whether nothing may follow the last urgent byte yet.
func (u *sentUrgent) awaitsRead(s *sendRing) bool { return s.peerConsumed < u.sent }

// limit is the position up to which data may be sent for urgent data's
// sake: none beyond an urgent byte that the peer has not consumed, and no
// write past one that is to be announced.
func (u *sentUrgent) limit(s *sendRing) uint64 {
	switch {
	case u.awaitsRead(s):
		return u.sent
	case u.next == 0:
		return s.produced
	}
	return min(u.next, s.produced)
}

// noticeDue reports whether urgent data waits for window and the peer does not
// know that (§4.7.6).
func (u *sentUrgent) noticeDue(s *sendRing) bool {
	return u.next != 0 && !u.told && s.awaitsWindow() && !u.awaitsRead(s)
}

// flags are P and U of the message after a write of [from, s.sent).
func (u *sentUrgent) flags(from uint64, s *sendRing) Flags {
	var f Flags
	switch {
	case from < u.sent && s.sent == u.sent:
		return f.WithUrgentPresent() // again, after a failover
	case u.next == 0 || u.awaitsRead(s):
		return 0
	case s.sent == u.next:
		u.sent, u.next = u.next, 0
		return f.WithUrgentPending().WithUrgentPresent()
	case s.produced > s.sent:
		u.told = true
		return f.WithUrgentPending()
	}
	return 0
}

// handle takes P and U of a message whose cursors were taken over.
func (u *receivedUrgent) handle(m Message, r *receiveRing) Events {
	pending := m.Flags.UrgentPending() && !m.Flags.UrgentPresent()
	ev := Events(0)
	if pending && !u.pending {
		ev = PeerUrgent
	}
	u.pending = pending
	// The same position again, or one before what was seen, is a repetition
	// (§4.6.2).
	if m.Flags.UrgentPresent() && r.peerProduced != u.end && r.isAt(m.Prod) {
		u.end = r.peerProduced
		ev = PeerUrgent
	}
	return ev
}

// handleLate takes U of a message that a newer one has overtaken over another link: no other message of that peer says U.
// The peer writes nothing behind the urgent byte until it hears that the byte was consumed, and would not hear that
// soon without the mark (updateDue). Where the peer was told of all bytes the mark is not needed any more.
func (u *receivedUrgent) handleLate(m Message, r *receiveRing) Events {
	if !m.Flags.UrgentPresent() || r.announced == r.peerProduced || r.peerProduced == u.end || !r.isAt(m.Prod) {
		return 0
	}
	u.end = r.peerProduced
	return Readable | PeerUrgent
}

// updateDue reports whether the peer waits to hear that we have read on, whatever the
// window (§4.7.5): before urgent data, which needs room, and after urgent data, behind
// which the peer writes nothing before all of it was consumed.
func (u *receivedUrgent) updateDue(r *receiveRing) bool {
	return u.pending || r.announced < u.end && r.consumed >= u.end
}
