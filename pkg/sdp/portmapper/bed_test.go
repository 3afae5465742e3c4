// SPDX-License-Identifier: Apache-2.0

package portmapper_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp/portmap"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// patience bounds what a test waits for.
const patience = 30 * time.Second

var (
	loopback = netip.MustParseAddrPort("127.0.0.1:0")
	service  = netip.MustParseAddrPort("127.0.0.1:5001")
	sdp      = netip.MustParseAddrPort("127.0.0.1:35001")
	cp       = netip.MustParseAddrPort("127.0.0.1:40000")
)

func listen(t testing.TB, at netip.AddrPort, c portmapper.ServerConfig) *portmapper.Server {
	t.Helper()
	s, err := portmapper.Listen(at, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// newClient makes a client of the port mapper at a port of the service's host.
func newClient(t testing.TB, port uint16, c portmapper.ClientConfig) *portmapper.Client {
	t.Helper()
	c.MapperPort = port
	client, err := portmapper.NewClient(c)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func mapped(t testing.TB, s *portmapper.Server, service, sdp netip.AddrPort) {
	t.Helper()
	if err := s.Map(service, sdp); err != nil {
		t.Fatal(err)
	}
}

func limited(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// finds has a client look up the service.
func finds(t testing.TB, c *portmapper.Client, want netip.AddrPort) {
	t.Helper()
	if got, err := c.Lookup(limited(t), service, cp); err != nil || got != want {
		t.Errorf("the SDP address is %v, %v; want %v", got, err, want)
	}
}

// fails has a client look up the service in vain.
func fails(t testing.TB, c *portmapper.Client, want portmapper.Reason) *portmapper.LookupError {
	t.Helper()
	got, err := c.Lookup(limited(t), service, cp)
	var e *portmapper.LookupError
	if !errors.As(err, &e) || e.Reason != want || e.Service != service {
		t.Fatalf("the SDP address is %v, %v; want that it is %v", got, err, want)
	}
	return e
}

// eventually waits until something holds at a server, which nobody says when it happens.
func eventually(t testing.TB, s *portmapper.Server, what string, holds func(portmapper.ServerStats) bool) portmapper.ServerStats {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // polls the counts
		st := s.Stats()
		if holds(st) {
			return st
		}
		if time.Now().After(end) {
			t.Fatalf("never: %s; counts are %+v", what, st)
		}
	}
}

// A script is a port mapper that answers as a test says.
type script struct {
	conn *net.UDPConn
	wg   sync.WaitGroup
	mu   sync.Mutex
	got  []portmap.Message
}

// newScript calls answer for each message that comes, and sends what it returns.
func newScript(t testing.TB, answer func(n int, m portmap.Message) [][]byte) *script {
	t.Helper()
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	s := &script{conn: conn}
	s.wg.Go(func() {
		for n, b := 0, make([]byte, 100); ; n++ {
			got, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			m, err := portmap.ParseMessage(b[:got])
			if err != nil {
				t.Errorf("a client sends %x: %v", b[:got], err)
			}
			s.mu.Lock()
			s.got = append(s.got, m)
			s.mu.Unlock()
			for _, a := range answer(n, m) {
				_, _ = conn.WriteToUDPAddrPort(a, from)
			}
		}
	})
	t.Cleanup(func() {
		_ = conn.Close()
		s.wg.Wait()
	})
	return s
}

func (s *script) port() uint16 { return uint16(s.conn.LocalAddr().(*net.UDPAddr).Port) }

func (s *script) heard() []portmap.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]portmap.Message(nil), s.got...)
}

// count returns how many messages of a type came.
func (s *script) count(typ portmap.Type) int {
	n := 0
	for _, m := range s.heard() {
		if m.Type == typ {
			n++
		}
	}
	return n
}

// as is a message as an answer of some type, with another address.
func as(typ portmap.Type, m portmap.Message, ap netip.AddrPort) []byte {
	m.Type, m.AP = typ, ap
	return m.Append(nil)
}

// A road is between clients and a server, and loses, doubles and delays datagrams.
type road struct {
	conn   *net.UDPConn // of the clients' side
	server netip.AddrPort
	mu     sync.Mutex
	rnd    *rand.Rand
	faults faults
	back   map[netip.AddrPort]*net.UDPConn
	wg     sync.WaitGroup
	done   chan struct{}
}

// faults are the likelihoods of what happens to a datagram.
type faults struct{ lost, doubled, delayed float64 }

func newRoad(t testing.TB, s *portmapper.Server, seed uint64, f faults) *road {
	t.Helper()
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(loopback))
	if err != nil {
		t.Fatal(err)
	}
	r := &road{conn: conn, server: s.Addr(), rnd: rand.New(rand.NewPCG(seed, 2)), faults: f, back: make(map[netip.AddrPort]*net.UDPConn), done: make(chan struct{})}
	r.wg.Go(r.up)
	t.Cleanup(func() {
		close(r.done)
		_ = conn.Close()
		r.mu.Lock()
		for _, c := range r.back {
			_ = c.Close()
		}
		r.mu.Unlock()
		r.wg.Wait()
	})
	return r
}

func (r *road) port() uint16 { return uint16(r.conn.LocalAddr().(*net.UDPAddr).Port) }

// up carries what clients send. Each client has a socket to the server.
func (r *road) up() {
	for b := make([]byte, 100); ; {
		n, from, err := r.conn.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // a client that has gone
		}
		r.mu.Lock()
		c := r.back[from]
		if c == nil {
			if c, err = net.DialUDP("udp4", net.UDPAddrFromAddrPort(loopback), net.UDPAddrFromAddrPort(r.server)); err != nil {
				r.mu.Unlock()
				continue
			}
			r.back[from] = c
			r.wg.Go(func() { r.down(c, from) })
		}
		r.mu.Unlock()
		r.carry(append([]byte(nil), b[:n]...), func(b []byte) { _, _ = c.Write(b) })
	}
}

// down carries what the server answers to a client.
func (r *road) down(c *net.UDPConn, to netip.AddrPort) {
	for b := make([]byte, 100); ; {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		r.carry(append([]byte(nil), b[:n]...), func(b []byte) { _, _ = r.conn.WriteToUDPAddrPort(b, to) })
	}
}

func (r *road) carry(b []byte, send func([]byte)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	copies := 1
	if r.rnd.Float64() < r.faults.doubled {
		copies = 2
	}
	for range copies {
		switch {
		case r.rnd.Float64() < r.faults.lost:
		case r.rnd.Float64() < r.faults.delayed:
			delay := time.Duration(r.rnd.IntN(30)) * time.Millisecond
			r.wg.Go(func() {
				select {
				case <-time.After(delay):
					send(b)
				case <-r.done:
				}
			})
		default:
			send(b)
		}
	}
}
