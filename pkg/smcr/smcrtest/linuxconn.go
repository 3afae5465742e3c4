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
	l     *linux
	name  string
	token cdc.AlertToken
	key   byte // of the stream that we write
	rmb   *linuxRMB
	via   *linuxLink // of the rendezvous
	link  *linuxLink // that carries what we send
	ready bool       // the peer's half is known

	out     linuxSending
	in      linuxReceiving
	msgs    linuxMessages
	closing linuxClosing
}

func newLinuxConn(l *linux, name string, token cdc.AlertToken, r *linuxRMB, lk *linuxLink) *linuxConn {
	return &linuxConn{
		l: l, name: name, token: token, rmb: r, via: lk, link: lk, key: streamKey(name, l.side),
		out: linuxSending{buf: make([]byte, l.size)},
		in:  linuxReceiving{size: l.size},
	}
}

func (c *linuxConn) activate(peer linkgroup.RMBE, keys *linuxToken) {
	c.out.activate(peer, keys)
	c.ready = true
}

// peerKey is the key of the stream that the peer writes.
func (c *linuxConn) peerKey() byte { return streamKey(c.name, 1-c.l.side) }

// over reports that the application and both machines are done.
func (c *linuxConn) over() bool {
	if c.closing.killed {
		return c.closing.closed
	}
	return c.closing.isOver() && c.msgs.areOver()
}

// recv takes a message of the peer and checks what the kernel could not: that
// the peer keeps the rules.
func (c *linuxConn) recv(_ time.Time, m cdc.Message) error {
	if m.Flags.FailoverValidation() {
		if err := c.msgs.takeValidation(m.Seq); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		return nil
	}
	if ok, err := c.msgs.take(m); !ok {
		return err
	}
	if c.closing.gotA && m.Flags.Abort() || c.closing.gotC && m.Flags.Closed() && fromCursor(m.Prod) == c.in.peerProd {
		return nil // once more over another link
	}
	if c.closing.hasGotLast() && !c.msgs.peerMoved {
		return errors.New("a message after the last word")
	}
	if err := c.takeData(m.Prod); err != nil {
		return err
	}
	c.in.takeFlags(m.Flags)
	if c.ready {
		if err := c.out.takeSpace(m.Cons); err != nil {
			return err
		}
	}
	if m.Flags.CursorUpdateRequested() {
		c.msgs.tell = true
	}
	c.closing.take(m.Flags)
	if c.isBetweenKernels() { // one that resets would wait for ever
		c.closing.silent = false
	}
	c.resetIfUndeliverable()
	c.l.release(c)
	return nil
}

// takeData takes the peer's producer cursor. Cursors never move back.
func (c *linuxConn) takeData(prod cdc.Cursor) error {
	n, err := c.in.gain(prod)
	if err != nil {
		return err
	}
	if n > 0 && c.closing.gotD {
		return errors.New("data after the end of the stream")
	}
	if err := c.in.checkTold(prod); err != nil {
		return err
	}
	if n > 0 {
		c.in.take(prod, n)
		c.closing.reset = c.closing.reset || c.closing.closed // nobody will read the data
	}
	return nil
}

// resetIfUndeliverable resets a connection with data for a peer that has closed.
func (c *linuxConn) resetIfUndeliverable() {
	if c.closing.gotC && c.out.unsent() > 0 {
		c.closing.reset = true
	}
}

// isBetweenKernels reports whether the peer is a kernel, too.
func (c *linuxConn) isBetweenKernels() bool { return c.l.w.cfg.Linux[c.l.p.peers[1-c.l.side]] }

// switchTo moves the connection to another link. What was not acknowledged is
// sent again, after a validation message; a connection that is closing just
// moves, and what was under way is lost.
//
// The kernel would not say its consumer cursor and the flags of its end again either, before it has something else to say.
// Its applications have, sooner or later; here the kernel says both at once. Two kernels would lose data without a word:
// where the peer is one, too, a connection that is closing moves like others.
func (c *linuxConn) switchTo(to *linuxLink) {
	underWay := len(c.msgs.unacked) > 0
	c.link, c.msgs.moved = to, true
	c.msgs.unacked = nil
	if !c.ready || c.closing.killed || !underWay && c.closing.isEnding() {
		return
	}
	c.msgs.tell = true // the last consumer cursor may be lost
	c.closing.resend = c.closing.hasSentAny() && !c.closing.silent
	if c.closing.isEnding() && !c.isBetweenKernels() {
		c.l.w.conns[c.name].lost = true
		return
	}
	c.out.goBack()
	c.resetIfUndeliverable()
	c.msgs.validate = true
	c.out.urgentSent = false
}

// hasLost reports whether the kernel's model has lost data of a connection of the path, which may be reset for that.
func (p *path) hasLost() bool {
	for _, c := range p.w.conns {
		if c.path == p && c.lost {
			return true
		}
	}
	return false
}

// window is where the peer may write.
func (c *linuxConn) window() window { return c.in.window(c.peerKey()) }

// delivered is the completion of a message on a link.
func (c *linuxConn) delivered(on *linuxLink) {
	m, ok := c.msgs.delivered(on)
	if !ok {
		return
	}
	if !m.validation {
		c.out.delivered(m)
	}
	c.l.release(c)
}

// transmit sends one message, after its data, if there is a reason to.
func (c *linuxConn) transmit(post func(int, work)) bool {
	if c.ready && !c.closing.killed && c.msgs.validate {
		c.msgs.validate = false
		var f cdc.Flags
		c.post(cdc.Message{Seq: c.msgs.seqFin, Token: c.out.peer.Token, Flags: f.WithFailoverValidation()}, true, post)
		return true
	}
	if !c.ready || c.closing.killed || c.closing.hasSentLast() && !c.closing.resend {
		return false
	}
	// A reset by the peer is answered when the application closes.
	abort := c.closing.abortDue()
	sendD := c.closing.shut && !c.closing.sentD && c.out.unsent() == 0
	sendC := c.closing.closed && !abort && c.out.unsent() == 0
	n := 0
	if !abort && !c.closing.hasGotLast() && !c.out.urgentSent {
		n = min(c.out.unsent(), c.out.space)
	}
	if n == 0 && !abort && !c.closing.resend && (c.closing.gotA || !sendD && !sendC && !c.msgs.tell && !c.in.updateDue()) {
		return false
	}
	if n > 0 {
		c.out.blocked = c.out.unsent() >= c.out.space
		c.writes(n, post)
		c.out.urgentSent = c.out.urgent && c.out.unsent() == 0
	} else if c.out.unsent() == 0 {
		c.out.blocked = false
	}
	c.msgs.tell = false
	c.in.told = c.in.cons
	c.closing.sent(sendD, sendC, abort)
	c.msgs.seq++
	m := cdc.Message{Seq: c.msgs.seq, Token: c.out.peer.Token, Prod: c.out.prod.cursor(), Cons: c.in.cons.cursor(), Flags: c.closing.flags()}
	if c.out.urgentSent && n > 0 {
		m.Flags = m.Flags.WithUrgentPending().WithUrgentPresent()
		c.out.urgent = false
	}
	if c.out.blocked {
		m.Flags = m.Flags.WithWriterBlocked()
	}
	c.post(m, false, post)
	return true
}

func (c *linuxConn) post(m cdc.Message, validation bool, post func(int, work)) {
	wr := work{send: true, id: uint64(c.token)}
	m.Append(wr.msg[:0])
	c.msgs.unacked = append(c.msgs.unacked, linuxSent{c.link, c.out.sent, c.out.prod, c.msgs.seq - 1, validation})
	post(c.link.slot, wr)
}

// writes posts the RDMA writes of n bytes, cut where the peer's RMBE wraps.
func (c *linuxConn) writes(n int, post func(int, work)) {
	for n > 0 {
		part, to, from := c.out.next(n)
		t := c.out.keys.on[c.link.slot]
		if !c.out.keys.known[c.link.slot] {
			if !c.l.w.cfg.Linux[c.l.p.peers[1-c.l.side]] {
				c.l.w.fault("%v: no RKey of the peer for %s on link %d", c.l, c.name, c.link.id)
			}
			c.closing.reset = true // the key was told while the link was being added
			return
		}
		post(c.link.slot, work{
			conn: c.name, rkey: uint32(t.RKey),
			addr:   t.VAddr + uint64(c.out.peer.Size)*uint64(c.out.peer.Index-1) + uint64(to),
			source: func() []byte { return c.out.copyFrom(from, part) },
		})
		c.out.advance(part)
		n -= part
	}
}

func (c *linuxConn) write(n int) int {
	if c.closing.shut || c.closing.closed || c.closing.aborted() || c.closing.gotC {
		return 0
	}
	n = min(n, c.out.room())
	if n > 0 && c.l.w.rng.IntN(10) == 0 {
		c.out.urgent = true // the last byte of these
	}
	c.out.write(n, c.key)
	return n
}

func (c *linuxConn) read(t reader, n int) int {
	if c.closing.closed || c.closing.aborted() {
		return 0
	}
	n = min(n, c.in.unread)
	key := c.peerKey()
	for range n {
		if got, want := c.in.read(c.rmb.mem, key); got != want {
			t.fault("%s at Linux peer %d: byte %d is 0x%02x, want 0x%02x", c.name, c.l.side, c.in.consumed, got, want)
			break
		}
	}
	if c.in.urgentCame && c.in.unread == 0 {
		c.in.urgentCame, c.msgs.tell = false, true // the peer waits for the message
	}
	c.closing.eofSeen = c.in.unread == 0 && (c.closing.gotD || c.closing.gotC)
	return n
}

func (c *linuxConn) shutdown() { c.closing.shut = c.closing.shut || !c.closing.closed }

func (c *linuxConn) close(time.Time) {
	if !c.closing.closed {
		c.closing.closed = true
		c.closing.reset = c.closing.reset || c.in.unread > 0
		c.l.release(c)
	}
}

func (c *linuxConn) abort(now time.Time) {
	if !c.closing.closed {
		c.closing.reset = true
		c.close(now)
	}
}

func (c *linuxConn) progress() progress {
	return progress{
		produced: c.out.produced, consumed: c.in.consumed, unread: uint64(c.in.unread), eof: c.closing.eofSeen,
		aborted: c.closing.aborted(), over: c.over(), closed: c.closing.closed, state: c.closing.String(),
	}
}
