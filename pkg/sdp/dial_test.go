// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/portmapper"
)

// With a port mapper a service is reached at its SDP address if it has one, and else, unless SDP is required, by plain TCP.
func TestDialer_mapper(t *testing.T) {
	ended := make(chan error, 2)
	p := newPair(t, openIWARP, func(c *sdp.Config) { c.Hooks.Ended = func(_ *sdp.Conn, err error) { ended <- err } })
	plain, err := net.Listen("tcp", net.JoinHostPort(serverAddr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = plain.Close() }()
	service := netip.MustParseAddrPort(plain.Addr().String())
	mapper, err := portmapper.Listen(netip.MustParseAddrPort(serverAddr+":0"), portmapper.ServerConfig{
		Agents: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, // the question is from 127.0.0.1, and the connection is not
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mapper.Close() }()
	client, err := portmapper.NewClient(portmapper.ClientConfig{MapperPort: mapper.Addr().Port()})
	if err != nil {
		t.Fatal(err)
	}
	d := p.dialer()
	d.Mapper = client

	c, path, err := d.Dial(t.Context(), service.String())
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := c.(*net.TCPConn); !ok || path.Mapped || path.Reason == 0 {
		t.Errorf("without a mapping: %T, %v", c, path)
	}
	_ = c.Close()
	d.Require = true
	if c, path, err := d.Dial(t.Context(), service.String()); err == nil {
		t.Errorf("SDP is required: %T, %v", c, path)
	}

	mapped := netip.AddrPortFrom(service.Addr(), 7) // another one: that there is none may be remembered
	if err := mapper.Map(mapped, netip.MustParseAddrPort(p.l.Addr().String())); err != nil {
		t.Fatal(err)
	}
	c, path, err = d.Dial(t.Context(), mapped.String())
	if err != nil {
		t.Fatalf("%v, %v: %v", path, path.Err, err)
	}
	if _, ok := c.(*sdp.Conn); !ok || !path.Mapped {
		t.Errorf("with a mapping: %T, %v", c, path)
	}
	s, err := p.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Close(), s.Close()
	for range 2 { // both ends are told, and that it was in order
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("ended: %v", err)
			}
		case <-time.After(5 * time.Second):
			t.Error("nobody is told of the end")
		}
	}
}

// Connections of one address that say nothing take some of a listener's places, and not those of others.
func TestListener_boundsSilentPeers(t *testing.T) {
	refused := make(chan error, 100) // all of them are, in the end
	p := newPair(t, openIWARP, func(c *sdp.Config) {
		c.SetupTimeout = 10 * time.Second
		c.Hooks.Refused = func(_ net.Addr, err error) { refused <- err }
	})
	silent := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 93, 0, 5)}}
	for range 65 { // one more than there are places for an address
		c, err := silent.DialContext(t.Context(), "tcp", p.l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
	select {
	case err := <-refused:
		if !errors.Is(err, rdma.ErrNoResources) {
			t.Errorf("refused: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("none was refused")
	}
	a, b := p.dial(t)
	_, _ = a.Close(), b.Close()
}

// So it is where Hello goes in the request: who never sends one has some of the places of the device's listener.
func TestListener_boundsSilentCallers(t *testing.T) {
	p := newPair(t, openAdapter)
	silent := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 93, 0, 5)}}
	var last net.Conn
	for range 300 { // more than there are places
		c, err := silent.DialContext(t.Context(), "tcp", p.l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		last = c
	}
	begin := time.Now()
	_ = last.SetReadDeadline(begin.Add(3 * time.Second)) // before the first ones have had their time
	if n, err := last.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a connection too many stays: %d bytes, %v", n, err)
	}
	a, b := p.dial(t)
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("another peer has waited for %v", d)
	}
	_, _ = a.Close(), b.Close()
}

// resolver says that every name has some addresses.
func resolver(addrs ...string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		asks, answers := net.Pipe() // no datagrams: each message behind its length
		go func() {
			defer func() { _ = answers.Close() }()
			var n [2]byte
			if _, err := io.ReadFull(answers, n[:]); err != nil {
				return
			}
			b := make([]byte, binary.BigEndian.Uint16(n[:]))
			var m dnsmessage.Message
			if _, err := io.ReadFull(answers, b); err != nil || m.Unpack(b) != nil {
				return
			}
			m.Response, m.Authoritative, m.Additionals = true, true, nil
			q := m.Questions[0]
			for _, s := range addrs {
				h := dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class}
				switch a := netip.MustParseAddr(s); {
				case a.Is4() && q.Type == dnsmessage.TypeA:
					m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AResource{A: a.As4()}})
				case a.Is6() && q.Type == dnsmessage.TypeAAAA:
					m.Answers = append(m.Answers, dnsmessage.Resource{Header: h, Body: &dnsmessage.AAAAResource{AAAA: a.As16()}})
				}
			}
			if b, err := m.AppendPack(make([]byte, 2)); err == nil {
				binary.BigEndian.PutUint16(b, uint16(len(b)-2))
				_, _ = answers.Write(b) // who asks may be gone
			}
		}()
		return asks, nil
	}}
}

// A name may have addresses that cannot be reached from the device, and some at which nobody listens.
func TestDialer_addresses(t *testing.T) {
	p := newPair(t, openAdapter)
	_, port, err := net.SplitHostPort(p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d := p.dialer()
	d.Dialer.Resolver = resolver("::1", "127.93.0.8", serverAddr, "127.93.0.9")
	c, path, err := d.Dial(limited(t), net.JoinHostPort("service.example.", port))
	if err != nil || path.Addr.Addr().String() != serverAddr {
		t.Fatalf("%v: %v", path, err)
	}
	_ = c.Close()
	d.Dialer.Resolver = resolver("::1")
	if _, _, err := d.Dial(limited(t), net.JoinHostPort("service.example.", port)); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("a name with no address of the device's family: %v", err)
	}
	d.Dialer.Resolver = resolver("127.93.0.8", "127.93.0.9")
	if _, _, err := d.Dial(limited(t), net.JoinHostPort("service.example.", port)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a name at whose addresses nobody listens: %v", err)
	}
	plain := sdp.Dialer{Stack: newStack(t, openIWARP(t, clientAddr)), Dialer: d.Dialer}
	if plain.Mapper, err = portmapper.NewClient(portmapper.ClientConfig{}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(serverAddr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ = net.SplitHostPort(l.Addr().String()) // it has one
	plain.Dialer.Resolver = resolver("::1", "127.93.0.8", serverAddr)
	if c, path, err = plain.Dial(limited(t), net.JoinHostPort("service.example.", port)); err != nil || path.Mapped || path.Addr.Addr().String() != serverAddr {
		t.Fatalf("by a mapper: %v: %v", path, err)
	}
	_ = c.Close()
}
