// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// TestSSP_anyAmountBefore: programs talk as long as they like, in both directions at a time, and then
// upgrade: the stream lacks no byte and has none twice, and private data may be of any length.
func TestSSP_anyAmountBefore(t *testing.T) {
	for _, n := range []int{0, 1, 251, iwarp.PortablePrivateData, iwarp.MaxPrivateData - 4} {
		x, y, a, b := ends(t)
		ca, cb := tcpPair(t)
		var errs [2]chan error
		for i, c := range []*net.TCPConn{ca, cb} {
			errs[i] = make(chan error, 1)
			long := bytes.Repeat([]byte{byte('a' + i)}, 1<<20)
			go func() {
				_, err := c.Write(long)
				errs[i] <- err
			}()
		}
		hears(t, ca, string(bytes.Repeat([]byte{'b'}, 1<<20)))
		hears(t, cb, string(bytes.Repeat([]byte{'a'}, 1<<20)))
		if err := errors.Join(<-errs[0], <-errs[1]); err != nil {
			t.Fatal(err)
		}
		pd := bytes.Repeat([]byte{'p'}, n)
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP, Last: []byte("now")})
		hears(t, ca, "now")
		type result struct {
			pd  []byte
			err error
		}
		connected := make(chan result, 1)
		go func() {
			got, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{PrivateData: pd})
			connected <- result{got, err}
		}()
		r, err := s.Request(within(t))
		if err != nil || !bytes.Equal(r.PrivateData(), pd) {
			t.Fatalf("%d bytes of private data: %q, %v", n, r.PrivateData(), err)
		}
		if r.SSP() != s || s.Device() != b || r.RemoteAddr().String() != ca.LocalAddr().String() || r.LocalAddr().String() != s.LocalAddr().String() {
			t.Errorf("request of %v to %v", r.RemoteAddr(), r.LocalAddr())
		}
		if err := r.Accept(within(t), nil, softiwarp.ConnectOptions{PrivateData: pd}); err != nil {
			t.Fatal(err)
		}
		if c := <-connected; c.err != nil || !bytes.Equal(c.pd, pd) {
			t.Fatalf("%d bytes of private data: %q, %v", n, c.pd, c.err)
		}
		talk(t, x, y)
	}
}

// TestSSP_lastAndAnswer: however soon a peer answers the last message, its request is there; and the last
// message may be long.
func TestSSP_lastAndAnswer(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	for i := range 1000 {
		last := bytes.Repeat([]byte{'l'}, 1+i%10)
		if i%100 == 0 {
			last = make([]byte, 64<<10)
		}
		answered := make(chan error, 1)
		go func() {
			_, err := io.ReadFull(ca, make([]byte, len(last)))
			if err == nil {
				_, err = ca.Write(mpaRequest("at once"))
			}
			answered <- err
		}()
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP, Last: last})
		r, err := s.Request(within(t))
		if errAnswer := <-answered; err != nil || errAnswer != nil || string(r.PrivateData()) != "at once" {
			t.Fatalf("%v, %v", err, errAnswer)
		}
		if cb, err = r.Reject(nil); err != nil {
			t.Fatal(err)
		}
		readFrame(t, ca)
	}
	_ = cb.Close()
}

// TestSSP_noRequest: a peer that says something else than a Request takes the SSP down, and the
// program reads that itself. A new SSP of the same connection then has the request.
func TestSSP_noRequest(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	for said, is := range map[string]error{
		"QUIT\r\n":                         iwarp.ErrKey,
		"MPA ID Req Frobnicate":            iwarp.ErrKey,
		string(mpaRequest("")[:18]) + "xx": iwarp.ErrPrivateData,
	} {
		if _, err := io.WriteString(ca, said); err != nil {
			t.Fatal(err)
		}
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
		if r, err := s.Request(within(t)); r != nil || !errors.Is(err, softiwarp.ErrSocketDown) || !errors.Is(err, is) {
			t.Fatalf("%q: %v, %v", said, r, err)
		}
		if s.QP() != nil || s.State() != softiwarp.NonOperational {
			t.Errorf("%q: %v, queue pair %v", said, s.State(), s.QP())
		}
		var err error
		if cb, err = s.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Request(within(t)); !errors.Is(err, softiwarp.ErrSocketDown) {
			t.Errorf("%q: after Close: %v", said, err)
		}
		hears(t, cb, said)
		says(t, cb, ca, "what?")
	}

	// A revision that nobody has is refused, and behind that is the streaming mode.
	f := iwarp.Frame{Rev: 3}
	if _, err := ca.Write(append(f.Append(nil), "then not"...)); err != nil {
		t.Fatal(err)
	}
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	if _, err := s.Request(within(t)); !errors.Is(err, iwarp.ErrRevision) {
		t.Fatal(err)
	}
	cb, err := s.Close()
	if err != nil {
		t.Fatal(err)
	}
	if f := readFrame(t, ca); !f.Reject || f.Rev != 2 {
		t.Errorf("Reply %+v", f)
	}
	hears(t, cb, "then not")
	upgrade(t, x, y, a, b, ca, cb)
}

// TestSSP_endedWithBytes: what a peer said before it ended its half is there for the program.
func TestSSP_endedWithBytes(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	if _, err := ca.Write(mpaRequest("")[:10]); err != nil {
		t.Fatal(err)
	}
	if err := ca.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Request(within(t)); !errors.Is(err, iwarp.ErrEnded) {
		t.Errorf("%v", err)
	}
	back, err := s.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = back.Close() }()
	rest, err := io.ReadAll(back)
	if string(rest) != string(mpaRequest("")[:10]) || err != nil {
		t.Errorf("%q, %v", rest, err)
	}
	says(t, back, ca, "bye")
}

// TestSSP_behindTheRequest: of what a peer sends behind its request nothing is read before it is answered:
// after a refusal that is there for the program.
func TestSSP_behindTheRequest(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	if _, err := ca.Write(append(mpaRequest("x"), "behind it"...)); err != nil {
		t.Fatal(err)
	}
	r, err := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP}).Request(within(t))
	if err != nil {
		t.Fatal(err)
	}
	back, err := r.Reject(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = back.Close() }()
	hears(t, back, "behind it")
}

// TestConnect_behindTheReply: of what a peer sends behind a refusal nothing is read: it is there for the program.
func TestConnect_behindTheReply(t *testing.T) {
	x, _, a, _ := ends(t)
	ca, cb := tcpPair(t)
	f := iwarp.Frame{Reply: true, Reject: true, Rev: 2, IsEnhanced: true, PrivateData: []byte("no")}
	if _, err := cb.Write(append(f.Append(nil), "behind it"...)); err != nil {
		t.Fatal(err)
	}
	_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
	e := connectError(t, err, softiwarp.Rejected)
	defer func() { _ = e.Socket.Close() }()
	hears(t, e.Socket, "behind it")
}

// option reads an option of the socket behind f, whoever has the connection.
func option(t testing.TB, f *os.File, level, name int) int {
	t.Helper()
	v, err := unix.GetsockoptInt(int(f.Fd()), level, name)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestSSP_options: a connection keeps its options and its route, but that RDMA does without Nagle; who gets it back
// finds that as it was, too.
func TestSSP_options(t *testing.T) {
	x, y, a, b := ends(t)
	ca, cb := tcpPair(t)
	set := []struct{ level, name, value int }{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 77},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 11},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
		{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 12345},
		{unix.IPPROTO_IP, unix.IP_TOS, 0x10},
		{unix.SOL_SOCKET, unix.SO_DONTROUTE, 1},
		{unix.SOL_SOCKET, unix.SO_MARK, 0},
		{unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, 0},
	}
	var files []*os.File
	for _, c := range []*net.TCPConn{ca, cb} {
		f, err := c.File()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		files = append(files, f)
		for _, o := range set {
			if o.value == 0 && o.name != unix.SO_KEEPALIVE {
				continue // it is 0
			}
			if err := unix.SetsockoptInt(int(f.Fd()), o.level, o.name, o.value); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.SetNoDelay(false); err != nil {
			t.Fatal(err)
		}
		if err := unix.SetNonblock(int(f.Fd()), true); err != nil { // Fd has made it block
			t.Fatal(err)
		}
	}
	check := func(when string, noDelay int) {
		t.Helper()
		for i, f := range files {
			for _, o := range set {
				if v := option(t, f, o.level, o.name); v != o.value {
					t.Errorf("%s, side %d: option %d/%d is %d, want %d", when, i, o.level, o.name, v, o.value)
				}
			}
			if v := option(t, f, unix.IPPROTO_TCP, unix.TCP_NODELAY); v != noDelay {
				t.Errorf("%s, side %d: TCP_NODELAY is %d, want %d", when, i, v, noDelay)
			}
			if err := unix.SetNonblock(int(f.Fd()), true); err != nil {
				t.Fatal(err)
			}
		}
	}
	s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
	if v := option(t, files[1], unix.IPPROTO_TCP, unix.TCP_NODELAY); v != 1 {
		t.Error("a SSP with Nagle")
	}
	if err := unix.SetNonblock(int(files[1].Fd()), true); err != nil {
		t.Fatal(err)
	}
	cb, err := s.Close()
	if err != nil {
		t.Fatal(err)
	}
	refused := make(chan error, 1)
	go func() {
		_, err := a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
		refused <- err
	}()
	r, err := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP}).Request(within(t))
	if err == nil {
		cb, err = r.Reject(nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	ca = connectError(t, <-refused, softiwarp.Rejected).Socket
	check("given back", 0)
	upgrade(t, x, y, a, b, ca, cb)
	check("in use", 1)
}

// TestSSP_endReleases: when a connection of RDMA ends, on whichever side and however, its descriptors are
// closed; it is never the program's again.
func TestSSP_endReleases(t *testing.T) {
	for name, end := range map[string]func(x *rdmatest.End, a *softiwarp.Device) error{
		"disconnected": func(x *rdmatest.End, a *softiwarp.Device) error { return a.Disconnect(x.QP) },
		"destroyed":    func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Close() },
		"broken":       func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Modify(rdma.QPAttr{State: rdma.QPError}) },
	} {
		x, y, a, b := ends(t)
		ca, cb := tcpPair(t)
		before := descriptors()
		upgrade(t, x, y, a, b, ca, cb)
		if n := descriptors(); n != before {
			t.Errorf("%s: %d descriptors of 2 connections' ends, %d before", name, n, before)
		}
		if err := end(x, a); err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(patience)
		for descriptors() > before-2 {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d descriptors, want %d", name, descriptors(), before-2)
			}
			time.Sleep(time.Millisecond) // polls the descriptors
		}
		rdmatest.AwaitEvent(t, y.Ctx, rdma.EventDisconnected)
	}
}

// peerToPeerRequest is one whose connection begins with the initiator's first message.
func peerToPeerRequest() []byte {
	f := iwarp.Frame{CRC: true, Rev: 2, IsEnhanced: true, Enhanced: iwarp.Enhanced{PeerToPeer: true, RTRWrite: true}}
	return f.Append(nil)
}

// TestSSP_lostBeforeAccept: a connection that is lost after the request was seen fails what answers it.
func TestSSP_lostBeforeAccept(t *testing.T) {
	for _, reject := range []bool{true, false} {
		_, y, _, b := ends(t)
		ca, cb := tcpPair(t)
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
		if _, err := ca.Write(peerToPeerRequest()); err != nil {
			t.Fatal(err)
		}
		r, err := s.Request(within(t))
		if err != nil {
			t.Fatal(err)
		}
		_ = ca.SetLinger(0)
		_ = ca.Close()
		if reject {
			if c, err := r.Reject(nil); err == nil { // it was in time
				_ = c.Close()
			}
			continue
		}
		if err := r.Accept(within(t), nil, softiwarp.ConnectOptions{}); err == nil || errors.Is(err, rdma.ErrState) {
			t.Errorf("accept: %v", err)
		}
	}
}

// TestAccept_context: one that has ended leaves all as it is; one that ends while the initiator's first
// message is awaited ends the connection.
func TestAccept_context(t *testing.T) {
	_, y, _, b := ends(t)
	ca, cb := tcpPair(t)
	if _, err := ca.Write(peerToPeerRequest()); err != nil {
		t.Fatal(err)
	}
	r, err := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP}).Request(within(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.Accept(ctx, nil, softiwarp.ConnectOptions{}); !errors.Is(err, context.Canceled) || y.QP.State() != rdma.QPInit {
		t.Fatalf("%v, queue pair in %v", err, y.QP.State())
	}
	ctx, cancel = context.WithCancel(context.Background())
	accepted := make(chan error, 1)
	go func() { accepted <- r.Accept(ctx, nil, softiwarp.ConnectOptions{}) }()
	if f := readFrame(t, ca); f.Reject {
		t.Errorf("Reply %+v", f)
	}
	cancel()
	if err := <-accepted; !errors.Is(err, context.Canceled) || y.QP.State() != rdma.QPError {
		t.Errorf("%v, queue pair in %v", err, y.QP.State())
	}
	_ = ca.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadAll(ca); err != nil {
		t.Errorf("the peer: %v", err)
	}
}

// TestConnect_noTime: a context that has ended gives the peer no time, and nothing is tried.
func TestConnect_noTime(t *testing.T) {
	x, _, a, _ := ends(t)
	ca, cb := tcpPair(t)
	ctx, cancel := context.WithTimeout(context.Background(), 0)
	defer cancel()
	_, err := a.Connect(ctx, x.QP, ca, softiwarp.ConnectOptions{})
	var e *softiwarp.ConnectError
	if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &e) || x.QP.State() != rdma.QPInit {
		t.Errorf("%v, queue pair in %v", err, x.QP.State())
	}
	says(t, ca, cb, "nothing was sent")
}

// TestConnect_cancelMeetsReply: whichever comes first, the queue pair and the connection have one fate on each side,
// and both queue pairs can be used again.
func TestConnect_cancelMeetsReply(t *testing.T) {
	x, y, a, b := ends(t)
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	var connected, cancelled int
	for i := range 1000 {
		ca, cb := tcpPair(t)
		s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
		accepted := make(chan error, 1)
		go func() {
			r, err := s.Request(within(t))
			if err == nil {
				err = r.Accept(within(t), nil, softiwarp.ConnectOptions{})
			}
			accepted <- err
		}()
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+rnd.IntN(600))*time.Microsecond)
		_, err := a.Connect(ctx, x.QP, ca, softiwarp.ConnectOptions{})
		cancel()
		var e *softiwarp.ConnectError
		switch {
		case err == nil:
			connected++
			if err := <-accepted; err != nil {
				t.Fatalf("seed %d, round %d: connected, and accept: %v", seed, i, err)
			}
			for _, q := range []*rdmatest.End{x, y} {
				if err := q.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
					t.Fatal(err)
				}
				q.Init(t)
			}
		case errors.As(err, &e):
			cancelled++
			if e.Reason != softiwarp.TimedOut || e.Socket == nil || !e.Tainted || x.QP.State() != rdma.QPInit {
				t.Fatalf("seed %d, round %d: %+v, queue pair in %v", seed, i, e, x.QP.State())
			}
			_ = e.Socket.Close()
			if err := <-accepted; err == nil {
				t.Fatalf("seed %d, round %d: cancelled, and accepted", seed, i)
			}
			if c, err := s.Close(); err != nil {
				t.Fatal(err)
			} else if c != nil {
				_ = c.Close()
			}
			if err := y.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
				t.Fatal(err)
			}
			y.Init(t)
		default: // its time was over before it began
			_ = ca.Close()
			if err := <-accepted; !errors.Is(err, softiwarp.ErrSocketDown) {
				t.Fatalf("seed %d, round %d: not tried, and accept: %v", seed, i, err)
			}
			if c, err := s.Close(); err != nil {
				t.Fatal(err)
			} else if c != nil {
				_ = c.Close()
			}
		}
	}
	t.Logf("%d connected, %d cancelled", connected, cancelled)
	if connected == 0 || cancelled == 0 {
		t.Error("there was no race")
	}
}

// TestConnect_reads: what a program says of READs is never changed; what it leaves open is fitted to the peer.
func TestConnect_reads(t *testing.T) {
	for _, c := range []struct {
		name            string
		connect, accept softiwarp.ConnectOptions
		want            softiwarp.ConnectReason // 0: connected
	}{
		{"both open", softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{}, 0},
		{"as many as the peer serves", softiwarp.ConnectOptions{ReadsAsked: 4, Exact: true}, softiwarp.ConnectOptions{ReadsServed: 4, Exact: true}, 0},
		{"more than the peer serves", softiwarp.ConnectOptions{ReadsAsked: 5, Exact: true}, softiwarp.ConnectOptions{ReadsServed: 4, Exact: true}, softiwarp.Refused},
		{"open, to one that serves none", softiwarp.ConnectOptions{}, softiwarp.ConnectOptions{Exact: true}, 0},
		{"none, to one that has it open", softiwarp.ConnectOptions{Exact: true}, softiwarp.ConnectOptions{}, 0},
		{"the responder wants too much", softiwarp.ConnectOptions{ReadsServed: 1, Exact: true}, softiwarp.ConnectOptions{ReadsAsked: 2, Exact: true}, softiwarp.Rejected},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, y, a, b := ends(t)
			ca, cb := tcpPair(t)
			s := newSSP(t, b, cb, softiwarp.SSPOptions{QP: y.QP})
			connected := make(chan error, 1)
			go func() {
				_, err := a.Connect(within(t), x.QP, ca, c.connect)
				var e *softiwarp.ConnectError
				if errors.As(err, &e) {
					_ = e.Socket.Close()
				}
				connected <- err
			}()
			r, err := s.Request(within(t))
			if err != nil {
				t.Fatal(err)
			}
			err = r.Accept(within(t), nil, c.accept)
			if errConnect := <-connected; c.want != 0 {
				if connectError(t, errConnect, c.want); err == nil {
					t.Error("accepted")
				}
				if c.want == softiwarp.Refused && !errors.Is(errConnect, iwarp.ErrReads) {
					t.Errorf("%v", errConnect)
				}
				return
			} else if err != nil || errConnect != nil {
				t.Fatalf("accept: %v, connect: %v", err, errConnect)
			}
			talk(t, x, y)
		})
	}
}

// TestConnect_unreachable: a connection whose peer is not to be reached any more fails as such.
func TestConnect_unreachable(t *testing.T) {
	testenv.Need(t, testenv.NetAdmin)
	x, _, a, _ := ends(t)
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // its thread ends with it
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			if err := setLoopback(true); err != nil {
				return err
			}
			ca, _ := tcpPair(t)
			f, err := ca.File()
			if err != nil {
				return err
			}
			defer func() { _ = f.Close() }()
			raw, err := ca.SyscallConn()
			if err != nil {
				return err
			}
			if errControl := raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 50)
			}); err != nil || errControl != nil {
				return errors.Join(err, errControl)
			}
			if err := setLoopback(false); err != nil {
				return err
			}
			_, err = a.Connect(within(t), x.QP, ca, softiwarp.ConnectOptions{})
			var e *softiwarp.ConnectError
			if !errors.As(err, &e) || e.Reason != softiwarp.Unreachable || e.Timeout() {
				return fmt.Errorf("%w, want %v", err, softiwarp.Unreachable)
			}
			return e.Socket.Close()
		}()
	}()
	if err := <-result; err != nil {
		t.Error(err)
	}
	if s := x.QP.State(); s != rdma.QPInit {
		t.Errorf("queue pair in %v", s)
	}
}

// setLoopback switches the loopback interface of the thread's network namespace.
func setLoopback(up bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, ifr); err != nil {
		return err
	}
	flags := ifr.Uint16() &^ unix.IFF_UP
	if up {
		flags |= unix.IFF_UP
	}
	ifr.SetUint16(flags)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// TestSSP_isOfIWARP: a program that has some device learns by its type of addresses whether that speaks iWARP, and by
// its methods whether it takes over connections.
func TestSSP_isOfIWARP(t *testing.T) {
	var d rdma.Device = open(t, "a", loopA)
	if g := d.GIDs(); len(g) != 1 || g[0].Type != rdma.GIDTypeIWARP {
		t.Errorf("%+v", g)
	}
	if types := d.Attr().GIDTypes; len(types) != 1 || types[0] != rdma.GIDTypeIWARP {
		t.Errorf("%+v", types)
	}
	type takesOver interface {
		NewSSP(c *net.TCPConn, o softiwarp.SSPOptions) (*softiwarp.SSP, error)
		Connect(ctx context.Context, qp rdma.QP, c *net.TCPConn, o softiwarp.ConnectOptions) ([]byte, error)
	}
	if _, ok := d.(takesOver); !ok {
		t.Error("it does not")
	}
}
