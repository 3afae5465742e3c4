// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// Conn is one TCP connection carried by the group. It belongs to the group's
// owner.
type Conn struct {
	g        *Group
	link     place    // the link that carries what we send
	target   place    // where it moves once nothing is under way; noPlace: nowhere
	awaits   place    // where it depends on hearing of its SENDs at once; noPlace: nowhere
	named    place    // the link that CLC messages about the connection name
	peerLink place    // the link that carries what the peer sends, as far as we know; noPlace: not known, or closed since
	cameTo   uint8    // bit set of links over which the peer said that it fails over, and nothing else since
	endpoint Endpoint // our half of the link named
	data     cdc.Conn
	token    cdc.AlertToken
	slot     int // in the group's conns
	rmb      *rmb
	element  int
	peerRMB  *rtoken // nil until Activate
	offset   uint64  // of the peer's RMBE in it
	peerSize uint32
	peerTok  cdc.AlertToken
	deadline time.Time // zero unless closing
	since    time.Time // zombie
	queued   bool
	done     bool
	zombie   bool  // given up; the peer may still write the RMBE
	replaced bool  // the peer uses its RMBE for another connection, or not any more
	next     *Conn // in the ready queue

	clockPrev, clockNext *Conn // in the group's clocks

	writes, messagesSent, messagesRecv uint64
}

// connQueue is a first-in first-out list of connections with something to
// send, each at most once: nobody starves.
type connQueue struct{ head, tail *Conn }

func (q *connQueue) empty() bool { return q.head == nil }

func (q *connQueue) push(c *Conn) {
	if c.queued {
		return
	}
	c.queued = true
	c.next = nil
	if q.tail == nil {
		q.head = c
	} else {
		q.tail.next = c
	}
	q.tail = c
}

func (q *connQueue) pop() *Conn {
	c := q.head
	q.head = c.next
	if q.head == nil {
		q.tail = nil
	}
	c.next, c.queued = nil, false
	return c
}

// connTable has the connections of a group, by the slot that is part of their token.
type connTable struct {
	list     []*Conn
	n        int
	slots    [(maxSlots + 63) / 64]uint64 // bit set of those taken
	closing  clocks
	zombies  int       // connections given up whose RMBE the peer has not released
	retireAt time.Time // when something is to be done about the oldest
}

// RMBE describes a receive buffer as CLC messages do.
type RMBE struct {
	RMB   RMBID  // ours only
	Index uint8  // 1 is the first element of its RMB, as Linux counts
	Size  uint32 // bytes
	RToken
	Token cdc.AlertToken
}

// OpenConn takes a free RMBE of the wanted size and a token, for a connection whose send
// buffer is a ring of sendBuffer bytes. It fails with ErrNeedRMB, ErrFull or, in a group that
// ends, ErrProtocol.
func (g *Group) OpenConn(size, sendBuffer uint32) (*Conn, error) {
	if g.state != Active && g.state != Forming {
		return nil, fmt.Errorf("%w: group is %v", ErrProtocol, g.state)
	}
	if g.conns.n >= g.connLimit() {
		return nil, ErrFull
	}
	r, i, err := g.keys.take(size)
	if err != nil {
		return nil, err
	}
	if g.state == Forming {
		r.becomeConfirmed() // first contact confirms its RMB (§3.5.1)
	}
	c := &Conn{g: g, rmb: r, element: i}
	c.useLink(g.links.best(c, nil, g.state == Forming))
	g.conns.add(g.cfg.Rand, c)
	c.start(sendBuffer)
	return c, nil
}

// add gives a connection a slot and a token.
func (t *connTable) add(rng *rand.Rand, c *Conn) {
	c.slot = t.takeSlot()
	c.token = t.newToken(rng, c.slot)
	t.list[c.slot] = c
	t.n++
}

// takeSlot finds a place in conns.
func (t *connTable) takeSlot() int {
	for i, taken := range t.slots {
		if taken == ^uint64(0) {
			continue
		}
		bit := bits.TrailingZeros64(^taken)
		t.slots[i] |= 1 << bit
		slot := 64*i + bit
		if slot == len(t.list) {
			t.list = append(t.list, nil)
		}
		return slot
	}
	panic("linkgroup: more connections than slots") // OpenConn has counted them
}

// newToken makes the alert token of a slot. The slot makes it unique among most
// connections, and easy to find; the random part makes a stale one recognizable.
func (t *connTable) newToken(rng *rand.Rand, slot int) cdc.AlertToken {
	for {
		token := cdc.AlertToken(rng.Uint32()<<8 | uint32(slot%slotsPerByte+1))
		if t.byToken(token) == nil {
			return token
		}
	}
}

// byToken finds the connection of one of our tokens.
func (t *connTable) byToken(token cdc.AlertToken) *Conn {
	if token&0xff == 0 {
		return nil
	}
	for slot := int(token&0xff) - 1; slot < len(t.list); slot += slotsPerByte {
		if c := t.list[slot]; c != nil && c.token == token {
			return c
		}
	}
	return nil
}

// remove frees the slot of a connection; false: the connection has it no more.
func (t *connTable) remove(c *Conn) bool {
	if t.list[c.slot] != c {
		return false
	}
	t.list[c.slot] = nil
	t.slots[c.slot/64] &^= 1 << (c.slot % 64)
	t.n--
	return true
}

func (c *Conn) useLink(l *link) {
	if c.link != noPlace {
		c.dest().conns--
	}
	c.link, c.target, c.named, c.endpoint = l.place(), noPlace, l.place(), l.local
	l.conns++
}

// UseLink binds a connection, before Activate, to the link that the peer's CLC
// message named.
func (c *Conn) UseLink(index LinkIndex) {
	if l := &c.g.links.at[index]; l.isUp() {
		c.useLink(l)
	}
}

// ErrLinkLost: the link that CLC messages name was lost during the rendezvous.
var ErrLinkLost = errors.New("link group: the connection's link was lost")

// Endpoint is our half of the link that CLC messages about the connection
// name.
func (c *Conn) Endpoint() Endpoint { return c.endpoint }

// start sets the positions to the start.
func (c *Conn) start(sendBuffer uint32) {
	c.data = cdc.NewConn(cdc.Config{Local: c.g.ring(c.rmb.elementSize), SendBuffer: sendBuffer})
	if c.peerSize != 0 {
		c.data.Activate(c.g.ring(c.peerSize), c.peerTok)
	}
}

// Local describes our RMBE, for the Accept or Confirm.
func (c *Conn) Local() RMBE {
	return RMBE{
		RMB: c.rmb.id, Index: uint8(c.element + 1), Size: c.rmb.elementSize,
		RToken: c.rmb.tokens[c.endpoint.RNIC], Token: c.token,
	}
}

// Ring is the geometry of our RMBE. It is settled once the group is Active.
func (c *Conn) Ring() cdc.Ring { return c.g.ring(c.rmb.elementSize) }

// ErrPeerRMBE means that the peer's description of its RMBE is impossible.
var ErrPeerRMBE = errors.New("link group: impossible RMBE of the peer")

// Activate takes the peer's RMBE from its Accept or Confirm. On a subsequent
// contact its RKey must have been confirmed before (§3.5.2).
func (c *Conn) Activate(peer RMBE) error {
	g := c.g
	if peer.Token == 0 || peer.Index == 0 || peer.Size < 16<<10 {
		return fmt.Errorf("%w: token %d, index %d, %d bytes", ErrPeerRMBE, peer.Token, peer.Index, peer.Size)
	}
	var t *rtoken
	named := c.at(c.named)
	at := named.index
	switch g.state {
	case Forming:
		if t = g.keys.learn(at, peer.RToken); t == nil {
			return ErrFull
		}
	case Active:
		if !g.side.namesLinks() && (!named.isUp() || named.local != c.endpoint) {
			// The Confirm must name the Accept's link: a Linux server looks for
			// our RKey there only.
			return fmt.Errorf("%w before the Confirm", ErrLinkLost)
		}
		// It may name a link that is lost and whose place another one has by
		// now, so the RKey alone does not tell.
		if t = g.keys.peer(at, peer.RKey); t == nil || t.tokens[at] != peer.RToken {
			t = g.keys.find(peer.RToken)
		}
		if t == nil || !g.links.reaches(t) {
			return fmt.Errorf("%w: 0x%08x", ErrUnknownRToken, uint32(peer.RKey))
		}
	case Draining, Dead:
		return fmt.Errorf("%w: group is %v", ErrProtocol, g.state)
	}
	c.peerRMB = t
	c.offset = uint64(peer.Size) * uint64(peer.Index-1)
	c.peerSize, c.peerTok = peer.Size, peer.Token
	if c.peerLink == noPlace && named.state != linkDown {
		c.peerLink = c.named // where the peer begins
	}
	for _, o := range g.conns.list {
		if o != nil && o != c && !o.done && o.peerSize != 0 && o.peerRMB == t && o.offset == c.offset {
			o.replace()
		}
	}
	c.data.Activate(g.ring(peer.Size), peer.Token)
	if g.state == Active && !c.canUse(c.dest()) {
		c.moveTo(g.links.best(c, nil, g.state == Forming))
	}
	c.enqueue()
	return nil
}

// Abandon drops a connection whose rendezvous failed. If the peer may have
// learned of the RMBE and did not decline, the RMBE stays out of use: see
// becomeZombie.
func (c *Conn) Abandon(now time.Time, peerDeclined bool) {
	c.data.Fail()
	c.await()
	c.stopClock()
	if peerDeclined {
		c.finish()
		return
	}
	c.becomeZombie(now)
}

// Release gives a finished connection's RMBE back; the shell has zeroed it.
func (c *Conn) Release(now time.Time) {
	invariant.Must(c.done, "connection released before it was done")
	g := c.g
	if !g.conns.remove(c) {
		return
	}
	c.dest().conns--
	c.setAwaits(nil)
	g.idleSince = now
	c.rmb.give(now, c.element, g.state == Active && g.afterLoss.holds(now))
	g.keys.drop(g, c.rmb)
}

// Getters.

// ConnAt is the connection that has a slot; nil: there is none.
func (g *Group) ConnAt(slot int) *Conn {
	if slot < 0 || slot >= len(g.conns.list) {
		return nil
	}
	return g.conns.list[slot]
}

// Slot is a number by which the shell finds what belongs to the connection: small, and
// no other connection of the group has it before Release.
func (c *Conn) Slot() int { return c.slot }

// Token is our alert token.
func (c *Conn) Token() cdc.AlertToken { return c.token }

// Data is the state of the connection's streams, to be read only.
func (c *Conn) Data() *cdc.Conn { return &c.data }

// Link is the link that carries what we send; the peer chooses its own.
func (c *Conn) Link() llc.LinkID { return c.at(c.link).id }

// Heard is when the peer last said anything in the link group.
func (c *Conn) Heard() time.Time {
	var last time.Time
	for i := range c.g.links.at {
		if l := &c.g.links.at[i]; l.state != linkDown && l.heard.After(last) {
			last = l.heard
		}
	}
	return last
}

// PeerRMBESize is the size of the peer's buffer in bytes.
func (c *Conn) PeerRMBESize() uint32 { return c.peerSize }

// Counters returns RDMA writes, CDC messages sent and received.
func (c *Conn) Counters() (writes, sent, recv uint64) {
	return c.writes, c.messagesSent, c.messagesRecv
}

// Commands.

// Produce tells the position up to which the application filled the send
// buffer.
func (c *Conn) Produce(pos uint64) {
	if pos != c.data.Produced() && c.data.State() != cdc.Closed {
		c.raise(c.data.Produce(pos))
		c.enqueue()
	}
}

// Consume tells the position up to which the application emptied the RMBE.
func (c *Conn) Consume(pos uint64) {
	if c.data.State() != cdc.Closed {
		c.data.Consume(pos)
		c.enqueue()
	}
}

// Shutdown ends our stream after what was produced.
func (c *Conn) Shutdown() {
	c.data.Shutdown()
	c.enqueue()
}

// Close ends the connection; the application neither reads nor writes again.
func (c *Conn) Close(now time.Time) {
	ev := c.data.Close()
	c.startClock(now)
	c.raise(ev)
	c.enqueue()
}

// Abort resets the connection.
func (c *Conn) Abort(now time.Time) {
	ev := c.data.Abort()
	c.startClock(now)
	c.raise(ev)
	c.enqueue()
}

func (c *Conn) enqueue() {
	if c.target != noPlace && c.data.InFlight() == 0 {
		c.arrive()
	}
	c.await()
	if (c.target == noPlace || c.data.Repeats()) && c.data.Pending() { // no move before the end of a failover
		c.at(c.link).ready.push(c)
	}
	c.finishIfOver()
}

// await tells the link whether the connection depends on hearing at once that
// what it sent was delivered.
func (c *Conn) await() {
	var l *link
	if c.target != noPlace || c.data.AwaitsDelivery() {
		l = c.at(c.link)
	}
	c.setAwaits(l)
}

func (c *Conn) setAwaits(l *link) {
	if l.place() == c.awaits {
		return
	}
	if old := c.at(c.awaits); old != nil {
		old.awaiting--
	}
	if l != nil {
		l.awaiting++
	}
	c.awaits = l.place()
}

// raise tells the shell about events.
func (c *Conn) raise(ev cdc.Events) {
	if ev != 0 {
		c.g.out.put(Output{Kind: OutEvent, Event: EventConn, Conn: c, Events: ev})
	}
}

// finishIfOver ends a closed connection when the peer has said that it will
// not write again and nothing of ours is in flight.
func (c *Conn) finishIfOver() {
	if c.data.State() == cdc.Closed && (c.data.PeerReleased() || c.replaced) && c.data.InFlight() == 0 {
		c.finish()
	}
}

func (c *Conn) finish() {
	if c.done {
		return
	}
	c.done = true
	c.stopClock()
	c.endZombie()
	c.g.out.put(Output{Kind: OutEvent, Event: EventConnDone, Conn: c})
}

// fail ends the connection without the peer: its group died, or it does not
// close. In a dead group nobody can write the RMBE any more.
func (c *Conn) fail(now time.Time) {
	c.raise(c.data.Fail())
	c.await()
	c.stopClock()
	if c.g.state == Dead {
		c.finish()
		return
	}
	c.becomeZombie(now)
}

// expire gives up waiting for the peer's close (§4.8.1, §4.8.2): first the
// peer learns of it, if it did not know that we close. Until it has acknowledged that,
// the message may be lost with its link, and must be repeated: a peer that never hears
// of the end goes on writing to an RMB that we take back.
func (c *Conn) expire(now time.Time) {
	told := c.data.HasSentClose() || c.data.State() == cdc.PeerAbortWait
	if told && c.data.InFlight() == 0 {
		c.fail(now)
		return
	}
	c.resetClock(now)
	if !told {
		c.raise(c.data.Abort())
		c.enqueue()
	}
}

// replace ends a connection of which the peer knows nothing any more, since it
// gave its RMBE to another one (§4.4.2), or took the RMBE back. Nothing may be written there.
func (c *Conn) replace() {
	c.replaced = true
	c.raise(c.data.Fail())
	c.await()
	c.stopClock()
	c.finishIfOver()
}

func (c *Conn) handleSent() {
	c.raise(c.data.HandleSent())
	c.enqueue()
}

// take has the streams take a message, which leaves others out or does not.
func (c *Conn) take(m cdc.Message, skips bool) (cdc.Events, error) {
	if skips {
		return c.data.HandleSkip(m)
	}
	return c.data.HandleMessage(m)
}

func (c *Conn) handleMessage(now time.Time, l *link, m cdc.Message) error {
	c.messagesRecv++
	before, closed := c.data.PeerProduced(), c.data.State() == cdc.Closed
	skips := c.skips(l, m)
	ev, err := c.take(m, skips)
	l.recv += c.data.PeerProduced() - before
	stale := errors.Is(err, cdc.ErrStaleMessage)
	if stale {
		c.g.Discarded++
		err = nil
	}
	if !stale && !closed && (err == nil || skips) {
		c.peerSpoke(now, l, m.Flags.FailoverValidation(), skips)
	}
	switch {
	case ev&cdc.Aborted != 0 && c.data.State() != cdc.Closed:
		c.startClock(now)
	case !c.deadline.IsZero() && !c.data.HasSentClose():
		c.resetClock(now) // the peer still takes what was written before the close
	}
	c.raise(ev)
	c.enqueue()
	return err
}

// pumpData turns what connections have to send into RDMA writes and
// messages, as far as the link's send budget goes.
func (g *Group) pumpData(dst []Output, l *link) []Output {
	if g.state != Active {
		return dst
	}
	for !l.ready.empty() && l.inflight < SendBudget-llcReserve {
		c := l.ready.pop()
		if c.link != l.place() || (c.target != noPlace && !c.data.Repeats()) { // it moves, or has moved
			c.enqueue()
			continue
		}
		if !c.data.Pending() {
			continue
		}
		t, ev := c.data.Next()
		dst = c.appendWrites(dst, t)
		o := Output{Kind: OutSend, Link: l.index, Conn: c, ID: uint64(c.token)}
		t.Message.Append(o.Msg[:0])
		dst = append(dst, o)
		l.inflight++
		l.sent += uint64(t.Len)
		c.messagesSent++
		g.CDCSent++
		c.await()
		if ev != 0 {
			dst = append(dst, Output{Kind: OutEvent, Event: EventConn, Conn: c, Events: ev})
		}
		if c.data.Pending() {
			l.ready.push(c)
		}
	}
	return dst
}

// appendWrites cuts a transmission where the peer's RMBE wraps, and each
// piece where our send buffer wraps.
func (c *Conn) appendWrites(dst []Output, t cdc.Transmission) []Output {
	if t.Len == 0 {
		return dst
	}
	source := cdc.Ring{Size: c.data.SendBuffer()}
	l := c.at(c.link)
	to := c.peerRMB.tokens[l.index]
	pos := t.Pos
	for _, s := range c.data.WriteSpans(t) {
		if s.Len == 0 {
			continue
		}
		dst = append(dst, Output{
			Kind: OutWrite, Link: l.index, Conn: c,
			Local:      source.Spans(pos, s.Len),
			RemoteAddr: to.VAddr + c.offset + uint64(s.Offset),
			RKey:       to.RKey,
		})
		pos += uint64(s.Len)
		c.writes++
	}
	return dst
}
