// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// mpaRequest is what an initiator sends.
func mpaRequest(pd string) []byte {
	f := iwarp.Frame{CRC: true, Rev: 2, IsEnhanced: true, PrivateData: []byte(pd)}
	return f.Append(nil)
}

func newSSP(t testing.TB, d *softiwarp.Device, c *net.TCPConn, o softiwarp.SSPOptions) *softiwarp.SSP {
	t.Helper()
	s, err := d.NewSSP(c, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSSP_upgrade: streaming mode, request, RDMA; the SSP is not operational after its one request.
func TestSSP_upgrade(t *testing.T) {
	for _, reserve := range []bool{true, false} {
		x, y, a, b := ends(t)
		ca, cb := tcpPair(t)
		says(t, ca, cb, "STARTRDMA\n")
		o := softiwarp.SSPOptions{Last: []byte("go on\n")}
		if reserve {
			o.QP = y.QP
		}
		s := newSSP(t, b, cb, o)
		if s.State() != softiwarp.Operational || s.QP() != o.QP || s.RemoteAddr().String() != ca.LocalAddr().String() {
			t.Errorf("%v, queue pair %v, peer %v", s.State(), s.QP(), s.RemoteAddr())
		}
		hears(t, ca, "go on\n")
		connected := make(chan error, 1)
		go func() {
			_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{PrivateData: []byte("hello")})
			connected <- err
		}()
		r, err := s.Request(within(t))
		if err != nil || string(r.PrivateData()) != "hello" || s.State() != softiwarp.NonOperational {
			t.Fatalf("%q, %v, %v", r.PrivateData(), err, s.State())
		}
		if again, err := s.Request(within(t)); again != r || err != nil {
			t.Errorf("another request: %v, %v", again, err)
		}
		if c, err := s.Close(); c != nil || err != nil {
			t.Errorf("close after the request: %v, %v", c, err)
		}
		if reserve {
			other := rdmatest.NewEnd(t, b, rdmatest.Options{})
			other.Init(t)
			if err := r.Accept(within(t), other.QP, softiwarp.ConnectOptions{}); !errors.Is(err, rdma.ErrInvalid) {
				t.Errorf("accept on another queue pair: %v", err)
			}
		}
		if err := r.Accept(within(t), y.QP, softiwarp.ConnectOptions{PrivateData: make([]byte, 509)}); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("accept with long private data: %v", err)
		}
		if err := r.Accept(within(t), y.QP, softiwarp.ConnectOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := <-connected; err != nil {
			t.Fatal(err)
		}
		talk(t, x, y)
		if err := r.Accept(within(t), y.QP, softiwarp.ConnectOptions{}); !errors.Is(err, rdma.ErrState) {
			t.Errorf("accept again: %v", err)
		}
	}
}

// TestSSP_reserves: the queue pair of a SSP is for its request only, until the SSP is closed.
func TestSSP_reserves(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	_, other := tcpPair(t)
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	if _, err := b.Connect(within(t), y.QP, other, softiwarp.ConnectOptions{}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("connect a reserved queue pair: %v", err)
	}
	if _, err := b.NewSSP(other, softiwarp.SSPOptions{QP: y.QP}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("reserve a reserved queue pair: %v", err)
	}
	back, err := s.Close()
	if err != nil {
		t.Fatal(err)
	}
	says(t, back, ca, "as you were")
	says(t, ca, back, "thanks")
	if _, err := s.Close(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("close again: %v", err)
	}
	if _, err := s.Request(within(t)); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("request after close: %v", err)
	}
	s = newSSP(t, b, back, softiwarp.SSPOptions{QP: y.QP}) // free again, both
	if back, err = s.Close(); err != nil {
		t.Fatal(err)
	}
	_ = back.Close()
}

// TestSSP_notMade: what is wrong at once leaves the connection as it was.
func TestSSP_notMade(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	reset := rdmatest.NewEnd(t, b, rdmatest.Options{})
	for name, c := range map[string]struct {
		dev  *softiwarp.Device
		conn *net.TCPConn
		opt  softiwarp.SSPOptions
		want error
	}{
		"no socket":           {b, nil, softiwarp.SSPOptions{}, rdma.ErrInvalid},
		"another address":     {a, cb, softiwarp.SSPOptions{}, rdma.ErrState},
		"another device":      {b, cb, softiwarp.SSPOptions{QP: x.QP}, rdma.ErrClosed},
		"queue pair in RESET": {b, cb, softiwarp.SSPOptions{QP: reset.QP}, rdma.ErrState},
		"long last message":   {b, cb, softiwarp.SSPOptions{QP: y.QP, Last: make([]byte, 64<<10+1)}, rdma.ErrInvalid},
		"much read before":    {b, cb, softiwarp.SSPOptions{QP: y.QP, Early: make([]byte, 533)}, rdma.ErrInvalid},
	} {
		if s, err := c.dev.NewSSP(c.conn, c.opt); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v, want %v", name, s, err, c.want)
		}
	}
	says(t, ca, cb, "still here")
	says(t, cb, ca, "here, too")
}

// TestSSP_down: a connection that ends, or begins with what is no request, takes the SSP down and
// frees its queue pair.
func TestSSP_down(t *testing.T) {
	_, y, _, b := ends(t)
	for name, peer := range map[string]func(c *net.TCPConn){
		"closed":          func(c *net.TCPConn) { _ = c.Close() },
		"reset":           func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() },
		"half a request":  func(c *net.TCPConn) { _, _ = c.Write(mpaRequest("x")[:22]); _ = c.CloseWrite() },
		"no request":      func(c *net.TCPConn) { _, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n") },
		"a reply":         func(c *net.TCPConn) { f := iwarp.Frame{Reply: true, Rev: 2}; _, _ = c.Write(f.Append(nil)) },
		"another version": func(c *net.TCPConn) { f := iwarp.Frame{Rev: 3}; _, _ = c.Write(f.Append(nil)) },
	} {
		for _, before := range []bool{true, false} {
			ca, cb := tcpPair(t)
			if before {
				peer(ca)
			}
			s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP, Last: []byte("last")})
			if !before {
				peer(ca)
			}
			if r, err := s.Request(within(t)); r != nil || !errors.Is(err, softiwarp.ErrSocketDown) {
				t.Errorf("%s: %v, %v", name, r, err)
			}
			if s.State() != softiwarp.NonOperational || s.QP() != nil {
				t.Errorf("%s: %v, queue pair %v", name, s.State(), s.QP())
			}
			c, err := s.Close()
			if c == nil || err != nil {
				t.Fatalf("%s: close: %v, %v", name, c, err)
			}
			_ = c.Close()
		}
	}
}

// TestSSP_context: who waits for the request may stop to wait; the SSP goes on.
func TestSSP_context(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Request(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if _, err := ca.Write(mpaRequest("")); err != nil {
		t.Fatal(err)
	}
	r, err := s.Request(within(t))
	if err != nil {
		t.Fatal(err)
	}
	back, err := r.Reject(nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = back.Close()
	if f := readFrame(t, ca); !f.Reject || f.Rev != 2 || !f.IsEnhanced {
		t.Errorf("Reply %+v", f)
	}
}

// TestSSP_early: what was read too far belongs to the request, whole or in part.
func TestSSP_early(t *testing.T) {
	_, _, _, b := ends(t)
	req := mpaRequest("early")
	for _, n := range []int{1, 20, 25, len(req)} {
		ca, cb := tcpPair(t)
		s := newSSP(t, b, cb, softiwarp.SSPOptions{Early: req[:n]})
		if _, err := ca.Write(req[n:]); err != nil {
			t.Fatal(err)
		}
		r, err := s.Request(within(t))
		if err != nil || string(r.PrivateData()) != "early" {
			t.Fatalf("%d bytes before: %v", n, err)
		}
		back, err := r.Reject(nil)
		if err != nil {
			t.Fatal(err)
		}
		_ = back.Close()
	}
}

// TestSSP_closeInRequest: a Close in the middle of a request returns the connection as it was, with what
// came of the request.
func TestSSP_closeInRequest(t *testing.T) {
	x, y, a, b := ends(t)
	ca, back := tcpPair(t)
	req := mpaRequest("half")
	for _, c := range []struct{ early, came int }{{10, 0}, {0, 10}, {10, 15}, {0, len(req) - 1}, {len(req) - 1, 0}} {
		s := newSSP(t, b, back, softiwarp.SSPOptions{QP: y.QP, Early: req[:c.early]})
		came := string(req[c.early : c.early+c.came])
		if _, err := io.WriteString(ca, came); err != nil {
			t.Fatal(err)
		}
		var err error
		if back, err = s.Close(); err != nil || back == nil {
			t.Fatalf("%+v: %v, %v", c, back, err)
		}
		if _, err := s.Request(within(t)); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%+v: %v", c, err)
		}
		hears(t, back, came)
		says(t, back, ca, "as you were")
	}
	upgrade(t, x, y, a, b, ca, back)
}

// TestSSP_closeMeetsRequest: whichever comes first, there is either a request or a closed SSP, and the
// connection has one owner and lacks no byte: it is the same one all the time.
func TestSSP_closeMeetsRequest(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	req := mpaRequest("race")
	requests, closes := 0, 0
	for i := range 10_000 {
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
		wrote := make(chan struct{})
		go func() {
			defer close(wrote)
			_, _ = ca.Write(req[:i%len(req)])
			_, _ = ca.Write(req[i%len(req):])
		}()
		switch i % 3 {
		case 0:
			<-wrote
		case 1:
			runtime.Gosched()
		default:
		}
		back, errClose := s.Close()
		<-wrote
		r, err := s.Request(within(t))
		switch {
		case errClose != nil:
			t.Fatal(errClose)
		case err == nil && back == nil:
			requests++
			if s.QP() != y.QP {
				t.Fatal("the request has lost its queue pair")
			}
			if cb, err = r.Reject(nil); err != nil {
				t.Fatal(err)
			}
			if f := readFrame(t, ca); !f.Reject {
				t.Fatalf("Reply %+v", f)
			}
		case errors.Is(err, rdma.ErrClosed) && back != nil:
			closes++
			cb = back
			hears(t, cb, string(req))
		default:
			t.Fatalf("close: %v; request: %v, %v", back, r, err)
		}
		if s.QP() != nil {
			t.Fatal("the queue pair is reserved still")
		}
	}
	t.Logf("%d requests, %d closes", requests, closes)
	if requests == 0 || closes == 0 {
		t.Error("there was no race")
	}
	upgrade(t, x, y, a, b, ca, cb)
}

// upgrade makes a connection of x and y of one that was talked on.
func upgrade(t testing.TB, x, y *rdmatest.End, a, b *softiwarp.Device, ca, cb *net.TCPConn) {
	t.Helper()
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	connected := make(chan error, 1)
	go func() {
		_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
		connected <- err
	}()
	r, err := s.Request(within(t))
	if err == nil {
		err = r.Accept(within(t), nil, softiwarp.ConnectOptions{})
	}
	if errConnect := <-connected; err != nil || errConnect != nil {
		t.Fatalf("accept: %v, connect: %v", err, errConnect)
	}
	talk(t, x, y)
}

// TestDevice_Close ends what waits: listeners, service points, requests that nobody answers.
func TestDevice_Close(t *testing.T) {
	b := open(t, "b", loopB)
	l, err := b.Listen(":0")
	if err != nil {
		t.Fatal(err)
	}
	ca, cb := tcpPair(t)
	s := newSSP(t, b, cb, softiwarp.SSPOptions{})
	half, cb := tcpPair(t)
	inRequest := newSSP(t, b, cb, softiwarp.SSPOptions{Early: mpaRequest("")[:3]})
	asked, cb := tcpPair(t)
	pending := newSSP(t, b, cb, softiwarp.SSPOptions{Early: mpaRequest("")})
	if _, err := pending.Request(within(t)); err != nil {
		t.Fatal(err)
	}
	idle, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]net.Conn{"waiting": ca, "in a request": half, "asked": asked, "accepted": idle} {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		var timeout net.Error
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("connection %s: %d bytes, %v", name, n, err)
		}
	}
	for _, s := range []*softiwarp.SSP{s, inRequest} {
		if _, err := s.Request(within(t)); err == nil {
			t.Error("a request of a closed device")
		}
	}
	if _, err := l.Accept(within(t)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept: %v", err)
	}
	if _, err := b.Listen(":0"); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("listen: %v", err)
	}
	if _, cb := tcpPair(t); cb != nil {
		if _, err := b.NewSSP(cb, softiwarp.SSPOptions{}); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("new SSP: %v", err)
		}
	}
}
