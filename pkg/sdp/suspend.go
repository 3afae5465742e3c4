// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// A suspended connection leaves its connection of TCP and its queue pair, and goes on with others (§13). The machine says when;
// this is how. The peer that did not ask makes the next connection, whoever made the one before:
//
//	Suspend: listens    ---- SuspComm, port ------------->
//	                    <--- SuspCommAck -----------------
//	ends both           <--- FIN, and ours -------------->   ends both
//	accepts             <--- TCP, from the same port -----   connects
//	                    <--- as for a new connection ---->
//
// What waits goes on afterwards: reads, writes, what nobody has read, the end of a stream that was told.

// SuspendOptions say how a suspended connection goes on.
type SuspendOptions struct {
	// AnyPort accepts the peer's next connection from any port of its address. Without AnyPort it must come from the port that the peer
	// had before, as the draft demands (§13.1.1): no other program of the peer's host can have that port. But a peer that accepted its
	// last connection had the port of its listener, and cannot connect from there while the listener is open. It needs AnyPort.
	AnyPort bool
}

// moves is what a connection has for its suspensions.
type moves struct {
	ctx    context.Context //nolint:containedctx // of the goroutines that move the connection, until its end
	cancel context.CancelFunc
	wg     sync.WaitGroup // those goroutines

	one           sync.Mutex     // held by the one that moves; guards what follows
	local, remote netip.AddrPort // of the connection of TCP

	own   *suspension // that our program asked for; the turn guards it, and asked
	asked bool        // the connection moves because of it
}

// suspension is one that our program asked for.
type suspension struct {
	l       *net.TCPListener // where the peer comes to
	anyPort bool
	over    chan struct{} // closed when the connection has moved, or ended
	err     error         // why it has not moved, once over is closed
}

// end says how a suspension ended.
func (p *suspension) end(err error) {
	p.err = err
	_ = p.l.Close() // it may be
	close(p.over)
}

// Suspend moves the connection to another TCP connection and another queue pair, between the same addresses. It opens a port for this,
// to which the peer connects. Reads and writes wait meanwhile, and adverts that were not used are made again, so that neither program
// notices. Suspend returns when data flow again. If ctx ends before, Suspend returns its error, and the suspension goes on nevertheless;
// if the peer has not come back within Config.SuspendTimeout, the connection is reset.
//
// Only one suspension is under way at a time. A second one of this side fails with [socket.ErrState]; one that the peer asks for takes
// place before or after this one. On adapters that open their TCP connections themselves Suspend fails with [rdma.ErrNotSupported], and
// a peer that asks for a suspension loses the connection.
func (c *Conn) Suspend(ctx context.Context, o SuspendOptions) error {
	return c.opError("suspend", c.suspend(ctx, o))
}

func (c *Conn) suspend(ctx context.Context, o SuspendOptions) error {
	if c.stack.adapter != nil {
		return fmt.Errorf("device %q opens its connections itself: %w", c.stack.cfg.Device.Name(), rdma.ErrNotSupported)
	}
	at, err := endOf(c.local)
	if err != nil {
		return err
	}
	l, err := plaintcp.Listen(ctx, netip.AddrPortFrom(at.Addr(), 0).String())
	if err != nil {
		return err
	}
	p := &suspension{l: l, anyPort: o.AnyPort, over: make(chan struct{})}
	if err := c.ask(p); err != nil {
		return errors.Join(err, l.Close())
	}
	select {
	case <-p.over:
		return p.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ask gives a suspension to the machine.
func (c *Conn) ask(p *suspension) error {
	at, err := endOf(p.l.Addr())
	if err != nil {
		return err
	}
	c.lock()
	defer c.unlock()
	switch {
	case c.life.closed:
		return net.ErrClosed
	case c.moves.own != nil:
		return fmt.Errorf("connection is being suspended: %w", socket.ErrState)
	}
	if err := c.m.Suspend(time.Now(), at.Port()); err != nil {
		return err
	}
	c.moves.own = p
	c.run()
	return nil
}

// leave begins the way from a queue pair to the next one. The caller has the turn.
func (c *Conn) leave(m bsdh.Message) {
	c.ep.dead = true
	c.moves.asked = m.MID == bsdh.SuspCommAck
	c.info.Role = socket.Connecting
	if c.moves.asked {
		c.info.Role = socket.Accepting
	}
	c.moves.wg.Go(func() { c.move(&m) })
}

// arrived says that the connection is established again. The caller has the turn.
func (c *Conn) arrived() {
	c.info.Moves++
	if p := c.moves.own; p != nil && c.moves.asked {
		c.moves.own = nil
		p.end(nil)
	}
}

// move takes a connection from its queue pair to the next one, as OutSuspended says with m.
func (c *Conn) move(m *bsdh.Message) {
	c.moves.one.Lock() // the last one may not have returned, though the connection was established
	defer c.moves.one.Unlock()
	err := c.goTo(c.moves.ctx, m)
	c.lock()
	switch {
	case err != nil:
		c.m.HandleLeft(err)
	case !c.ep.dead:
		c.drain()
	}
	c.run()
	c.unlock()
}

// goTo ends the present TCP connection and queue pair, and sets the next ones up. m says in which part: SuspComm of the peer asks us to
// connect to its port, SuspCommAck says that the peer will connect to ours.
func (c *Conn) goTo(ctx context.Context, m *bsdh.Message) error {
	c.endLink(ctx)
	if m.MID == bsdh.SuspCommAck {
		return c.takeBack(ctx)
	}
	return c.follow(ctx, m.Port)
}

// follow connects to the port at which the peer waits, as the connecting peer.
func (c *Conn) follow(ctx context.Context, port uint16) error {
	tcp, err := c.moves.comeBack(ctx, port)
	if err != nil {
		return fmt.Errorf("connect to where the peer has moved: %w", err)
	}
	l, err := c.reopen(ctx, tcp)
	if err != nil {
		return err
	}
	c.lock()
	err = c.m.Resume(time.Now())
	c.run()
	hello := c.greeting
	c.unlock()
	if err != nil {
		return err // the machine has ended
	}
	return l.connect(ctx, &c.ep, hello.Append(nil, c.stack.cfg.Layout))
}

// takeBack waits for the peer at the listener of our suspension, and goes on as the accepting peer.
func (c *Conn) takeBack(ctx context.Context) error {
	c.lock()
	p := c.moves.own
	c.unlock()
	if p == nil {
		return net.ErrClosed
	}
	tcp, err := awaitPeer(ctx, p.l, c.moves.remote, p.anyPort)
	if err != nil {
		return fmt.Errorf("wait for the peer: %w", err)
	}
	l, err := c.reopen(ctx, tcp)
	if err != nil {
		return err
	}
	b, err := l.readHello(ctx)
	if err != nil {
		return fmt.Errorf("read Hello: %w", err)
	}
	if err := l.accept(ctx, &c.ep); err != nil {
		return err
	}
	// Not before: what follows may be posted by whoever has the turn then.
	c.lock()
	defer c.unlock()
	err = c.m.HandleHello(time.Now(), b)
	if err == nil && c.ep.qp.State() == rdma.QPError {
		c.down(nil) // the peer has gone again; until now the machine took that for the end of the old connection
	}
	return err
}

// endLink ends the connection of TCP and the queue pair in order: SuspCommAck is to arrive.
func (c *Conn) endLink(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, finWait)
	c.link.close(ctx, &c.ep)
	cancel()
	c.stack.unnamed(c.ep.qp.Num())
	err := c.ep.closeQP()
	c.link.release()
	c.lock()
	if err = errors.Join(err, c.ep.forgetQP()); c.life.err == nil {
		c.life.err = err
	}
	c.unlock()
}

// reopen makes a queue pair for a connection of TCP, which it owns.
func (c *Conn) reopen(ctx context.Context, tcp *net.TCPConn) (link, error) {
	for {
		l, err := c.tryReopen(tcp)
		if err == nil {
			return l, nil
		}
		if afterShortage(ctx, err) != nil {
			return nil, errors.Join(err, tcp.Close())
		}
	}
}

// tryReopen is reopen, once. After an error there is no queue pair.
func (c *Conn) tryReopen(tcp *net.TCPConn) (link, error) {
	c.lock()
	defer c.unlock()
	err := c.moves.attach(tcp)
	if err == nil && c.life.over {
		err = net.ErrClosed
	}
	if err != nil {
		return nil, err
	}
	if err = c.ep.openQP(c.stack.ctx, &c.stack.cfg, int(c.m.Snapshot().RecvBytes)); err != nil {
		c.ep.dead = true
		return nil, errors.Join(err, c.ep.closeQP(), c.ep.forgetQP())
	}
	c.link = c.newLink(tcp)
	c.ep.cq.OnNotify(c.onNotify)
	c.stack.named(c.ep.qp.Num(), c)
	return c.link, nil
}

// attach notes the ends of the TCP connection that carries the connection from now on, and lets the next one, after a suspension, have the same port.
func (m *moves) attach(tcp *net.TCPConn) (err error) {
	if m.local, err = endOf(tcp.LocalAddr()); err != nil {
		return err
	}
	if m.remote, err = endOf(tcp.RemoteAddr()); err != nil {
		return err
	}
	r, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	return plaintcp.ShareAddress(r)
}

// comeBack connects to the port at which the peer waits after a suspension, from the port that we had if possible (§13.1.1). We connect
// only to the peer's own address, and to no port below minSuspendPort: a peer shall not be able to send us to another service.
func (m *moves) comeBack(ctx context.Context, port uint16) (*net.TCPConn, error) {
	if port < minSuspendPort {
		return nil, fmt.Errorf("port %d, want %d at least: %w", port, minSuspendPort, rdma.ErrInvalid)
	}
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(m.local),
		Control:   func(_, _ string, r syscall.RawConn) error { return plaintcp.ShareAddress(r) },
	}
	to := netip.AddrPortFrom(m.remote.Addr(), port).String()
	for ours := true; ; {
		tcp, err := plaintcp.Dial(ctx, d, to)
		switch {
		case err == nil:
			return tcp, nil
		case ours && (errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EADDRNOTAVAIL)): // it is a listener's
			ours, d.LocalAddr = false, net.TCPAddrFromAddrPort(netip.AddrPortFrom(m.local.Addr(), 0))
		default:
			if err = afterShortage(ctx, err); err != nil {
				return nil, err
			}
		}
	}
}

// afterShortage says whether to try again after err. If err tells of a shortage that may pass (of descriptors, of memory, of something of
// the device) it waits for acceptPause and returns nil, or the context's error if that ends first. Any other err it returns as it is.
func afterShortage(ctx context.Context, err error) error {
	short := []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, rdma.ErrNoResources}
	if !slices.ContainsFunc(short, func(e error) bool { return errors.Is(err, e) }) {
		return err
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(acceptPause):
		return nil
	}
}

// awaitPeer accepts the connection that comes from the address of from, and from its port unless anyPort. It resets all others.
func awaitPeer(ctx context.Context, l *net.TCPListener, from netip.AddrPort, anyPort bool) (*net.TCPConn, error) {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		tcp, err := l.AcceptTCP()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err == nil {
			var at netip.AddrPort
			if at, err = endOf(tcp.RemoteAddr()); err == nil && at.Addr() == from.Addr() && (anyPort || at.Port() == from.Port()) {
				return tcp, nil
			}
		}
		if tcp != nil {
			_ = tcp.SetLinger(0)
			_ = tcp.Close() // nobody waits for it
		}
		if err != nil {
			if err = afterShortage(ctx, err); err != nil {
				return nil, err
			}
		}
	}
}

// endOf returns the address and port of one end of a TCP connection, with IPv4 unmapped.
func endOf(a net.Addr) (netip.AddrPort, error) {
	at, err := netip.ParseAddrPort(a.String())
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), err
}
