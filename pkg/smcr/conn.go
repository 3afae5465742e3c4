// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"cmp"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Conn is a TCP connection, carried by SMC-R or by TCP itself; Info tells
// which. A Conn owns the TCP connection and, with SMC-R, a send buffer and an element of an
// RMB until nobody uses them any more (see life); the link group owns the memory that both lie
// in, and the state of the protocol.
//
// Conn implements net.Conn. Reads and writes may run at the same time; two reads, or two
// writes, take turns.
type Conn struct {
	tcp   *net.TCPConn
	stack *Stack
	info  Info // what is fixed at the rendezvous
	life  life

	// Without SMC-R only.
	fallback fallback

	// With SMC-R only.
	group   *group          // nil: TCP carries the connection
	lc      *linkgroup.Conn // guarded by the stack's turn
	streams streams
	recv    receiver
	send    sender
	urgent  urgentState
	mark    dirtyMark
	cool    coolness
	watched watched
}

// newTCPConn wraps a connection that stays TCP, from which early was read already. The peer's
// Decline may still come if mayCross is set.
func newTCPConn(s *Stack, tcp *net.TCPConn, info Info, early []byte, mayCross bool) *Conn {
	return &Conn{tcp: tcp, stack: s, info: info, fallback: fallback{early: early, mayCross: mayCross}}
}

// newSMCConn makes the shell of a connection; the caller holds the turn.
func newSMCConn(s *Stack, g *group, lc *linkgroup.Conn, buf *sendBuffer, tcp *net.TCPConn) *Conn {
	c := &Conn{tcp: tcp, stack: s, group: g, lc: lc}
	c.recv.init(g.rmbs[lc.Local().RMB], int(lc.Local().Index-1), g.rmbe(lc.Local()), lc.Ring())
	c.send.init(buf)
	c.cool.able = c.recv.region.canDiscard() && buf.region.canDiscard()
	if lc.Stale() {
		c.recv.wipeAll()
	}
	c.life.begin()
	g.setShell(c)
	s.conns[c] = struct{}{}
	return c
}

// applyNegotiated fixes what the first contact negotiated; the caller holds the turn
// and no data has moved yet.
func (c *Conn) applyNegotiated() {
	c.recv.negotiated(c.lc.Ring())
	c.startCoalescing()
}

// handle takes the machine's events; the caller holds the turn.
func (c *Conn) handle(ev cdc.Events) {
	d := c.lc.Data()
	c.stack.stir(c)
	// The reader must know of an urgent byte before the bytes around it arrive, also where
	// the event that tells of the urgent byte is only the next one.
	if ev&cdc.PeerUrgent != 0 || d.PeerUrgent() != c.urgent.mark.Load() || c.streams.has(flagPeerUrgent) {
		c.handleUrgent(d, ev)
	}
	c.streams.peerProduced.Store(d.PeerProduced())
	c.streams.completed.Store(d.Completed())
	var f uint32
	if ev&cdc.PeerDone != 0 {
		f |= flagPeerDone
	}
	if ev&cdc.Aborted != 0 {
		f |= flagAborted | flagReset
		if c.group.lg.State() == linkgroup.Dead {
			f |= flagGroupLost
		}
	}
	if d.PeerBlocked() != c.streams.has(flagPeerBlocked) {
		if d.PeerBlocked() {
			f |= flagPeerBlocked
		} else {
			c.streams.flags.And(^flagPeerBlocked)
		}
	}
	if f != 0 {
		c.streams.flags.Or(f)
	}
	// The reader may have gone on since it last told the machine, without a reason to
	// tell; with what has arrived there may be a reason.
	if ev&cdc.Readable != 0 {
		written := f == 0 && c.writeArrived()
		c.lc.Consume(c.streams.consumed.Load())
		if !written {
			c.recv.wake()
		}
	}
	if ev&cdc.Writable != 0 {
		c.send.wake()
	}
	if c.send.coalesce.on {
		c.armCoalesce() // what was left of more, or what waited for window
	}
	if f&(flagAborted|flagPeerDone) != 0 {
		c.recv.wake()
		c.send.wake()
	}
	if f&flagReset != 0 {
		c.recv.sink.Load().giveUp()
	}
}

// ErrLinkGroupLost is what the calls of a connection return that was reset because its link group ended: the last
// of its links was lost, or the peer deleted the group. It is syscall.ECONNRESET, too.
var ErrLinkGroupLost error = groupLostError{}

type groupLostError struct{}

func (groupLostError) Error() string { return "connection reset by peer: its link group ended" }
func (groupLostError) Unwrap() error { return syscall.ECONNRESET }

// whyReset is the error of a connection that did not end in order.
func (c *Conn) whyReset() error {
	if c.streams.has(flagGroupLost) {
		return ErrLinkGroupLost
	}
	return syscall.ECONNRESET
}

func (c *Conn) raise(f uint32) {
	c.streams.flags.Or(f)
	c.recv.wake()
	c.send.wake()
}

// sync tells the machine how far the application has come; the caller holds
// the turn.
func (c *Conn) sync() {
	if c.life.isOver() {
		return
	}
	c.stack.stir(c)
	produced := c.streams.written()
	// The writer stores the urgent position before produced, and a byte behind that may not come: CloseWrite may be first.
	if u := c.urgent.at.Load(); u != 0 && (u <= produced || u == urgentAhead) {
		c.urgent.at.CompareAndSwap(u, 0)
		c.lc.Urgent(u)
	}
	c.lc.Consume(c.streams.consumed.Load())
	c.lc.Produce(produced)
	if c.send.coalesce.on {
		c.armCoalesce()
	}
	c.stack.groups.touch(c.group)
}

// wakeUp leaves a token for a waiter.
func wakeUp(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// opError wraps an error as package net does.
func (c *Conn) opError(op string, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return &net.OpError{Op: op, Net: c.tcp.LocalAddr().Network(), Source: c.tcp.LocalAddr(), Addr: c.tcp.RemoteAddr(), Err: err}
}

// LocalAddr returns the TCP connection's local address.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr returns the TCP connection's peer.
func (c *Conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return cmp.Or(c.SetReadDeadline(t), c.SetWriteDeadline(t)) // both; one error, which is a net.Error
}

// SetReadDeadline bounds Read and WriteTo; the zero time removes the bound.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if c.group == nil {
		return c.tcp.SetReadDeadline(t)
	}
	if c.life.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.recv.deadline.Set(t)
	return nil
}

// SetWriteDeadline bounds Write, not what is still to be delivered.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if c.group == nil {
		return c.tcp.SetWriteDeadline(t)
	}
	if c.life.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.send.deadline.Set(t)
	return nil
}

// Unwrap returns the TCP connection of a connection that fell back, nil with
// SMC-R.
func (c *Conn) Unwrap() *net.TCPConn {
	if c.group != nil || !c.fallback.isOver() {
		return nil
	}
	return c.tcp
}

// Info describes the connection as it is now.
func (c *Conn) Info() Info {
	if c.group == nil {
		return c.info
	}
	c.stack.lock()
	defer c.stack.unlock()
	return c.infoLocked()
}

func (c *Conn) infoLocked() Info {
	i := c.info
	i.BytesSent, i.BytesRecv = c.streams.written(), c.streams.consumed.Load()
	i.GroupID, i.LinkID = c.group.id, uint8(c.lc.Link())
	i.Token = uint32(c.lc.Token())
	i.State = c.lc.Data().State().String()
	i.SendBuffer, i.RMBE, i.PeerRMBE = int(c.send.size()), len(c.recv.rmbe), int(c.lc.PeerRMBESize())
	i.RDMAWrites, i.CDCSent, i.CDCRecv = c.lc.Counters()
	return i
}

// Mode returns what carries the connection.
func (c *Conn) Mode() Mode { return c.info.Mode }

// Reason returns why the connection is TCP, 0 with SMC-R.
func (c *Conn) Reason() clc.Reason { return c.info.Reason }
