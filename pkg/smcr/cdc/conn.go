// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"errors"
	"fmt"
	"strings"
)

// Limits of a transmission.
const (
	// MaxTransmission bounds the bytes that one message announces, so that
	// the peer starts to read while the rest is on its way: half of the
	// default buffer.
	MaxTransmission = 256 << 10
	// corkBytes is the size from which data no longer waits for company; the
	// value Linux uses.
	corkBytes = 64 << 10
	// corkMessages is how many messages may be on their way before a small
	// piece waits: more than an RNIC acknowledges at once when a dialogue goes
	// on (ours: seven), so that no question waits for the acknowledgement of
	// earlier ones.
	corkMessages = 12
	// sendBytes is the payload of whole packets, of any path MTU from 1024 on, that leaves a software device in
	// one datagram of 64 KiB (UDP_SEGMENT) with a message behind it. RNICs do not care.
	sendBytes = 60 << 10
	// streamBytes is how much has to be under way before some of what could go waits to fill datagrams.
	streamBytes = 2 * sendBytes
	// streamMessages is how many messages that has to be: with fewer a device in software may wait for an answer
	// before it acknowledges them, and what waits would wait for that.
	streamMessages = 2
	// packetBytes is a multiple of all path MTUs.
	packetBytes = 4 << 10
	// patientMessages is how many messages may be on their way before it is
	// worth while to hear of their delivery at once: more than a dialogue has.
	patientMessages = 4
)

// Config describes a connection to be made.
type Config struct {
	Local      Ring   // our RMBE, which the peer writes
	SendBuffer uint32 // bytes that the application may be ahead of the network
}

// Conn is one TCP connection on a link group: where both streams stand, what
// must be told to the peer, and how far the connection is closed. A Conn moves no
// bytes and keeps no time: [Conn.Next] says which bytes to write and which message to
// send after them.
//
// All positions are counted from the start of their stream in bytes and only
// grow; the cursors of the wire are derived from them.
//
//	send:     completed <= sent <= produced       and sent-peerConsumed <= peer capacity
//	receive:  announced <= consumed <= peerProduced <= announced+capacity
//
// A Conn is owned by the owner of its link group.
type Conn struct {
	token AlertToken // the peer's, put into each message; 0 before Activate

	send      sendRing
	coalesce  coalescing
	urgentOut sentUrgent
	sentMsgs  sentMessages

	recv     receiveRing
	urgentIn receivedUrgent
	recvMsgs receivedMessages

	failover failover
	end      ending
}

// Events is a set of things the application side should know.
type Events uint8

// Events of a connection.
const (
	Readable   Events = 1 << iota // the peer wrote more
	Writable                      // send buffer space became free
	PeerDone                      // the peer will write no more (D or C)
	Aborted                       // the connection was reset
	Ended                         // state Closed: nothing more will happen
	PeerUrgent                    // the peer announced or wrote urgent data
)

// String names the events.
func (ev Events) String() string {
	if ev == 0 {
		return "none"
	}
	var names []string
	for i, n := range [...]string{"readable", "writable", "peer done", "aborted", "ended", "peer urgent"} {
		if ev&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return strings.Join(names, ", ")
}

// Errors of HandleMessage. ErrStale is harmless; the others are the peer's
// fault and end in an abort.
var (
	ErrStaleMessage = errors.New("cdc: message is older than the last one")
	ErrOverrun      = errors.New("cdc: producer cursor passes the consumer cursor")
	ErrUnsent       = errors.New("cdc: consumer cursor passes what was sent")
	ErrAfterEnd     = errors.New("cdc: data after the end of the stream")
	ErrLostData     = errors.New("cdc: the peer changed its link, and a message never arrived")
)

// NewConn returns a connection that can receive; Activate makes it send.
func NewConn(cfg Config) Conn {
	return Conn{
		send: sendRing{buffer: cfg.SendBuffer},
		recv: receiveRing{ring: cfg.Local},
		end:  ending{state: Active},
	}
}

// Activate gives the peer's half, learned from its Accept or Confirm.
func (c *Conn) Activate(peer Ring, token AlertToken) {
	c.send.ring, c.token = peer, token
}

// Getters.

// State returns the connection's state.
func (c *Conn) State() State { return c.end.state }

// SendBuffer is how many bytes the application may be ahead of the network.
func (c *Conn) SendBuffer() uint32 { return c.send.buffer }

// Produced, Sent and Completed are the send positions.
func (c *Conn) Produced() uint64 { return c.send.produced }

// Sent is the position up to which the peer was told.
func (c *Conn) Sent() uint64 { return c.send.sent }

// Completed is the position up to which the send buffer is free.
func (c *Conn) Completed() uint64 { return c.send.completed }

// PeerProduced is the position up to which the peer wrote our RMBE.
func (c *Conn) PeerProduced() uint64 { return c.recv.peerProduced }

// Announced is the consumer position that the peer knows.
func (c *Conn) Announced() uint64 { return c.recv.announced }

// PeerBlocked reports whether the peer waits to hear how far we have read: for
// window (the peer sent B), because the peer asked (R), or before (P) or after urgent
// data (U).
func (c *Conn) PeerBlocked() bool {
	return c.recv.peerBlocked || c.urgentIn.pending || c.recv.updateAsked || c.recv.announced < c.urgentIn.end
}

// Window is how many bytes the peer's RMBE can take now.
func (c *Conn) Window() uint32 { return c.send.window() }

// PeerIsDone reports that the peer writes no more.
func (c *Conn) PeerIsDone() bool { return c.end.peerIsDone() }

// PeerReleased reports that the peer said its last word: the RMBE, which the peer
// will never write again, may be reused (§4.8.1, 3C).
func (c *Conn) PeerReleased() bool { return c.end.peerReleased() }

// WasAborted reports that the connection was reset by either side.
func (c *Conn) WasAborted() bool { return c.end.wasAborted() }

// HasSentClose reports that the peer was told that we are gone.
func (c *Conn) HasSentClose() bool { return c.end.hasSentClose() }

// Commands.

// Produce tells that the application put bytes into the send buffer up to
// position pos. Data for a peer that has closed resets the connection, since
// such data can never be delivered (§4.8.1, 4A).
func (c *Conn) Produce(pos uint64) Events {
	c.send.produce(pos)
	return c.abortIfUndeliverable()
}

// Consume tells that the application took bytes from the RMBE up to pos.
func (c *Conn) Consume(pos uint64) { c.recv.consume(pos) }

// Shutdown ends our stream after all that was produced (shutdown for write).
func (c *Conn) Shutdown() { c.end.wantDone = true }

// Close ends the connection after all that was produced. Unread data makes it
// an abort, so that the peer learns that its data was lost (§4.8.1, 3A).
func (c *Conn) Close() Events {
	if c.recv.unread() > 0 {
		return c.Abort()
	}
	c.end.wantClose = true
	return c.abortIfUndeliverable()
}

// Abort resets the connection.
func (c *Conn) Abort() Events { return c.end.abort() }

// Fail ends the connection at once because its link group is gone or a
// close timer expired; nothing is sent.
func (c *Conn) Fail() Events {
	c.failover.stop()
	return c.end.fail()
}

// abortIfUndeliverable resets a connection whose peer closed while we still
// have data for the peer (§4.8.1, 4A), other than what has arrived.
func (c *Conn) abortIfUndeliverable() Events {
	if c.end.peerFlags.Closed() && c.send.produced > c.send.delivered() && !c.end.wasAborted() {
		return c.end.abort()
	}
	return 0
}

// Input.

// HandleSent tells that the oldest message in flight was delivered.
func (c *Conn) HandleSent() Events {
	m := c.sentMsgs.told.pop()
	if m.validation {
		return 0
	}
	c.sentMsgs.acknowledge(m)
	if c.send.complete(m.pos) {
		return Writable
	}
	return 0
}

// HandleMessage takes a CDC message for this connection. An error other than
// ErrStaleMessage is a violation by the peer; the connection is aborted then.
func (c *Conn) HandleMessage(m Message) (Events, error) {
	if c.end.state == Closed {
		if !m.Flags.FailoverValidation() {
			c.end.handleLate(m.Flags)
		}
		return 0, nil
	}
	if m.Flags.FailoverValidation() {
		return c.handleValidation(m.Seq)
	}
	if c.recvMsgs.isStale(m.Seq) {
		return c.urgentIn.handleLate(m, &c.recv), ErrStaleMessage
	}
	if m.Flags.Abort() {
		return c.end.handleAbort(), nil
	}
	if err := c.moveCursors(m); err != nil {
		return c.Abort(), err
	}
	reset := c.end.wantAbort
	c.recvMsgs.seq = m.Seq
	c.recv.peerBlocked = m.Flags.WriterBlocked()
	c.recv.updateAsked = c.recv.updateAsked || m.Flags.CursorUpdateRequested()
	ev := Readable
	if m.Flags != 0 || c.urgentIn.pending {
		ev |= c.urgentIn.handle(m, &c.recv)
	}
	if m.Flags.SendingDone() {
		ev |= c.end.handleDone()
	}
	if m.Flags.Closed() && !c.end.peerFlags.Closed() {
		ev |= c.end.handleClosed() | c.abortIfUndeliverable()
	}
	if c.end.state == Closed {
		ev |= Ended
	}
	if reset {
		ev &^= PeerDone // a stream that was reset has no end
	}
	return ev, nil
}

// moveCursors checks and takes over both cursors of a message; nothing
// changes on error.
func (c *Conn) moveCursors(m Message) error {
	prod, err := c.recv.position(m.Prod)
	if errors.Is(err, ErrStale) && c.recvMsgs.replaying {
		prod, err = c.recv.repeated(m.Prod)
	}
	if err != nil {
		return fmt.Errorf("producer cursor: %w", err)
	}
	if prod > c.recv.peerProduced && c.PeerIsDone() && !c.end.wantAbort {
		return fmt.Errorf("%w: position %d after %d", ErrAfterEnd, prod, c.recv.peerProduced)
	}
	if !c.recv.hasRoom(prod) {
		return fmt.Errorf("%w: position %d, announced %d, capacity %d", ErrOverrun, prod, c.recv.announced, c.recv.ring.Capacity())
	}
	if c.send.ring.Size != 0 {
		cons, err := c.send.position(m.Cons)
		if err != nil {
			return fmt.Errorf("consumer cursor: %w", err)
		}
		if cons > c.send.announcedTo {
			return fmt.Errorf("%w: position %d, sent %d", ErrUnsent, cons, c.send.announcedTo)
		}
		c.send.consume(cons)
	}
	if !c.end.wantAbort { // what comes after a reset may be behind bytes that never came
		c.recv.peerProduced = prod
	}
	c.recvMsgs.replaying = c.recvMsgs.replaying && !c.recv.isAt(m.Prod)
	return nil
}

// Output.

// Transmission is what must go to the peer now, in order: the stream bytes
// [Pos, Pos+Len) by RDMA WRITE, then the message by SEND. A failover validation
// message goes alone.
type Transmission struct {
	Pos        uint64
	Len        uint32
	Validation bool
	Message    Message
}

// Pending reports whether Next has something to send.
func (c *Conn) Pending() bool {
	if c.token == 0 || c.sentMsgs.told.isFull() {
		return false
	}
	if c.Repeats() {
		return true
	}
	return c.end.state != Closed &&
		(c.end.abortDue() || (!c.end.wantAbort && (c.sendable() > 0 || c.noticeDue() || c.UpdateDue() || c.closeDue() != 0)))
}

// sendable is how many bytes may be written now.
func (c *Conn) sendable() uint32 {
	if !c.end.mayWrite() {
		return 0
	}
	room := c.send.room(c.urgentOut.limit(&c.send))
	if c.send.isRepeating() {
		// §4.6.2: a repetition leaves nothing out.
		return uint32(max(c.send.announcedTo-c.send.sent, room))
	}
	n := uint32(room)
	if n == uint32(c.send.unsent()) && c.waitsForCompany(n) {
		return 0
	}
	return c.wholeSends(c.untilWrap(n))
}

// untilWrap cuts a long write at the end of the RMBE, if the RMBE ends within a packet. What is behind
// goes with the next write, which begins the RMBE, and from then on the RMBE ends with a packet. Else
// two WRITEs with short packets would go with every round of a stream that began with a short
// message, as in an RMBE of 512 KiB:
//
//	8 bytes, then 256 KiB each      8..256K+8   256K+8..512K and 0..8   8..256K+8   ...
//	cut                             8..256K+8   256K+8..512K            0..256K     256K..512K
func (c *Conn) untilWrap(n uint32) uint32 {
	if n < corkBytes {
		return n
	}
	if before := c.send.ring.Spans(c.send.sent, n)[0].Len; before%packetBytes != 0 {
		return before
	}
	return n
}

// wholeSends cuts a write in the midst of a stream so that it fills the datagrams in which it leaves, each up
// to the last one, which has room for the message behind it. The rest goes with what the application writes next,
// or when there is no longer so much under way that the peer has enough to do until then. As of writes of 64 KiB:
//
//	64 KiB each      60 KiB, and 4 KiB and the message      60 KiB, and 4 KiB and the message      ...
//	whole sends      60 KiB and the message      60 KiB and the message      ...
func (c *Conn) wholeSends(n uint32) uint32 {
	if c.send.sent-c.send.delivered() < streamBytes || c.sentMsgs.told.size < streamMessages || c.mayNotWait() {
		return n
	}
	return n - n%sendBytes
}

// waitsForCompany reports whether n bytes, all there are, could travel with more (§4.5.2).
func (c *Conn) waitsForCompany(n uint32) bool {
	if c.mayNotWait() || n >= c.send.buffer/2 {
		return false
	}
	// With messages on their way their delivery is the timer, since a delivery
	// always comes; without such messages, the owner has a timer.
	return c.sentMsgs.told.size >= corkMessages && n < corkBytes || c.coalesce.delays(n, c.send.sent)
}

// mayNotWait reports whether what could travel with more goes without: urgent data, the last data of all, or what Flush
// was called for.
func (c *Conn) mayNotWait() bool {
	return c.urgentOut.next != 0 || c.end.wantsEnd() || c.coalesce.isFlushed(c.send.sent)
}

// Coalesce makes less than n bytes wait until more are produced or Flush is
// called; 0 lets nothing wait, which is what an application that switched
// Nagle's algorithm off has asked for (§4.5.2).
func (c *Conn) Coalesce(n uint32) { c.coalesce.below = n }

// Coalesced reports whether data waits only for more data to travel with. The owner of the
// connection calls Flush when the data has waited for as long as it may.
func (c *Conn) Coalesced() bool {
	return c.coalesce.isOn(c.send.sent) && c.urgentOut.limit(&c.send) > c.send.sent && c.Window() > 0 && c.sendable() == 0 &&
		c.end.mayWrite()
}

// Flush sends what was produced until now without further waiting.
func (c *Conn) Flush() { c.coalesce.flushed = c.send.produced }

// RequestUpdate asks the peer how far the peer has read, whatever the window: to
// find out whether a reader stalls (§4.5.1). RequestUpdate is not for the data path.
func (c *Conn) RequestUpdate() { c.send.askUpdate = true }

// UpdateDue reports whether the consumer cursor must be told by a message of
// its own (§4.5.1): the peer asked, is blocked, or has less than half of the
// window and would gain a tenth; or waits to hear of urgent data (§4.7.5).
func (c *Conn) UpdateDue() bool {
	if c.recv.consumed == c.recv.announced || c.end.isClosedByAny() {
		return false
	}
	return c.recv.updateDue() || c.urgentIn.updateDue(&c.recv)
}

// noticeDue reports whether the peer should hear of something, even without data: that data
// waits for window, that urgent data does, or that we want to know how far the peer has read.
func (c *Conn) noticeDue() bool {
	return (!c.send.blocked && c.send.awaitsWindow() || c.urgentOut.noticeDue(&c.send) || c.send.askUpdate) &&
		!c.end.isClosedByAny()
}

// AwaitsDelivery reports whether anything depends on hearing at once that the
// messages in flight were delivered: a writer's room in the send buffer, what
// waits for company, the end of the stream. In a dialogue nothing does, nor while
// the window is closed.
func (c *Conn) AwaitsDelivery() bool {
	switch {
	case c.sentMsgs.told.size == 0:
		return false
	case c.end.state != Active || c.end.wantsEnd() || c.end.wantAbort || c.Repeats():
		return true
	case c.send.blocked && c.Window() == 0:
		// Nothing could go before the peer tells us that there is room in its
		// RMBE, and then the owner of c looks at deliveries, too. But there has
		// to be room for more messages in flight.
		return c.sentMsgs.told.size >= corkMessages
	}
	return c.sentMsgs.told.size >= patientMessages || c.send.unsent() != 0 || c.send.isQuarterFull()
}

// closeDue returns the closing flag that may go out now: only after all data
// was delivered (§4.8.1, 3A).
func (c *Conn) closeDue() Flags {
	if c.send.completed != c.send.produced {
		return 0
	}
	return c.end.closeDue()
}

// Next returns the next transmission. Call it only when Pending.
func (c *Conn) Next() (Transmission, Events) {
	t := Transmission{Pos: c.send.sent}
	if c.failover.validate {
		t.Validation, t.Message = true, c.validation()
		return t, 0
	}
	c.failover.repeat = false
	over := c.end.state == Closed // an end that was told before
	if c.end.abortDue() {
		ev := c.end.sentAbort()
		t.Message = c.message(false, 0)
		return t, ev
	}
	closing := c.closeDue()
	t.Len = c.sendable()
	c.send.announce(t.Len)
	c.recv.announce()
	if closing != 0 {
		c.end.sent(closing)
	}
	t.Message = c.message(t.Len > 0, c.notices(t.Pos))
	if c.end.state == Closed && !over {
		return t, Ended
	}
	return t, 0
}

// notices are the flags that only the message after a write of [from, c.send.sent)
// has.
func (c *Conn) notices(from uint64) Flags {
	if c.end.wantAbort || c.urgentOut.next == 0 && from >= c.urgentOut.sent && !c.send.askUpdate {
		return 0
	}
	f := c.urgentOut.flags(from, &c.send)
	if c.send.askUpdate {
		f, c.send.askUpdate = f.WithCursorUpdateRequested(), false
	}
	return f
}

// message builds the message of the positions and flags as they are and
// counts the message as in flight; write tells that the message describes a write,
// notices are flags of this message alone.
func (c *Conn) message(write bool, notices Flags) Message {
	f := c.end.sentFlags | notices
	if c.send.blocked {
		f = f.WithWriterBlocked()
	}
	return Message{
		Seq:   c.sentMsgs.add(c.send.sent, write),
		Token: c.token,
		Prod:  c.send.cursor(),
		Cons:  c.recv.ring.Cursor(c.recv.announced),
		Flags: f,
	}
}

// WriteSpans returns where the bytes of a transmission lie in the peer's RMBE:
// one span, or two when they wrap.
func (c *Conn) WriteSpans(t Transmission) [2]Span { return c.send.ring.Spans(t.Pos, t.Len) }

// InFlight is how many messages were sent and not yet delivered. After a
// failover those that were lost count as one until they are told again.
func (c *Conn) InFlight() int {
	if c.failover.repeat {
		return int(c.sentMsgs.told.size) + 1
	}
	return int(c.sentMsgs.told.size)
}
