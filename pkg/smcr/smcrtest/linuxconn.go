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

// minus is how far p is ahead of o.
func (p place32) minus(o place32, size uint32) int {
	d := int(p.count) - int(o.count)
	if p.wrap != o.wrap {
		d += int(size)
	}
	return max(d, 0)
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
	ready   bool // the peer's half is known
	key     byte
	seq     uint16
	peerSeq uint16
	heard   bool

	// Sending. The send buffer is as large as the RMB.
	buf                 []byte
	prepared, sent, fin place32 // in buf
	prod                place32 // in the peer's RMBE
	space               int     // of the peer's RMBE
	peerCons            place32
	unacked             []place32 // sent, at each message under way
	produced            uint64
	blocked             bool
	urgent              bool // the next message ends with an urgent byte
	urgentSent          bool // nothing is sent until the peer has read it

	// Receiving.
	peerProd, cons, told place32
	unread               int
	consumed             uint64
	peerFlags            cdc.Flags

	tell                      bool // a message is due
	shut, closed, reset       bool // by the application
	sentD, sentC, sentA       bool
	gotD, gotC, gotA, eofSeen bool
	killed                    bool // with its group or its rendezvous
}

func newLinuxConn(l *linux, name string, token cdc.AlertToken, r *linuxRMB) *linuxConn {
	return &linuxConn{l: l, name: name, token: token, rmb: r, key: streamKey(name, l.side), buf: make([]byte, l.size)}
}

func (c *linuxConn) activate(peer linkgroup.RMBE) {
	c.peer, c.ready = peer, true
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
	return c.closed && (c.sentC || c.sentA) && (c.gotC || c.gotA) && len(c.unacked) == 0
}

// recv takes a message of the peer and checks what the kernel could not: that
// the peer keeps the rules.
func (c *linuxConn) recv(now time.Time, m cdc.Message) error {
	if d := int16(m.Seq - c.peerSeq); c.heard && d < 0 || !c.heard && m.Seq != 1 {
		return fmt.Errorf("sequence number %d after %d", m.Seq, c.peerSeq)
	}
	c.heard, c.peerSeq = true, m.Seq
	if c.gotC || c.gotA {
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
	c.peerProd = fromCursor(m.Prod)
	c.unread += n
	c.peerFlags = m.Flags
	if c.ready {
		k := fromCursor(m.Cons).minus(c.peerCons, c.peer.Size)
		c.peerCons = fromCursor(m.Cons)
		if c.space += k; c.space == int(c.peer.Size) {
			c.urgentSent = false
		}
		if c.space > int(c.peer.Size) {
			return fmt.Errorf("consumer cursor %v passes what was sent", m.Cons)
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
	_ = now
	return nil
}

// delivered is the completion of the oldest message under way.
func (c *linuxConn) delivered() {
	c.fin = c.unacked[0]
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
func (c *linuxConn) transmit(post func(work)) bool {
	if !c.ready || c.killed || c.sentC || c.sentA {
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
	if n == 0 && !abort && (c.gotA || !sendD && !sendC && !c.tell && !c.updateDue()) {
		return false
	}
	if n > 0 {
		c.blocked = c.unsent() >= c.space
		c.writes(n, post)
		c.urgentSent = c.urgent && c.unsent() == 0
	} else if c.unsent() == 0 {
		c.blocked = false
	}
	c.tell = false
	c.told = c.cons
	c.sentD = c.sentD || sendD && !abort
	c.sentC, c.sentA = sendC, abort
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
	wr := work{send: true, id: uint64(c.token)}
	m.Append(wr.msg[:0])
	c.unacked = append(c.unacked, c.sent)
	post(wr)
	return true
}

// writes posts the RDMA writes of n bytes, cut where the peer's RMBE wraps.
func (c *linuxConn) writes(n int, post func(work)) {
	for n > 0 {
		part := min(n, int(c.peer.Size-c.prod.count))
		from := c.sent.count
		post(work{
			conn: c.name, rkey: uint32(c.peer.RKey),
			addr: c.peer.VAddr + uint64(c.peer.Size)*uint64(c.peer.Index-1) + uint64(c.prod.count),
			source: func() []byte {
				b := make([]byte, part)
				k := copy(b, c.buf[from:])
				copy(b[k:], c.buf)
				return b
			},
		})
		c.sent = c.sent.plus(c.bufSize(), part)
		c.prod = c.prod.plus(c.peer.Size, part)
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
