// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// TestSIW_connect is what programs on siw and softiwarp say to each other while they connect.
func TestSIW_connect(t *testing.T) {
	testenv.Need(t, testenv.RDMADevice)
	siw := func(t *testing.T) *rdmatest.End { return rdmatest.NewEnd(t, openSIW(t), rdmatest.Options{}) }
	soft := func(t *testing.T) *rdmatest.End { return rdmatest.NewEnd(t, openSoft(t), rdmatest.Options{}) }
	for _, c := range []struct {
		name           string
		client, server func(*testing.T) *rdmatest.End
	}{{"siwToSIW", siw, siw}, {"softToSIW", soft, siw}, {"siwToSoft", siw, soft}} {
		t.Run(c.name, func(t *testing.T) {
			for _, n := range []int{0, 1, cm.MaxPrivateData} {
				t.Run(fmt.Sprintf("%d bytes", n), func(t *testing.T) {
					request, reply := data(n, 0xa5), data(n, 0x5a)
					if asked, answered := tell(t, c.client(t), c.server(t), request, reply); !bytes.Equal(asked, request) || !bytes.Equal(answered, reply) {
						t.Errorf("%d bytes asked, %x, and %d answered, %x; want %d", len(asked), asked, len(answered), answered, n)
					}
				})
			}
			for _, n := range []int{0, 20} {
				t.Run(fmt.Sprintf("rejected with %d bytes", n), func(t *testing.T) { rejected(t, c.client(t), c.server(t), data(n, 0xa5)) })
			}
		})
	}
	t.Run("end", testEnd)
	t.Run("nobody listens", testNobodyListens)
	t.Run("nobody answers", testNobodyAnswers)
	t.Run("wrong use", testWrongUse)
	t.Run("listener closes", testListenerCloses)
}

func data(n int, of byte) []byte { return bytes.Repeat([]byte{of}, n) }

// rejected has y reject what x asks.
func rejected(t *testing.T, x, y *rdmatest.End, reply []byte) {
	t.Helper()
	x.Init(t)
	ctx := within(t)
	answer := make(chan error, 1)
	var at string
	if dev, ok := y.Dev.(*softiwarp.Device); ok {
		l, err := dev.Listen(":0")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		at = l.Addr().String()
		go func() {
			r, err := l.Accept(ctx)
			if err == nil {
				var c *net.TCPConn
				if c, err = r.Reject(reply); err == nil {
					err = c.Close()
				}
			}
			answer <- err
		}()
	} else {
		l, err := y.Dev.(cm.Device).Listen(netip.AddrPortFrom(address(t, siwAddrEnv), 0))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = l.Close() }()
		at = l.Addr().String()
		go func() {
			r, err := l.Accept(ctx)
			if err == nil {
				err = r.Reject(reply)
			}
			answer <- err
		}()
	}
	_, err := dial(ctx, x, netip.MustParseAddrPort(at), nil)
	if e := <-answer; e != nil {
		t.Fatal(e)
	}
	var got []byte
	var soft *softiwarp.ConnectError
	var kernel *cm.RejectError
	switch {
	case errors.As(err, &soft) && soft.Reason == softiwarp.Rejected:
		got = soft.PrivateData
	case errors.As(err, &kernel):
		got = kernel.PrivateData
	default:
		t.Fatalf("dial: %v, want that it was rejected", err)
	}
	if !bytes.Equal(got, reply) {
		t.Errorf("rejected with %x, want %x", got, reply)
	}
	if s := x.QP.State(); s != rdma.QPInit {
		t.Errorf("the queue pair is in %v", s)
	}
}

// testEnd ends a connection in order: the peer has an event, and who ends it has none.
func testEnd(t *testing.T) {
	d := openSIW(t)
	x, y := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	connect(t, x, y)
	y.Recv(t, 1, 0, 10)
	if err := d.Disconnect(x.QP); err != nil {
		t.Fatal(err)
	}
	if e := rdmatest.AwaitEvent(t, y.Ctx, rdma.EventDisconnected); e.QPN != y.QP.Num() {
		t.Errorf("event %+v, want one of queue pair %v", e, y.QP.Num())
	}
	rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusFlushed)
	for _, e := range []*rdmatest.End{x, y} {
		if err := d.AwaitEnd(within(t), e.QP); err != nil {
			t.Error(err)
		}
		if s := e.QP.State(); s != rdma.QPError {
			t.Errorf("a queue pair is in %v", s)
		}
	}
	select {
	case e := <-x.Ctx.Events():
		t.Errorf("who ended the connection has event %+v", e)
	default:
	}
	if err := d.Disconnect(x.QP); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

// testNobodyListens leaves the queue pair to be used for another try.
func testNobodyListens(t *testing.T) {
	d := openSIW(t)
	x, y := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	x.Init(t)
	if _, err := d.Dial(within(t), x.QP, netip.AddrPortFrom(address(t, siwAddrEnv), 1), cm.Options{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial: %v, want %v", err, syscall.ECONNREFUSED)
	}
	connect(t, x, y)
}

// testNobodyAnswers has a listener that looks at nothing: the context ends what waits for it.
func testNobodyAnswers(t *testing.T) {
	l, err := net.Listen("tcp", netip.AddrPortFrom(address(t, softAddrEnv), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	d := openSIW(t)
	x := rdmatest.NewEnd(t, d, rdmatest.Options{})
	x.Init(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := d.Dial(ctx, x.QP, netip.MustParseAddrPort(l.Addr().String()), cm.Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dial: %v, want %v", err, context.DeadlineExceeded)
	}
}

func testWrongUse(t *testing.T) {
	d := openSIW(t)
	x, other := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, openSoft(t), rdmatest.Options{})
	to := netip.AddrPortFrom(address(t, siwAddrEnv), 1)
	is := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	dial := func(q rdma.QP, o cm.Options) error {
		_, err := d.Dial(within(t), q, to, o)
		return err
	}
	is("a queue pair in RESET", dial(x.QP, cm.Options{}), rdma.ErrState)
	is("a queue pair of another device", dial(other.QP, cm.Options{}), rdma.ErrInvalid)
	x.Init(t)
	is("too much private data", dial(x.QP, cm.Options{PrivateData: data(cm.MaxPrivateData+1, 1)}), rdma.ErrInvalid)
	is("too many READs", dial(x.QP, cm.Options{ReadsAsked: d.Attr().MaxReadsAsked + 1}), rdma.ErrInvalid)
	is("disconnect of what is not connected", d.Disconnect(x.QP), rdma.ErrState)
	is("end of what is not connected", d.AwaitEnd(within(t), x.QP), rdma.ErrState)
	if err := x.QP.Close(); err != nil {
		t.Fatal(err)
	}
	is("a closed queue pair", dial(x.QP, cm.Options{}), rdma.ErrClosed)
	if _, err := d.Listen(netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), 0)); !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.ENODEV) {
		t.Errorf("listen on an address that nobody has: %v", err)
	}
}

// testListenerCloses rejects the request that nobody has, and leaves the one that was given away.
func testListenerCloses(t *testing.T) {
	d := openSIW(t)
	x, y, z := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	l, err := d.Listen(netip.AddrPortFrom(address(t, siwAddrEnv), 0))
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(l.Addr().String())
	ask := func(e *rdmatest.End) chan error {
		e.Init(t)
		asked := make(chan error, 1)
		go func() {
			_, err := d.Dial(within(t), e.QP, at, cm.Options{})
			asked <- err
		}()
		return asked
	}
	first := ask(x)
	r, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	second := ask(z)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-second; err == nil {
		t.Error("who asks a listener that closes is connected")
	}
	if _, err := l.Accept(within(t)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v, want %v", err, net.ErrClosed)
	}
	y.Init(t)
	if err := r.Accept(within(t), y.QP, cm.Options{}); err != nil {
		t.Error(err)
	}
	if err := <-first; err != nil {
		t.Error(err)
	}
}
