// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// shortage refuses one of the requests that come, and counts them.
type shortage struct {
	at   atomic.Int32 // which one of the next; 0: none
	seen atomic.Int32
}

func (s *shortage) refuses() error {
	if n := s.seen.Add(1); n == s.at.Load() {
		return rdma.ErrNoResources
	}
	return nil
}

// begin counts from one again.
func (s *shortage) begin(at int32) {
	s.seen.Store(0)
	s.at.Store(at)
}

// shortDevice and shortAdapter are devices with too little of something.
type shortDevice struct {
	rdma.Device
	s *shortage
}

func (d shortDevice) Open() (rdma.Context, error) { return d.s.open(d.Device) }

type shortAdapter struct {
	cm.Device
	s *shortage
}

func (d shortAdapter) Open() (rdma.Context, error) { return d.s.open(d.Device) }

func (s *shortage) open(d rdma.Device) (rdma.Context, error) {
	c, err := d.Open()
	return shortContext{c, s}, err
}

type shortContext struct {
	rdma.Context
	s *shortage
}

func (c shortContext) AllocPD() (rdma.PD, error) {
	if err := c.s.refuses(); err != nil {
		return nil, err
	}
	pd, err := c.Context.AllocPD()
	return shortPD{pd, c.s}, err
}

func (c shortContext) CreateCQ(depth int) (rdma.CQ, error) {
	if err := c.s.refuses(); err != nil {
		return nil, err
	}
	return c.Context.CreateCQ(depth)
}

type shortPD struct {
	rdma.PD
	s *shortage
}

func (p shortPD) AllocMR(n int, a rdma.Access) (rdma.MR, error) {
	if err := p.s.refuses(); err != nil {
		return nil, err
	}
	return p.PD.AllocMR(n, a)
}

func (p shortPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	if err := p.s.refuses(); err != nil {
		return nil, err
	}
	return p.PD.CreateQP(cfg)
}

// accepting is a pair whose listener tells of the connections that it refuses, and of those that end.
type accepting struct {
	*pair
	refused chan error
	ended   chan *sdp.Conn
}

func newAccepting(t *testing.T, client, server rdma.Device) *accepting {
	t.Helper()
	a := &accepting{refused: make(chan error, 64), ended: make(chan *sdp.Conn, 64)}
	a.pair = &pair{client: newStack(t, client), server: newStack(t, server, func(c *sdp.Config) {
		c.Hooks = sdp.Hooks{
			Refused: func(_ net.Addr, err error) { a.refused <- err },
			Ended:   func(c *sdp.Conn, _ error) { a.ended <- c },
		}
	})}
	a.listenOn(t)
	return a
}

// refuses dials a connection that the listener refuses, and returns why.
func (a *accepting) refuses(t *testing.T) error {
	t.Helper()
	c, _, err := a.dialer().Dial(limited(t), a.l.Addr().String())
	if err == nil {
		_ = c.(*sdp.Conn).Abort() // HelloAck was there before the refusal
	}
	select {
	case err := <-a.refused:
		return err
	case <-time.After(5 * time.Second):
		t.Fatal("nobody hears that the connection was refused")
	}
	return nil
}

// serves dials a connection, and checks that its end is the only one that is told of.
func (a *accepting) serves(t *testing.T) {
	t.Helper()
	x, y := a.dial(t)
	_, _ = x.Close(), y.Close()
	select {
	case c := <-a.ended:
		if c != y {
			t.Error("the end of a connection is told that nobody had")
		}
	case <-time.After(5 * time.Second):
		t.Error("the end of a connection is not told")
	}
}

// An accepting peer whose device has too little for a connection, whatever of it, refuses this one, and takes the next.
func TestListener_shortages(t *testing.T) {
	for _, tc := range []struct {
		name   string
		open   func(testing.TB, string) rdma.Device
		server func(t *testing.T, s *shortage) rdma.Device
	}{
		{"adapter", openAdapter, func(t *testing.T, s *shortage) rdma.Device {
			return shortAdapter{sdp.NewSoftAdapter(openIWARP(t, serverAddr).(*softiwarp.Device)), s}
		}},
		{"RoCE", openRoCE, func(t *testing.T, s *shortage) rdma.Device { return shortDevice{openRoCE(t, serverAddr), s} }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &shortage{}
			a := newAccepting(t, tc.open(t, clientAddr), tc.server(t, s))
			s.begin(0)
			a.serves(t)
			all := s.seen.Load()
			if all < 5 { // a domain, messages, completions, a queue pair, receive buffers
				t.Fatalf("a connection takes %d things of the device", all)
			}
			for n := int32(1); n <= all; n++ {
				s.begin(n)
				if err := a.refuses(t); !errors.Is(err, rdma.ErrNoResources) {
					t.Errorf("without thing %d: %v", n, err)
				}
				a.serves(t)
			}
		})
	}
}

// A device that goes while connections wait for their Hello, which have nothing of the device yet, ends them.
func TestStack_deviceGoesDuringSetUp(t *testing.T) {
	device := openRoCE(t, serverAddr)
	a := newAccepting(t, openRoCE(t, clientAddr), device)
	c, err := net.Dial("tcp", a.l.Addr().String()) // says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for ctx := limited(t); len(a.server.Conns()) == 0 && ctx.Err() == nil; {
		<-tick.C
	}
	if err := device.(io.Closer).Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-a.refused:
		if errors.Is(err, socket.ErrSetupTimeout) {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the connection is not refused")
	}
}

// abortingDevice is an adapter that ends the connections of its stack before it accepts one, as Stack.Close does.
type abortingDevice struct {
	cm.Device
	stack  *sdp.Stack
	aborts atomic.Bool
}

func (d *abortingDevice) Listen(at netip.AddrPort) (cm.Listener, error) {
	l, err := d.Device.Listen(at)
	return abortingListener{l, d}, err
}

type abortingListener struct {
	cm.Listener
	d *abortingDevice
}

func (l abortingListener) Accept(ctx context.Context) (cm.Request, error) {
	r, err := l.Listener.Accept(ctx)
	return abortingRequest{r, l.d}, err
}

type abortingRequest struct {
	cm.Request
	d *abortingDevice
}

func (r abortingRequest) Accept(ctx context.Context, qp rdma.QP, o cm.Options) error {
	if r.d.aborts.Load() {
		for _, c := range r.d.stack.Conns() {
			_ = c.Abort() // it may have ended
		}
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for len(r.d.stack.Conns()) > 0 && ctx.Err() == nil { // until their ends were told, or are about to be
			<-tick.C
		}
	}
	return r.Request.Accept(ctx, qp, o)
}

// A connection that is ended while it is set up is refused, and its end is not told.
func TestListener_abortedBeforeItStands(t *testing.T) {
	d := &abortingDevice{Device: sdp.NewSoftAdapter(openIWARP(t, serverAddr).(*softiwarp.Device))}
	a := newAccepting(t, openAdapter(t, clientAddr), d)
	d.stack = a.server
	for range 5 {
		d.aborts.Store(true)
		if err := a.refuses(t); err == nil || errors.Is(err, socket.ErrSetupTimeout) {
			t.Errorf("refused: %v", err)
		}
		d.aborts.Store(false)
		a.serves(t)
	}
}
