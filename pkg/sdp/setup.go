// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// Client makes an SDP connection of a TCP connection whose other end is given to Server. It plays the part of the connecting peer, also if
// the TCP connection was accepted here. The programs may have used the TCP connection before: the next 32 bytes on it are the Hello. The
// stack owns the TCP connection from now on; after an error it has closed it.
func (s *Stack) Client(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	return s.setUp(ctx, tcp, socket.Connecting)
}

// Server makes an SDP connection of a TCP connection whose other end is given to Client, and plays the part of the accepting peer. Of
// the TCP connection it reads exactly the 32 bytes of the Hello. If they are not a Hello, it closes the connection before it makes a queue
// pair. As with Client, the stack owns the TCP connection from now on.
func (s *Stack) Server(ctx context.Context, tcp *net.TCPConn) (*Conn, error) {
	return s.setUp(ctx, tcp, socket.Accepting)
}

func (s *Stack) setUp(ctx context.Context, tcp *net.TCPConn, r socket.Role) (*Conn, error) {
	var c *Conn
	err := fmt.Errorf("device %q opens its connections itself: %w", s.cfg.Device.Name(), rdma.ErrNotSupported)
	if s.adapter == nil {
		c, err = s.newConn(r, tcp)
	}
	if err != nil {
		_ = tcp.Close()
		return nil, fmt.Errorf("set up SDP with %v: %w", tcp.RemoteAddr(), err)
	}
	return s.establish(ctx, c)
}

// establish sets a new connection up.
func (s *Stack) establish(ctx context.Context, c *Conn) (_ *Conn, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.SetupTimeout, socket.ErrSetupTimeout)
	defer cancel()
	if c.role == socket.Connecting {
		err = c.hello(ctx)
	} else {
		err = c.answer(ctx)
	}
	if err == nil {
		err = c.await(ctx)
	}
	if err != nil {
		c.abandon(err)
		return nil, c.opError("set up SDP", err)
	}
	return c, nil
}

// hello connects as the connecting peer.
func (c *Conn) hello(ctx context.Context) error {
	c.lock()
	outs := c.m.Poll(nil) // OutHello, which is all that a new machine wants
	err := c.open()
	c.unlock()
	if err != nil {
		return err
	}
	return c.link.connect(ctx, &c.ep, outs[0].Message.Append(nil, c.stack.cfg.Layout))
}

// answer connects as the accepting peer.
func (c *Conn) answer(ctx context.Context) error {
	b, err := c.link.readHello(ctx)
	if err != nil {
		return fmt.Errorf("read Hello: %w", err)
	}
	c.lock() // in one turn: the HelloAck, which the machine now has, needs the endpoint
	if err = c.m.HandleHello(time.Now(), b); err == nil {
		err = c.open()
	}
	c.unlock()
	if err != nil {
		return err
	}
	return c.link.accept(ctx, &c.ep)
}

// open makes the endpoint. The caller has the turn.
func (c *Conn) open() error {
	if c.life.over { // Stack.Close was quicker
		return net.ErrClosed
	}
	if err := c.ep.open(c.stack.ctx, &c.stack.cfg); err != nil {
		return err
	}
	c.stack.named(c.ep.qp.Num(), c)
	return nil
}

// await waits until the connection is established. Only now that the queue pair is connected may notifications do anything: the peer's
// first message may be there before we hear that it is, a notification may come for no reason (see [rdma.CQ]), and the answer would be
// refused.
func (c *Conn) await(ctx context.Context) error {
	c.lock()
	c.ep.cq.OnNotify(c.onNotify)
	if !c.ep.dead {
		c.drain()
	}
	c.run()
	c.unlock()
	if err := c.waitReady(ctx); err != nil {
		return err
	}
	c.lock()
	defer c.unlock()
	switch {
	case c.stands():
	case c.life.err != nil:
		return c.life.err
	default:
		return rdma.ErrClosed
	}
	c.ep.begins = beginsWithout
	return nil
}

// stands reports whether the connection is, or was, one that somebody has. The caller has the turn.
func (c *Conn) stands() bool { return c.life.established && c.ep.begins != beginsWaiting }

// abandon ends a connection that was not established.
func (c *Conn) abandon(err error) {
	c.lock()
	defer c.unlock()
	c.life.closed = true
	c.life.established = false // nobody hears of its end
	if !c.life.over {
		c.ep.dead = true
		c.link.reset(&c.ep)
		c.m.HandleDown(err)
	}
	c.run()
	c.free()
}
