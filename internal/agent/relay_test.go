// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// queued is how many bytes wait in a socket's two buffers.
func queued(t testing.TB, c *net.TCPConn) (in, out int) {
	t.Helper()
	must(t, value(c.SyscallConn())(t).Control(func(fd uintptr) {
		in = value(unix.IoctlGetInt(int(fd), unix.SIOCINQ))(t)
		out = value(unix.IoctlGetInt(int(fd), unix.SIOCOUTQ))(t)
	}))
	return in, out
}

// fill writes until nothing moves any more.
func fill(t testing.TB, c *net.TCPConn) {
	t.Helper()
	b := make([]byte, 1<<20)
	for {
		must(t, c.SetWriteDeadline(time.Now().Add(300*time.Millisecond)))
		if _, err := c.Write(b); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestAttack_sinks: programs on both sides of carried connections write, and do not
// read. What the kernel keeps for the agent is no more than the agent has in its
// books, which status and metrics show.
func TestAttack_sinks(t *testing.T) {
	for _, mode := range []smcr.Mode{smcr.ModeSMCR, smcr.ModeTCP} {
		t.Run(mode.String(), func(t *testing.T) {
			b := newBench(t, "", preferAll)
			reason := clc.ReasonNone
			if mode == smcr.ModeTCP {
				reason = clc.ReasonNoDev
			}
			b.stack.set(mode, reason, nil)
			var view View
			b.cfg.Observe = func(v View) { view = v }
			p := b.attach("a", 1)
			sink := value(net.Listen("tcp4", "127.0.0.1:0"))(t).(*net.TCPListener)
			accepted := make(chan *net.TCPConn, 1)
			go func() {
				if c, err := sink.AcceptTCP(); err == nil {
					accepted <- c
				}
			}()
			t.Cleanup(func() { _ = sink.Close() })
			p.dst = addrPort(sink.Addr())
			b.start()
			c := b.dial(p, 0)
			ask(t, c)
			peer := <-accepted
			t.Cleanup(func() { _ = peer.Close() })
			must(t, peer.SetDeadline(time.Now().Add(waitLimit)))
			value(io.ReadFull(peer, make([]byte, 1)))(t)
			fill(t, c)
			fill(t, peer)
			f := view.a.sessions.list(nil)[0]
			f.mu.Lock()
			app, tcp := f.app, f.peerConn.(fakeConn).TCPConn
			f.mu.Unlock()
			in, out := queued(t, app)
			if mode == smcr.ModeTCP { // the other one stands for what has no TCP below
				i, o := queued(t, tcp)
				in, out = in+i, out+o
			}
			s := b.status()
			want := map[smcr.Mode]int{smcr.ModeSMCR: buffersPerSocket * connBufferBest, smcr.ModeTCP: appSocketBytes + buffersPerSocket*netBufferBest}[mode]
			if s.NodeBudget.SocketUsedBytes != want || b.attachment("a").Budget.SocketUsedBytes != want {
				t.Errorf("in the books are %d and %d bytes, want %d", s.NodeBudget.SocketUsedBytes, b.attachment("a").Budget.SocketUsedBytes, want)
			}
			if in+out > want || in+out == 0 {
				t.Errorf("%d bytes wait to be read and %d to be sent, want at most %d", in, out, want)
			}
			if text, err := b.client.Metrics(t.Context()); err != nil || !strings.Contains(text, "kube_smcr_budget_socket_buffer_bytes 2.147483648e+09\n") {
				t.Error("metrics do not have the budget")
			}
		})
	}
}

// TestProxy_pausesForSockets: a pod with relays whose sockets may have nearly all of
// its budget is not diverted for a while.
func TestProxy_pausesForSockets(t *testing.T) {
	b := newBench(t, "  budgets: {pod: {sockets: 16MiB}}\n  negativeCacheTTL: 0s\n", preferAll)
	b.stack.set(smcr.ModeTCP, clc.ReasonNoDev, nil)
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	for range 16 << 20 / (appSocketBytes + buffersPerSocket*netBufferLeast) {
		c := b.dial(p, 0)
		ask(t, c)
		answered(t, c)
	}
	eventually(t, func() string {
		if x := b.attachment("a"); x.Paused != agentapi.CodeBudgetSockets {
			return string("paused: " + x.Paused)
		}
		return ""
	})
	if e := value(b.client.Explain(t.Context(), "test/a", "127.0.0.1:5"))(t); e.Code != agentapi.CodeBudgetSockets {
		t.Errorf("explanation %+v", e)
	}
}

// BenchmarkRelay is a stream through a relay on loopback, with the buffers that a
// relay gets, and with those that grow as the kernel likes (0).
func BenchmarkRelay(b *testing.B) {
	for name, size := range map[string]struct{ app, net int }{
		"grow": {}, "best": {appBufferBytes, netBufferBest}, "least": {appBufferBytes, netBufferLeast},
	} {
		b.Run(name, func(b *testing.B) {
			sink := value(net.Listen("tcp4", "127.0.0.1:0"))(b).(*net.TCPListener)
			serve(b, sink, func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, struct{ io.Reader }{c}) })
			door := value(net.Listen("tcp4", "127.0.0.1:0"))(b).(*net.TCPListener)
			serve(b, door, func(app *net.TCPConn) {
				tcp, err := dialTCP(b.Context(), addrPort(sink.Addr()))
				if err == nil {
					err = errors.Join(resetOnClose(app), resetOnClose(tcp))
				}
				if err == nil && size.app > 0 {
					err = errors.Join(linux.LimitBuffers(app, size.app), linux.LimitBuffers(tcp, size.net))
				}
				if err != nil {
					b.Error(err)
					return
				}
				_, _, _ = relay(app, plainTCP{tcp, time.Now()}, tcp) // the relay ends with the benchmark
			})
			c := value(dialTCP(b.Context(), addrPort(door.Addr())))(b)
			defer c.Close()
			buf := make([]byte, 64<<10)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
