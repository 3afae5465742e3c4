// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// quick are the times of a client that is not to wait long.
var quick = portmapper.ClientConfig{Tries: 3, Timeout: 5 * time.Millisecond}

// TestSection7_4_Lookup: an SDP address, or none, and the transaction is over at the server.
func TestSection7_4_Lookup(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{})
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	fails(t, c, portmapper.Denied)
	mapped(t, s, service, sdp)
	finds(t, c, sdp)
	finds(t, c, sdp) // it may not be kept (§7.3.1.4)
	st := eventually(t, s, "both are acknowledged", func(st portmapper.ServerStats) bool { return st.Acked == 2 })
	if st.Requests != 3 || st.Accepted != 2 || st.DeniedUnknown != 1 || st.Pending != 0 {
		t.Errorf("server: %+v", st)
	}
	if !s.Unmap(service) {
		t.Error("there was no mapping")
	}
	fails(t, c, portmapper.Denied)
	if st := c.Stats(); st.Lookups != 4 || st.Mapped != 2 || st.FromCache != 0 || st.NotMapped[portmapper.Denied] != 2 || len(st.Discarded) != 0 {
		t.Errorf("client: %+v", st)
	}
}

// TestLookup_ipv6: the same with addresses of IPv6, at a server of all addresses.
func TestLookup_ipv6(t *testing.T) {
	s := listen(t, netip.MustParseAddrPort("[::]:0"), portmapper.ServerConfig{})
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	mapped(t, s, netip.MustParseAddrPort("[::]:5001"), netip.MustParseAddrPort("[::]:35001"))
	got, err := c.Lookup(limited(t), netip.MustParseAddrPort("[::1]:5001"), netip.MustParseAddrPort("[::1]:40000"))
	if err != nil || got != netip.MustParseAddrPort("[::1]:35001") {
		t.Errorf("%v, %v", got, err)
	}
}

// TestSection7_3_1_4_Kept: an answer is kept for as long as it says, for who asked, and then asked for again.
func TestSection7_3_1_4_Kept(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{CacheTime: 250 * time.Millisecond})
	mapped(t, s, service, sdp)
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{})
	before := time.Now()
	finds(t, c, sdp)
	moved := netip.MustParseAddrPort("127.0.0.1:35002")
	mapped(t, s, service, moved)
	got, err := c.Lookup(limited(t), service, cp)
	if err != nil || got != sdp && time.Since(before) < 250*time.Millisecond {
		t.Errorf("%v, %v; want the answer of %v ago", got, err, time.Since(before))
	}
	if got, err := c.Lookup(limited(t), service, netip.MustParseAddrPort("127.0.0.2:40000")); got != moved || err != nil {
		t.Errorf("another connecting peer is told of %v, %v; what is kept is not for that one", got, err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) { // polls until it has expired
		if got, err := c.Lookup(limited(t), service, cp); err != nil {
			t.Fatal(err)
		} else if got == moved {
			break
		}
		if time.Now().After(end) {
			t.Fatal("an answer for 250 ms is kept for ever")
		}
	}
	if since := time.Since(before); since < 250*time.Millisecond {
		t.Errorf("it was kept for %v", since)
	}
	if st := c.Stats(); st.FromCache == 0 || st.FromCache != st.Mapped-3 && got == sdp {
		t.Errorf("%+v", st)
	}
}

// TestSection7_5_1_NoAnswer: after the last of some PMReqs, all the same, the caller is told; and at once for a while.
func TestSection7_5_1_NoAnswer(t *testing.T) {
	silent := newScript(t, func(int, portmap.Message) [][]byte { return nil })
	c := newClient(t, silent.port(), quick)
	e := fails(t, c, portmapper.NoAnswer)
	if !e.Timeout() {
		t.Errorf("%v is no timeout", e)
	}
	heard := silent.heard()
	if len(heard) != quick.Tries {
		t.Fatalf("%d datagrams, want %d", len(heard), quick.Tries)
	}
	for _, m := range heard {
		if m != heard[0] || m.Type != portmap.Request || m.AP != service || m.CP != cp {
			t.Errorf("a PMReq is %v, the first one is %v", m, heard[0])
		}
	}
	fails(t, c, portmapper.Silent)
	if n := len(silent.heard()); n != quick.Tries {
		t.Errorf("it is asked %d times", n)
	}
	always := quick
	always.SilentFor = -1
	c = newClient(t, silent.port(), always)
	fails(t, c, portmapper.NoAnswer)
	fails(t, c, portmapper.NoAnswer)
	brief := quick
	brief.SilentFor = time.Nanosecond
	c = newClient(t, silent.port(), brief)
	fails(t, c, portmapper.NoAnswer)
	fails(t, c, portmapper.NoAnswer)
	handles := map[uint64]bool{}
	for _, m := range silent.heard() {
		handles[m.Handle] = true
	}
	if len(handles) != 5 {
		t.Errorf("5 transactions have %d handles", len(handles))
	}
}

// TestClient_silentForOne: a port mapper that says nothing to one question, and answers another one meanwhile, is not left alone.
func TestClient_silentForOne(t *testing.T) {
	for _, typ := range []portmap.Type{portmap.Accept, portmap.Deny} {
		asked := make(chan struct{}, 10)
		s := newScript(t, func(_ int, m portmap.Message) [][]byte {
			switch {
			case m.Type != portmap.Request:
				return nil
			case m.AP == service:
				asked <- struct{}{}
				return nil
			}
			return [][]byte{as(typ, m, sdp)}
		})
		c := newClient(t, s.port(), portmapper.ClientConfig{Tries: 2, Timeout: 300 * time.Millisecond})
		first := make(chan error, 1)
		go func() {
			_, err := c.Lookup(limited(t), service, cp)
			first <- err
		}()
		<-asked
		_, err := c.Lookup(limited(t), netip.AddrPortFrom(service.Addr(), 1), cp)
		var e *portmapper.LookupError
		if denied := errors.As(err, &e) && e.Reason == portmapper.Denied; denied != (typ == portmap.Deny) || !denied && err != nil {
			t.Errorf("%v: %v", typ, err)
		}
		if err := <-first; !errors.As(err, &e) || e.Reason != portmapper.NoAnswer {
			t.Errorf("the first one: %v", err)
		}
		fails(t, c, portmapper.NoAnswer)
		fails(t, c, portmapper.Silent)
	}
}

// TestLookup_unreachable: a host without a port mapper says so, and nobody waits.
func TestLookup_unreachable(t *testing.T) {
	gone := listen(t, loopback, portmapper.ServerConfig{})
	port := gone.Addr().Port()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	c := newClient(t, port, portmapper.ClientConfig{Tries: 10, Timeout: time.Second})
	if e := fails(t, c, portmapper.Unreachable); !errors.Is(e, syscall.ECONNREFUSED) {
		t.Error(e)
	}
	refused := portmapper.ClientConfig{Control: func(string, string, syscall.RawConn) error { return os.ErrPermission }}
	if e := fails(t, newClient(t, port, refused), portmapper.Unreachable); !errors.Is(e, os.ErrPermission) {
		t.Error(e)
	}
}

// TestLookup_givenUp: the context ends a lookup.
func TestLookup_givenUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	silent := newScript(t, func(int, portmap.Message) [][]byte { cancel(); return nil })
	c := newClient(t, silent.port(), portmapper.ClientConfig{Tries: 10, Timeout: time.Second})
	for range 2 { // while it waits, and before
		_, err := c.Lookup(ctx, service, cp)
		var e *portmapper.LookupError
		if !errors.As(err, &e) || e.Reason != portmapper.GivenUp || !errors.Is(err, context.Canceled) || e.Timeout() {
			t.Errorf("%v, want that it was given up", err)
		}
	}
	past, cancel2 := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel2()
	_, err := c.Lookup(past, service, cp)
	var e *portmapper.LookupError
	if !errors.As(err, &e) || e.Reason != portmapper.GivenUp || !e.Timeout() {
		t.Errorf("%v, want that its time was over", err)
	}
	if n := c.Stats().NotMapped[portmapper.NoAnswer]; n != 0 {
		t.Errorf("the port mapper is held to be silent %d times", n)
	}
}

// TestLookup_busy: no more questions wait than there may be.
func TestLookup_busy(t *testing.T) {
	asked := make(chan struct{})
	silent := newScript(t, func(int, portmap.Message) [][]byte { asked <- struct{}{}; return nil })
	c := newClient(t, silent.port(), portmapper.ClientConfig{MaxLookups: 1, Tries: 1, Timeout: time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = c.Lookup(ctx, service, cp) })
	<-asked
	fails(t, c, portmapper.Busy)
	cancel()
	wg.Wait()
	ctx, cancel = context.WithCancel(t.Context())
	wg.Go(func() { _, _ = c.Lookup(ctx, service, cp) })
	<-asked // there is room again
	cancel()
	wg.Wait()
}

// TestLookup_hostileServer: whatever a server says besides, the first good answer counts, and only one PMAck follows.
func TestLookup_hostileServer(t *testing.T) {
	s := newScript(t, func(n int, m portmap.Message) [][]byte {
		if m.Type != portmap.Request {
			return nil
		}
		other := m
		other.Handle++
		return [][]byte{
			nil, []byte("rubbish"), make([]byte, 100), as(portmap.Request, m, sdp), as(portmap.Ack, m, sdp), as(portmap.Accept, other, sdp), as(portmap.Deny, other, sdp),
			as(portmap.Accept, m, netip.MustParseAddrPort("0.0.0.0:9")), as(portmap.Accept, m, netip.MustParseAddrPort("224.0.0.1:9")),
			as(portmap.Accept, m, sdp), as(portmap.Deny, m, sdp), as(portmap.Accept, m, service),
		}
	})
	c := newClient(t, s.port(), portmapper.ClientConfig{})
	for range 20 {
		finds(t, c, sdp)
	}
	st := c.Stats()
	if d := st.Discarded; d[portmap.Malformed] != 60 || d[portmap.NotAnswer] != 40 || d[portmap.Stranger] != 40 || d[portmap.BadAddress] != 40 || d[portmap.Taken] != 0 {
		t.Errorf("discarded: %v", d)
	}
	for end := time.Now().Add(patience); s.count(portmap.Ack) < 20 && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // polls what has come
	}
	if r, a := s.count(portmap.Request), s.count(portmap.Ack); r != 20 || a != 20 {
		t.Errorf("%d PMReqs and %d PMAcks", r, a)
	}
	for _, m := range s.heard() {
		if m.Type == portmap.Ack && (m.AP != sdp || m.CP != cp) {
			t.Errorf("a PMAck is %v", m)
		}
	}
}

// TestLookup_elsewhere: a third host cannot answer, though it knows the question and who asks.
func TestLookup_elsewhere(t *testing.T) {
	var u [2]*net.UDPConn // the stranger, and the port mapper
	for i, host := range []net.IP{net.IPv4(127, 0, 0, 7), net.IPv4(127, 0, 0, 1)} {
		var err error
		if u[i], err = net.ListenUDP("udp4", &net.UDPAddr{IP: host}); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = u[i].Close() }()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, portmap.Len)
		_, from, err := u[1].ReadFromUDPAddrPort(b)
		m, _ := portmap.ParseMessage(b)
		for i, sdp := range []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:666"), sdp} {
			if err == nil {
				_, err = u[i].WriteToUDPAddrPort(as(portmap.Accept, m, sdp), from)
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	finds(t, newClient(t, uint16(u[1].LocalAddr().(*net.UDPAddr).Port), portmapper.ClientConfig{Tries: 1, Timeout: time.Second}), sdp)
	wg.Wait()
}

func TestLookup_badAddresses(t *testing.T) {
	c := newClient(t, 1, portmapper.ClientConfig{})
	for _, a := range [][2]netip.AddrPort{
		{service, {}},
		{{}, cp},
		{service, loopback},
		{loopback, cp},
		{service, netip.MustParseAddrPort("[::1]:1")},
		{netip.MustParseAddrPort("0.0.0.0:1"), cp},
	} {
		if _, err := c.Lookup(t.Context(), a[0], a[1]); !errors.Is(err, portmapper.ErrAddress) {
			t.Errorf("%v for %v: %v", a[0], a[1], err)
		}
	}
	for name, bad := range map[string]portmapper.ClientConfig{"tries": {Tries: 11}, "timeout": {Timeout: 2 * time.Second}, "lookups": {MaxLookups: -1}} {
		if _, err := portmapper.NewClient(bad); err == nil {
			t.Errorf("%s are taken", name)
		}
	}
}

// TestLookup_faultyNetwork: with datagrams that are lost, doubled and late, clients learn what is true or that nobody
// answers, and the server is left with nothing.
func TestLookup_faultyNetwork(t *testing.T) {
	seed := testenv.Seed(t)
	for i, f := range []faults{{lost: 0.3}, {doubled: 1}, {delayed: 0.9, doubled: 0.5}, {lost: 0.3, doubled: 0.3, delayed: 0.5}, {lost: 1}} {
		t.Run(fmt.Sprintf("%+v", f), func(t *testing.T) {
			s := listen(t, loopback, portmapper.ServerConfig{AckTimeout: 200 * time.Millisecond, PeerRate: 1e6, PeerBurst: 1e6})
			mapped(t, s, service, sdp)
			r := newRoad(t, s, seed+uint64(i), f)
			c := newClient(t, r.port(), portmapper.ClientConfig{Tries: 6, Timeout: 5 * time.Millisecond, SilentFor: -1})
			const clients = 16
			var wg sync.WaitGroup
			var mu sync.Mutex
			found := 0
			for n := range clients {
				wg.Go(func() {
					mine := netip.AddrPortFrom(cp.Addr(), uint16(1000+n))
					asked := service
					if n%2 == 1 {
						asked = netip.AddrPortFrom(service.Addr(), 1)
					}
					got, err := c.Lookup(limited(t), asked, mine)
					var e *portmapper.LookupError
					switch {
					case err == nil && asked == service && got == sdp:
						mu.Lock()
						found++
						mu.Unlock()
					case errors.As(err, &e) && (e.Reason == portmapper.Denied && asked != service || e.Reason == portmapper.NoAnswer && f.lost > 0):
					default:
						t.Errorf("seed %d: %v for %v: %v, %v", seed, asked, mine, got, err)
					}
				})
			}
			wg.Wait()
			if f.lost == 0 && found != clients/2 || f.lost == 1 && found != 0 {
				t.Errorf("seed %d: %d of %d clients found the service", seed, found, clients/2)
			}
			st := eventually(t, s, "no transaction waits", func(st portmapper.ServerStats) bool { return st.Pending == 0 })
			if st.Malformed != 0 || st.Throttled != 0 || st.NotForUs != 0 || st.DeniedForeign != 0 {
				t.Errorf("seed %d: %+v", seed, st)
			}
		})
	}
}

// TestClient_mapper: who is asked, and at which port.
func TestClient_mapper(t *testing.T) {
	s := listen(t, loopback, portmapper.ServerConfig{})
	mapped(t, s, netip.MustParseAddrPort("192.0.2.9:5001"), netip.MustParseAddrPort("192.0.2.9:35001"))
	c := newClient(t, s.Addr().Port(), portmapper.ClientConfig{Mapper: s.Addr().Addr()})
	got, err := c.Lookup(limited(t), netip.MustParseAddrPort("192.0.2.9:5001"), cp)
	if err != nil || got != netip.MustParseAddrPort("192.0.2.9:35001") {
		t.Errorf("a server that knows of others says %v, %v", got, err)
	}
	var asked string
	c, err = portmapper.NewClient(portmapper.ClientConfig{Control: func(_, address string, _ syscall.RawConn) error {
		asked = address
		return os.ErrPermission
	}})
	if err != nil {
		t.Fatal(err)
	}
	fails(t, c, portmapper.Unreachable)
	if asked != "127.0.0.1:3935" {
		t.Errorf("%s is asked, want port 3935 of the service's host", asked)
	}
}
