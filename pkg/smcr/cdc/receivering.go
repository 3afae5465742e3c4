// SPDX-License-Identifier: Apache-2.0

package cdc

import "github.com/smcr-io/kube-smcr/internal/invariant"

// receiveRing is how far the stream that the peer writes has come: into our RMBE, from
// there to the application, and what the peer was told of that.
//
//	announced <= consumed <= peerProduced <= announced + capacity
type receiveRing struct {
	ring         Ring // our RMBE, which the peer writes
	peerProduced uint64
	consumed     uint64 // by the application
	announced    uint64 // told to the peer
	peerBlocked  bool   // the peer's last message had B
	updateAsked  bool   // the peer sent R, and was not told a new position since
}

// unread is how many bytes the application has not taken.
func (r *receiveRing) unread() uint64 { return r.peerProduced - r.consumed }

// consume takes over what the application has taken from the RMBE up to pos.
func (r *receiveRing) consume(pos uint64) {
	invariant.Must(pos >= r.consumed && pos <= r.peerProduced, "consumed what was not received")
	r.consumed = pos
}

// announce brings the peer up to date with the message that is next.
func (r *receiveRing) announce() {
	if r.consumed > r.announced {
		r.updateAsked = false
	}
	r.announced = r.consumed
}

// updateDue reports whether the peer asked how far we have read, waits for window, or has
// so little of it that the update is worth a message of its own (§4.5.1).
func (r *receiveRing) updateDue() bool {
	return r.peerBlocked || r.updateAsked || r.ring.UpdateDue(r.consumed, r.announced, r.peerProduced)
}

// isAt reports whether the peer has written up to the producer cursor, and no further.
func (r *receiveRing) isAt(prod Cursor) bool { return r.ring.Cursor(r.peerProduced) == prod }

// position is the position of the peer's producer cursor.
func (r *receiveRing) position(prod Cursor) (uint64, error) {
	return r.ring.Advance(r.peerProduced, prod)
}

// repeated is the position of a producer cursor that is behind the last one.
// After a change of link such a cursor is no fault: Linux goes back to what Linux knows
// to be delivered, and may say so before all is written again. The cursor cannot be
// further behind than the RMBE is large; the position never goes back.
func (r *receiveRing) repeated(prod Cursor) (uint64, error) {
	if _, err := r.ring.Distance(prod, r.ring.Cursor(r.peerProduced)); err != nil {
		return 0, ErrStale
	}
	return r.peerProduced, nil
}

// hasRoom reports whether the RMBE has room up to a producer position, as far as the peer
// knows.
func (r *receiveRing) hasRoom(pos uint64) bool { return pos-r.announced <= uint64(r.ring.Capacity()) }
