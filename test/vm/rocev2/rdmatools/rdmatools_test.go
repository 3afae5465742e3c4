// SPDX-License-Identifier: Apache-2.0

package rdmatools

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	clientText = "0000:0001:000012:eff865:0000036f:0000561e1bbd2000:" +
		"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:02:00000000:\x00"
	clientKeys = keys{
		reads: 1, qpn: 0x12, psn: 0xeff865, rkey: 0x36f, addr: 0x561e1bbd2000,
		gid: rdma.GIDFromAddr(netip.MustParseAddr("10.0.0.2")),
	}
)

// TestExchange_captured reads and writes what two real programs exchanged.
func TestExchange_captured(t *testing.T) {
	allow := cmp.AllowUnexported(keys{})
	got, err := parsePerftest([]byte(clientText))
	if diff := cmp.Diff(clientKeys, got, allow); err != nil || diff != "" {
		t.Errorf("perftest: %v\n%s", err, diff)
	}
	if diff := cmp.Diff(clientText, string(got.perftest())); diff != "" {
		t.Errorf("perftest, written again:\n%s", diff)
	}
	const pingpong = "0000:000011:0e798d:00000000000000000000ffff0a000002\x00"
	want := keys{qpn: 0x11, psn: 0xe798d, gid: clientKeys.gid}
	got, err = parsePingpong([]byte(pingpong))
	if diff := cmp.Diff(want, got, allow); err != nil || diff != "" {
		t.Errorf("ibv_rc_pingpong: %v\n%s", err, diff)
	}
	if diff := cmp.Diff(pingpong, string(got.pingpong())); diff != "" {
		t.Errorf("ibv_rc_pingpong, written again:\n%s", diff)
	}
}

func TestExchange_malformed(t *testing.T) {
	for _, c := range []struct{ name, text string }{
		{"empty", ""},
		{"short", clientText[1:]},
		{"no zero", clientText[:len(clientText)-1] + " "},
		{"digit", strings.Replace(clientText, "eff865", "eff86g", 1)},
		{"sign", strings.Replace(clientText, "eff865", "+ff865", 1)},
		{"colon", strings.Replace(clientText, "ff:ff", "fffff", 1)},
		{"wide field", strings.Replace(clientText, "0000:0001:", "00000:001:", 1)},
	} {
		if _, err := parsePerftest([]byte(c.text)); !errors.Is(err, errText) {
			t.Errorf("%s: %v, want %v", c.name, err, errText)
		}
	}
}

func FuzzParsePerftest(f *testing.F) {
	f.Add([]byte(clientText))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := parsePerftest(b)
		if err != nil {
			return
		}
		if again, err := parsePerftest(k.perftest()); err != nil || again != k {
			t.Errorf("%+v became %+v, %v", k, again, err)
		}
	})
}

func FuzzParsePingpong(f *testing.F) {
	f.Add([]byte("0000:000011:0e798d:00000000000000000000ffff0a000002\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := parsePingpong(b)
		if err != nil {
			return
		}
		if again, err := parsePingpong(k.pingpong()); err != nil || again != k {
			t.Errorf("%+v became %+v, %v", k, again, err)
		}
	})
}

// testPort keeps the devices away from other tests.
const testPort = 14793

func openDevice(t *testing.T, addr string) *soft.Device {
	t.Helper()
	d, err := soft.Open(soft.Config{Name: addr, Addr: netip.MustParseAddr(addr), Port: testPort})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// connected returns both ends of a TCP connection; it needs the buffers, as both
// sides end with writing.
func connected(t *testing.T) (server, client net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if client, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = server.Close(), client.Close() })
	return server, client
}

// TestRun plays both ends of each program.
func TestRun(t *testing.T) {
	a, b := openDevice(t, "127.0.14.1"), openDevice(t, "127.0.14.2")
	for _, tool := range Tools() {
		for _, size := range []int{1, 5000, 70_000} {
			t.Run(fmt.Sprintf("%s %d", tool, size), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				s, c := connected(t)
				const iters = 40
				cfg := Config{Tool: tool, Iters: iters, SizeBytes: size, PSN: rdma.PSNMask - 5, MTU: rdma.MTU1024}
				served := make(chan error, 1)
				var server Report
				go func() {
					var err error
					server, err = Run(ctx, s, a, cfg)
					served <- err
				}()
				small := cfg
				small.Client = true
				if tool != PingPong {
					small.MTU = rdma.MTU512
				}
				client, err := Run(ctx, c, b, small)
				if err := errors.Join(err, <-served); err != nil {
					t.Fatal(err)
				}
				if client.MTU != small.MTU || server.MTU != small.MTU || client.RemoteQPN != server.LocalQPN {
					t.Errorf("client %+v\nserver %+v", client, server)
				}
				// A long READ is several requests, and a long WRITE is.
				isOne := tool != ReadBW && tool != ReadLat && tool != WriteBW && tool != WriteLat
				if n := server.Stats.RxMessages; n < iters || n > iters && isOne {
					t.Errorf("the server took %d messages, want %d", n, iters)
				}
			})
		}
	}
}

func TestRun_refuses(t *testing.T) {
	good := Config{Tool: WriteBW, Iters: 1, SizeBytes: 1}
	for _, c := range []struct {
		name string
		edit func(*Config)
	}{
		{"tool", func(c *Config) { c.Tool = "ib_atomic_bw" }},
		{"no iterations", func(c *Config) { c.Iters = 0 }},
		{"no bytes", func(c *Config) { c.SizeBytes = 0 }},
		{"too many bytes", func(c *Config) { c.SizeBytes = maxSize + 1 }},
		{"PSN", func(c *Config) { c.PSN = rdma.PSNMask + 1 }},
	} {
		cfg := good
		c.edit(&cfg)
		if _, err := Run(t.Context(), nil, nil, cfg); err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
}

// TestRun_ends ends an exchange whose peer says nothing.
func TestRun_ends(t *testing.T) {
	d := openDevice(t, "127.0.14.1")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	s, _ := connected(t)
	_, err := Run(ctx, s, d, Config{Tool: WriteBW, Iters: 1, SizeBytes: 1})
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v, want the context's deadline", err)
	}
}
