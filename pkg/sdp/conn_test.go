// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/smcr-io/kube-smcr/pkg/internal/conntest"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

func TestConn_netTest(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
			a, b := p.dial(t)
			return a, b, func() { _, _ = a.Close(), b.Close() }, nil
		})
	})
}

// tcpPair is what SDP is compared with.
func tcpPair(tb testing.TB) (a, b *net.TCPConn) {
	tb.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)); err != nil {
		tb.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		tb.Fatal(err)
	}
	return a, b
}

// A program must not notice that its connection is not TCP: each script ends the same way over both.
func TestConn_closesLikeTCP(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open)
		for _, script := range conntest.Scripts() {
			t.Run(script, func(t *testing.T) {
				t.Parallel()
				conntest.Check(t, script, 50*time.Millisecond, func() (x, y conntest.Conn) {
					a, b := tcpPair(t)
					return a, b
				}, func() (x, y conntest.Conn) {
					a, b := p.dial(t)
					return a, b
				})
			})
		}
	})
}

// A connection that is closed says so, and not that its deadline, which came first, has passed.
func TestConn_closedBehindItsDeadline(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		if err := a.SetDeadline(time.Now().Add(-time.Second)); err != nil {
			t.Fatal(err)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		for range 50 { // of two ways to say something one is drawn
			if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Fatalf("read: %v", err)
			}
			if _, err := a.Write(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
				t.Fatalf("write: %v", err)
			}
		}
		_ = b.Close()
	})
}

// A connection that was closed while writes wait for a peer that does not read can be aborted, and the writes end.
func TestConn_abortedBehindClose(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		wrote := make(chan error, 1)
		go func() {
			for {
				if _, err := a.Write(make([]byte, 1<<20)); err != nil {
					wrote <- err
					return
				}
			}
		}()
		<-time.After(200 * time.Millisecond) // polls nothing: the peer's buffers get full, or a buffer is offered
		if err := errors.Join(a.CloseWrite(), a.Close()); err != nil {
			t.Fatal(err)
		}
		if err := a.Abort(); err != nil {
			t.Errorf("abort: %v", err)
		}
		select {
		case err := <-wrote:
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("write: %v", err)
			}
		case <-time.After(5 * time.Second):
			t.Error("a write goes on for ever")
		}
		if err := a.Abort(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("abort once more: %v", err)
		}
		_ = b.Close()
	})
}

// A connection whose peer has the end of its stream is aborted by a message, which may still be under way. To abort it once more is an error
// all the same.
func TestConn_abortedOnce(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		if err := errors.Join(a.CloseWrite(), a.Close(), a.Abort()); err != nil {
			t.Fatal(err)
		}
		if err := a.Abort(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("abort once more: %v", err)
		}
		_ = b.Close()
	})
}

// What was written before Close arrives, and the end of the stream, although the stack is closed behind it.
func TestStack_closedBehindConns(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		d := open(t, clientAddr)
		cfg := sdp.Config{Device: d}
		if a, ok := d.(asAdapter); ok {
			cfg.Device, cfg.HelloInRequest = a.Device, true
		}
		own, err := sdp.NewStack(cfg)
		if err != nil {
			t.Fatal(err)
		}
		p := &pair{client: own, server: newStack(t, open(t, serverAddr))}
		p.listenOn(t)
		a, b := p.dial(t)
		const size = 100_000
		if _, err := a.Write(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		closed := make(chan error, 1)
		go func() { closed <- own.Close() }()
		got, err := io.ReadAll(b)
		if err != nil || len(got) != size {
			t.Errorf("%d bytes arrived, want %d: %v", len(got), size, err)
		}
		_ = b.Close()
		if err := <-closed; err != nil {
			t.Error(err)
		}
	})
}

// random is n bytes that follow from a seed.
func random(seed uint64, n int) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// Both streams of a connection move at the same time, in writes of all lengths, and arrive.
func TestConn_streamsBothWays(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		data := random(1, 5<<20)
		var wg sync.WaitGroup
		for _, c := range []*sdp.Conn{a, b} {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(2, 2))
				for left := data; len(left) > 0; {
					n, err := c.Write(left[:min(len(left), 1+rng.IntN(100_000))])
					if err != nil {
						t.Error(err)
						return
					}
					left = left[n:]
				}
				if err := c.CloseWrite(); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				got, err := io.ReadAll(c)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("read %d of %d bytes: %v", len(got), len(data), err)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(a.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	})
}

// Thousands of short writes do not stop for receive buffers that hold a byte each, while nobody reads.
func TestConn_shortWrites(t *testing.T) {
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open).dial(t)
		data := random(3, 5000)
		if err := a.SetWriteDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for i := range data {
			if n, err := a.Write(data[i : i+1]); n != 1 || err != nil {
				t.Fatalf("write %d: %d bytes: %v", i, n, err)
			}
		}
		got := make([]byte, len(data))
		if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, data) {
			t.Errorf("read other bytes: %v", err)
		}
		_, _ = a.Close(), b.Close()
	})
}

// A peer's receive buffers grow when that is asked for and allowed, while streams go on in both directions.
func TestConn_resizePeer(t *testing.T) {
	const small, large = 4 << 10, 64 << 10
	eachTransport(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := &pair{
			client: newStack(t, open(t, clientAddr), func(c *sdp.Config) { c.RecvBufferSize = large }),
			server: newStack(t, open(t, serverAddr), func(c *sdp.Config) { c.RecvBufferSize, c.MaxRecvBufferSize = small, large }),
		}
		p.listenOn(t)
		a, b := p.dial(t)
		if n := a.Info().PeerRecvBufferSize; n != small {
			t.Errorf("server begins with receive buffers of %d bytes, want %d", n, small)
		}
		data := random(4, 4<<20)
		var wg sync.WaitGroup
		for _, c := range []*sdp.Conn{a, b} {
			wg.Go(func() {
				if _, err := c.Write(data); err != nil {
					t.Error(err)
				}
				_ = c.CloseWrite()
			})
			wg.Go(func() {
				if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
					t.Errorf("read %d of %d bytes, or others: %v", len(got), len(data), err)
				}
			})
		}
		if err := a.ResizePeer(large); err != nil {
			t.Error(err)
		}
		wg.Wait()
		if n := a.Info().PeerRecvBufferSize; n != large {
			t.Errorf("receive buffers of %d bytes, want %d", n, large)
		}
		_, _ = a.Close(), b.Close()
	})
}
