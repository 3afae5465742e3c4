// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// tcp listens at a port of this host.
func tcp(t testing.TB) (*net.TCPListener, netip.AddrPort) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, netip.MustParseAddrPort(l.Addr().String())
}

// dials has a client dial a service, and returns its path and the address that the listener sees.
func dials(t testing.TB, c *portmapper.Client, d *net.Dialer, to netip.AddrPort, l *net.TCPListener) (portmapper.Path, netip.AddrPort) {
	t.Helper()
	conn, path, err := c.Dial(limited(t), d, to)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := l.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	peer, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	if conn.RemoteAddr().String() != path.Addr.String() {
		t.Errorf("the connection leads to %v, and is said to lead to %v", conn.RemoteAddr(), path.Addr)
	}
	return path, netip.MustParseAddrPort(peer.RemoteAddr().String())
}

// TestSection7_4_Dial: the connection leads to the SDP address, from the port that the PMReq has told of.
func TestSection7_4_Dial(t *testing.T) {
	l, at := tcp(t)
	s := newScript(t, func(_ int, m portmap.Message) [][]byte {
		if m.Type != portmap.Request {
			return nil
		}
		return [][]byte{as(portmap.Accept, m, at)}
	})
	c := newClient(t, s.port(), portmapper.ClientConfig{})
	for _, d := range []*net.Dialer{nil, {LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 3)}}, {LocalAddr: &net.TCPAddr{}}} {
		path, from := dials(t, c, d, service, l)
		if !path.Mapped || path.Addr != at || path.Reason != 0 || path.Err != nil {
			t.Errorf("%v, want SDP at %v", path, at)
		}
		if !slices.ContainsFunc(s.heard(), func(m portmap.Message) bool { return m.Type == portmap.Request && m.CP == from && m.AP == service }) {
			t.Errorf("the connection comes from %v, and the messages were %v", from, s.heard())
		}
		if d != nil && d.LocalAddr.(*net.TCPAddr).Port != 0 {
			t.Errorf("the caller's dialer was changed: %+v", d)
		}
	}
	if got := (portmapper.Path{Addr: at, Mapped: true}).String(); got != "SDP at "+at.String() {
		t.Error(got)
	}
}

// TestDial_severalAddresses: on a host with several addresses the question comes from the one that the connection has: a
// server would deny any other one. Without the dialer's word that is the one that the kernel chooses for the service.
func TestDial_severalAddresses(t *testing.T) {
	l, at := tcp(t)
	s := listen(t, netip.MustParseAddrPort("0.0.0.0:0"), portmapper.ServerConfig{})
	mapped(t, s, service, at)
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	for _, host := range []string{"127.0.0.1", "127.0.0.3", "127.0.0.4", ""} {
		d := &net.Dialer{}
		if host != "" {
			d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(host)}
		}
		path, from := dials(t, c, d, service, l)
		if !path.Mapped || host != "" && from.Addr() != netip.MustParseAddr(host) {
			t.Errorf("from %q: %v, and the connection comes from %v", host, path, from)
		}
	}
	if st := s.Stats(); st.Accepted != 4 || st.DeniedForeign != 0 {
		t.Errorf("server: %+v", st)
	}
	// A port mapper of the other family is asked all the same, as an agent.
	six := listen(t, netip.MustParseAddrPort("[::1]:0"), portmapper.ServerConfig{Agents: []netip.Prefix{netip.MustParsePrefix("::1/128")}})
	mapped(t, six, service, at)
	c = newClient(t, six.Addr().Port(), portmapper.ClientConfig{Mapper: six.Addr().Addr()})
	if path, _ := dials(t, c, &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 3)}}, service, l); !path.Mapped {
		t.Errorf("of a port mapper with IPv6: %v", path)
	}
}

// TestSection7_5_1_Fallback: without an SDP address, or without somebody there, it is plain TCP, with a reason.
func TestSection7_5_1_Fallback(t *testing.T) {
	l, conventional := tcp(t)
	dead, nobody := tcp(t)
	_ = dead.Close()
	s := listen(t, loopback, portmapper.ServerConfig{CacheTime: time.Minute})
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	plain := func(c *portmapper.Client, want portmapper.Reason) portmapper.Path {
		t.Helper()
		path, _ := dials(t, c, nil, conventional, l)
		if path.Mapped || path.Reason != want || path.Addr != conventional {
			t.Errorf("%v, want TCP to %v: %v", path, conventional, want)
		}
		return path
	}
	plain(c, portmapper.Denied)
	mapped(t, s, conventional, nobody)
	if p := plain(c, portmapper.Refused); !errors.Is(p.Err, syscall.ECONNREFUSED) || p.String() != "TCP to "+conventional.String()+": refused" {
		t.Errorf("%v: %v", p, p.Err)
	}
	living, at := tcp(t)
	mapped(t, s, conventional, at)
	if path, _ := dials(t, c, nil, conventional, living); !path.Mapped { // the dead one was not kept, though it might be
		t.Errorf("%v, want SDP at %v", path, at)
	}
	silent := newScript(t, func(int, portmap.Message) [][]byte { return nil })
	c = newClient(t, silent.port(), quick)
	plain(c, portmapper.NoAnswer)
	plain(c, portmapper.Silent)
}

// TestDial_inTime: who says nothing to questions, and drops them, takes half of a dialer's time at most, and that once.
func TestDial_inTime(t *testing.T) {
	l, conventional := tcp(t)
	silent := newScript(t, func(int, portmap.Message) [][]byte { return nil })
	dialsIn := func(c *portmapper.Client, d time.Duration, want portmapper.Reason) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		conn, path, err := c.Dial(ctx, nil, conventional)
		if err != nil {
			t.Fatalf("%v: %v", path, err)
		}
		if path.Mapped || path.Reason != want || path.Addr != conventional {
			t.Errorf("%v, want TCP to %v: %v", path, conventional, want)
		}
		_ = conn.Close()
		if peer, err := l.AcceptTCP(); err == nil {
			_ = peer.Close()
		}
	}
	c := newClient(t, silent.port(), portmapper.ClientConfig{})
	dialsIn(c, 200*time.Millisecond, portmapper.NoAnswer) // no time for two questions: that says nothing of the port mapper
	dialsIn(c, time.Second, portmapper.NoAnswer)
	dialsIn(c, time.Second, portmapper.Silent)

	asked := make(chan struct{}, 10)
	silent = newScript(t, func(int, portmap.Message) [][]byte { asked <- struct{}{}; return nil })
	c = newClient(t, silent.port(), portmapper.ClientConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	go func() {
		<-asked
		cancel()
	}()
	if _, path, err := c.Dial(ctx, nil, conventional); err == nil || path.Reason != portmapper.GivenUp {
		t.Errorf("canceled: %v, %v", path, err)
	}
	if st := c.Stats(); st.NotMapped[portmapper.GivenUp] != 1 || st.NotMapped[portmapper.NoAnswer] != 0 {
		t.Errorf("what the caller has canceled counts as silence: %+v", st)
	}
}

// full listens at an address that drops every SYN: nobody accepts, and there is no room for one more.
func full(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.AddrPortFrom(loopback.Addr(), uint16(sa.(*syscall.SockaddrInet4).Port))
	for range 10 {
		c, err := net.DialTimeout("tcp", at.String(), 300*time.Millisecond)
		if err != nil {
			return at
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Fatal("there is always room")
	return at
}

// TestDial_mute: a firewall that lets questions pass, and no connection to the SDP address, takes half of a dialer's time at most, and that
// once. An answer that may be kept stays while its address is left alone.
func TestDial_mute(t *testing.T) {
	l, conventional := tcp(t)
	s := listen(t, loopback, portmapper.ServerConfig{CacheTime: time.Minute})
	mapped(t, s, conventional, full(t))
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	for _, most := range []time.Duration{2500 * time.Millisecond, time.Second, time.Second} {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		begin := time.Now()
		conn, path, err := c.Dial(ctx, nil, conventional)
		cancel()
		if err != nil {
			t.Fatalf("%v: %v", path, err)
		}
		if d := time.Since(begin); d > most || path.Mapped || path.Reason != portmapper.Refused || path.Err == nil {
			t.Errorf("after %v: %v, %v, want TCP after %v at most", d, path, path.Err, most)
		}
		_ = conn.Close()
		if peer, err := l.AcceptTCP(); err == nil {
			_ = peer.Close()
		}
	}
	if st := s.Stats(); st.Accepted != 2 {
		t.Errorf("%d questions were answered, want those of the dial that found out, and of the next one", st.Accepted)
	}
}

// TestDial_muteForOne: where one connection to an SDP address times out and another one stands meanwhile, the address is not left alone.
func TestDial_muteForOne(t *testing.T) {
	_, conventional := tcp(t)
	l, at := tcp(t)
	s := listen(t, loopback, portmapper.ServerConfig{})
	mapped(t, s, conventional, at)
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	began, ended := make(chan struct{}), make(chan portmapper.Path, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		conn, path, err := c.Dial(ctx, &net.Dialer{Control: deaf(at, began)}, conventional)
		if err == nil {
			_ = conn.Close()
		}
		ended <- path
	}()
	<-began
	if path, _ := dials(t, c, nil, conventional, l); !path.Mapped {
		t.Errorf("while another one waits: %v", path)
	}
	var timeout net.Error
	if path := <-ended; path.Reason != portmapper.Refused || !errors.As(path.Err, &timeout) || !timeout.Timeout() {
		t.Errorf("the other one: %v, %v; want that it timed out", path, path.Err)
	}
	if path, _ := dials(t, c, nil, conventional, l); !path.Mapped {
		t.Errorf("behind it: %v", path)
	}
}

// deaf has a socket hear nothing that comes from an address, and tells when it is about to connect there.
func deaf(at netip.AddrPort, began chan<- struct{}) func(string, string, syscall.RawConn) error {
	return func(_, address string, r syscall.RawConn) error {
		if address != at.String() {
			return nil
		}
		defer close(began)
		none := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		var err error
		cerr := r.Control(func(fd uintptr) {
			err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &none})
		})
		return errors.Join(cerr, err)
	}
}

// TestDial_errors: what cannot be dialed at all.
func TestDial_errors(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{})
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	if _, _, err := c.Dial(limited(t), nil, netip.AddrPort{}); !errors.Is(err, portmapper.ErrAddress) {
		t.Error(err)
	}
	if _, _, err := c.Dial(limited(t), &net.Dialer{LocalAddr: &net.UDPAddr{}}, service); err == nil {
		t.Error("a local address of UDP is taken")
	}
	if _, _, err := c.Dial(limited(t), &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)}}, service); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("a foreign local address: %v", err)
	}
	_, path, err := c.Dial(limited(t), nil, service)
	if !errors.Is(err, syscall.ECONNREFUSED) || path.Reason != portmapper.Denied {
		t.Errorf("nobody is there: %v, %v", path, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := c.Dial(ctx, nil, service); err == nil {
		t.Error("a context that has ended does not matter")
	}
}

// TestDial_itself: a port where nobody listens may be the one that the connection was to come from.
func TestDial_itself(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{})
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	dead, nobody := tcp(t)
	_ = dead.Close()
	conn, path, err := c.Dial(limited(t), &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(nobody)}, nobody)
	if !errors.Is(err, syscall.ECONNREFUSED) || conn != nil {
		t.Errorf("%v, %v, %v; want that it is refused", conn, path, err)
	}
}

// TestDial_control: the functions of the caller's dialer are called, too.
func TestDial_control(t *testing.T) {
	l, at := tcp(t)
	s := listen(t, loopback, portmapper.ServerConfig{})
	mapped(t, s, service, at)
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	called := 0
	count := func() error { called++; return nil }
	dials(t, c, &net.Dialer{Control: func(string, string, syscall.RawConn) error { return count() }}, service, l)
	dials(t, c, &net.Dialer{ControlContext: func(context.Context, string, string, syscall.RawConn) error { return count() }}, service, l)
	if called != 2 {
		t.Errorf("called %d times", called)
	}
}
