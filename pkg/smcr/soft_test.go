// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/net/nettest"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// testPort is not 4791, so that the tests do not meet a device of the machine, and of no other run of them.
var testPort = testenv.UDPPort()

// openSoft opens a software device on a loopback address.
func openSoft(tb testing.TB, addr string, mtu rdma.MTU) rdma.Device {
	tb.Helper()
	d, err := soft.Open(soft.Config{Name: "soft-" + addr, Addr: netip.MustParseAddr(addr), Port: testPort, MTU: mtu})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}

func newSoftPair(tb testing.TB, mtu rdma.MTU, edit ...func(*smcr.Config)) *pair {
	tb.Helper()
	p := &pair{}
	p.client = newStack(tb, openSoft(tb, "127.92.0.1", mtu), edit...)
	p.server = newStack(tb, openSoft(tb, "127.92.0.2", mtu), edit...)
	p.listen(tb)
	return p
}

func TestConn_netTestOverSoftwareRoCE(t *testing.T) {
	eachVersion(t, func(t *testing.T, v smcr.VersionSet) {
		p := newSoftPair(t, rdma.MTU1024, versions(v))
		nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
			a, b := p.dial(t)
			if a.Mode() != smcr.ModeSMCR || b.Mode() != smcr.ModeSMCR {
				t.Fatal("not SMC-R")
			}
			return a, b, func() { _ = a.Close(); _ = b.Close() }, nil
		})
	})
}

// tcpPair is the base of the benchmarks.
func tcpPair(tb testing.TB) (net.Conn, net.Conn) {
	tb.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	a, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	_ = l.Close()
	return a, b
}

func bothWays(b *testing.B, run func(b *testing.B, c, s net.Conn)) {
	b.Run("tcp", func(b *testing.B) {
		c, s := tcpPair(b)
		run(b, c, s)
		_, _ = c.Close(), s.Close()
	})
	for _, mtu := range []rdma.MTU{rdma.MTU1024, rdma.MTU4096} {
		b.Run("smcr-mtu"+mtu.String(), func(b *testing.B) {
			c, s := newSoftPair(b, mtu).dial(b)
			run(b, c, s)
			_, _ = c.Close(), s.Close()
		})
	}
}

func BenchmarkSoft_pingPong(b *testing.B) {
	bothWays(b, func(b *testing.B, c, s net.Conn) {
		go func() {
			buf := make([]byte, 64)
			for {
				if _, err := io.ReadFull(s, buf); err != nil {
					return
				}
				if _, err := s.Write(buf); err != nil {
					return
				}
			}
		}()
		buf := make([]byte, 64)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkSoft_stream(b *testing.B) {
	const chunk = 64 << 10
	bothWays(b, func(b *testing.B, c, s net.Conn) {
		var wg sync.WaitGroup
		wg.Go(func() {
			buf := make([]byte, chunk)
			for left := int64(b.N) * chunk; left > 0; {
				n, err := s.Read(buf)
				if err != nil {
					b.Error(err)
					return
				}
				left -= int64(n)
			}
		})
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		b.ReportAllocs()
		b.ResetTimer()
		for range b.N {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
		wg.Wait()
	})
}

// The data path allocates nothing: not in this package, the machines or the
// device.
func TestConn_dataPathAllocatesNothing(t *testing.T) {
	c, s := newSoftPair(t, rdma.MTU1024).dial(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 4096)
		for {
			if _, err := io.ReadFull(s, buf); err != nil {
				return
			}
			if _, err := s.Write(buf); err != nil {
				t.Error(err)
				return
			}
		}
	})
	buf := make([]byte, 4096)
	round := func() {
		if _, err := c.Write(buf); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			t.Fatal(err)
		}
	}
	for range 200 { // queues and pools reach their size
		round()
	}
	// The runtime's own timers and goroutine caches allocate now and then.
	if n := testing.AllocsPerRun(2000, round); n > 0.05 {
		t.Errorf("%v allocations per round trip", n)
	}
	_ = c.Close()
	wg.Wait()
	_ = s.Close()
}

// A relay writes to a socket what arrives, in pieces of all sizes: little ones
// go through the sink, bulk through RelayTo itself.
func TestConn_relaysToSocket(t *testing.T) {
	c, s := newSoftPair(t, rdma.MTU1024).dial(t)
	from, to := tcpPair(t)
	const total = 4 << 20
	var wg sync.WaitGroup
	wg.Go(func() {
		n, err := s.RelayTo(from.(*net.TCPConn))
		if n != total || err != nil {
			t.Errorf("relayed %d of %d bytes: %v", n, total, err)
		}
		_ = from.Close()
	})
	wg.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		src := io.LimitReader(randomReader(3), total)
		buf := make([]byte, 40<<10)
		for {
			n, err := io.ReadFull(src, buf[:1+r.IntN([]int{64, 2000, len(buf)}[r.IntN(3)])])
			if _, werr := c.Write(buf[:n]); werr != nil {
				t.Error(werr)
			}
			if err != nil {
				break
			}
			if r.IntN(8) == 0 {
				runtime.Gosched()
			}
		}
		_ = c.CloseWrite()
	})
	want := randomReader(3)
	got, exp := make([]byte, 8192), make([]byte, 8192)
	for at := 0; at < total; {
		n, err := to.Read(got)
		if err != nil {
			t.Fatalf("at %d: %v", at, err)
		}
		_, _ = io.ReadFull(want, exp[:n])
		if !bytes.Equal(got[:n], exp[:n]) {
			t.Fatalf("bytes differ after %d", at)
		}
		at += n
	}
	if n, err := to.Read(got); !errors.Is(err, io.EOF) {
		t.Errorf("after the stream: %d bytes, %v", n, err)
	}
	wg.Wait()
	_, _, _ = c.Close(), s.Close(), to.Close()
}
