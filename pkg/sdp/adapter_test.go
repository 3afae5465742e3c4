// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// hello is one that every peer takes.
func hello(mid bsdh.MID) bsdh.Message {
	return bsdh.Message{MID: mid, Bufs: 8, Setup: bsdh.Setup{
		MaxAdverts: 4, Major: bsdh.VersionMajor, Minor: bsdh.VersionMinor, RecvBytes: 4096, IRD: 4, ORD: 4,
	}}
}

// limited is the context of one step.
func limited(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// adapterEnd is a peer without SDP's machine: its queue pair is in INIT, with some receives.
func adapterEnd(t *testing.T, addr string) (*rdmatest.End, *softiwarp.Device) {
	t.Helper()
	d := openIWARP(t, addr).(*softiwarp.Device)
	e := rdmatest.NewEnd(t, d, rdmatest.Options{})
	e.Init(t)
	for i := range 4 {
		e.Recv(t, uint64(i), 1024*(i+1), 1024)
	}
	return e, d
}

// say sends a message.
func say(t *testing.T, e *rdmatest.End, b []byte) {
	t.Helper()
	e.Send(t, rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(0, copy(e.MR.Bytes(), b))}})
	rdmatest.AwaitOne(t, e.SendCQ, 0, rdma.StatusSuccess)
}

// What an adapter has connected is not moved, and goes on.
func TestConn_adaptersAreNotSuspended(t *testing.T) {
	a, b := newPair(t, openAdapter).dial(t)
	for _, c := range []*sdp.Conn{a, b} {
		if err := c.Suspend(limited(t), sdp.SuspendOptions{}); !errors.Is(err, rdma.ErrNotSupported) {
			t.Errorf("suspend: %v", err)
		}
	}
	buf := make([]byte, 2)
	if _, err := a.Write([]byte("on")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(b, buf); err != nil || string(buf) != "on" {
		t.Fatalf("%q, %v", buf, err)
	}
	_, _ = a.Close(), b.Close()
}

// A request without a good Hello is rejected before there is a queue pair.
func TestListener_rejects(t *testing.T) {
	refused := make(chan error, 8)
	p := newPair(t, openAdapter, func(c *sdp.Config) { c.Hooks.Refused = func(_ net.Addr, err error) { refused <- err } })
	version, few := hello(bsdh.Hello), hello(bsdh.Hello)
	version.Setup.Major = 2
	few.Bufs = 2
	ack := hello(bsdh.HelloAck)
	for _, tc := range []struct {
		name string
		data []byte
	}{
		{"nothing", nil},
		{"half a Hello", version.Append(nil, bsdh.LayoutFigures)[:16]},
		{"garbage", make([]byte, bsdh.HelloLen)},
		{"another version", version.Append(nil, bsdh.LayoutFigures)},
		{"few buffers", few.Append(nil, bsdh.LayoutFigures)},
		{"HelloAck", ack.Append(nil, bsdh.LayoutFigures)},
	} {
		x, d := adapterEnd(t, "127.93.0.6")
		_, err := d.Dial(limited(t), x.QP, p.l.Addr().String(), softiwarp.ConnectOptions{PrivateData: tc.data})
		var why *softiwarp.ConnectError
		if !errors.As(err, &why) || why.Reason != softiwarp.Rejected {
			t.Errorf("%s: %v, want that it is rejected", tc.name, err)
		}
		select {
		case err := <-refused:
			if !errors.Is(err, socket.ErrProtocol) {
				t.Errorf("%s: refused: %v", tc.name, err)
			}
		case <-time.After(5 * time.Second):
			t.Errorf("%s: nobody hears of it", tc.name)
		}
	}
	a, b := p.dial(t)
	_, _ = a.Close(), b.Close()
}

// The accepting peer sends nothing before the connecting one has begun, and then HelloAck.
func TestListener_waitsForTheBeginning(t *testing.T) {
	refused := make(chan error, 8)
	p := newPair(t, openAdapter, func(c *sdp.Config) {
		c.SetupTimeout = 500 * time.Millisecond
		c.Hooks.Refused = func(_ net.Addr, err error) { refused <- err }
	})
	first := hello(bsdh.Hello)
	request := softiwarp.ConnectOptions{PrivateData: first.Append(nil, bsdh.LayoutFigures)}
	for _, tc := range []struct {
		name  string
		bytes int // with which the peer begins
		want  error
	}{{"silent", 0, socket.ErrSetupTimeout}, {"too long", 2, nil}, {"a message of SDP", bsdh.HelloLen, nil}} {
		x, d := adapterEnd(t, "127.93.0.6")
		if _, err := d.Dial(limited(t), x.QP, p.l.Addr().String(), request); err != nil {
			t.Fatal(err)
		}
		if tc.bytes > 0 {
			x.Send(t, rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, tc.bytes)}})
		}
		if w := rdmatest.Await(t, x.RecvCQ, 1)[0]; w.Status != rdma.StatusFlushed {
			t.Errorf("%s: the accepting peer says something: %+v", tc.name, w)
		}
		select {
		case err := <-refused:
			if tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("%s: refused: %v", tc.name, err)
			}
		case <-time.After(5 * time.Second):
			t.Errorf("%s: not refused", tc.name)
		}
	}
	x, d := adapterEnd(t, "127.93.0.6")
	if _, err := d.Dial(limited(t), x.QP, p.l.Addr().String(), request); err != nil {
		t.Fatal(err)
	}
	say(t, x, []byte{0})
	w := rdmatest.AwaitOne(t, x.RecvCQ, 0, rdma.StatusSuccess)
	m, err := bsdh.Parse(x.MR.Bytes()[1024:][:w.Bytes], bsdh.LayoutFigures)
	if err != nil || m.MID != bsdh.HelloAck {
		t.Errorf("the accepting peer answers %v, %v", m.MID, err)
	}
	c, err := p.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = c.(*sdp.Conn).Abort() // the peer does not end its stream
}

// An adapter may have the peer's first message before it says that the queue pair is connected, and a notification may come
// then: the program's answer waits until it may be sent.
func TestListener_notifiedEarly(t *testing.T) {
	d := &lateDevice{Device: sdp.NewSoftAdapter(openIWARP(t, serverAddr).(*softiwarp.Device))}
	p := &pair{client: newStack(t, openAdapter(t, clientAddr)), server: newStack(t, d)}
	p.listenOn(t)
	a, b := p.dial(t)
	if d.notified == 0 {
		t.Error("nobody was notified early")
	}
	_, _ = a.Close(), b.Close()
}

// lateDevice is an adapter that hears of it last that a queue pair is connected: until then it refuses to send, and
// notifies of what has come.
type lateDevice struct {
	cm.Device
	cq       *lateCQ // the last one
	notified int     // requests whose queue pair had a message before it was said to be connected
}

func (d *lateDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return lateContext{c, d}, err
}

func (d *lateDevice) Listen(at netip.AddrPort) (cm.Listener, error) {
	l, err := d.Device.Listen(at)
	return lateListener{l, d}, err
}

type lateContext struct {
	rdma.Context
	d *lateDevice
}

func (c lateContext) AllocPD() (rdma.PD, error) {
	pd, err := c.Context.AllocPD()
	return latePD{pd}, err
}

func (c lateContext) CreateCQ(depth int) (rdma.CQ, error) {
	cq, err := c.Context.CreateCQ(depth)
	c.d.cq = &lateCQ{CQ: cq}
	return c.d.cq, err
}

type lateCQ struct {
	rdma.CQ
	notify func()
}

func (q *lateCQ) OnNotify(f func()) {
	q.notify = f
	q.CQ.OnNotify(f)
}

type latePD struct{ rdma.PD }

func (p latePD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	for _, cq := range []*rdma.CQ{&cfg.SendCQ, &cfg.RecvCQ} {
		*cq = (*cq).(*lateCQ).CQ
	}
	q, err := p.PD.CreateQP(cfg)
	return &lateQP{QP: q}, err
}

type lateQP struct {
	rdma.QP
	connected bool
}

func (q *lateQP) PostSend(wrs []rdma.SendWR) (int, error) {
	if !q.connected {
		return 0, rdma.ErrState
	}
	return q.QP.PostSend(wrs)
}

type lateListener struct {
	cm.Listener
	d *lateDevice
}

func (l lateListener) Accept(ctx context.Context) (cm.Request, error) {
	r, err := l.Listener.Accept(ctx)
	return lateRequest{r, l.d}, err
}

type lateRequest struct {
	cm.Request
	d *lateDevice
}

func (r lateRequest) Accept(ctx context.Context, qp rdma.QP, o cm.Options) error {
	q, cq := qp.(*lateQP), r.d.cq
	came := make(chan struct{}, 1)
	cq.CQ.OnNotify(func() { came <- struct{}{} })
	if err := cq.Arm(false); err != nil {
		return err
	}
	if err := r.Request.Accept(ctx, q.QP, o); err != nil {
		return err
	}
	select {
	case <-came:
	case <-ctx.Done():
		return ctx.Err()
	}
	r.d.notified++
	if cq.notify != nil {
		cq.CQ.OnNotify(cq.notify)
		cq.notify()
	}
	q.connected = true
	return nil
}

// A peer that hears of nothing before more comes, as Linux' siw does at its Reply, is given more, until it answers.
func TestDialer_nudges(t *testing.T) {
	y, d := adapterEnd(t, serverAddr)
	l, err := d.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	s := newStack(t, openAdapter(t, clientAddr))
	dialed := make(chan error, 1)
	go func() {
		c, _, err := (&sdp.Dialer{Stack: s}).Dial(limited(t), l.Addr().String())
		if err == nil {
			err = c.(*sdp.Conn).Abort()
		}
		dialed <- err
	}()
	r, err := l.Accept(limited(t))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := bsdh.Parse(r.PrivateData(), bsdh.LayoutFigures); err != nil || got.MID != bsdh.Hello {
		t.Errorf("the request has %v, %v", got.MID, err)
	}
	if err := r.Accept(limited(t), y.QP, softiwarp.ConnectOptions{}); err != nil {
		t.Fatal(err)
	}
	if w := rdmatest.AwaitOne(t, y.RecvCQ, 0, rdma.StatusSuccess); w.Bytes != 1 || y.MR.Bytes()[1024] != 0 {
		t.Errorf("the connection begins with %d bytes, %x", w.Bytes, y.MR.Bytes()[1024])
	}
	began, _ := d.QPStats(y.QP.Num())
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for late := time.After(10 * time.Second); ; {
		if now, _ := d.QPStats(y.QP.Num()); now.RxFPDUs > began.RxFPDUs+2 {
			break
		}
		select {
		case <-tick.C: // polls the counter
		case <-late:
			t.Fatal("nothing comes behind the first message")
		}
	}
	ack := hello(bsdh.HelloAck)
	say(t, y, ack.Append(nil, bsdh.LayoutFigures))
	if err := <-dialed; err != nil {
		t.Error(err)
	}
}

// An adapter has no connection of TCP that could become one of SDP, nor one for which a port mapper could be asked.
func TestStack_adapterOpensConnections(t *testing.T) {
	p := newPair(t, openAdapter)
	x, y := tcpPair(t)
	if _, err := p.client.Client(t.Context(), x); !errors.Is(err, rdma.ErrNotSupported) {
		t.Errorf("client: %v", err)
	}
	if _, err := p.server.Server(t.Context(), y); !errors.Is(err, rdma.ErrNotSupported) {
		t.Errorf("server: %v", err)
	}
	for _, c := range []*net.TCPConn{x, y} {
		if err := c.Close(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("the connection is open: %v", err)
		}
	}
	m, err := portmapper.NewClient(portmapper.ClientConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := (&sdp.Dialer{Stack: p.client, Mapper: m}).Dial(t.Context(), p.l.Addr().String()); !errors.Is(err, rdma.ErrNotSupported) {
		t.Errorf("dial with a port mapper: %v", err)
	}
	for _, at := range []string{"", "127.93.0.2", "name:7", ":port"} {
		if _, err := sdp.Listen(t.Context(), p.server, "tcp", at); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("listen on %q: %v", at, err)
		}
	}
	a, b := p.dial(t)
	if at := netip.MustParseAddrPort(a.LocalAddr().String()); at.Addr().String() != clientAddr || at.Port() == 0 || a.LocalAddr().String() != b.RemoteAddr().String() ||
		a.RemoteAddr().String() != b.LocalAddr().String() {
		t.Errorf("from %v to %v, and at the other end from %v to %v", a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr())
	}
	_, _ = a.Close(), b.Close()
}

// Connections of an adapter that are ended while they are set up: by whom their requests are answered is decided once.
func TestStack_endsRequests(t *testing.T) {
	p := newPair(t, openAdapter, func(c *sdp.Config) { c.Hooks.Refused = func(net.Addr, error) {} })
	over := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
			}
			for _, c := range p.server.Conns() {
				_ = c.Abort() // it may have ended
			}
		}
	})
	var dials sync.WaitGroup
	for range 4 {
		dials.Go(func() {
			for range 30 {
				if c, _, err := p.dialer().Dial(limited(t), p.l.Addr().String()); err == nil {
					_ = c.(*sdp.Conn).Abort() // it may have ended
				}
			}
		})
	}
	dials.Wait()
	close(over)
	wg.Wait()
}
