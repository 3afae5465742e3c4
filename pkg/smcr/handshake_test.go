// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
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

// The tests of this file put a hand-made peer at the other end of the TCP
// connection: one that stops, lies or speaks something else.

const shortTimeout = 200 * time.Millisecond

func quick(c *smcr.Config) { c.MessageTimeout = shortTimeout }

func testProposal(prefix string) clc.Proposal {
	return clc.Proposal{
		Version: clc.V1, V1: clc.ModeR, V2: clc.ModeNone, PeerID: clc.PeerID{1, 2, 3, 4, 5, 6, 7, 8},
		GID: rdma.GIDFromAddr(netip.MustParseAddr("192.0.2.99")), IPv4: netip.MustParsePrefix(prefix),
	}
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

func TestServer_badClients(t *testing.T) {
	good := testProposal("127.0.0.0/24")
	for _, tc := range []struct {
		name string
		talk func(t *testing.T, c net.Conn)
		tcp  bool // the server falls back, and the connection works as TCP
	}{
		{"says nothing", func(t *testing.T, c net.Conn) { wantReset(t, c) }, false},
		{"stops in the header", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:5])
			wantReset(t, c)
		}, false},
		{"stops in the Proposal", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:20])
			wantReset(t, c)
		}, false},
		{"closes in the Proposal", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil)[:20])
			_ = c.(*net.TCPConn).CloseWrite()
			wantReset(t, c)
		}, false},
		{"sends application data", func(t *testing.T, c net.Conn) {
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"))
			wantReset(t, c)
		}, false},
		{"oversized length", func(t *testing.T, c net.Conn) {
			b := good.Append(nil)
			b[5], b[6] = 0xff, 0xff
			_, _ = c.Write(b)
			wantReset(t, c)
		}, false},
		{"stops after the Accept", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil))
			readMessage(t, c)
			wantReset(t, c)
		}, false},
		{"declines the Accept", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil))
			readMessage(t, c)
			_, _ = c.Write(clc.Decline{Version: clc.V1, PeerID: good.PeerID, Reason: clc.ReasonMem}.Append(nil))
		}, true},
		{"another subnet", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(testProposal("10.1.2.0/24").Append(nil))
			wantDecline(t, c, clc.ReasonDiffPrefix, false)
		}, true},
		{"SMC-D only", func(t *testing.T, c net.Conn) {
			p := good
			p.Version, p.V1, p.HasSMCD = clc.V2, clc.ModeD, true
			_, _ = c.Write(p.Append(nil))
			wantDecline(t, c, clc.ReasonModeUnsupp, false)
		}, true},
		{"confirms an impossible RMBE", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil))
			readMessage(t, c)
			e := testEndpoint(true)
			e.RMBEIndex = 0
			_, _ = c.Write(clc.Confirm{Endpoint: e}.Append(nil))
			wantDecline(t, c, clc.ReasonErrRToken, false)
		}, true},
		{"confirms as somebody else", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil))
			readMessage(t, c)
			e := testEndpoint(true)
			e.PeerID[0]++
			_, _ = c.Write(clc.Confirm{Endpoint: e}.Append(nil))
			wantDecline(t, c, clc.ReasonInternal, false)
		}, true},
		{"never answers CONFIRM LINK", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(good.Append(nil))
			readMessage(t, c)
			_, _ = c.Write(clc.Confirm{Endpoint: testEndpoint(true)}.Append(nil))
			_ = c.SetReadDeadline(time.Now().Add(8 * time.Second))
			wantDecline(t, &patient{c}, clc.ReasonTimeoutCL, false)
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, quick)
			c, err := net.Dial("tcp", p.l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			tc.talk(t, c)
			if tc.tcp {
				checkPlain(t, p, c)
			}
			waitFor(t, "rendezvous cleaned up", func() bool { return p.server.Stats().Conns == 0 && p.server.Stats().Groups == 0 })
		})
	}
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

func TestClient_badServers(t *testing.T) {
	decline := clc.Decline{Version: clc.V1, Reason: clc.ReasonNoDevR}.Append(nil)
	for _, tc := range []struct {
		name   string
		answer func(t *testing.T, c net.Conn) // after the Proposal
		reason clc.Reason                     // of the fallback; 0: the dial fails
	}{
		{"echoes the option, speaks no CLC", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"))
		}, 0},
		{"says nothing", func(*testing.T, net.Conn) {}, 0},
		{"closes", func(_ *testing.T, c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }, 0},
		{"stops in the Accept", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(true)}.Append(nil)[:30])
		}, 0},
		{"declines, and the application speaks at once", func(_ *testing.T, c net.Conn) {
			_, _ = c.Write(decline)
		}, clc.ReasonNoDevR},
		{"names a group that does not exist", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(false)}.Append(nil))
			wantDecline(t, c, clc.ReasonSyncErr, true)
		}, clc.ReasonSyncErr},
		{"offers a path MTU that does not exist", func(t *testing.T, c net.Conn) {
			e := testEndpoint(true)
			b := clc.Accept{Endpoint: e}.Append(nil)
			b[50] = b[50]&0xf0 | 9
			_, _ = c.Write(b)
			wantDecline(t, c, clc.ReasonConfigErr, false)
		}, clc.ReasonConfigErr},
		{"never sends CONFIRM LINK", func(t *testing.T, c net.Conn) {
			_, _ = c.Write(clc.Accept{Endpoint: testEndpoint(true)}.Append(nil))
			readMessage(t, c)
			_ = c.SetReadDeadline(time.Now().Add(8 * time.Second))
			wantDecline(t, &patient{c}, clc.ReasonTimeoutCL, false)
		}, clc.ReasonTimeoutCL},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, newFakeFabric().device("c", 1), quick)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			served := make(chan net.Conn, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					t.Error(err)
				}
				readMessage(t, c)
				tc.answer(t, c)
				served <- c
			}()
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			c, err := (&smcr.Dialer{Stack: s}).DialContext(ctx, "tcp", l.Addr().String())
			peer := <-served
			defer peer.Close()
			switch {
			case tc.reason == 0 && err == nil:
				t.Fatal("dial succeeded")
			case tc.reason == 0:
				wantReset(t, peer)
			case err != nil:
				t.Fatal(err)
			default:
				if i := c.(*smcr.Conn).Info(); i.Mode != smcr.ModeTCP || i.Reason != tc.reason {
					t.Errorf("mode %v, reason %v, want TCP, %v", i.Mode, i.Reason, tc.reason)
				}
				exchange(t, c, peer)
				_ = c.Close()
			}
			waitFor(t, "rendezvous cleaned up", func() bool { return s.Stats().Conns == 0 && s.Stats().Groups == 0 })
		})
	}
}

// A handshake that cannot be looked up says nothing about the peer.
func TestDialer_requireRefusesFallback(t *testing.T) {
	for _, tc := range []struct {
		name   string
		option fakeOption
		want   clc.Reason
	}{
		{"not offered", fakeOption{}, clc.ReasonPeerNoSMC},
		{"not known", fakeOption{err: errors.New("no memory for its state")}, clc.ReasonInternal},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, func(c *smcr.Config) { c.Option = tc.option })
			_, err := (&smcr.Dialer{Stack: p.client, Require: true}).DialContext(t.Context(), "tcp", p.l.Addr().String())
			var fe *smcr.FallbackError
			if !errors.As(err, &fe) || fe.Reason != tc.want {
				t.Errorf("error %v, want %v", err, tc.want)
			}
			c, err := p.l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			_ = c.Close()
		})
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
