// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
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
		answer := pd[:min(n, iwarp.PortablePrivateData)]
		if err := r.Accept(within(t), nil, softiwarp.ConnectOptions{PrivateData: answer}); err != nil {
			t.Fatal(err)
		}
		if c := <-connected; c.err != nil || !bytes.Equal(c.pd, answer) {
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
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector closes what was forgotten
	for name, end := range map[string]func(x *rdmatest.End, a *softiwarp.Device) error{
		"disconnected": func(x *rdmatest.End, a *softiwarp.Device) error { return a.Disconnect(x.QP) },
		"destroyed":    func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Close() },
		"broken":       func(x *rdmatest.End, _ *softiwarp.Device) error { return x.QP.Modify(rdma.QPAttr{State: rdma.QPError}) },
	} {
		x, y, a, b := ends(t)
		ca, cb := tcpPair(t)
		before := leaktest.Descriptors()
		upgrade(t, x, y, a, b, ca, cb)
		if n := leaktest.Descriptors(); n != before {
			t.Errorf("%s: %d descriptors of 2 connections' ends, %d before", name, n, before)
		}
		if err := end(x, a); err != nil {
			t.Fatal(err)
		}
		deadline := time.Now().Add(patience)
		for leaktest.Descriptors() > before-2 {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d descriptors, want %d", name, leaktest.Descriptors(), before-2)
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
