// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"errors"
	"fmt"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/invariant"
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
// must be told to the peer, and how far the connection is closed. It moves no
// bytes and keeps no time: it says which bytes to write and which message to
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
	local, peer Ring
	sendBuffer  uint32
	token       AlertToken // the peer's, put into each message
	state       State

	produced     uint64 // by the application
	sent         uint64 // told to the peer
	completed    uint64 // delivered, the send buffer before it is free
	peerConsumed uint64
	announcedTo  uint64 // the furthest position ever told to the peer: sent, but after a failover
	seq          uint16 // of the last message sent
	written      uint16 // §4.6.1, SS: of the last delivered message that described a write
	told         inflight
	blocked      bool   // the last message had B
	validate     bool   // the link changed: the validation message is next
	repeat       bool   // what the last messages told may be lost
	askUpdate    bool   // R goes with the next message
	urgent       uint64 // one past our urgent byte, if it is not announced as present
	urgentTold   bool   // P was sent for it
	urgentSent   uint64 // one past our last urgent byte announced as present
	coalesce     uint32 // less data than this waits for Flush
	flushed      uint64 // up to here data does not wait

	peerProduced uint64
	consumed     uint64 // by the application
	announced    uint64 // told to the peer
	peerSeq      uint16 // of the last message accepted (§4.6.1: SR)
	replaying    bool   // the peer changed its link and has not caught up
	peerBlocked  bool
	updateAsked  bool
	peerUrgent   bool   // the last message had P without U
	urgentEnd    uint64 // one past the peer's last urgent byte

	wantDone, wantClose, wantAbort bool
	failed                         bool  // ended without the peer: nothing may be sent
	sentFlags                      Flags // D, C, A that we have sent
	peerFlags                      Flags // D, C, A that the peer has sent
}

// inflight is the queue of messages whose delivery is not confirmed.
type inflight struct {
	q          [MaxInflight]sentMessage
	head, size uint8
}

// sentMessage is what the delivery of a message means.
type sentMessage struct {
	pos        uint64 // the send position it announced
	seq        uint16
	write      bool // it described a write
	validation bool // it announced nothing
}

func (q *inflight) push(m sentMessage) {
	invariant.Must(q.size < MaxInflight, "more CDC messages in flight than MaxInflight")
	q.q[(q.head+q.size)%MaxInflight] = m
	q.size++
}

func (q *inflight) pop() sentMessage {
	invariant.Must(q.size > 0, "CDC completion without a message in flight")
	m := q.q[q.head]
	q.head = (q.head + 1) % MaxInflight
	q.size--
	return m
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
	ErrLostData     = errors.New("cdc: failover validation names a message that never arrived")
)

// NewConn returns a connection that can receive; Activate makes it send.
func NewConn(cfg Config) Conn {
	return Conn{local: cfg.Local, sendBuffer: cfg.SendBuffer, state: Active}
}

// Activate gives the peer's half, learned from its Accept or Confirm.
func (c *Conn) Activate(peer Ring, token AlertToken) {
	c.peer, c.token = peer, token
}

// Getters.

// State returns the connection's state.
func (c *Conn) State() State { return c.state }

// Produced, Sent and Completed are the send positions.
func (c *Conn) Produced() uint64 { return c.produced }

// Sent is the position up to which the peer was told.
func (c *Conn) Sent() uint64 { return c.sent }

// Completed is the position up to which the send buffer is free.
func (c *Conn) Completed() uint64 { return c.completed }

// PeerProduced is the position up to which the peer wrote our RMBE.
func (c *Conn) PeerProduced() uint64 { return c.peerProduced }

// Announced is the consumer position that the peer knows.
func (c *Conn) Announced() uint64 { return c.announced }

// PeerBlocked reports whether the peer waits to hear how far we have read: for
// window (its B bit), because it asked (R), or before (P) or after urgent data
// (U).
func (c *Conn) PeerBlocked() bool {
	return c.peerBlocked || c.peerUrgent || c.updateAsked || c.announced < c.urgentEnd
}

// Window is how many bytes the peer's RMBE can take now.
func (c *Conn) Window() uint32 {
	if c.peer.Size == 0 {
		return 0
	}
	return c.peer.Capacity() - uint32(c.sent-c.peerConsumed)
}

// PeerIsDone reports that the peer writes no more.
func (c *Conn) PeerIsDone() bool { return c.peerFlags.SendingDone() || c.peerFlags.Closed() }

// PeerReleased reports that the peer said it will never write again: the
// RMBE may be reused (§4.8.1, 3C).
func (c *Conn) PeerReleased() bool { return c.peerFlags.Closed() || c.peerFlags.Abort() }

// WasAborted reports that the connection was reset by either side.
func (c *Conn) WasAborted() bool { return c.sentFlags.Abort() || c.peerFlags.Abort() || c.wantAbort }

// HasSentClose reports that the peer was told that we are gone.
func (c *Conn) HasSentClose() bool { return c.sentFlags.Closed() || c.sentFlags.Abort() }

// Commands.

// Produce tells that the application put bytes into the send buffer up to
// position pos. Data for a peer that has closed resets the connection, since
// it can never be delivered (§4.8.1, 4A).
func (c *Conn) Produce(pos uint64) Events {
	invariant.Must(pos >= c.produced && pos-c.completed <= uint64(c.sendBuffer), "produced outside the send buffer")
	c.produced = pos
	return c.abortIfUndeliverable()
}

// Consume tells that the application took bytes from the RMBE up to pos.
func (c *Conn) Consume(pos uint64) {
	invariant.Must(pos >= c.consumed && pos <= c.peerProduced, "consumed what was not received")
	c.consumed = pos
}

// Shutdown ends our stream after all that was produced (shutdown for write).
func (c *Conn) Shutdown() { c.wantDone = true }

// Close ends the connection after all that was produced. Unread data makes it
// an abort, so that the peer learns that its data was lost (§4.8.1, 3A).
func (c *Conn) Close() Events {
	if c.peerProduced > c.consumed {
		return c.Abort()
	}
	c.wantClose = true
	return c.abortIfUndeliverable()
}

// Abort resets the connection.
func (c *Conn) Abort() Events {
	switch c.state {
	case Closed, PeerAbortWait, ProcessAbort:
		return 0
	case Active, PeerCloseWait1, PeerCloseWait2, AppCloseWait1, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait:
	}
	c.wantAbort = true
	c.state = PeerAbortWait
	return Aborted
}

// Fail ends the connection at once because its link group is gone or a
// close timer expired; nothing is sent.
func (c *Conn) Fail() Events {
	if c.state == Closed {
		c.failed, c.validate, c.repeat = true, false, false
		return 0
	}
	c.state = Closed
	c.wantAbort, c.failed = true, true
	c.validate, c.repeat = false, false
	return Aborted | Ended
}

// abortIfUndeliverable resets a connection whose peer closed while we still
// have data for it (§4.8.1, 4A). What the peer consumed was delivered, even
// if the completion that says so is still on its way.
func (c *Conn) abortIfUndeliverable() Events {
	if c.peerFlags.Closed() && c.produced > max(c.completed, c.peerConsumed) && !c.WasAborted() {
		return c.Abort()
	}
	return 0
}

// Input.

// HandleSent tells that the oldest message in flight was delivered.
func (c *Conn) HandleSent() Events {
	m := c.told.pop()
	if m.validation {
		return 0
	}
	c.acknowledge(m)
	if m.pos > c.completed {
		c.completed = m.pos
		return Writable
	}
	return 0
}

// HandleMessage takes a CDC message for this connection. An error other than
// ErrStaleMessage is a violation by the peer; the connection is aborted then.
func (c *Conn) HandleMessage(m Message) (Events, error) {
	if c.state == Closed {
		// Given up without the peer; what counts is that it writes no more.
		if !m.Flags.FailoverValidation() {
			c.peerFlags |= m.Flags & (flagClosed | flagAbort)
		}
		return 0, nil
	}
	if m.Flags.FailoverValidation() {
		return c.handleValidation(m.Seq)
	}
	if m.Seq != c.peerSeq && !SeqNewer(m.Seq, c.peerSeq) {
		return 0, ErrStaleMessage
	}
	if m.Flags.Abort() {
		return c.handleAbort(), nil
	}
	if err := c.moveCursors(m); err != nil {
		return c.Abort(), err
	}
	c.peerSeq = m.Seq
	c.peerBlocked = m.Flags.WriterBlocked()
	c.updateAsked = c.updateAsked || m.Flags.CursorUpdateRequested()
	ev := Readable
	if m.Flags != 0 || c.peerUrgent {
		ev |= c.handleUrgent(m)
	}
	if m.Flags.SendingDone() && !c.peerFlags.SendingDone() {
		c.peerFlags = c.peerFlags.WithSendingDone()
		c.peerDone()
		ev |= PeerDone
	}
	if m.Flags.Closed() && !c.peerFlags.Closed() {
		c.peerFlags = c.peerFlags.WithClosed()
		c.peerClosed()
		ev |= PeerDone | c.abortIfUndeliverable()
	}
	if c.state == Closed {
		ev |= Ended
	}
	return ev, nil
}

// handleAbort answers the peer's reset (§4.8.2, 2A and 2B).
func (c *Conn) handleAbort() Events {
	c.peerFlags = c.peerFlags.WithAbort()
	if c.HasSentClose() { // it has our last word already
		c.state = Closed
		return Aborted | Ended
	}
	c.wantAbort = true
	c.state = ProcessAbort
	return Aborted
}

// moveCursors checks and takes over both cursors of a message; nothing
// changes on error.
func (c *Conn) moveCursors(m Message) error {
	prod, err := c.local.Advance(c.peerProduced, c.local.Cursor(c.peerProduced), m.Prod)
	if errors.Is(err, ErrStale) && c.replaying {
		prod, err = c.repeated(m.Prod)
	}
	if err != nil {
		return fmt.Errorf("producer cursor: %w", err)
	}
	if prod > c.peerProduced && c.PeerIsDone() {
		return fmt.Errorf("%w: position %d after %d", ErrAfterEnd, prod, c.peerProduced)
	}
	if prod-c.announced > uint64(c.local.Capacity()) {
		return fmt.Errorf("%w: position %d, announced %d, capacity %d", ErrOverrun, prod, c.announced, c.local.Capacity())
	}
	if c.peer.Size != 0 {
		cons, err := c.peer.Advance(c.peerConsumed, c.peer.Cursor(c.peerConsumed), m.Cons)
		if err != nil {
			return fmt.Errorf("consumer cursor: %w", err)
		}
		if cons > c.announcedTo {
			return fmt.Errorf("%w: position %d, sent %d", ErrUnsent, cons, c.announcedTo)
		}
		c.peerConsumed = cons
		c.sent = max(c.sent, cons) // what was read need not be sent again
	}
	c.replaying = c.replaying && c.local.Cursor(prod) != m.Prod
	c.peerProduced = prod
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
	if c.token == 0 || c.told.size == MaxInflight {
		return false
	}
	if c.Repeats() {
		return true
	}
	return c.state != Closed &&
		(c.abortDue() || (!c.wantAbort && (c.sendable() > 0 || c.noticeDue() || c.UpdateDue() || c.closeDue() != 0)))
}

// sendable is how many bytes may be written now.
func (c *Conn) sendable() uint32 {
	if c.wantAbort || c.sentFlags.Closed() || c.peerFlags.Closed() {
		return 0
	}
	limit := c.sendLimit()
	if c.sent < c.announcedTo {
		// §4.6.2: a repetition leaves nothing out.
		return uint32(max(c.announcedTo-c.sent, min(limit-c.sent, uint64(c.Window()), MaxTransmission)))
	}
	n := uint32(min(limit-c.sent, uint64(c.Window()), MaxTransmission))
	if n == uint32(c.produced-c.sent) && c.waitsForCompany(n) {
		return 0
	}
	return n
}

// waitsForCompany: n bytes, all there are, could travel with more (§4.5.2).
func (c *Conn) waitsForCompany(n uint32) bool {
	if c.urgent != 0 || c.wantDone || c.wantClose || n >= c.sendBuffer/2 {
		return false
	}
	// With messages on their way their delivery is the timer, since it always
	// comes; without, the owner has one.
	return c.told.size >= corkMessages && n < corkBytes || n < c.coalesce && c.flushed <= c.sent
}

// Coalesce makes less than n bytes wait until more are produced or Flush is
// called; 0 lets nothing wait, which is what an application that switched
// Nagle's algorithm off has asked for (§4.5.2).
func (c *Conn) Coalesce(n uint32) { c.coalesce = n }

// Held reports that data waits only for company: its owner calls Flush after
// the time that it may wait.
func (c *Conn) Held() bool {
	return c.coalesce > 0 && c.flushed <= c.sent && c.sendLimit() > c.sent && c.Window() > 0 && c.sendable() == 0 &&
		!c.wantAbort && !c.sentFlags.Closed() && !c.peerFlags.Closed()
}

// Flush sends what was produced until now without further waiting.
func (c *Conn) Flush() { c.flushed = c.produced }

// RequestUpdate asks the peer how far it has read, whatever the window: to
// find out whether a reader stalls (§4.5.1). It is not for the data path.
func (c *Conn) RequestUpdate() { c.askUpdate = true }

// UpdateDue reports whether the consumer cursor must be told by a message of
// its own (§4.5.1): the peer asked, is blocked, or has less than half of the
// window and would gain a tenth.
func (c *Conn) UpdateDue() bool {
	gain := c.consumed - c.announced
	if gain == 0 || c.peerFlags.Closed() || c.sentFlags.Closed() {
		return false
	}
	if c.peerBlocked || c.peerUrgent || c.updateAsked {
		return true
	}
	// §4.7.5: after urgent data the peer writes nothing until it hears that
	// all of it was consumed, whatever the window.
	if c.announced < c.urgentEnd && c.consumed >= c.urgentEnd {
		return true
	}
	size := uint64(c.local.Capacity())
	return gain >= size/10 && size-(c.peerProduced-c.announced) < size/2
}

// blockNoticeDue: data waits, the window is closed, and the peer does not
// know it.
func (c *Conn) blockNoticeDue() bool {
	return !c.blocked && c.produced > c.sent && c.Window() == 0 && !c.peerFlags.Closed() && !c.sentFlags.Closed()
}

// full: the send buffer is, so that the application waits, or will when it writes.
func (c *Conn) full() bool { return c.produced-c.completed == uint64(c.sendBuffer) }

// noticeDue: the peer should hear of something, even without data.
func (c *Conn) noticeDue() bool {
	return c.blockNoticeDue() || c.urgentNoticeDue() || c.askUpdate && !c.peerFlags.Closed() && !c.sentFlags.Closed()
}

// AwaitsDelivery reports whether anything depends on hearing at once that the
// messages in flight were delivered: a writer's room in the send buffer, what
// waits for company, the end of the stream. In a dialogue nothing does, nor while
// the window is closed.
func (c *Conn) AwaitsDelivery() bool {
	switch {
	case c.told.size == 0:
		return false
	case c.state != Active || c.wantDone || c.wantClose || c.wantAbort || c.Repeats():
		return true
	case c.blocked && c.Window() == 0:
		// Nothing could go before the peer tells us that there is room, which
		// is when its owner looks. But there has to be room for messages.
		return c.told.size >= corkMessages
	}
	return c.told.size >= patientMessages || c.produced != c.sent || c.produced-c.completed >= uint64(c.sendBuffer)/4
}

// closeDue returns the closing flag that may go out now: only after all data
// was delivered (§4.8.1, 3A).
func (c *Conn) closeDue() Flags {
	if c.completed != c.produced || c.wantAbort {
		return 0
	}
	var f Flags
	if c.wantClose && !c.sentFlags.Closed() {
		return f.WithClosed()
	}
	if c.wantDone && !c.sentFlags.SendingDone() && !c.sentFlags.Closed() {
		return f.WithSendingDone()
	}
	return 0
}

func (c *Conn) abortDue() bool {
	return c.wantAbort && !c.sentFlags.Abort() && !c.sentFlags.Closed()
}

// Next returns the next transmission. Call it only when Pending.
func (c *Conn) Next() (Transmission, Events) {
	t := Transmission{Pos: c.sent}
	if c.validate {
		t.Validation, t.Message = true, c.validation()
		return t, 0
	}
	c.repeat = false
	over := c.state == Closed // an end that was told before
	if c.abortDue() {
		c.sentFlags = c.sentFlags.WithAbort()
		t.Message = c.message(false, 0)
		if c.state == ProcessAbort || c.PeerReleased() {
			// The peer has said its last word: its A, or its C, after which
			// it does not answer ours.
			c.state = Closed
			return t, Ended
		}
		return t, 0
	}
	if c.consumed > c.announced {
		c.updateAsked = false
	}
	closing := c.closeDue()
	if t.Len = c.sendable(); t.Len > 0 {
		c.sent += uint64(t.Len)
		c.announcedTo = c.sent
	}
	c.blocked = c.Window() == 0 && (c.produced > c.sent || c.full())
	c.announced = c.consumed
	switch {
	case closing.Closed():
		c.sentFlags = c.sentFlags.WithClosed()
		c.sentClosed()
	case closing.SendingDone():
		c.sentFlags = c.sentFlags.WithSendingDone()
		c.sentDone()
	}
	t.Message = c.message(t.Len > 0, c.notices(t.Pos))
	if c.state == Closed && !over {
		return t, Ended
	}
	return t, 0
}

// notices are the flags that only the message after a write of [from, c.sent)
// has.
func (c *Conn) notices(from uint64) Flags {
	if c.wantAbort || c.urgent == 0 && from >= c.urgentSent && !c.askUpdate {
		return 0
	}
	f := c.urgentFlags(from)
	if c.askUpdate {
		f, c.askUpdate = f.WithCursorUpdateRequested(), false
	}
	return f
}

// message builds the message of the positions and flags as they are and
// counts it as in flight; write tells that it describes one, notices are flags
// of this message alone.
func (c *Conn) message(write bool, notices Flags) Message {
	c.seq++
	c.told.push(sentMessage{pos: c.sent, seq: c.seq, write: write})
	f := c.sentFlags | notices
	if c.blocked {
		f = f.WithWriterBlocked()
	}
	return Message{
		Seq:   c.seq,
		Token: c.token,
		Prod:  c.peer.Cursor(max(c.sent, c.announcedTo)),
		Cons:  c.local.Cursor(c.announced),
		Flags: f,
	}
}

// WriteSpans returns where the bytes of a transmission lie in the peer's RMBE:
// one span, or two when they wrap.
func (c *Conn) WriteSpans(t Transmission) [2]Span { return c.peer.Spans(t.Pos, t.Len) }

// InFlight is how many messages were sent and not yet delivered. After a
// failover those that were lost count as one until they are told again.
func (c *Conn) InFlight() int {
	if c.repeat {
		return int(c.told.size) + 1
	}
	return int(c.told.size)
}
