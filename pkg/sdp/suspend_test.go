// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// fromListener lets a server come back from another port than its listener's.
var fromListener = sdp.SuspendOptions{AnyPort: true}

// unhurried takes time out of tests that are not about it: the machine may have other work.
func unhurried(c *sdp.Config) { c.SetupTimeout, c.SuspendTimeout = time.Minute, time.Minute }

// startFlow moves data in both directions, by Write and by Buffers. The streams end when end is closed, and when both have, so is done.
func startFlow(t *testing.T, p *pair, a, b *sdp.Conn, size int, end <-chan struct{}) (done chan struct{}) {
	t.Helper()
	done = make(chan struct{})
	data := random(11, size)
	const buffer = 200_000
	half := len(data) / 2
	results := make(chan error, 4)
	write := func(s *sdp.Stack, c *sdp.Conn) {
		_, err := c.Write(data[:half])
		if err == nil {
			err = send(c, []*sdp.Buffer{newBuffer(t, s, buffer), newBuffer(t, s, buffer)}, data[half:])
		}
		<-end
		results <- errors.Join(err, c.CloseWrite())
	}
	read := func(s *sdp.Stack, c *sdp.Conn) {
		got := make([]byte, half)
		_, err := io.ReadFull(c, got)
		if err == nil {
			var rest []byte
			rest, err = receive(c, []*sdp.Buffer{newBuffer(t, s, buffer), newBuffer(t, s, buffer)}, false)
			got = append(got, rest...)
		}
		if err == nil && !bytes.Equal(got, data) {
			err = errors.New("other bytes arrived")
		}
		results <- err
	}
	go write(p.client, a)
	go write(p.server, b)
	go read(p.client, a)
	go read(p.server, b)
	go func() {
		defer close(done)
		for range 4 {
			if err := <-results; err != nil {
				t.Error(err)
			}
		}
	}()
	return done
}

// A connection moves again and again under load, asked by either side, and both streams arrive whole.
func TestSection13_1_1_Suspend(t *testing.T) {
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		for _, who := range []string{"server", "client", "both in turn"} {
			t.Run(who, func(t *testing.T) {
				p := newPair(t, open, unhurried)
				a, b := p.dial(t)
				end := make(chan struct{})
				done := startFlow(t, p, a, b, 6<<20, end)
				const moves = 4
				for i := range moves {
					c, o := b, sdp.SuspendOptions{} // the client comes back from its port
					if who == "client" || who != "server" && i%2 == 1 {
						c, o = a, fromListener
					}
					if err := c.Suspend(t.Context(), o); err != nil {
						t.Errorf("suspend: %v", err)
					}
				}
				close(end)
				<-done
				if x, y := a.Info().Moves, b.Info().Moves; x != moves || y != moves {
					t.Errorf("moved %d times at the client and %d at the server, want %d", x, y, moves)
				}
				if err := errors.Join(a.Close(), b.Close()); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// What waits in a suspended connection is there afterwards: bytes that nobody has read, and the end of a stream.
func TestSection13_1_1_SuspendKeeps(t *testing.T) {
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		a, b := newPair(t, open, unhurried).dial(t)
		data := random(12, 100_000)
		if _, err := a.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if err := b.Suspend(t.Context(), sdp.SuspendOptions{}); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, or others: %v", len(got), err)
		}
		if _, err := b.Write(data); err != nil {
			t.Error(err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
		if got, err := io.ReadAll(a); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, or others: %v", len(got), err)
		}
		i, j := a.Info(), b.Info()
		if i.Role != socket.Connecting || j.Role != socket.Accepting || i.Moves != 1 || j.Moves != 1 {
			t.Errorf("%+v; %+v", i, j)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}

// When both sides suspend at a time, both do, one after the other.
func TestSection13_1_2_SuspendCrossing(t *testing.T) {
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open, unhurried)
		for range 5 {
			a, b := p.dial(t)
			ends := make(chan error, 2)
			go func() { ends <- a.Suspend(t.Context(), fromListener) }()
			go func() { ends <- b.Suspend(t.Context(), fromListener) }()
			if err := errors.Join(<-ends, <-ends); err != nil {
				t.Fatal(err)
			}
			end := make(chan struct{})
			close(end)
			<-startFlow(t, p, a, b, 500_000, end)
			if i, j := a.Info(), b.Info(); i.Moves != 2 || j.Moves != 2 {
				t.Errorf("moved %d and %d times", i.Moves, j.Moves)
			}
			if err := errors.Join(a.Close(), b.Close()); err != nil {
				t.Error(err)
			}
		}
	})
}

// A peer that does not come back, because it cannot from its port, costs the connection, in time, at both ends.
func TestSection13_1_1_PeerDoesNotComeBack(t *testing.T) {
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		p := newPair(t, open, func(c *sdp.Config) { c.SuspendTimeout = 500 * time.Millisecond })
		a, b := p.dial(t)
		begin := time.Now()
		if err := a.Suspend(t.Context(), sdp.SuspendOptions{}); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("suspend: %v", err)
		}
		for _, c := range []*sdp.Conn{a, b} {
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read: %v", err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("took %v", d)
		}
	})
}

// Nobody but the peer takes the place of a peer: neither from another address, nor, unless that is allowed, from another port.
func TestSection13_1_1_AwaitPeer(t *testing.T) {
	dial := func(from, to string) *net.TCPConn {
		t.Helper()
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))}
		c, err := d.DialContext(t.Context(), "tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		return c.(*net.TCPConn)
	}
	for _, anyPort := range []bool{false, true} {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort(serverAddr+":0")))
		if err != nil {
			t.Fatal(err)
		}
		to := l.Addr().String()
		strangers := []*net.TCPConn{dial("127.93.0.6:0", to)}
		port := dial(clientAddr+":0", to)
		peer := dial(clientAddr+":0", to)
		want := peer
		if anyPort {
			want = port
		} else {
			strangers = append(strangers, port)
		}
		got, err := sdp.AwaitPeer(t.Context(), l, netip.MustParseAddrPort(peer.LocalAddr().String()), anyPort)
		if err != nil {
			t.Fatal(err)
		}
		if got.RemoteAddr().String() != want.LocalAddr().String() {
			t.Errorf("any port %t: got %v, want %v", anyPort, got.RemoteAddr(), want.LocalAddr())
		}
		for _, c := range strangers {
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("stranger at %v: %v", c.LocalAddr(), err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if c, err := sdp.AwaitPeer(ctx, l, netip.MustParseAddrPort("192.0.2.1:7"), true); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("nobody comes: %v, %v", c, err)
		}
		cancel()
		for _, c := range append(strangers, port, peer, got) {
			_ = c.Close() // some are
		}
	}
}

// fewDescriptors leaves the process only so many descriptors for a while, whose end closes the channel.
func fewDescriptors(t *testing.T, left int) <-chan struct{} {
	t.Helper()
	lowest, err := syscall.Open("/dev/null", syscall.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Close(lowest); err != nil {
		t.Fatal(err)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = uint64(lowest + left) // descriptors are numbers below that
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	time.AfterFunc(100*time.Millisecond, func() {
		defer close(over)
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { <-over })
	return over
}

// A connection that moves while its process is short of descriptors is not lost, neither by the peer that waits nor by the one that connects.
func TestSection13_1_1_FewDescriptors(t *testing.T) {
	listen := func() *net.TCPListener {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.MustParseAddrPort(serverAddr+":0")))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	t.Run("accept", func(t *testing.T) {
		l := listen()
		peer, err := net.DialTCP("tcp", &net.TCPAddr{IP: net.ParseIP(clientAddr)}, l.Addr().(*net.TCPAddr))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = peer.Close() }()
		fewDescriptors(t, 0)
		got, err := sdp.AwaitPeer(limited(t), l, netip.MustParseAddrPort(peer.LocalAddr().String()), false)
		if err != nil {
			t.Fatal(err)
		}
		_ = got.Close()
	})
	t.Run("connect", func(t *testing.T) {
		l := listen()
		a, b := newPair(t, openIWARP).dial(t)
		fewDescriptors(t, 0)
		got, err := a.ComeBack(limited(t), netip.MustParseAddrPort(l.Addr().String()).Port())
		if err != nil {
			t.Fatal(err)
		}
		_, _, _ = got.Close(), a.Close(), b.Close()
	})
	t.Run("all the way", func(t *testing.T) {
		eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
			p := newPair(t, open, unhurried)
			for left := 1; left < 5; left++ { // one is for the listener to which the peer comes back
				a, b := p.dial(t)
				over := fewDescriptors(t, left)
				if err := b.Suspend(limited(t), sdp.SuspendOptions{}); err != nil {
					t.Errorf("%d descriptors left: %v", left, err)
				}
				if err := errors.Join(a.Close(), b.Close()); err != nil {
					t.Error(err)
				}
				<-over
			}
		})
	})
}

// A peer sends us to its own address, and not to the ports of services with rights.
func TestSection13_1_1_NotToServices(t *testing.T) {
	a, b := newPair(t, openIWARP).dial(t)
	if _, err := a.ComeBack(t.Context(), 22); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("sent to port 22: %v", err)
	}
	_, _ = a.Close(), b.Close()
}

// A connection that is closed while it moves ends as ever, and so does what is suspended no more.
func TestConn_closeSuspended(t *testing.T) {
	eachOnTCP(t, func(t *testing.T, open func(testing.TB, string) rdma.Device) {
		t.Run("Close", func(t *testing.T) {
			closeSuspended(t, newPair(t, open, unhurried), (*sdp.Conn).Close, true)
		})
		t.Run("Abort", func(t *testing.T) {
			p := newPair(t, open, unhurried, func(c *sdp.Config) {
				c.SuspendTimeout = 500 * time.Millisecond // who waits for the next connection hears nothing of it
			})
			closeSuspended(t, p, (*sdp.Conn).Abort, false)
		})
	})
}

// closeSuspended has the server suspend connections, and the client end them meanwhile.
func closeSuspended(t *testing.T, p *pair, end func(*sdp.Conn) error, inOrder bool) {
	t.Helper()
	for i := range 6 {
		a, b := p.dial(t)
		moved := make(chan error, 1)
		go func() { moved <- b.Suspend(t.Context(), sdp.SuspendOptions{}) }()
		wait := time.NewTimer(time.Duration(i) * 300 * time.Microsecond) // any moment of it
		<-wait.C
		if err := end(a); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadAll(b); inOrder && err != nil {
			t.Errorf("read: %v", err)
		}
		_ = b.Close() // it may have ended
		err := <-moved
		if err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, net.ErrClosed) && !errors.Is(err, socket.ErrState) {
			t.Errorf("suspend: %v", err)
		}
		if err := b.Suspend(t.Context(), sdp.SuspendOptions{}); !errors.Is(err, net.ErrClosed) {
			t.Errorf("suspend after Close: %v", err)
		}
	}
}
