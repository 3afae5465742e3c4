// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// What is said in text.
const (
	wantRDMA = "MAY WE GO ON WITH RDMA?\n"
	goAhead  = "YES, SEND YOUR REQUEST\n" // the last message of the streaming mode
)

// Kinds of ways to a connection of RDMA.
const (
	kindUpgrade = "upgrade" // a TCP connection of text becomes one, between two of softiwarp
	kindDirect  = "direct"  // softiwarp, and who begins with RDMA
	kindSIW     = "siw"     // Linux' siw by rdma_cm
)

// A way is a device, and how its queue pairs are connected.
type way interface {
	rdma.Device
	Close() error
	// listen returns where the server is, and meet waits for its client.
	listen() (addr string, err error)
	meet() error
	// accept and connect make the connection. The server's private data is what it offers.
	accept(ctx context.Context, e *end, offer []byte) error
	connect(ctx context.Context, t *teller, e *end, addr string) (offer []byte, err error)
	// disconnect ends a connection in order; ended returns nil if the peer has done so.
	disconnect(e *end) error
	ended(e *end) error
}

// newWay opens the device with an address of this machine.
func newWay(kind string, addr netip.Addr) (way, error) {
	if kind == kindSIW {
		return openSIW(addr)
	}
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: addr})
	if err != nil {
		return nil, err
	}
	switch s := (software{Device: d, addr: addr}); kind {
	case kindUpgrade:
		return &upgraded{software: s}, nil
	case kindDirect:
		return &direct{software: s}, nil
	}
	return nil, errors.Join(fmt.Errorf("connect by %q: %w", kind, rdma.ErrInvalid), d.Close())
}

// software is a device of softiwarp.
type software struct {
	*softiwarp.Device
	addr netip.Addr
}

func (s *software) disconnect(e *end) error { return s.Disconnect(e.qp) }

func (*software) ended(e *end) error {
	select {
	case ev := <-e.ctx.Events():
		if ev.Kind == rdma.EventDisconnected {
			return nil
		}
		return fmt.Errorf("connection ended: %v: %w", ev.Kind, ev.Err)
	case <-time.After(completionPatience):
		return errors.New("connection ended for no reason")
	}
}

// upgraded connects over a TCP connection that both have talked over before.
type upgraded struct {
	software
	l net.Listener
	c *net.TCPConn
}

func (u *upgraded) listen() (string, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	var err error
	if u.l, err = lc.Listen(context.Background(), "tcp", net.JoinHostPort(u.addr.String(), "0")); err != nil {
		return "", err
	}
	return u.l.Addr().String(), nil
}

func (u *upgraded) meet() error {
	c, err := u.l.Accept()
	if err != nil {
		return err
	}
	_ = u.l.Close() // there is one client
	said, err := bufio.NewReaderSize(c, len(wantRDMA)).ReadString('\n')
	if err != nil || said != wantRDMA {
		return fmt.Errorf("client said %q: %w", said, errors.Join(err, rdma.ErrInvalid))
	}
	u.c = c.(*net.TCPConn)
	return nil
}

func (u *upgraded) accept(ctx context.Context, e *end, offer []byte) error {
	s, err := u.NewSSP(u.c, softiwarp.SSPOptions{QP: e.qp, Last: []byte(goAhead)})
	if err != nil {
		return err
	}
	r, err := s.Request(ctx)
	if err != nil {
		return err
	}
	return r.Accept(ctx, nil, softiwarp.ConnectOptions{PrivateData: offer})
}

// connect talks text, and then asks for RDMA on the same connection.
func (u *upgraded) connect(ctx context.Context, t *teller, e *end, addr string) ([]byte, error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := nc.(*net.TCPConn)
	from, to := c.LocalAddr(), c.RemoteAddr()
	if err := t.tell(line{Title: fmt.Sprintf("A connection of text, %v to %v", from, to)}); err != nil {
		return nil, err
	}
	if _, err := c.Write([]byte(wantRDMA)); err != nil {
		return nil, err
	}
	answer := make([]byte, len(goAhead)) // and not a byte more: what comes behind it is not text
	for n := 0; n < len(answer); {
		k, err := c.Read(answer[n:])
		if err != nil {
			return nil, err
		}
		n += k
	}
	for _, said := range []string{"client: " + wantRDMA, "server: " + string(answer)} {
		if err := t.tell(line{Say: said[:len(said)-1]}); err != nil {
			return nil, err
		}
	}
	offer, err := u.Connect(ctx, e.qp, c, softiwarp.ConnectOptions{})
	if err != nil {
		return nil, err
	}
	return offer, t.check("the connection of text is one of RDMA now", e.qp.State() == rdma.QPRTS,
		"queue pair %v in %v; the server says what may be written and read", e.qp.Num(), e.qp.State())
}

// direct connects with who begins with an MPA Request, as siw does.
type direct struct {
	software
	l *softiwarp.Listener
	r *softiwarp.Request
}

func (d *direct) listen() (string, error) {
	var err error
	if d.l, err = d.Listen(":0"); err != nil {
		return "", err
	}
	return d.l.Addr().String(), nil
}

func (d *direct) meet() (err error) {
	d.r, err = d.l.Accept(context.Background())
	return err
}

func (d *direct) accept(ctx context.Context, e *end, offer []byte) error {
	return d.r.Accept(ctx, e.qp, softiwarp.ConnectOptions{PrivateData: offer})
}

func (d *direct) connect(ctx context.Context, t *teller, e *end, addr string) ([]byte, error) {
	offer, err := d.Dial(ctx, e.qp, addr, softiwarp.ConnectOptions{})
	if err != nil {
		return nil, err
	}
	return offer, t.check("softiwarp is connected with siw", e.qp.State() == rdma.QPRTS,
		"queue pair %v in %v; over a TCP socket of this program", e.qp.Num(), e.qp.State())
}
