// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// TestServer_allAddresses: the answer comes from the address that was asked, or the client would not hear it; and
// nobody is answered who asks all.
func TestServer_allAddresses(t *testing.T) {
	s := listen(t, netip.MustParseAddrPort("0.0.0.0:0"), portmapper.ServerConfig{})
	mapped(t, s, netip.MustParseAddrPort("0.0.0.0:5001"), netip.MustParseAddrPort("0.0.0.0:35001"))
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	for _, host := range []string{"127.0.0.1", "127.0.0.2", "127.7.7.7"} {
		at := netip.MustParseAddr(host)
		got, err := c.Lookup(limited(t), netip.AddrPortFrom(at, 5001), cp)
		if err != nil || got != netip.AddrPortFrom(at, 35001) {
			t.Errorf("%s: %v, %v", host, got, err)
		}
	}
	u, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = u.Close() }()
	m := portmap.Message{Type: portmap.Request, CP: cp, AP: service}
	all := netip.AddrPortFrom(netip.MustParseAddr("127.255.255.255"), s.Addr().Port())
	if _, err := u.WriteToUDPAddrPort(m.Append(nil), all); err != nil {
		t.Fatal(err)
	}
	eventually(t, s, "a broadcast is counted", func(st portmapper.ServerStats) bool { return st.ToMany == 1 && st.Requests == 3 })
}

// TestSection7_5_2_Connect: a connection says what a PMAck that was lost would have said; without both the transaction ends.
func TestSection7_5_2_Connect(t *testing.T) {
	l, at := tcp(t)
	conn, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(at))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	peer, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	ask := func(timeout time.Duration) *portmapper.Server {
		t.Helper()
		s := listen(t, loopback, portmapper.ServerConfig{AckTimeout: timeout})
		mapped(t, s, service, at)
		u, err := net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(s.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = u.Close() }()
		m := portmap.Message{Type: portmap.Request, CP: netip.MustParseAddrPort(conn.LocalAddr().String()), AP: service}
		if _, err := u.Write(m.Append(nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := u.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := ask(time.Hour)
	s.HandleConnect(peer)
	a, b := net.Pipe()
	s.HandleConnect(a) // of no port mapper's making
	_, _ = a.Close(), b.Close()
	if st := s.Stats(); st.Connected != 1 || st.Pending != 0 {
		t.Errorf("after the connection: %+v", st)
	}
	s = ask(10 * time.Millisecond)
	eventually(t, s, "the transaction expires by itself", func(st portmapper.ServerStats) bool { return st.Pending == 0 && st.Expired == 1 })
}

// TestSection15_2_HostilePeers: peers that send what they like, as fast as they can, have nothing but their own share: what
// they leave behind is in nobody's way, and what they send is counted.
func TestSection15_2_HostilePeers(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{PeerRate: 100, PeerBurst: 100, MaxPendingPerPeer: 10, MaxPending: 50, MaxPeers: 8, AckTimeout: time.Minute})
	mapped(t, s, service, sdp)
	const hostile, perPeer = 4, 10
	var answers atomic.Uint64
	var enough atomic.Bool
	var senders, readers sync.WaitGroup
	var sockets []*net.UDPConn
	for i := range hostile {
		from := netip.AddrFrom4([4]byte{127, 0, 1, byte(i + 1)})
		u, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(s.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		sockets = append(sockets, u)
		readers.Go(func() {
			for b := make([]byte, 100); ; answers.Add(1) {
				n, err := u.Read(b)
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err != nil || n != portmap.Len {
					t.Errorf("%d bytes, %v", n, err)
				}
			}
		})
		senders.Go(func() {
			for k := 0; !enough.Load(); k++ {
				m := portmap.Message{Type: portmap.Type(k % 4), Handle: uint64(k), CP: netip.AddrPortFrom(from, uint16(k)), AP: service}
				b := m.Append(nil)
				switch k % 7 {
				case 0:
					b = b[:k%portmap.Len]
				case 1:
					b = append(b, make([]byte, 1000)...)
				}
				if _, err := u.Write(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	// The kernel drops most of what comes, the same peer's for a while.
	st := eventually(t, s, "each peer has what it may have", func(st portmapper.ServerStats) bool {
		return st.Throttled > 0 && st.Pending >= hostile*perPeer && st.DeniedPeer > 0
	})
	enough.Store(true)
	senders.Wait()
	for _, u := range sockets {
		_ = u.Close()
	}
	readers.Wait()
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{Tries: 10})
	for range 20 {
		finds(t, c, sdp)
	}
	if st.Peers > hostile+1 || st.Malformed == 0 || st.NotForUs == 0 || st.StrayAcks == 0 || st.DeniedPeer == 0 {
		t.Errorf("%+v", st)
	}
	if n := answers.Load(); n > s.Stats().Requests {
		t.Errorf("%d answers to %d PMReqs", n, s.Stats().Requests)
	}
}

// TestServer_foreign: a client asks for itself, unless it is an agent.
func TestServer_foreign(t *testing.T) {
	theirs := netip.MustParseAddrPort("192.0.2.9:40000")
	for _, c := range []struct {
		agents []netip.Prefix
		want   error
	}{{nil, &portmapper.LookupError{Service: service, Reason: portmapper.Denied}}, {[]netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, nil}} {
		s := listen(t, loopback, portmapper.ServerConfig{Agents: c.agents})
		mapped(t, s, service, sdp)
		_, err := newClient(t, s.Addr().Port(), portmapper.ClientConfig{}).Lookup(limited(t), service, theirs)
		if fmt.Sprint(err) != fmt.Sprint(c.want) {
			t.Errorf("agents %v: %v, want %v", c.agents, err, c.want)
		}
	}
}

// TestServer_closes: it ends, also in the middle of things, and its port is free.
func TestServer_closes(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{})
	at := s.Addr()
	if _, err := portmapper.Listen(at, portmapper.ServerConfig{}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second one: %v", err)
	}
	c := newClient(t, at.Port(), quick)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				_, _ = c.Lookup(limited(t), service, cp)
			}
		})
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("a second time: %v", err)
	}
	wg.Wait()
	if err := s.Map(service, sdp); err != nil { // its table is still there
		t.Error(err)
	}
	listen(t, at, portmapper.ServerConfig{})
}

func TestListen_errors(t *testing.T) {
	if _, err := portmapper.Listen(netip.AddrPort{}, portmapper.ServerConfig{}); !errors.Is(err, portmapper.ErrAddress) {
		t.Error(err)
	}
	if _, err := portmapper.Listen(loopback, portmapper.ServerConfig{MaxPeers: -1}); err == nil {
		t.Error("limits below 0 are taken")
	}
	if _, err := portmapper.Listen(netip.MustParseAddrPort("192.0.2.1:0"), portmapper.ServerConfig{}); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Error(err)
	}
	veto := errors.New("veto")
	if _, err := portmapper.Listen(loopback, portmapper.ServerConfig{Control: func(string, string, syscall.RawConn) error { return veto }}); !errors.Is(err, veto) {
		t.Error(err)
	}
	s := listen(t, loopback, portmapper.ServerConfig{})
	if err := s.Map(service, netip.MustParseAddrPort("[::1]:1")); !errors.Is(err, portmap.ErrAddress) {
		t.Error(err)
	}
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		portmapper.Denied.String(): "denied", portmapper.Refused.String(): "refused", portmapper.Reason(99).String(): "Reason(99)",
		(&portmapper.LookupError{Service: service, Reason: portmapper.GivenUp, Err: errors.New("why")}).Error(): "look up the SDP address of 127.0.0.1:5001: given up: why",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
