// SPDX-License-Identifier: Apache-2.0

package softvi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/internal/plaintcp"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// call is a call that a program makes, in its own goroutine. In peer-to-peer mode the goroutine of
// the peer's call may meet it.
type call struct {
	q      *qp
	own    vitcp.Discriminator
	called vitcp.Discriminator
	opt    Options
	dial   func(ctx context.Context) (*net.TCPConn, error)
	peerIP netip.Addr // valid in peer-to-peer mode

	conn *net.TCPConn // nil: none

	mu   sync.Mutex // guards what follows
	m    *vitcp.Caller
	peer *vitcp.Peer // in peer-to-peer mode: the machine is a part of it
	won  *Request    // the peer's call, which stands in place of ours
	wake func()      // ends what the goroutine waits for
}

// crossing names a call of ours and one of the peer that meet each other.
type crossing struct {
	own, peers vitcp.Discriminator
	peer       netip.Addr
}

// Dial calls a program: it opens a TCP connection, says what it offers, and waits until the called
// program accepts. The queue pair is in INIT, with its receives posted, and then in RTS.
//
// A TCP connection that the other side closes without an answer is opened again, until the
// context ends; one without deadline ends after vitcp.DefaultConnectTimeout. Errors unwrap to those
// of package vitcp: ErrRejected, ErrNoMatch, ErrUnreachable, ErrTimeout, ErrReliability and so on, or to
// ErrState, ErrInvalid and ErrClosed for what is wrong on this side. Then the queue pair is still in INIT, and can be
// connected again, unless it was modified meanwhile.
func (d *Device) Dial(ctx context.Context, r rdma.QP, to Addr, o Options) (Terms, error) {
	at, called, err := to.parse(d)
	var t Terms
	if err == nil {
		t, err = d.connect(ctx, r, &call{called: called, opt: o, dial: d.dialer(at)})
	}
	if err != nil {
		return Terms{}, fmt.Errorf("call %v: %w", to, err)
	}
	return t, nil
}

// Connect is [Device.Dial] over a TCP connection that is open already, and on which the other side waits for a Connect
// Request. It closes c; the connection itself goes on under another descriptor. If there is no VI connection in the
// end, the TCP connection is closed, too. After ErrState, ErrInvalid and ErrClosed c may be as it was.
func (d *Device) Connect(ctx context.Context, r rdma.QP, c *net.TCPConn, discriminator string, o Options) (Terms, error) {
	called, err := vitcp.NewDiscriminator(discriminator)
	if err == nil {
		err = tcpqp.CheckConn(c, d.cfg.Addr)
	}
	var t Terms
	if err == nil {
		t, err = d.connect(ctx, r, &call{called: called, opt: o, dial: once(c)})
	}
	if err != nil {
		return Terms{}, fmt.Errorf("call %q on a connection: %w", discriminator, err)
	}
	return t, nil
}

// DialPeer calls a program that calls this one, too, so that neither is a server (§4). Each names the other one by
// address and discriminator, and itself by Options.Discriminator. If the calls meet, that
// of the higher address stands. Otherwise DialPeer is as [Device.Dial], except that it waits for a program that does
// not call yet.
func (d *Device) DialPeer(ctx context.Context, r rdma.QP, to Addr, o Options) (Terms, error) {
	at, called, err := to.parse(d)
	var t Terms
	if err == nil {
		t, err = d.connect(ctx, r, &call{called: called, opt: o, dial: d.dialer(at), peerIP: at.Addr()})
	}
	if err != nil {
		return Terms{}, fmt.Errorf("call peer %v: %w", to, err)
	}
	return t, nil
}

// dialer opens TCP connections from any port of the device's address (§2.2.2.2.1).
func (d *Device) dialer(at netip.AddrPort) func(ctx context.Context) (*net.TCPConn, error) {
	return func(ctx context.Context) (*net.TCPConn, error) {
		return plaintcp.Dial(ctx, net.Dialer{LocalAddr: &net.TCPAddr{IP: d.cfg.Addr.AsSlice(), Zone: d.cfg.Addr.Zone()}}, at.String())
	}
}

// once returns a function that gives c under another descriptor, the first time that it is called.
func once(c *net.TCPConn) func(context.Context) (*net.TCPConn, error) {
	return func(context.Context) (*net.TCPConn, error) {
		t, err := tcpqp.TakeOver(c) // which a second time is closed
		if err != nil {
			return nil, fmt.Errorf("%w: %w", vitcp.ErrPeerClosed, err)
		}
		return t.TCPConn, nil
	}
}

// connect makes a call on a queue pair, and starts that on what comes of it.
func (d *Device) connect(ctx context.Context, r rdma.QP, c *call) (Terms, error) {
	q, err := d.find(r)
	if err == nil {
		err = c.opt.Validate()
	}
	if err != nil {
		return Terms{}, err
	}
	if _, ok := ctx.Deadline(); !ok {
		limited, cancel := context.WithTimeout(ctx, vitcp.DefaultConnectTimeout)
		defer cancel()
		ctx = limited
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	c.q = q
	if err := c.prepare(ctx, d); err != nil {
		return Terms{}, err
	}
	if err := q.reserve(abort); err != nil {
		return Terms{}, err
	}
	t, err := c.meetOrRun(ctx, d)
	q.Lock()
	defer q.Unlock()
	q.abort = nil
	if err != nil {
		return Terms{}, err
	}
	return q.begin(c.conn, &t, &c.opt)
}

// reserve makes the queue pair that of a call, until its abort is nil again.
func (q *qp) reserve(abort context.CancelCauseFunc) error {
	q.Lock()
	defer q.Unlock()
	err := q.ready()
	if err == nil {
		q.abort = abort
	}
	return err
}

// prepare makes the machine, and starts it.
func (c *call) prepare(ctx context.Context, d *Device) error {
	var err error
	if c.own, err = vitcp.NewDiscriminator(c.opt.Discriminator); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	cfg := vitcp.CallConfig{
		Calling: c.own, Called: c.called, Attr: c.opt.attr(), First: randomFirst(), Security: c.opt.Security,
		Timeout: max(time.Until(deadline), 1),
	}
	if !c.peerIP.IsValid() {
		c.m, err = vitcp.NewCaller(cfg)
	} else if c.peer, err = vitcp.NewPeer(cfg, d.cfg.Addr, c.peerIP); err == nil {
		c.m = &c.peer.Caller
	}
	if err == nil {
		c.m.Start(time.Now())
	}
	return err
}

// meetOrRun makes the call; in peer-to-peer mode it may meet the peer's call meanwhile.
func (c *call) meetOrRun(ctx context.Context, d *Device) (vitcp.Terms, error) {
	run, wake := context.WithCancel(ctx)
	defer wake()
	c.wake = wake
	if c.peer != nil {
		key := crossing{own: c.own, peers: c.called, peer: c.peerIP.WithZone("")}
		if err := d.expect(key, c); err != nil {
			return vitcp.Terms{}, err
		}
		defer d.expectNoMore(key)
	}
	t, err := c.run(run)
	if errors.Is(err, vitcp.ErrRival) {
		<-c.won.ended
		c.conn = c.won.conn
		if t, err = c.won.perform(); err != nil {
			_ = c.conn.Close()
		}
	}
	if err != nil {
		return vitcp.Terms{}, failure(ctx, err)
	}
	return t, nil
}

// failure says why a call has failed that was given up.
func failure(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, vitcp.ErrTimeout):
		<-ctx.Done() // at the same time
		return fmt.Errorf("%w: %w", err, context.Cause(ctx))
	case !errors.Is(err, vitcp.ErrCanceled):
		return err
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Errorf("%w: %w", vitcp.ErrTimeout, context.Cause(ctx))
	}
	return fmt.Errorf("%w: %w", err, context.Cause(ctx))
}

// expect has calls of a peer meet ours.
func (d *Device) expect(key crossing, c *call) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("device %q: %w", d.cfg.Name, rdma.ErrClosed)
	case d.peers[key] != nil:
		return fmt.Errorf("another call of %q to it is under way: %w", key.own, rdma.ErrBusy)
	}
	d.peers[key] = c
	return nil
}

func (d *Device) expectNoMore(key crossing) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.peers, key)
}

// meet gives a call of the peer to ours, in the goroutine of the peer's: one of both stands.
func (c *call) meet(r *Request) {
	posted := c.q.posted()
	c.mu.Lock()
	stands := c.peer.HandleRequest(time.Now(), r.m, posted)
	if stands {
		c.won = r
	}
	if c.m.State() == vitcp.StateDisconnected {
		c.wake() // ours is over
	}
	c.mu.Unlock()
	if stands {
		r.state = requestTaken
	} else {
		r.refused()
	}
}

// run makes the call, and returns its terms, or why there are none. Then c.conn is the
// connection, or closed.
func (c *call) run(ctx context.Context) (vitcp.Terms, error) {
	for {
		c.mu.Lock()
		outs := c.m.Poll(nil)
		c.mu.Unlock()
		for _, o := range outs {
			switch o.Kind {
			case vitcp.OutputDial:
				c.dialed(ctx)
			case vitcp.OutputSend:
				c.say(o.Data)
			case vitcp.OutputClose:
				c.hangUp()
			case vitcp.OutputConnected:
				return o.Terms, nil
			case vitcp.OutputFailed:
				c.hangUp()
				return vitcp.Terms{}, o.Err
			case vitcp.OutputRequest:
			}
		}
		if len(outs) == 0 {
			c.await(ctx)
		}
	}
}

// dialed opens the TCP connection.
func (c *call) dialed(ctx context.Context) {
	c.hangUp()
	conn, err := c.dial(ctx)
	posted := c.q.posted()
	deadline, _ := ctx.Deadline()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch now := time.Now(); {
	case err == nil:
		c.conn = conn
		c.m.HandleDialed(now, posted)
	case ctx.Err() != nil, !now.Before(deadline):
		c.m.Cancel(now)
	default:
		c.m.HandleDialFailed(now, err)
	}
}

// say sends a message.
func (c *call) say(b []byte) {
	_ = c.conn.SetWriteDeadline(time.Now().Add(sendTimeout))
	if _, err := c.conn.Write(b); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.m.HandleEnd(time.Now(), err)
	}
}

func (c *call) hangUp() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// await waits for what happens next: bytes of the peer, a timeout, or the end of the context.
func (c *call) await(ctx context.Context) {
	c.mu.Lock()
	want := c.m.Want()
	at, _ := c.m.NextTimeout()
	c.mu.Unlock()
	var n int
	var err error
	var buf [vitcp.MaxConnectLen]byte
	if want > 0 && c.conn != nil {
		n, err = readUntil(ctx, c.conn, at, buf[:want])
	} else {
		c.hangUp() // a pause, after the peer has closed it
		t := time.NewTimer(time.Until(at))
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.m.HandleData(now, buf[:n])
	c.m.HandleTimeout(now)
	switch {
	case ctx.Err() != nil:
		c.m.Cancel(now)
	case err != nil && now.Before(at):
		c.m.HandleEnd(now, err)
	}
}

// readUntil reads from a connection until a time, or the end of the context.
func readUntil(ctx context.Context, c *net.TCPConn, at time.Time, b []byte) (int, error) {
	_ = c.SetReadDeadline(at)
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		_ = c.SetReadDeadline(past())
	})
	n, err := c.Read(b)
	if !stop() {
		<-woken // or it would meet whoever has the connection then
	}
	return n, err
}
