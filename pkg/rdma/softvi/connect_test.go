// SPDX-License-Identifier: Apache-2.0

package softvi_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softvi"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

// ends are two ends in INIT, and their devices.
func ends(t testing.TB) (x, y *rdmatest.End, a, b *softvi.Device) {
	t.Helper()
	a, b = devices(t)
	return end(t, a), end(t, b), a, b
}

func end(t testing.TB, d *softvi.Device) *rdmatest.End {
	t.Helper()
	e := rdmatest.NewEnd(t, d, rdmatest.Options{})
	e.Init(t)
	return e
}

func listen(t testing.TB, d *softvi.Device, discriminator string) *softvi.Listener {
	t.Helper()
	l, err := d.Listen(discriminator)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// result is what a call led to.
type result struct {
	terms softvi.Terms
	err   error
}

// dial calls in the background.
func dial(t testing.TB, x *rdmatest.End, to softvi.Addr, o softvi.Options) <-chan result {
	t.Helper()
	ctx := within(t)
	c := make(chan result, 1)
	go func() {
		terms, err := device(x).Dial(ctx, x.QP, to, o)
		c <- result{terms, err}
	}()
	return c
}

func accept(t testing.TB, l *softvi.Listener) *softvi.Request {
	t.Helper()
	r, err := l.Accept(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return r
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

func states(t testing.TB, want rdma.QPState, ends ...*rdmatest.End) {
	t.Helper()
	for _, e := range ends {
		if s := e.QP.State(); s != want {
			t.Errorf("queue pair of %s in %v, want %v", e.Dev.Name(), s, want)
		}
	}
}

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

// TestSection3_2_PrivateData: what both programs say of themselves reaches the other one, and sizes are the
// lesser ones.
func TestSection3_2_PrivateData(t *testing.T) {
	x, y, _, b := ends(t)
	l := listen(t, b, "server")
	long := []byte(strings.Repeat("p", vitcp.MaxSecurity))
	called := dial(t, x, at(b, "server"), softvi.Options{
		Discriminator: "client", Security: long, MaxTransfer: 1 << 20, ReadWindow: 3, NoFlowControl: true,
	})
	r := accept(t, l)
	offer := r.Offer()
	if r.Calling() != "client" || r.Called() != "server" || string(r.Security()) != string(long) || offer.FlowControl ||
		!offer.Reliable || offer.Peer || offer.MaxTransfer != 1<<20 || offer.ReadWindow != 3 {
		t.Errorf("call of %q to %q with %d bytes and %+v", r.Calling(), r.Called(), len(r.Security()), offer)
	}
	if ip := netip.MustParseAddrPort(r.RemoteAddr().String()).Addr(); ip != loopA || r.LocalAddr().String() != b.Addr().String() {
		t.Errorf("call from %v to %v", r.RemoteAddr(), r.LocalAddr())
	}
	ours, err := r.Accept(y.QP, softvi.Options{Security: []byte("welcome"), MaxTransfer: 4096, ReadWindow: 5})
	theirs := <-called
	if err != nil || theirs.err != nil {
		t.Fatalf("accept: %v, dial: %v", err, theirs.err)
	}
	want := vitcp.Attr{Reliable: true, RDMAWrite: true, RDMARead: true, MaxTransfer: 4096, ReadWindow: 3}
	if ours.Attr != want || theirs.terms.Attr != want || string(ours.Security) != string(long) || string(theirs.terms.Security) != "welcome" {
		t.Errorf("agreed on %+v and %+v, want %+v", ours, theirs.terms, want)
	}
	talk(t, x, y)
	if _, err := r.Accept(y.QP, softvi.Options{}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("accept twice: %v", err)
	}
	if err := r.Reject(); !errors.Is(err, rdma.ErrState) {
		t.Errorf("reject after accept: %v", err)
	}
	x.Send(t, rdma.SendWR{ID: 9, Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, 4097)}})
	rdmatest.AwaitOne(t, x.SendCQ, 9, rdma.StatusLocalLength)
}

// TestSection2_2_2_2_1_OnePort: programs behind one port are told apart by discriminators, callers come from any
// port, and nobody is mistaken for another one.
func TestSection2_2_2_2_1_OnePort(t *testing.T) {
	a, b := devices(t)
	names := []string{"", "a", "b", "sixteen bytes 01"}
	from := map[string]bool{}
	for _, name := range names {
		l := listen(t, b, name)
		for range 2 {
			x, y := end(t, a), end(t, b)
			called := dial(t, x, at(b, name), softvi.Options{})
			r := accept(t, l)
			if r.Called() != name || r.LocalAddr().String() != b.Addr().String() {
				t.Errorf("call of %q at %v arrived as %q at %v", name, b.Addr(), r.Called(), r.LocalAddr())
			}
			from[r.RemoteAddr().String()] = true
			if _, err := r.Accept(y.QP, softvi.Options{}); err != nil {
				t.Fatal(err)
			}
			if c := <-called; c.err != nil {
				t.Fatal(c.err)
			}
		}
	}
	if len(from) != 2*len(names) || from[a.Addr().String()] {
		t.Errorf("calls came from %v", from)
	}
	if _, err := b.Listen("a"); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("listen twice: %v", err)
	}
	if _, err := b.Listen("seventeen bytes 0"); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("long discriminator: %v", err)
	}
	if d, err := softvi.Open(softvi.Config{Name: "b2", Addr: loopB, Port: b.Addr().Port()}); err == nil {
		t.Errorf("a port that is taken is open again: %v", d.Addr())
	}
}

// TestSection2_2_2_2_4_Timestamps: what the device says of a connection is what the kernel does.
func TestSection2_2_2_2_4_Timestamps(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_timestamps")
	if err != nil {
		t.Fatal(err)
	}
	want := strings.TrimSpace(string(text)) != "0"
	x, y, _, b := ends(t)
	l := listen(t, b, "x")
	called := dial(t, x, at(b, "x"), softvi.Options{})
	terms, err := accept(t, l).Accept(y.QP, softvi.Options{})
	if c := <-called; err != nil || c.err != nil || terms.Timestamps != want || c.terms.Timestamps != want {
		t.Errorf("timestamps %v, %v and %v, %v, want %v", terms.Timestamps, err, c.terms.Timestamps, c.err, want)
	}
}

// TestSection2_2_1_SendsBeforeReceives: what is sent before there is a receive waits for the news of one, which
// come by themselves.
func TestSection2_2_1_SendsBeforeReceives(t *testing.T) {
	x, y, _, _ := ends(t)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	for i := range uint64(20) {
		x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 100)}})
	}
	for i := range uint64(20) {
		if n, err := y.RecvCQ.Poll(make([]rdma.WC, 1)); n != 0 || err != nil {
			t.Fatalf("message %d came before its receive: %d, %v", i, n, err)
		}
		y.Recv(t, 100+i, 0, 100)
		rdmatest.AwaitOne(t, y.RecvCQ, 100+i, rdma.StatusSuccess)
		rdmatest.AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
	}
}

// TestSection2_2_1_Mismatch: a program whose options do not fit may offer others, or reject.
func TestSection2_2_1_Mismatch(t *testing.T) {
	a, b := devices(t)
	l := listen(t, b, "x")
	for _, c := range []struct {
		name string
		dial softvi.Options
		want error
	}{
		{"reliability", softvi.Options{Unreliable: true}, vitcp.ErrReliability},
		{"WRITE", softvi.Options{NoRDMAWrite: true}, vitcp.ErrRDMAWrite},
		{"READ", softvi.Options{NoRDMARead: true}, vitcp.ErrRDMARead},
	} {
		x, y := end(t, a), end(t, b)
		called := dial(t, x, at(b, "x"), c.dial)
		r := accept(t, l)
		if _, err := r.Accept(y.QP, softvi.Options{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		states(t, rdma.QPInit, y)
		if _, err := r.Accept(y.QP, c.dial); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if c := <-called; c.err != nil {
			t.Fatal(c.err)
		}
		talk(t, x, y)
	}
}

// TestSection4_2_Failures: each way in which a call fails has its error, and the queue pair is as before.
func TestSection4_2_Failures(t *testing.T) {
	x, _, a, b := ends(t)
	l := listen(t, b, "x")
	fails := func(name string, err error, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		states(t, rdma.QPInit, x)
	}
	called := dial(t, x, at(b, "x"), softvi.Options{})
	if err := accept(t, l).Reject(); err != nil {
		t.Error(err)
	}
	fails("rejected", (<-called).err, vitcp.ErrRejected)
	fails("no match", (<-dial(t, x, at(b, "y"), softvi.Options{})).err, vitcp.ErrNoMatch)
	closed := at(b, "x")
	silent, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	gone, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	closed.Port = uint16(gone.Addr().(*net.TCPAddr).Port)
	_ = gone.Close()
	fails("unreachable", (<-dial(t, x, closed, softvi.Options{})).err, vitcp.ErrUnreachable)

	quiet := closed
	quiet.Port = uint16(silent.Addr().(*net.TCPAddr).Port)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	_, err = a.Dial(ctx, x.QP, quiet, softvi.Options{})
	cancel()
	fails("silent", err, vitcp.ErrTimeout)
	fails("silent", err, context.DeadlineExceeded)
	ctx, cancel = context.WithCancel(context.Background())
	go func() {
		if c, err := silent.AcceptTCP(); err == nil { // that of before
			_ = c.Close()
		}
		c, err := silent.AcceptTCP()
		if err == nil {
			_, _ = io.ReadFull(c, make([]byte, vitcp.HeaderLen))
			defer func() { _ = c.Close() }()
		}
		cancel()
	}()
	_, err = a.Dial(ctx, x.QP, quiet, softvi.Options{})
	fails("canceled", err, vitcp.ErrCanceled)
	fails("canceled", err, context.Canceled)
	cancel()

	bare, stop := context.WithTimeout(context.Background(), time.Nanosecond)
	defer stop()
	_, err = a.Dial(bare, x.QP, at(b, "x"), softvi.Options{})
	fails("no time", err, vitcp.ErrTimeout)
}

// TestSection4_2_CalledAgain: a caller whose TCP connection is closed without an answer calls again.
func TestSection4_2_CalledAgain(t *testing.T) {
	x, y, _, b := ends(t)
	l := listen(t, b, "x")
	front, err := net.ListenTCP("tcp", &net.TCPAddr{IP: loopB.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = front.Close() }()
	to := at(b, "x")
	to.Port = uint16(front.Addr().(*net.TCPAddr).Port)
	called := dial(t, x, to, softvi.Options{})
	for i := range 3 {
		c, err := front.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			_ = c.Close()
			continue
		}
		if err := b.Serve(c); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("what was taken over is written: %v", err)
		}
	}
	if _, err := accept(t, l).Accept(y.QP, softvi.Options{}); err != nil {
		t.Fatal(err)
	}
	if c := <-called; c.err != nil {
		t.Fatal(c.err)
	}
	talk(t, x, y)
}

// TestConnect: a VI connection on a TCP connection over which programs have talked.
func TestConnect(t *testing.T) {
	x, y, a, b := ends(t)
	l := listen(t, b, "upgrade")
	ca, cb := tcpPair(t)
	if _, err := io.WriteString(ca, "VI now?"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(cb, make([]byte, 7)); err != nil {
		t.Fatal(err)
	}
	called := make(chan error, 1)
	ctx := within(t)
	go func() {
		_, err := a.Connect(ctx, x.QP, ca, "upgrade", softvi.Options{})
		called <- err
	}()
	if err := b.Serve(cb); err != nil {
		t.Fatal(err)
	}
	if _, err := accept(t, l).Accept(y.QP, softvi.Options{}); err != nil {
		t.Fatal(err)
	}
	if err := <-called; err != nil {
		t.Fatal(err)
	}
	talk(t, x, y)

	z := end(t, a)
	ca, cb = tcpPair(t)
	_ = cb.Close()
	if _, err := a.Connect(ctx, z.QP, ca, "upgrade", softvi.Options{}); !errors.Is(err, vitcp.ErrPeerClosed) || !errors.Is(err, vitcp.ErrUnreachable) {
		t.Errorf("connection that is closed: %v", err)
	}
	states(t, rdma.QPInit, z)
}

// TestConnect_notTried: what is wrong at once leaves connection and queue pair as they were.
func TestConnect_notTried(t *testing.T) {
	x, y, a, b := ends(t)
	reset := rdmatest.NewEnd(t, a, rdmatest.Options{})
	ca, cb := tcpPair(t)
	closed, _ := tcpPair(t)
	_ = closed.Close()
	for name, try := range map[string]struct {
		dev  *softvi.Device
		qp   rdma.QP
		conn *net.TCPConn
		disc string
		opt  softvi.Options
		want error
	}{
		"no connection":            {a, x.QP, nil, "x", softvi.Options{}, rdma.ErrInvalid},
		"closed connection":        {a, x.QP, closed, "x", softvi.Options{}, rdma.ErrInvalid},
		"another address":          {b, y.QP, ca, "x", softvi.Options{}, rdma.ErrState},
		"another device":           {a, y.QP, ca, "x", softvi.Options{}, rdma.ErrClosed},
		"no queue pair":            {a, nil, ca, "x", softvi.Options{}, rdma.ErrInvalid},
		"queue pair in RESET":      {a, reset.QP, ca, "x", softvi.Options{}, rdma.ErrState},
		"long discriminator":       {a, x.QP, ca, "seventeen bytes 0", softvi.Options{}, rdma.ErrInvalid},
		"own long discriminator":   {a, x.QP, ca, "x", softvi.Options{Discriminator: "seventeen bytes 0"}, rdma.ErrInvalid},
		"long private data":        {a, x.QP, ca, "x", softvi.Options{Security: make([]byte, vitcp.MaxSecurity+1)}, rdma.ErrInvalid},
		"too many READs":           {a, x.QP, ca, "x", softvi.Options{ReadWindow: vitcp.MaxReadWindow + 1}, rdma.ErrInvalid},
		"segments of one byte":     {a, x.QP, ca, "x", softvi.Options{MaxSegment: 1}, rdma.ErrInvalid},
		"segments of a length two": {a, x.QP, ca, "x", softvi.Options{MaxSegment: 1 << 16}, rdma.ErrInvalid},
	} {
		if _, err := try.dev.Connect(within(t), try.qp, try.conn, try.disc, try.opt); !errors.Is(err, try.want) {
			t.Errorf("%s: %v, want %v", name, err, try.want)
		}
	}
	for _, to := range []softvi.Addr{{}, {IP: netip.IPv4Unspecified()}, {IP: loopB, Discriminator: "seventeen bytes 0"}} {
		if _, err := a.Dial(within(t), x.QP, to, softvi.Options{}); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("dial %v: %v", to, err)
		}
	}
	if _, err := a.DialPeer(within(t), x.QP, at(a, "x"), softvi.Options{Discriminator: "x"}); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("a peer that calls itself: %v", err)
	}
	if err := a.Serve(cb); !errors.Is(err, rdma.ErrState) {
		t.Errorf("serve a connection of another address: %v", err)
	}
	if _, err := io.WriteString(ca, "still here"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(cb, make([]byte, 10)); err != nil {
		t.Error(err)
	}
	states(t, rdma.QPInit, x)
}

// TestDial_modifiedMeanwhile: a queue pair that is reset, closed or failed while it calls takes the call with
// it, and the device's end does.
func TestDial_modifiedMeanwhile(t *testing.T) {
	modify := func(s rdma.QPState) func(x *rdmatest.End, _ *softvi.Device) error {
		return func(x *rdmatest.End, _ *softvi.Device) error { return x.QP.Modify(rdma.QPAttr{State: s}) }
	}
	for name, c := range map[string]struct {
		do   func(x *rdmatest.End, d *softvi.Device) error
		want error
	}{
		"reset":  {modify(rdma.QPReset), rdma.ErrState},
		"error":  {modify(rdma.QPError), rdma.ErrState},
		"close":  {func(x *rdmatest.End, _ *softvi.Device) error { return x.QP.Close() }, rdma.ErrClosed},
		"device": {func(_ *rdmatest.End, d *softvi.Device) error { return d.Close() }, rdma.ErrClosed},
	} {
		x, y, a, b := ends(t)
		l := listen(t, b, "x")
		called := dial(t, x, at(b, "x"), softvi.Options{})
		r := accept(t, l)
		other := make(chan error, 1)
		go func() {
			_, err := a.Dial(context.Background(), x.QP, at(b, "x"), softvi.Options{})
			other <- err
		}()
		if err := <-other; !errors.Is(err, rdma.ErrState) {
			t.Errorf("%s: call on a queue pair that calls: %v", name, err)
		}
		if err := c.do(x, a); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c2 := <-called; !errors.Is(c2.err, c.want) {
			t.Errorf("%s: %v, want %v", name, c2.err, c.want)
		}
		over(t, r, y, vitcp.ErrPeerClosed)
	}
}

// over waits until nobody is at the other end of a request, for a reason. y is in INIT.
func over(t testing.TB, r *softvi.Request, y *rdmatest.End, want error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // polls the request
		_, err := r.Accept(y.QP, softvi.Options{Unreliable: true}) // does not fit
		if errors.Is(err, want) {
			return
		}
		if !errors.Is(err, vitcp.ErrReliability) || time.Now().After(end) {
			t.Fatalf("accept: %v, want %v", err, want)
		}
	}
}

// TestSection4_3_CallsEnd: a call whose caller is gone, or that the program leaves lying, is over, and a listener's
// calls end with it.
func TestSection4_3_CallsEnd(t *testing.T) {
	a := open(t, softvi.Config{Name: "a", Addr: loopA})
	b := open(t, softvi.Config{Name: "b", Addr: loopB, AcceptTimeout: 50 * time.Millisecond})
	l := listen(t, b, "x")
	y := end(t, b)
	ctx, cancel := context.WithCancel(within(t))
	called := make(chan error, 1)
	x := end(t, a)
	go func() {
		_, err := a.Dial(ctx, x.QP, at(b, "x"), softvi.Options{})
		called <- err
	}()
	r := accept(t, l)
	over(t, r, y, vitcp.ErrTimeout)
	r = accept(t, l) // it calls again
	cancel()
	if err := <-called; !errors.Is(err, vitcp.ErrCanceled) {
		t.Errorf("canceled: %v", err)
	}
	over(t, r, y, vitcp.ErrPeerClosed)
	states(t, rdma.QPInit, x, y)

	again := dial(t, x, at(b, "x"), softvi.Options{})
	waitPending(t, b, 1)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if c := <-again; !errors.Is(c.err, vitcp.ErrNoMatch) { // TCP is closed, and then nobody is there
		t.Errorf("listener closed: %v", c.err)
	}
	if _, err := l.Accept(within(t)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept of a closed listener: %v", err)
	}
	l = listen(t, b, "x")
	ctx, cancel = context.WithCancel(context.Background())
	cancel()
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("accept, canceled: %v", err)
	}
}

// waitPending waits until a device has n calls that are not answered.
func waitPending(t testing.TB, d *softvi.Device, n int) {
	t.Helper()
	for end := time.Now().Add(patience); d.Pending() != n; time.Sleep(time.Millisecond) { // polls the device
		if time.Now().After(end) {
			t.Fatalf("%d calls are not answered, want %d", d.Pending(), n)
		}
	}
}

// TestSection2_2_2_2_2_Disconnect: what was posted arrives before the end, and the peer sees an end in order.
func TestSection2_2_2_2_2_Disconnect(t *testing.T) {
	x, y, a, _ := ends(t)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	const n = 1 << 20
	y.Recv(t, 1, 0, n)
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, n)}})
	if err := a.Disconnect(within(t), x.QP); err != nil {
		t.Fatal(err)
	}
	states(t, rdma.QPError, x)
	rdmatest.AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
	rdmatest.AwaitEvent(t, y.Ctx, rdma.EventDisconnected)
	if err := a.Disconnect(within(t), x.QP); !errors.Is(err, rdma.ErrState) {
		t.Errorf("disconnect twice: %v", err)
	}
	if err := a.Disconnect(within(t), y.QP); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("disconnect a queue pair of another device: %v", err)
	}
}

// TestDisconnect_full: what was posted is sent before the end, also what the queue pair had no place for yet, and
// what is posted beside the end completes.
func TestDisconnect_full(t *testing.T) {
	for range 8 {
		x, y, a, _ := ends(t)
		connect(t, x, y, softvi.Options{}, softvi.Options{})
		wr := x.Write(0, y, 0, 1<<20)
		posted, polled := 0, 0
		post := func() error {
			n, err := x.QP.PostSend([]rdma.SendWR{wr})
			posted += n
			return err
		}
		poll := func(wcs []rdma.WC, before int) {
			for _, w := range wcs {
				if polled++; polled <= before && w.Status != rdma.StatusSuccess || w.Status != rdma.StatusSuccess && w.Status != rdma.StatusFlushed {
					t.Fatalf("%d of %d, %d before the end: %+v (%v)", polled, posted, before, w, w.Status)
				}
			}
		}
		for post() == nil {
		}
		before := posted
		ended := make(chan error, 1)
		ctx := within(t)
		go func() { ended <- a.Disconnect(ctx, x.QP) }()
		for err := post(); !errors.Is(err, rdma.ErrState) && x.QP.State() == rdma.QPRTS; err = post() {
			var w [1]rdma.WC
			n, err := x.SendCQ.Poll(w[:])
			if err != nil {
				t.Fatal(err)
			}
			poll(w[:n], before)
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		poll(rdmatest.Await(t, x.SendCQ, posted-polled), before)
	}
}

// disconnecting has a queue pair disconnect, which it has begun, and says what became of that.
func disconnecting(d *softvi.Device, x *rdmatest.End) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- d.Disconnect(context.Background(), x.QP) }()
	for _, err := x.QP.PostSend(nil); err == nil; _, err = x.QP.PostSend(nil) {
		<-time.After(time.Millisecond) // polls the queue pair, which takes nothing when it disconnects
	}
	return ended
}

// TestDisconnect_impatient: a peer that has no receive for what was posted does not hold up the end for longer than
// the program wants.
func TestDisconnect_impatient(t *testing.T) {
	x, y, a, _ := ends(t)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := a.Disconnect(ctx, x.QP); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("disconnect: %v", err)
	}
	rdmatest.AwaitOne(t, x.SendCQ, 2, rdma.StatusFlushed)
	rdmatest.AwaitEvent(t, y.Ctx, rdma.EventDisconnected)
	states(t, rdma.QPError, x, y)

	x, y, a, _ = ends(t)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	ended := disconnecting(a, x)
	if err := x.QP.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("closed meanwhile: %v", err)
	}
}

// TestDisconnect_lost: a connection that ends before what was posted was sent, and acknowledged, has not ended as
// Disconnect promises.
func TestDisconnect_lost(t *testing.T) {
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	modify := func(s rdma.QPState) func(x, _ *rdmatest.End) error {
		return func(x, _ *rdmatest.End) error { return x.QP.Modify(rdma.QPAttr{State: s}) }
	}
	for name, c := range map[string]struct {
		do   func(x, y *rdmatest.End) error
		want func(error) bool
		send rdma.Status // success: it does not complete
	}{
		"peer closes": {func(_, y *rdmatest.End) error { return y.QP.Close() }, is(vitcp.ErrPeerClosed), rdma.StatusFlushed},
		"peer disconnects": {
			func(_, y *rdmatest.End) error { return device(y).Disconnect(within(t), y.QP) },
			is(vitcp.ErrPeerClosed), rdma.StatusFlushed,
		},
		"peer refuses": {
			func(_, y *rdmatest.End) error {
				_, err := y.QP.PostRecv([]rdma.RecvWR{{SGE: y.SGE(0, 5)}})
				return err
			},
			func(err error) bool { return errors.As(err, new(*vitcp.RemoteError)) }, rdma.StatusRemoteInvalid,
		},
		"error": {modify(rdma.QPError), is(rdma.ErrState), rdma.StatusFlushed},
		"reset": {modify(rdma.QPReset), is(rdma.ErrState), rdma.StatusSuccess},
	} {
		x, y, a, _ := ends(t)
		connect(t, x, y, softvi.Options{}, softvi.Options{})
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
		ended := disconnecting(a, x)
		if err := c.do(x, y); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := <-ended; !c.want(err) {
			t.Errorf("%s: disconnect: %v", name, err)
		}
		if c.send != rdma.StatusSuccess {
			rdmatest.AwaitOne(t, x.SendCQ, 2, c.send)
		}
	}
}

// TestQP_Close_acknowledges: a message that the program has is acknowledged, although the program closes the queue pair
// at once.
func TestQP_Close_acknowledges(t *testing.T) {
	x, y, _, _ := ends(t)
	connect(t, x, y, softvi.Options{}, softvi.Options{})
	y.Recv(t, 1, 0, 64)
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	rdmatest.AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess)
	if err := y.QP.Close(); err != nil {
		t.Error(err)
	}
	rdmatest.AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
	rdmatest.AwaitEvent(t, x.Ctx, rdma.EventDisconnected)
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]softvi.Config{
		"no name":          {Addr: loopA},
		"no address":       {Name: "x"},
		"mapped":           {Name: "x", Addr: netip.AddrFrom16(loopA.As16())},
		"link-local":       {Name: "x", Addr: netip.MustParseAddr("fe80::1")},
		"negative timeout": {Name: "x", Addr: loopA, AcceptTimeout: -1},
	} {
		if d, err := softvi.Open(c); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: %v, %v", name, d, err)
		}
	}
	d := open(t, softvi.Config{Name: "x", Addr: loopA})
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Listen("x"); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("listen on a closed device: %v", err)
	}
	if _, err := d.Open(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("open a closed device: %v", err)
	}
}
