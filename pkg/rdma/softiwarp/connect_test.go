// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// tcpPair is a connection from the address of device a to that of device b.
func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	a, err = net.DialTCP("tcp", &net.TCPAddr{IP: loopA.AsSlice()}, l.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return a, b
}

// ends are an initiator and a responder, both in INIT, and their devices.
func ends(t testing.TB) (x, y *rdmatest.End, a, b *softiwarp.Device) {
	t.Helper()
	a, b = open(t, "a", loopA), open(t, "b", loopB)
	x, y = rdmatest.NewEnd(t, a, rdmatest.Options{}), rdmatest.NewEnd(t, b, rdmatest.Options{})
	x.Init(t)
	y.Init(t)
	return x, y, a, b
}

// says writes s to one side of a connection and expects it at the other.
func says(t testing.TB, from, to net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(from, s); err != nil {
		t.Fatalf("write %q: %v", s, err)
	}
	hears(t, to, s)
}

func hears(t testing.TB, c net.Conn, s string) {
	t.Helper()
	b := make([]byte, len(s))
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(c, b); err != nil || string(b) != s {
		t.Fatalf("read %q, %v, want %q", b, err, s)
	}
	_ = c.SetReadDeadline(time.Time{})
}

// talk sends a message in each direction.
func talk(t testing.TB, x, y *rdmatest.End) {
	t.Helper()
	for _, d := range [][2]*rdmatest.End{{x, y}, {y, x}} {
		d[1].Recv(t, 1, 0, 64)
		d[0].Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{d[0].SGE(0, 10)}})
		rdmatest.AwaitOne(t, d[0].SendCQ, 2, rdma.StatusSuccess)
		rdmatest.AwaitOne(t, d[1].RecvCQ, 1, rdma.StatusSuccess)
	}
}

func connectError(t testing.TB, err error, r softiwarp.ConnectReason) *softiwarp.ConnectError {
	t.Helper()
	var e *softiwarp.ConnectError
	if !errors.As(err, &e) || e.Reason != r {
		t.Fatalf("%v, want a ConnectError: %v", err, r)
	}
	return e
}

// readFrame reads a start-up frame of the peer.
func readFrame(t testing.TB, c net.Conn) iwarp.Frame {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 20)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	n, err := iwarp.FrameLen(b, strings.HasPrefix(string(b), "MPA ID Rep"))
	if err != nil {
		t.Fatal(err)
	}
	b = append(b, make([]byte, n-20)...)
	if _, err := io.ReadFull(c, b[20:]); err != nil {
		t.Fatal(err)
	}
	f, err := iwarp.ParseFrame(b)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestDial_privateData(t *testing.T) {
	x, y, a, b := ends(t)
	l, err := b.Listen("")
	if err == nil {
		t.Fatalf("listening without a port: %v", l.Addr())
	}
	if l, err = b.Listen(":0"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ctx := within(t)
	long := []byte(strings.Repeat("p", iwarp.MaxPrivateData-4))
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept(ctx)
		if err == nil && string(r.PrivateData()) != string(long) {
			err = fmt.Errorf("private data %q", r.PrivateData())
		}
		if err == nil {
			if served, asked, ok := r.Reads(); served != 3 || asked != 5 || !ok {
				err = fmt.Errorf("READs %d and %d, %v", served, asked, ok)
			}
		}
		if err == nil {
			err = r.Accept(ctx, y.QP, softiwarp.ConnectOptions{PrivateData: []byte("welcome")})
		}
		accepted <- err
	}()
	pd, err := a.Dial(ctx, x.QP, l.Addr().String(), softiwarp.ConnectOptions{PrivateData: long, ReadsServed: 3, ReadsAsked: 5, Exact: true})
	if errAccept := <-accepted; err != nil || errAccept != nil || string(pd) != "welcome" {
		t.Fatalf("dial: %q, %v; accept: %v", pd, err, errAccept)
	}
	talk(t, x, y)
}

// TestConnect_rejected: after a refusal both sides have the connection back, at the same byte, and
// may try again with the same queue pairs.
func TestConnect_rejected(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	says(t, ca, cb, "upgrade?")
	s, err := b.NewSSP(cb, softiwarp.SSPOptions{QP: y.QP, Last: []byte("go on")})
	if err != nil {
		t.Fatal(err)
	}
	hears(t, ca, "go on")
	type result struct {
		pd  []byte
		err error
	}
	connected := make(chan result, 1)
	ask := func(c *net.TCPConn) {
		pd, err := a.Connect(within(t), x.QP, c, softiwarp.ConnectOptions{})
		connected <- result{pd, err}
	}
	go ask(ca)
	r, err := s.Request(within(t))
	if err != nil {
		t.Fatal(err)
	}
	back, err := r.Reject([]byte("not today"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = back.Close() }()
	e := connectError(t, (<-connected).err, softiwarp.Rejected)
	if string(e.PrivateData) != "not today" || e.Tainted || e.Socket == nil {
		t.Fatalf("%+v", e)
	}
	defer func() { _ = e.Socket.Close() }()
	if sx, sy := x.QP.State(), y.QP.State(); sx != rdma.QPInit || sy != rdma.QPInit {
		t.Errorf("queue pairs in %v and %v", sx, sy)
	}
	says(t, back, e.Socket, "and now?")
	says(t, e.Socket, back, "again")
	if err := r.Accept(within(t), y.QP, softiwarp.ConnectOptions{}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("accept after reject: %v", err)
	}
	if s, err = b.NewSSP(back, softiwarp.SSPOptions{QP: y.QP}); err != nil {
		t.Fatal(err)
	}
	go ask(e.Socket)
	if r, err = s.Request(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := r.Accept(within(t), nil, softiwarp.ConnectOptions{PrivateData: []byte("yes")}); err != nil {
		t.Fatal(err)
	}
	if c := <-connected; c.err != nil || string(c.pd) != "yes" {
		t.Fatalf("%q, %v", c.pd, c.err)
	}
	talk(t, x, y)
}

// TestConnect_fails: whatever a peer does in place of an answer, the caller has its socket back and the
// queue pair is as it was.
func TestConnect_fails(t *testing.T) {
	x, _, a, _ := ends(t)
	for _, c := range []struct {
		name string
		peer func(c *net.TCPConn)
		want softiwarp.ConnectReason
		is   error
	}{
		{"silent", func(*net.TCPConn) {}, softiwarp.TimedOut, context.DeadlineExceeded},
		{"closed", func(c *net.TCPConn) { _ = c.CloseWrite() }, softiwarp.Refused, iwarp.ErrEnded},
		{"reset", func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() }, softiwarp.Refused, nil},
		{"another protocol", func(c *net.TCPConn) { _, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }, softiwarp.Refused, iwarp.ErrKey},
		{"part of a Reply", func(c *net.TCPConn) { _, _ = io.WriteString(c, "MPA ID Rep Fra") }, softiwarp.TimedOut, context.DeadlineExceeded},
	} {
		ca, cb := tcpPair(t)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if c.want == softiwarp.TimedOut {
			cancel()
			ctx, cancel = context.WithTimeout(context.Background(), 20*time.Millisecond)
		}
		c.peer(cb)
		_, err := a.Connect(ctx, x.QP, ca, softiwarp.ConnectOptions{})
		cancel()
		e := connectError(t, err, c.want)
		if c.is != nil && !errors.Is(err, c.is) || !e.Tainted || e.Socket == nil || e.Timeout() != (c.want == softiwarp.TimedOut) {
			t.Errorf("%s: %+v", c.name, e)
			continue
		}
		if _, err := ca.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: what was taken over is written: %v", c.name, err)
		}
		if err := e.Socket.Close(); err != nil {
			t.Errorf("%s: close: %v", c.name, err)
		}
		if s := x.QP.State(); s != rdma.QPInit {
			t.Fatalf("%s: queue pair in %v", c.name, s)
		}
	}
}

// TestConnect_notTried: what is wrong at once leaves socket and queue pair as they were.
func TestConnect_notTried(t *testing.T) {
	x, y, a, b := ends(t)
	reset := rdmatest.NewEnd(t, a, rdmatest.Options{})
	ca, cb := tcpPair(t)
	closed, _ := tcpPair(t)
	_ = closed.Close()
	for name, try := range map[string]struct {
		dev  *softiwarp.Device
		qp   rdma.QP
		conn *net.TCPConn
		opt  softiwarp.ConnectOptions
		want error
	}{
		"no socket":            {a, x.QP, nil, softiwarp.ConnectOptions{}, rdma.ErrInvalid},
		"closed socket":        {a, x.QP, closed, softiwarp.ConnectOptions{}, rdma.ErrInvalid},
		"another address":      {b, y.QP, ca, softiwarp.ConnectOptions{}, rdma.ErrState},
		"another device":       {a, y.QP, ca, softiwarp.ConnectOptions{}, rdma.ErrClosed},
		"no queue pair":        {a, nil, ca, softiwarp.ConnectOptions{}, rdma.ErrInvalid},
		"queue pair in RESET":  {a, reset.QP, ca, softiwarp.ConnectOptions{}, rdma.ErrState},
		"long private data":    {a, x.QP, ca, softiwarp.ConnectOptions{PrivateData: make([]byte, 509)}, rdma.ErrInvalid},
		"too many READs":       {a, x.QP, ca, softiwarp.ConnectOptions{ReadsAsked: iwarp.MaxReads + 1}, rdma.ErrInvalid},
		"revision 3":           {a, x.QP, ca, softiwarp.ConnectOptions{Rev: 3}, rdma.ErrInvalid},
		"segments of one byte": {a, x.QP, ca, softiwarp.ConnectOptions{MaxULPDU: 1}, rdma.ErrInvalid},
	} {
		_, err := try.dev.Connect(within(t), try.qp, try.conn, try.opt)
		var e *softiwarp.ConnectError
		if !errors.Is(err, try.want) || errors.As(err, &e) {
			t.Errorf("%s: %v, want %v", name, err, try.want)
		}
	}
	says(t, ca, cb, "still here")
	says(t, cb, ca, "here, too")
	if s := x.QP.State(); s != rdma.QPInit {
		t.Errorf("queue pair in %v", s)
	}
}

// TestConnect_modifiedMeanwhile: a queue pair that is reset, closed or failed while it is connected takes the
// connection with it, and the device's end does.
func TestConnect_modifiedMeanwhile(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(x *rdmatest.End, d *softiwarp.Device) error
		want error
	}{
		"reset":  {func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Modify(rdma.QPAttr{State: rdma.QPReset}) }, rdma.ErrState},
		"error":  {func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Modify(rdma.QPAttr{State: rdma.QPError}) }, rdma.ErrState},
		"close":  {func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Close() }, rdma.ErrClosed},
		"device": {func(_ *rdmatest.End, d *softiwarp.Device) error { return d.Close() }, rdma.ErrClosed},
	} {
		x, _, a, _ := ends(t)
		ca, cb := tcpPair(t)
		connected := make(chan error, 1)
		go func() {
			_, err := a.Connect(context.Background(), x.QP, ca, softiwarp.ConnectOptions{})
			connected <- err
		}()
		readFrame(t, cb)
		if err := c.do(x, a); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := <-connected; !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		_ = cb.SetReadDeadline(time.Now().Add(patience))
		if n, err := cb.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: the peer reads %d bytes, %v", name, n, err)
		}
	}
}

// TestDial_revision1: a peer that answers with revision 1 is asked again, so.
func TestDial_revision1(t *testing.T) {
	x, _, a, _ := ends(t)
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	revs := make(chan uint8, 2)
	go func() {
		for range 2 {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			f := readFrame(t, c)
			revs <- f.Rev
			reply := iwarp.Frame{Reply: true, Rev: 1, CRC: true, Reject: f.Rev != 1, PrivateData: []byte("old")}
			_, _ = c.Write(reply.Append(nil))
		}
	}()
	pd, err := a.Dial(within(t), x.QP, l.Addr().String(), softiwarp.ConnectOptions{})
	if err != nil || string(pd) != "old" || x.QP.State() != rdma.QPRTS {
		t.Fatalf("%q, %v, %v", pd, err, x.QP.State())
	}
	if r1, r2 := <-revs, <-revs; r1 != 2 || r2 != 1 {
		t.Errorf("revisions %d and %d", r1, r2)
	}
}

func TestDial_refused(t *testing.T) {
	x, _, a, _ := ends(t)
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	_, err = a.Dial(within(t), x.QP, addr, softiwarp.ConnectOptions{})
	if e := connectError(t, err, softiwarp.Refused); e.Socket != nil || e.Tainted {
		t.Errorf("%+v", e)
	}
}

// TestConnect_sparesPeers: the first FPDU does not come right behind the Reply, and the end not right
// behind the beginning, which Linux's siw would not take.
func TestConnect_sparesPeers(t *testing.T) {
	x, _, a, _ := ends(t)
	ca, cb := tcpPair(t)
	connected := make(chan error, 1)
	go func() {
		_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
		connected <- err
	}()
	f := readFrame(t, cb)
	if !f.CRC || f.Rev != 2 || !f.Enhanced.PeerToPeer || !f.Enhanced.RTRWrite {
		t.Fatalf("Request %+v", f)
	}
	f.Reply, f.PrivateData = true, nil
	start := time.Now()
	if _, err := cb.Write(f.Append(nil)); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	if err := x.QP.Close(); err != nil { // with the first message unsent: it is not sent any more
		t.Fatal(err)
	}
	_ = cb.SetReadDeadline(time.Now().Add(patience))
	rest, err := io.ReadAll(cb)
	if d := time.Since(start); err != nil || d < 50*time.Millisecond {
		t.Errorf("the connection ended after %v with %d bytes, %v", d, len(rest), err)
	}

	x, _, a, _ = ends(t)
	ca, cb = tcpPair(t)
	go func() {
		_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
		connected <- err
	}()
	f = readFrame(t, cb)
	f.Reply = true
	start = time.Now()
	if _, err := cb.Write(f.Append(nil)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 20) // an empty WRITE: length, header, CRC
	if _, err := io.ReadFull(cb, b); err != nil || time.Since(start) < 2*time.Millisecond {
		t.Errorf("first message %x after %v, %v", b, time.Since(start), err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
}

// connectToHand connects an initiator to a peer of which the test writes the bytes, on peer: it has agreed to all that the
// initiator asked for.
func connectToHand(t *testing.T, o softiwarp.ConnectOptions) (x *rdmatest.End, a *softiwarp.Device, peer *net.TCPConn) {
	t.Helper()
	x, _, a, _ = ends(t)
	own, peer := tcpPair(t)
	connected := make(chan error, 1)
	go func() {
		_, err := a.Connect(within(t), x.QP, own, o)
		connected <- err
	}()
	f := readFrame(t, peer)
	f.Reply, f.PrivateData = true, nil
	if _, err := peer.Write(f.Append(nil)); err != nil {
		t.Fatal(err)
	}
	if err := <-connected; err != nil {
		t.Fatal(err)
	}
	return x, a, peer
}

// TestConnect_nudges: a peer that says nothing is sent the empty WRITE again, until it says
// something. Linux's siw may have slept through the first one.
func TestConnect_nudges(t *testing.T) {
	_, _, cb := connectToHand(t, softiwarp.ConnectOptions{})
	_ = cb.SetReadDeadline(time.Now().Add(patience))
	var first, again [20]byte // an empty WRITE: length, header, CRC
	if _, err := io.ReadFull(cb, first[:]); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for i := range 2 {
		if _, err := io.ReadFull(cb, again[:]); err != nil || again != first {
			t.Fatalf("nudge %d is %x, %v, want %x", i, again, err, first)
		}
	}
	if d := time.Since(start); d < 150*time.Millisecond { // 100 ms, and 200 ms after that, less what the first took to come
		t.Errorf("two nudges in %v", d)
	}
	if _, err := cb.Write(first[:]); err != nil { // means as little to it
		t.Fatal(err)
	}
	_ = cb.SetReadDeadline(time.Now().Add(600 * time.Millisecond)) // the next one would come after 400
	if n, err := cb.Read(again[:]); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%x after the peer has said something, %v", again[:n], err)
	}
}

// TestConnect_streamed: a peer that has spoken another protocol before is no siw, and nothing is done for its sake.
func TestConnect_streamed(t *testing.T) {
	o := softiwarp.ConnectOptions{Streamed: true}
	best := time.Hour
	for i := 0; i < 50 && best >= 50*time.Millisecond; i++ { // the machine may have other work
		x, y, a, b := ends(t)
		start := time.Now()
		connect(t, x, y, o, o)
		if err := errors.Join(a.Disconnect(x.QP), a.AwaitEnd(within(t), x.QP), b.AwaitEnd(within(t), y.QP)); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(start))
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if best >= 50*time.Millisecond {
		t.Errorf("no connection lasted less than %v", best)
	}

	_, _, cb := connectToHand(t, o)
	_ = cb.SetReadDeadline(time.Now().Add(patience))
	var first [20]byte // an empty WRITE: length, header, CRC
	if _, err := io.ReadFull(cb, first[:]); err != nil {
		t.Fatal(err)
	}
	_ = cb.SetReadDeadline(time.Now().Add(250 * time.Millisecond)) // it would come again after 100
	if n, err := cb.Read(first[:]); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%x follows, %v", first[:n], err)
	}
}

// TestAccept_gate: without a first message of its own accord, what the responder posts waits for
// the initiator's.
func TestAccept_gate(t *testing.T) {
	x, y, _, _ := ends(t)
	connect(t, x, y, softiwarp.ConnectOptions{NoPeerToPeer: true}, softiwarp.ConnectOptions{})
	x.Recv(t, 1, 0, 64)
	y.Recv(t, 2, 0, 64)
	y.Send(t, rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{y.SGE(0, 10)}})
	if n, err := y.SendCQ.Poll(make([]rdma.WC, 1)); n != 0 || err != nil {
		t.Errorf("sent before the initiator: %d, %v", n, err)
	}
	x.Send(t, rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	rdmatest.AwaitOne(t, y.RecvCQ, 2, rdma.StatusSuccess)
	rdmatest.AwaitOne(t, y.SendCQ, 3, rdma.StatusSuccess)
	rdmatest.AwaitOne(t, x.RecvCQ, 1, rdma.StatusSuccess)
}

// TestDisconnect: what was posted arrives before the end, and the peer sees an end in order. The next connection of the
// queue pair goes on.
func TestDisconnect(t *testing.T) {
	x, y, a, _ := ends(t)
	connect(t, x, y, softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{})
	const n = 1 << 20
	y.Recv(t, 1, 0, n)
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
	if err := a.Disconnect(x.QP); err != nil {
		t.Fatal(err)
	}
	rdmatest.AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
	rdmatest.AwaitEvent(t, y.Ctx, rdma.EventDisconnected)
	if err := a.Disconnect(y.QP); err == nil {
		t.Error("a queue pair of another device is disconnected")
	}
	for _, e := range []*rdmatest.End{x, y} {
		if err := e.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
			t.Fatal(err)
		}
		e.Init(t)
	}
	connect(t, x, y, softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{})
	y.Recv(t, 3, 0, 64)
	x.Send(t, rdma.SendWR{ID: 4, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	rdmatest.AwaitOne(t, y.RecvCQ, 3, rdma.StatusSuccess)
	if s := x.QP.State(); s != rdma.QPRTS {
		t.Errorf("connected again, and in %v", s)
	}
}

// TestDisconnect_full: what was posted is sent before the end, also what the queue pair had no place for yet.
func TestDisconnect_full(t *testing.T) {
	x, a, cb := connectToHand(t, softiwarp.ConnectOptions{Streamed: true}) // it sends at once
	const places, size = 64, 32 << 20                                      // more than all buffers of TCP
	mr, err := x.PD.AllocMR(size, 0)
	if err != nil {
		t.Fatal(err)
	}
	post := func(n, size int) {
		t.Helper()
		wr := rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{{Addr: mr.Addr(), Length: uint32(size), LKey: mr.LKey()}}}
		for range n {
			if _, err := x.QP.PostSend([]rdma.SendWR{wr}); err != nil {
				t.Error(err)
			}
		}
	}
	owned := x.QP.(sync.Locker)
	post(1, size)
	for _, n := range []int{places - 1, 4} {
		owned.Lock() // what is posted meanwhile waits for the owner, who has no place for the last four
		post(n, 8)
		owned.Unlock()
	}
	if err := a.Disconnect(x.QP); err != nil {
		t.Fatal(err)
	}
	_ = cb.SetReadDeadline(time.Now().Add(patience))
	if n, err := io.Copy(io.Discard, cb); n < size || err != nil {
		t.Errorf("the peer reads %d bytes, %v", n, err)
	}
	_ = cb.Close()
	for i, w := range rdmatest.Await(t, x.SendCQ, places+4) {
		if w.Status != rdma.StatusSuccess {
			t.Fatalf("request %d of %d: %v", i+1, places+4, w.Status)
		}
	}
	if err := a.AwaitEnd(within(t), x.QP); err != nil {
		t.Error(err)
	}
}
