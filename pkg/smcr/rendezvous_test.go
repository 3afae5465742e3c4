// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The tests of a rendezvous put a hand-made peer at the other end of the TCP
// connection: one that stops, lies or speaks something else. Those of the server's
// half are in rendezvous_server_test.go, those of the client's half beside it.

const shortTimeout = 200 * time.Millisecond

func quick(c *smcr.Config) { c.MessageTimeout = shortTimeout }

func testProposal(prefix string) clc.Proposal {
	return clc.Proposal{
		Version: clc.V1, V1: clc.ModeR, V2: clc.ModeNone, PeerID: clc.PeerID{1, 2, 3, 4, 5, 6, 7, 8},
		GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.99")), IPv4: netip.MustParsePrefix(prefix),
	}
}

// dialTCP opens a TCP connection to the server, to which the test says what it likes.
func (p *pair) dialTCP(t *testing.T) net.Conn {
	t.Helper()
	return dialFrom(t, netip.MustParseAddr("127.0.0.1"), p.l.Addr().String())
}

// confirm sends a Confirm.
func confirm(c net.Conn, e clc.Endpoint) { _, _ = c.Write(clc.Confirm{Endpoint: e}.Append(nil)) }

// waitCleanedUp waits until nothing is left of a stack's rendezvous.
func waitCleanedUp(tb testing.TB, s *smcr.Stack) {
	tb.Helper()
	waitFor(tb, "rendezvous cleaned up", func() bool { return s.Stats().Conns == 0 && s.Stats().Groups == 0 })
}

func readMessage(tb testing.TB, c net.Conn) []byte {
	tb.Helper()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	head := make([]byte, clc.HeaderLen)
	if _, err := io.ReadFull(c, head); err != nil {
		tb.Fatalf("read CLC header: %v", err)
	}
	h, err := clc.ParseHeader([clc.HeaderLen]byte(head))
	if err != nil {
		tb.Fatal(err)
	}
	msg := append(head, make([]byte, h.Length-clc.HeaderLen)...)
	if _, err := io.ReadFull(c, msg[clc.HeaderLen:]); err != nil {
		tb.Fatalf("read CLC message: %v", err)
	}
	return msg
}

func wantDecline(tb testing.TB, c net.Conn, reason clc.Reason, outOfSync bool) {
	tb.Helper()
	d, err := clc.ParseDecline(readMessage(tb, c))
	if err != nil || d.Reason != reason || d.OutOfSync != outOfSync {
		tb.Fatalf("Decline %+v, %v; want %v, S=%v", d, err, reason, outOfSync)
	}
}

func wantReset(tb testing.TB, c net.Conn) {
	tb.Helper()
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err := io.Copy(io.Discard, c)
	if !errors.Is(err, syscall.ECONNRESET) {
		tb.Errorf("read: %v, want a reset", err)
	}
}

// testEndpoint is what a liar puts into Accept and Confirm.
func testEndpoint(first bool) clc.Endpoint {
	return clc.Endpoint{
		Version: clc.V1, FirstContact: first, PeerID: clc.PeerID{1, 2, 3, 4, 5, 6, 7, 8},
		GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.99")), QPN: 77, RKey: 88, RMBEIndex: 1, AlertToken: 5, MTU: rdma.MTU1024,
	}
}

func proposalV2(tb testing.TB, eid string) clc.Proposal {
	tb.Helper()
	return clc.Proposal{
		Version: clc.V2, V1: clc.ModeNone, V2: clc.ModeR, PeerID: clc.PeerID{1, 2, 3, 4, 5, 6, 7, 8},
		Ext: clc.V2Extension{
			EIDs: clc.ListOf(eids(tb, eid)...), Release: clc.Release1, GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.99")),
			MaxConns: 255, MaxLinks: 2,
		},
	}
}

func endpointV2(tb testing.TB, first bool) clc.Endpoint {
	tb.Helper()
	e := testEndpoint(first)
	e.Version, e.EID = clc.V2, eids(tb, smcr.DefaultEID)[0]
	e.Ext = clc.FirstContactExtension{Direct: true, OS: clc.OSLinux, Release: clc.Release1, MaxConns: 255, MaxLinks: 2}
	return e
}

// patient keeps a deadline that its owner has set.
type patient struct{ net.Conn }

func (*patient) SetReadDeadline(time.Time) error { return nil }

// checkPlain checks that both ends now carry the application's bytes.
func checkPlain(t *testing.T, p *pair, c net.Conn) {
	t.Helper()
	nc, err := p.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	s := nc.(*smcr.Conn)
	defer s.Close()
	if s.Mode() != smcr.ModeTCP || s.Reason() == 0 {
		t.Errorf("mode %v, reason %v", s.Mode(), s.Reason())
	}
	exchange(t, c, s)
}

func exchange(t *testing.T, a, b net.Conn) {
	t.Helper()
	for _, d := range []struct{ from, to net.Conn }{{a, b}, {b, a}} {
		if _, err := d.from.Write([]byte("application data")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 16)
		_ = d.to.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.ReadFull(d.to, buf); err != nil || string(buf) != "application data" {
			t.Fatalf("read %q, %v", buf, err)
		}
	}
}

func TestStack_declinesBeyondItsBudget(t *testing.T) {
	for _, tc := range []struct {
		name string
		edit func(*smcr.Config)
	}{
		{"connections", func(c *smcr.Config) { c.MaxConns = 2 }},
		{"memory", func(c *smcr.Config) { c.MemoryBytes = 300 << 10; c.RMBESizeBytes = 16 << 10; c.RMBEsPerRMB = 1 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, tc.edit)
			var conns []*smcr.Conn
			modes := map[smcr.Mode]int{}
			for range 20 {
				a, b := p.dial(t)
				conns = append(conns, a, b)
				modes[a.Mode()]++
				exchange(t, a, b)
				if a.Mode() == smcr.ModeTCP && a.Reason() != clc.ReasonMem {
					t.Errorf("reason %v, want MEM", a.Reason())
				}
			}
			if modes[smcr.ModeSMCR] == 0 || modes[smcr.ModeTCP] == 0 {
				t.Errorf("modes %v: want some of each", modes)
			}
			for _, c := range conns {
				_ = c.Close()
			}
		})
	}
}
