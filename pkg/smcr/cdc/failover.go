// SPDX-License-Identifier: Apache-2.0

package cdc

import "fmt"

// Failover moves the connection to another link after its own is closed: what
// was under way there is neither delivered nor reported any more. The next
// transmission is the failover validation message (§4.6.1), the one after it
// says everything again that the peer may not have heard (§4.6.2): one write
// of all data not known to have arrived, with new data if there is room, one
// message with a new sequence number, and the flags of our end.
//
// A connection whose link works moves without this once nothing is in flight.
func (c *Conn) Failover() Events {
	for c.told.size > 0 {
		if m := c.told.pop(); !m.validation {
			c.repeat = true
		}
	}
	if c.failed {
		c.repeat = false
		return 0
	}
	// Whatever is said next: also an end or a reset is a message over another
	// link, of which the peer may have missed the one before. Nothing is said
	// once the end was delivered, nor to a peer that is not known yet.
	c.validate = c.token != 0 && (c.state != Closed || c.repeat)
	// What the peer has read has arrived.
	delivered := max(c.completed, c.peerConsumed)
	c.sent = delivered
	if delivered > c.completed {
		c.completed = delivered
		return Writable
	}
	return 0
}

// Repeats reports whether a failover is not over: the validation message, or
// what may have been lost, has still to be said over the link that was chosen.
func (c *Conn) Repeats() bool { return c.validate || c.repeat }

// acknowledge notes how far the peer's RNIC has acknowledged writes (§4.6.1).
// Messages without a write do not count, since losing one loses no data; but
// the number must not fall so far behind that the peer takes it for a future
// one.
func (c *Conn) acknowledge(m sentMessage) {
	if m.write || m.seq-c.written > maxSeqLag {
		c.written = m.seq
	}
}

// validation builds the failover validation message. It has no sequence
// number of its own, and nothing in it counts but token, number and flag.
func (c *Conn) validation() Message {
	c.validate = false
	c.told.push(sentMessage{validation: true})
	return Message{Seq: c.written, Token: c.token, Flags: Flags(0).WithFailoverValidation()}
}

// handleValidation checks that what the peer believes delivered has arrived,
// or else data is lost and the connection must be reset (§4.6.1).
func (c *Conn) handleValidation(seq uint16) (Events, error) {
	c.replaying = true
	if !c.WasAborted() && SeqNewer(seq, c.peerSeq) {
		return c.Abort(), fmt.Errorf("%w: sequence number %d after %d", ErrLostData, seq, c.peerSeq)
	}
	return 0, nil
}

// IsValidation reports whether a message, not parsed yet, is a failover
// validation message.
func IsValidation(b []byte) bool {
	return len(b) >= Size && b[0] == Type && Flags(b[24])<<8&flagFailoverValidation != 0
}

// Misses reports whether a failover validation message would reset the
// connection, since it names a message that was not handed in. That is data
// loss only if it does not wait in the completion queue of the lost link, which
// the owner must look at first.
func (c *Conn) Misses(m Message) bool {
	return m.Flags.FailoverValidation() && c.state != Closed && !c.WasAborted() && SeqNewer(m.Seq, c.peerSeq)
}

// repeated is the position of a producer cursor that is behind the last one.
// After a change of link that is no fault: Linux goes back to what it knows to
// be delivered, and may say so before it has written all again. It cannot be
// further behind than the RMBE is large; the position never goes back.
func (c *Conn) repeated(prod Cursor) (uint64, error) {
	if _, err := c.local.Distance(prod, c.local.Cursor(c.peerProduced)); err != nil {
		return 0, ErrStale
	}
	return c.peerProduced, nil
}
