// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// place32 is a cursor as the kernel keeps it; its arithmetic is written apart
// from package cdc.
type place32 struct {
	wrap  uint16
	count uint32
}

func (p place32) plus(size uint32, n int) place32 {
	p.count += uint32(n)
	if p.count >= size {
		p.count -= size
		p.wrap++
	}
	return p
}

// minus is how far p is ahead of o, 0 when it is behind.
func (p place32) minus(o place32, size uint32) int {
	return max(int(p.count)-int(o.count)+int(int16(p.wrap-o.wrap))*int(size), 0)
}

func fromCursor(c cdc.Cursor) place32 { return place32{c.Wrap, c.Count} }
func (p place32) cursor() cdc.Cursor  { return cdc.Cursor{Wrap: p.wrap, Count: p.count} }

// linuxConn is a connection of the kernel's model.
type linuxConn struct {
	l       *linux
	name    string
	token   cdc.AlertToken
	rmb     *linuxRMB
	peer    linkgroup.RMBE
	keys    *linuxToken // of the peer's RMB
	via     *linuxLink  // of the rendezvous
	link    *linuxLink  // that carries what we send
	moved   bool        // the link changed: old messages may still come
	ready   bool        // the peer's half is known
	key     byte
	seq     uint16
	peerSeq uint16
	heard   bool
	// peerMoved: a validation message came, so that old messages may follow.
	peerMoved bool
	resend    bool // closing flags may be lost with a link

	// Sending. The send buffer is as large as the RMB.
	buf                 []byte
	prepared, sent, fin place32 // in buf
	prod, prodFin       place32 // in the peer's RMBE
	seqFin              uint16  // one less than the last message delivered had
	validate            bool    // the validation message is next
	space               int     // of the peer's RMBE
	peerCons            place32
	furthest            place32     // prod at its greatest
	unacked             []linuxSent // messages under way
	produced            uint64
	blocked             bool
	urgent              bool // the next message ends with an urgent byte
	urgentSent          bool // nothing is sent until the peer has read it

	// Receiving.
	peerProd, cons, told place32
	unread               int
	consumed             uint64
	urgentCame           bool
	peerFlags            cdc.Flags

	tell                      bool // a message is due
	shut, closed, reset       bool // by the application
	sentD, sentC, sentA       bool
	gotD, gotC, gotA, eofSeen bool
	killed                    bool // with its group or its rendezvous
}

// linuxSent is a message under way: the link that carries it, the positions after
// it, and its number less one.
type linuxSent struct {
	on         *linuxLink
	sent, prod place32
	seq        uint16
	validation bool
}

func newLinuxConn(l *linux, name string, token cdc.AlertToken, r *linuxRMB, lk *linuxLink) *linuxConn {
	return &linuxConn{l: l, name: name, token: token, rmb: r, via: lk, link: lk, key: streamKey(name, l.side), buf: make([]byte, l.size)}
}

func (c *linuxConn) activate(peer linkgroup.RMBE, keys *linuxToken) {
	c.peer, c.keys, c.ready = peer, keys, true
	c.space = int(peer.Size)
}

func (c *linuxConn) bufSize() uint32 { return uint32(len(c.buf)) }

func (c *linuxConn) unsent() int { return c.prepared.minus(c.sent, c.bufSize()) }

// aborted reports that the connection was reset by either side.
func (c *linuxConn) aborted() bool { return c.reset || c.gotA || c.killed }

// over reports that the application and both machines are done.
func (c *linuxConn) over() bool {
	if c.killed {
		return c.closed
	}
	return c.closed && (c.sentC || c.sentA) && (c.gotC || c.gotA) && len(c.unacked) == 0 && !c.validate && !c.resend
}

// recv takes a message of the peer and checks what the kernel could not: that
// the peer keeps the rules.
func (c *linuxConn) recv(_ time.Time, m cdc.Message) error {
	if m.Flags.FailoverValidation() {
		c.peerMoved = true
		if c.heard && int16(c.peerSeq-m.Seq) < 0 || !c.heard && m.Seq != 0 {
			// What it believes delivered never arrived.
			return fmt.Errorf("%s: validation of message %d after %d", c.name, m.Seq, c.peerSeq)
		}
		return nil
	}
	if d := int16(m.Seq - c.peerSeq); c.heard && d < 0 || !c.heard && m.Seq != 1 && !c.peerMoved && !m.Flags.Abort() {
		if c.heard && (c.peerMoved || c.moved) {
			return nil // late, from the old link
		}
		return fmt.Errorf("sequence number %d after %d", m.Seq, c.peerSeq)
	}
	c.heard, c.peerSeq = true, m.Seq
	if c.gotA && m.Flags.Abort() || c.gotC && m.Flags.Closed() && fromCursor(m.Prod) == c.peerProd {
		return nil // once more over another link
	}
	if (c.gotA || c.gotC) && !c.peerMoved {
		return errors.New("a message after the last word")
	}
	size := c.l.size
	n := fromCursor(m.Prod).minus(c.peerProd, size)
	if m.Prod.Count >= size || c.unread+n > int(size) {
		return fmt.Errorf("producer cursor %v after %v, %d unread", m.Prod, c.peerProd, c.unread)
	}
	if n > 0 && c.gotD {
		return errors.New("data after the end of the stream")
	}
	if fromCursor(m.Prod).minus(c.told, size) > int(size) {
		return fmt.Errorf("producer cursor %v passes the consumer cursor %v", m.Prod, c.told)
	}
	if n > 0 { // cursors never move back
		c.peerProd = fromCursor(m.Prod)
		c.unread += n
		c.reset = c.reset || c.closed // nobody will read it
	}
	c.peerFlags = m.Flags
	c.urgentCame = c.urgentCame || m.Flags.UrgentPresent()
	if c.ready {
		if err := c.takeSpace(m); err != nil {
			return err
		}
	}
	if m.Flags.CursorUpdateRequested() {
		c.tell = true
	}
	c.gotD = c.gotD || m.Flags.SendingDone()
	c.gotC = c.gotC || m.Flags.Closed()
	c.gotA = c.gotA || m.Flags.Abort()
	if c.gotC && c.unsent() > 0 {
		c.reset = true
	}
	c.l.release(c)
	return nil
}

// takeSpace takes the peer's consumer cursor.
func (c *linuxConn) takeSpace(m cdc.Message) error {
	size := c.peer.Size
	cons := fromCursor(m.Cons)
	k := cons.minus(c.peerCons, size)
	if k == 0 {
		return nil
	}
	if cons.minus(c.furthest, size) > 0 {
		return fmt.Errorf("consumer cursor %v passes what was sent, %v", m.Cons, c.furthest)
	}
	c.peerCons = cons
	if gap := cons.minus(c.prod, size); gap > 0 { // it has what we would send again
		c.prod, c.sent = cons, c.sent.plus(c.bufSize(), gap)
	}
	c.space = int(size) - c.prod.minus(c.peerCons, size)
	if c.space == int(size) {
		c.urgentSent = false
	}
	return nil
}

// switchTo moves the connection to another link. What was not acknowledged is
// sent again, after a validation message; a connection that is closing just
// moves.
func (c *linuxConn) switchTo(to *linuxLink) {
	underWay := len(c.unacked) > 0
	c.link, c.moved = to, true
	c.unacked = nil
	if !c.ready || c.killed || !underWay && (c.closed || c.gotC || c.gotA || c.reset) {
		return
	}
	size := c.peer.Size
	c.sent, c.prod = c.fin, c.prodFin
	if gap := c.peerCons.minus(c.prod, size); gap > 0 {
		c.prod, c.sent = c.peerCons, c.sent.plus(c.bufSize(), gap)
	}
	c.space = int(size) - c.prod.minus(c.peerCons, size)
	if c.gotC && c.unsent() > 0 {
		c.reset = true // it cannot be delivered
	}
	c.validate = true
	c.tell = true // its consumer cursor may be lost
	c.resend = c.sentD || c.sentC || c.sentA
	c.urgentSent = false
}

// window is where the peer may write.
func (c *linuxConn) window() window {
	return window{
		key: streamKey(c.name, 1-c.l.side), ring: cdc.Ring{Size: c.l.size},
		told: c.consumed - uint64(c.cons.minus(c.told, c.l.size)), prod: c.consumed + uint64(c.unread),
	}
}

// delivered is the completion of a message on a link: the oldest one under way, or
// one of a link that the connection has left, which may live on while it is deleted.
func (c *linuxConn) delivered(on *linuxLink) {
	if len(c.unacked) == 0 || c.unacked[0].on != on {
		return
	}
	if s := c.unacked[0]; !s.validation {
		c.fin, c.prodFin, c.seqFin = s.sent, s.prod, s.seq
	}
	c.unacked = c.unacked[1:]
	c.l.release(c)
}

// updateDue is the kernel's rule for telling how far it has read.
func (c *linuxConn) updateDue() bool {
	size := c.l.size
	gain := c.cons.minus(c.told, size)
	limit := max(int(size)/10, linuxMinUpdate)
	senderFree := int(size) - c.peerProd.minus(c.told, size)
	return gain > limit && (senderFree <= int(size)/2 || c.peerFlags.WriterBlocked())
}

// transmit sends one message, after its data, if there is a reason to.
func (c *linuxConn) transmit(post func(int, work)) bool {
	if c.ready && !c.killed && c.validate {
		c.validate = false
		var f cdc.Flags
		c.post(cdc.Message{Seq: c.seqFin, Token: c.peer.Token, Flags: f.WithFailoverValidation()}, true, post)
		return true
	}
	if !c.ready || c.killed || (c.sentC || c.sentA) && !c.resend {
		return false
	}
	// A reset by the peer is answered when the application closes.
	abort := c.reset || c.gotA && c.closed
	sendD := c.shut && !c.sentD && c.unsent() == 0
	sendC := c.closed && !abort && c.unsent() == 0
	n := 0
	if !abort && !c.gotA && !c.gotC && !c.urgentSent {
		n = min(c.unsent(), c.space)
	}
	if n == 0 && !abort && !c.resend && (c.gotA || !sendD && !sendC && !c.tell && !c.updateDue()) {
		return false
	}
	if n > 0 {
		c.blocked = c.unsent() >= c.space
		c.writes(n, post)
		c.urgentSent = c.urgent && c.unsent() == 0
	} else if c.unsent() == 0 {
		c.blocked = false
	}
	c.tell, c.resend = false, false
	c.told = c.cons
	c.sentD = c.sentD || sendD && !abort
	c.sentC, c.sentA = c.sentC || sendC, c.sentA || abort
	c.seq++
	m := cdc.Message{Seq: c.seq, Token: c.peer.Token, Prod: c.prod.cursor(), Cons: c.cons.cursor()}
	if c.urgentSent && n > 0 {
		m.Flags = m.Flags.WithUrgentPending().WithUrgentPresent()
		c.urgent = false
	}
	if c.blocked {
		m.Flags = m.Flags.WithWriterBlocked()
	}
	if c.sentD {
		m.Flags = m.Flags.WithSendingDone()
	}
	if c.sentC {
		m.Flags = m.Flags.WithClosed()
	}
	if c.sentA {
		m.Flags = m.Flags.WithAbort()
	}
	c.post(m, false, post)
	return true
}

func (c *linuxConn) post(m cdc.Message, validation bool, post func(int, work)) {
	wr := work{send: true, id: uint64(c.token)}
	m.Append(wr.msg[:0])
	c.unacked = append(c.unacked, linuxSent{c.link, c.sent, c.prod, c.seq - 1, validation})
	post(c.link.slot, wr)
}

// writes posts the RDMA writes of n bytes, cut where the peer's RMBE wraps.
func (c *linuxConn) writes(n int, post func(int, work)) {
	for n > 0 {
		part := min(n, int(c.peer.Size-c.prod.count))
		from := c.sent.count
		t := c.keys.on[c.link.slot]
		if !c.keys.known[c.link.slot] {
			if !c.l.w.cfg.Linux[c.l.p.peers[1-c.l.side]] {
				c.l.w.fault("%v: no RKey of the peer for %s on link %d", c.l, c.name, c.link.id)
			}
			c.reset = true // it was told while the link was being added
			return
		}
		post(c.link.slot, work{
			conn: c.name, rkey: uint32(t.RKey),
			addr: t.VAddr + uint64(c.peer.Size)*uint64(c.peer.Index-1) + uint64(c.prod.count),
			source: func() []byte {
				b := make([]byte, part)
				k := copy(b, c.buf[from:])
				copy(b[k:], c.buf)
				return b
			},
		})
		c.sent = c.sent.plus(c.bufSize(), part)
		c.prod = c.prod.plus(c.peer.Size, part)
		if c.prod.minus(c.furthest, c.peer.Size) > 0 {
			c.furthest = c.prod
		}
		c.space -= part
		n -= part
	}
}

func (c *linuxConn) write(n int) int {
	if c.shut || c.closed || c.aborted() || c.gotC {
		return 0
	}
	n = min(n, len(c.buf)-c.prepared.minus(c.fin, c.bufSize()))
	if n > 0 && c.l.w.rng.IntN(10) == 0 {
		c.urgent = true // the last byte of these
	}
	for range n {
		c.buf[c.prepared.count] = streamByte(c.key, c.produced)
		c.prepared = c.prepared.plus(c.bufSize(), 1)
		c.produced++
	}
	return n
}

func (c *linuxConn) read(t reader, n int) int {
	if c.closed || c.aborted() {
		return 0
	}
	n = min(n, c.unread)
	key := streamKey(c.name, 1-c.l.side)
	for range n {
		if got, want := c.rmb.mem[c.cons.count], streamByte(key, c.consumed); got != want {
			t.fault("%s at Linux peer %d: byte %d is 0x%02x, want 0x%02x", c.name, c.l.side, c.consumed, got, want)
			break
		}
		c.cons = c.cons.plus(c.l.size, 1)
		c.consumed++
		c.unread--
	}
	if c.urgentCame && c.unread == 0 {
		c.urgentCame, c.tell = false, true // the peer waits for it
	}
	c.eofSeen = c.unread == 0 && (c.gotD || c.gotC)
	return n
}

func (c *linuxConn) shutdown() { c.shut = c.shut || !c.closed }

func (c *linuxConn) close(time.Time) {
	if !c.closed {
		c.closed = true
		c.reset = c.reset || c.unread > 0
		c.l.release(c)
	}
}

func (c *linuxConn) abort(now time.Time) {
	if !c.closed {
		c.reset = true
		c.close(now)
	}
}

func (c *linuxConn) progress() progress {
	state := fmt.Sprintf("sent D %t C %t A %t, got D %t C %t A %t, killed %t", c.sentD, c.sentC, c.sentA, c.gotD, c.gotC, c.gotA, c.killed)
	return progress{
		produced: c.produced, consumed: c.consumed, unread: uint64(c.unread), eof: c.eofSeen,
		aborted: c.aborted(), over: c.over(), closed: c.closed, state: state,
	}
}
