// SPDX-License-Identifier: Apache-2.0

package cdc

import "fmt"

// failover is what a connection has to say after its link was lost: first the validation
// message, then everything again that the lost link may not have delivered.
type failover struct {
	validate bool // the link changed: the validation message is next
	repeat   bool // what the last messages told may be lost
}

// isUnderWay reports whether something is left to be said.
func (f *failover) isUnderWay() bool { return f.validate || f.repeat }

// stop leaves nothing to be said.
func (f *failover) stop() { f.validate, f.repeat = false, false }

// Failover moves the connection to another link after its own is closed: what
// was under way there is neither delivered nor reported any more. The next
// transmission is the failover validation message (§4.6.1), the one after that
// says everything again that the peer may not have heard (§4.6.2): one write
// of all data not known to have arrived, with new data if there is room, one
// message with a new sequence number, and the flags of our end.
//
//	sent 7 (write), 8 (write); 7 was delivered; the link is lost
//	Failover    -> V 7: "7 is the last that I know to have arrived"
//	            -> the data of 8 and what came since, then message 9
//
// A connection whose link works moves without Failover once nothing is in flight.
func (c *Conn) Failover() Events {
	lost := c.sentMsgs.lose()
	if c.end.failed {
		c.failover.repeat = false
		return 0
	}
	c.failover.repeat = c.failover.repeat || lost
	// The validation goes before whatever is said next: an end or a reset, too, is
	// a message over another link, and the peer may have missed the message before.
	// Nothing is said once the end was delivered, nor to a peer that is not known yet.
	c.failover.validate = c.token != 0 && (c.end.state != Closed || c.failover.repeat)
	if c.send.goBack() {
		return Writable
	}
	return 0
}

// Repeats reports whether a failover is not over: the validation message, or
// what may have been lost, has still to be said over the link that was chosen.
func (c *Conn) Repeats() bool { return c.failover.isUnderWay() }

// validation builds the failover validation message. The message has no sequence
// number of its own, and nothing in the message counts but token, number and flag.
func (c *Conn) validation() Message {
	c.failover.validate = false
	return Message{Seq: c.sentMsgs.addValidation(), Token: c.token, Flags: Flags(0).WithFailoverValidation()}
}

// handleValidation checks that what the peer believes delivered has arrived,
// or else data is lost and the connection must be reset (§4.6.1).
func (c *Conn) handleValidation(seq uint16) (Events, error) {
	c.recvMsgs.replaying = true
	if !c.WasAborted() && c.recvMsgs.misses(seq) {
		return c.Abort(), fmt.Errorf("%w: sequence number %d after %d", ErrLostData, seq, c.recvMsgs.seq)
	}
	return 0, nil
}

// Misses reports whether a failover validation message would reset the
// connection, since the validation names a message that was not handed in. That is
// data loss only if the named message does not wait in the completion queue of the
// lost link, which the owner must look at first.
func (c *Conn) Misses(m Message) bool {
	return m.Flags.FailoverValidation() && c.end.state != Closed && !c.WasAborted() && c.recvMsgs.misses(m.Seq)
}

// Skips reports whether a message announces bytes, and messages before it, which may have announced some of
// them, were not handed in. On one link that cannot be. Over another link than before such a message may come after a
// validation message: what it announces was written anew then.
func (c *Conn) Skips(m Message) bool {
	return !m.Flags.FailoverValidation() && c.end.state != Closed && SeqNewer(m.Seq, c.recvMsgs.seq+1) && !c.recv.isAt(m.Prod)
}

// IsReplaying reports whether the peer has sent a validation message and has not said again all that it had said before.
func (c *Conn) IsReplaying() bool { return c.recvMsgs.replaying }

// HandleSkip takes a message that Skips is true of, and that came over another link than the one before without a
// validation message. Linux moves a connection so, whatever is under way, from the first D or C of either side on:
//
//	the peer, old link                      the peer, new link              we
//	  7: WRITE of bytes 0 to 9  -->|
//	  the link is lost             |        8: WRITE of 10 to 19  -->       nobody writes 0 to 9
//
// So the connection is reset. If the message is the peer's last word, nothing else is awaited.
func (c *Conn) HandleSkip(m Message) (Events, error) {
	if m.Flags.Abort() || c.WasAborted() {
		return c.HandleMessage(m)
	}
	last := c.recvMsgs.seq
	c.recvMsgs.seq = m.Seq
	ev := c.Abort()
	if m.Flags.Closed() {
		c.end.handleClosed() // not an end for the application, which has not got all
	}
	if c.end.state == Closed {
		ev |= Ended
	}
	return ev, fmt.Errorf("%w: sequence number %d after %d", ErrLostData, m.Seq, last)
}
