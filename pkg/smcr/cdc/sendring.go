// SPDX-License-Identifier: Apache-2.0

package cdc

import "github.com/smcr-io/kube-smcr/internal/invariant"

// sendRing is how far the stream that we write has come: from the application into the send
// buffer, from there into the peer's RMBE, and out of the RMBE to the peer's application.
//
//	completed <= sent <= announcedTo <= produced <= completed + buffer
//	peerConsumed <= sent <= announcedTo <= peerConsumed + capacity of the RMBE
type sendRing struct {
	ring   Ring   // the peer's RMBE, which we write; zero before Activate
	buffer uint32 // bytes that the application may be ahead of the network

	produced     uint64 // by the application
	sent         uint64 // told to the peer
	completed    uint64 // delivered, the send buffer before it is free
	peerConsumed uint64
	announcedTo  uint64 // the furthest position ever told to the peer: sent, but after a failover

	blocked   bool // the last message had B
	askUpdate bool // R goes with the next message
}

// window is how many bytes the peer's RMBE can take now.
func (s *sendRing) window() uint32 {
	if s.ring.Size == 0 {
		return 0
	}
	return s.ring.Capacity() - uint32(s.sent-s.peerConsumed)
}

// unsent is how many bytes of the send buffer were not told to the peer.
func (s *sendRing) unsent() uint64 { return s.produced - s.sent }

// room is how many bytes up to limit one message may announce.
func (s *sendRing) room(limit uint64) uint64 {
	return min(limit-s.sent, uint64(s.window()), MaxTransmission)
}

// awaitsWindow reports whether data waits because the peer's RMBE is full.
func (s *sendRing) awaitsWindow() bool { return s.produced > s.sent && s.window() == 0 }

// isFull reports whether the send buffer is full, so that the application waits, or will
// wait when it writes.
func (s *sendRing) isFull() bool { return s.produced-s.completed == uint64(s.buffer) }

// isQuarterFull reports whether a quarter of the send buffer waits for delivery.
func (s *sendRing) isQuarterFull() bool { return s.produced-s.completed >= uint64(s.buffer)/4 }

// delivered is up to where the data has arrived: what the peer has read has, even if the
// completion that says so is still on its way.
func (s *sendRing) delivered() uint64 { return max(s.completed, s.peerConsumed) }

// produce takes over what the application has put into the send buffer up to pos.
func (s *sendRing) produce(pos uint64) {
	invariant.Must(pos >= s.produced && pos-s.completed <= uint64(s.buffer), "produced outside the send buffer")
	s.produced = pos
}

// complete frees the send buffer up to pos, and reports whether the buffer has more room now.
func (s *sendRing) complete(pos uint64) bool {
	if pos <= s.completed {
		return false
	}
	s.completed = pos
	return true
}

// announce moves sent by the n bytes that the next message tells the peer of. The message
// has B if then the RMBE is full and the application has more, or waits for the send buffer.
func (s *sendRing) announce(n uint32) {
	if n > 0 {
		s.sent += uint64(n)
		s.announcedTo = s.sent
	}
	s.blocked = s.window() == 0 && (s.produced > s.sent || s.isFull())
}

// goBack makes sent the position up to which the data has arrived, after the link was lost.
// It reports whether the send buffer has more room now.
func (s *sendRing) goBack() bool {
	s.sent = s.delivered()
	return s.complete(s.sent)
}

// isRepeating reports whether the peer was told of data that is to be sent again.
func (s *sendRing) isRepeating() bool { return s.sent < s.announcedTo }

// cursor is the producer cursor for the peer, which never goes back.
func (s *sendRing) cursor() Cursor { return s.ring.Cursor(max(s.sent, s.announcedTo)) }

// position is the position of the peer's consumer cursor.
func (s *sendRing) position(cons Cursor) (uint64, error) {
	return s.ring.Advance(s.peerConsumed, cons)
}

// consume takes over how far the peer has read. What was read need not be sent again.
func (s *sendRing) consume(pos uint64) {
	s.peerConsumed = pos
	s.sent = max(s.sent, pos)
}
