// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// credits is the account of receive buffers of both peers (§10). A message takes one of its receiver's; every
// message tells how many its sender has posted, and after which message of the peer.
//
// Seen from the sender of messages, the peer's word is a limit: the number of the last message that there is
// room for is MSeqAck + Bufs. What we told is a limit, too. Numbers wrap.
type credits struct {
	// What we may send.
	sent      uint32 // number of our last message
	peerAck   uint32 // of it, what the peer has received
	ackSeen   bool   // the peer's MSeqAck was more than 0 once, so that 0 is a number and does not mean nothing
	peerLimit uint32 // the last message that it has room for

	// What the peer may send.
	any      bool   // it sent something
	received uint32 // number of its last message
	posted   int
	pool     int    // receive buffers of the connection
	told     uint32 // the limit that our last message told
	toldAck  bool   // it told an MSeqAck of more than 0 once
	holds    bool   // held is set: a SrcAvailCancel is not acknowledged yet (§9.5.4)
	held     uint32

	// News is set by what is worth an update at once.
	news     bool
	updateAt time.Time // when an update is due without news
	delay    time.Duration
	late     bool      // that time has come: the next answer without news waits longer
	prodAt   time.Time // when to ask for credit
}

// none is the number before the first message, which is 0 (§6.1.5).
const none = ^uint32(0)

// newCredits begins the account of an established connection: with the receive buffers that we have, how many
// messages our Hello or HelloAck let the peer send, and how many the peer's let us. The HelloAck itself
// takes one of those of the Hello.
func newCredits(pool, granted, peerBufs int) credits {
	return credits{
		sent: none, peerAck: none, received: none, peerLimit: none + uint32(peerBufs), posted: pool, pool: pool,
		told: none + uint32(granted), delay: updateDelay,
	}
}

// after reports whether number a comes after b.
func after(a, b uint32) bool { return int32(a-b) > 0 }

// available is how many messages we may send (§10.2). While the peer holds its acknowledgement back it may
// seem to take credit back: there is none, then.
func (c *credits) available() int { return max(0, int(int32(c.peerLimit-c.sent))) }

// ack is the MSeqAck of a message that goes now (§6.1.6, §9.5.4).
func (c *credits) ack() uint32 {
	switch {
	case c.holds:
		return c.held - 1
	case !c.any:
		return 0
	}
	return c.received
}

// limit is what the peer learns of a message that goes now. An MSeqAck of 0 says nothing, as long as the peer
// saw no other.
func (c *credits) limit() uint32 {
	ack := c.ack()
	if ack == 0 && !c.toldAck {
		ack = none
	}
	return ack + uint32(c.posted)
}

// raises reports whether a message that goes now gives the peer credit.
func (c *credits) raises() bool { return after(c.limit(), c.told) }

// peerHas is how many messages the peer may send, as far as we told it.
func (c *credits) peerHas() int { return int(int32(c.told - c.received)) }

// allows reports whether a message may go (§10.5): one credit is kept for a message that gives credit, one more
// for those without payload.
func (c *credits) allows(payload bool) bool {
	switch n := c.available(); {
	case n >= 3:
		return true
	case n == 2:
		return !payload
	case n == 1:
		return !payload && c.raises()
	}
	return false
}

// stamp fills in what every message tells.
func (c *credits) stamp(m *bsdh.Message) {
	c.sent++
	m.Seq, m.Ack, m.Bufs = c.sent, c.ack(), uint16(c.posted)
	c.toldAck = c.toldAck || m.Ack > 0
	if l := c.limit(); c.toldAck || after(l, c.told) {
		c.told = l
	}
	if c.late {
		c.delay = min(2*c.delay, maxUpdateDelay)
	}
	c.news, c.late, c.updateAt, c.prodAt = false, false, time.Time{}, time.Time{}
}

// take checks and counts a message that arrived.
func (c *credits) take(m *bsdh.Message) error {
	if m.Seq != c.received+1 {
		return violation(BadNumber, "%v has number %d, want %d", m.MID, m.Seq, c.received+1)
	}
	if c.posted == 0 {
		return violation(NoCredit, "%v without credit", m.MID)
	}
	ack := m.Ack
	if !c.ackSeen {
		// 0 means nothing, or the first message; the first one of them cannot be told from the other.
		if ack == 0 {
			ack = none
		} else {
			c.ackSeen = true
		}
	}
	if c.sent-ack > c.sent-c.peerAck {
		return violation(BadAck, "%v acknowledges %d, sent are %d, acknowledged %d", m.MID, m.Ack, c.sent, c.peerAck)
	}
	c.any, c.received = true, m.Seq
	c.posted--
	c.peerAck = ack
	// As long as an MSeqAck of 0 says nothing, a receive buffer that the first message took looks as if it were
	// taken back.
	if l := ack + uint32(m.Bufs); c.ackSeen || after(l, c.peerLimit) {
		c.peerLimit = l
	}
	return nil
}

// acked reports whether the peer had received our message of a number.
func (c *credits) acked(seq uint32) bool { return !after(seq, c.peerAck) }

// hold keeps MSeqAck below the number of a SrcAvailCancel.
func (c *credits) hold(seq uint32) { c.holds, c.held = true, seq }

// tell says that there is something to answer, not just credit.
func (c *credits) tell() {
	c.news, c.delay = true, updateDelay
}

// updateDue reports whether the peer must hear of new receive buffers by a message of its own (§10.4,
// §10.5): it is down to one credit; or it has used up half, and would get a quarter of them back.
// Without news the answer waits.
func (c *credits) updateDue(now time.Time) bool {
	low := c.peerHas() <= 1
	switch {
	case !c.raises():
	case c.news:
		c.updateAt, c.late = time.Time{}, false
		return low || c.peerHas() <= c.pool/2 && int(int32(c.limit()-c.told)) >= c.pool/4
	case !low:
	case c.updateAt.IsZero():
		c.updateAt = now.Add(c.delay)
		return false
	default:
		c.late = !now.Before(c.updateAt)
		return c.late
	}
	c.updateAt, c.late = time.Time{}, false
	return false
}

// prodDue reports whether a message without payload should use up a credit. With two we may send no payload, and the
// peer need not say anything before we are down to one (§10.5): payload would wait for ever.
func (c *credits) prodDue(now time.Time, waits bool) bool {
	switch {
	case !waits || c.available() != 2:
		c.prodAt = time.Time{}
	case c.prodAt.IsZero():
		c.prodAt = now.Add(updateDelay)
	default:
		return !now.Before(c.prodAt)
	}
	return false
}
