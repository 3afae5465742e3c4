// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
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

// idling is a relay on plain TCP in which nothing has moved for a while.
type idling struct {
	*relay
	t            *testing.T
	app, peer    *net.TCPConn // the far ends
	ended        chan error   // gets what the relay ended with
	nsent, nrecv int64        // when ended has it
	session      *session
}

// newIdling starts a relay, and waits until both of its directions are parked.
func newIdling(t *testing.T) *idling {
	t.Helper()
	parker := value(smcr.NewParker(time.Millisecond, nil))(t)
	i := &idling{t: t, ended: make(chan error, 1)}
	var app, tcp *net.TCPConn
	app, i.app = loopback(t)
	tcp, i.peer = loopback(t)
	must(t, errors.Join(resetOnClose(app), resetOnClose(tcp)))
	c := plainTCP{tcp, time.Now()}
	i.relay = newRelay(parker, app, c, tcp, func(sent, recv int64, err error) {
		i.nsent, i.nrecv = sent, recv
		i.ended <- err
	})
	i.session = &session{app: app, peerConn: c}
	_, i.session.cancel = context.WithCancelCause(t.Context())
	i.session.setRelay(i.relay)
	i.start()
	t.Cleanup(func() {
		i.session.abort(agentapi.CodeDraining)
		<-i.ended
		must(t, parker.Close())
	})
	i.parked()
	return i
}

// parked waits until both directions are parked.
func (i *idling) parked() {
	i.t.Helper()
	eventually(i.t, func() string {
		if !i.out.Parked() || !i.in.Parked() {
			return fmt.Sprintf("parked: from the application %t, from the network %t", i.out.Parked(), i.in.Parked())
		}
		return ""
	})
}

// halfClose ends the stream of one far end, which the other one sees, and waits until what is left is
// parked.
func (i *idling) halfClose(from, to *net.TCPConn) {
	i.t.Helper()
	must(i.t, from.CloseWrite())
	if n, err := to.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		i.t.Errorf("read %d bytes, %v, want the end", n, err)
	}
	i.parked()
}

// broken waits until a far end that has seen the end of the stream cannot write any more.
func (i *idling) broken(far *net.TCPConn) {
	i.t.Helper()
	eventually(i.t, func() string {
		if _, err := far.Write([]byte("x")); err == nil {
			return "not reset"
		}
		return ""
	})
}

// trip sends a byte from one far end to the other.
func (i *idling) trip(from, to *net.TCPConn) {
	i.t.Helper()
	value(from.Write([]byte("x")))(i.t)
	value(io.ReadFull(to, make([]byte, 1)))(i.t)
}

// TestRelay_whileParked: whatever happens to a session of which no goroutine is left is passed on as
// it is while there are goroutines.
func TestRelay_whileParked(t *testing.T) {
	for _, tt := range []struct {
		name       string
		do         func(i *idling)
		reset      bool
		sent, recv int64
	}{
		{"bytes, and the end of both streams", func(i *idling) {
			i.trip(i.app, i.peer)
			i.parked()
			i.trip(i.peer, i.app)
			i.trip(i.peer, i.app)
			i.halfClose(i.app, i.peer)
			i.trip(i.peer, i.app)
			i.halfCloseLast(i.peer, i.app)
		}, false, 1, 3},
		{"the peer's end first", func(i *idling) {
			i.halfClose(i.peer, i.app)
			i.trip(i.app, i.peer)
			i.halfCloseLast(i.app, i.peer)
		}, false, 1, 0},
		{"the application resets", func(i *idling) { reset(i.app); wantReset(i.t, i.peer) }, true, 0, 0},
		{"the peer resets", func(i *idling) { reset(i.peer); wantReset(i.t, i.app) }, true, 0, 0},
		{"the application ends and then resets", func(i *idling) {
			i.halfClose(i.app, i.peer)
			reset(i.app)
			i.broken(i.peer)
		}, true, 0, 0},
		{"the peer ends and then resets", func(i *idling) {
			i.halfClose(i.peer, i.app)
			reset(i.peer)
			i.broken(i.app)
		}, true, 0, 0},
		{"the application ends, and the peer resets", func(i *idling) {
			i.halfClose(i.app, i.peer)
			reset(i.peer)
			wantReset(i.t, i.app)
		}, true, 0, 0},
		{"the agent resets", func(i *idling) {
			i.session.abort(agentapi.CodePolicyChange)
			wantReset(i.t, i.app)
			wantReset(i.t, i.peer)
		}, true, 0, 0},
		{"the application ends, and the agent resets", func(i *idling) {
			i.halfClose(i.app, i.peer)
			i.session.abort(agentapi.CodePolicyChange)
			wantReset(i.t, i.app)
		}, true, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := newIdling(t)
			tt.do(i)
			err := <-i.ended
			i.ended <- err // for the end of the test
			if (err != nil) != tt.reset {
				t.Errorf("ended with %v, want an error: %t", err, tt.reset)
			}
			if !tt.reset && (i.nsent != tt.sent || i.nrecv != tt.recv) {
				t.Errorf("sent %d and received %d bytes, want %d and %d", i.nsent, i.nrecv, tt.sent, tt.recv)
			}
		})
	}
}

// halfCloseLast ends the second stream, with which the relay ends.
func (i *idling) halfCloseLast(from, to *net.TCPConn) {
	i.t.Helper()
	must(i.t, from.CloseWrite())
	if n, err := to.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		i.t.Errorf("read %d bytes, %v, want the end", n, err)
	}
}

// TestRelay_resetThatAWriteTook: the kernel tells of a reset once. If a write was told, as that of the other
// direction, the reader finds the end of the stream: the relay does not pass that on as one.
func TestRelay_resetThatAWriteTook(t *testing.T) {
	for _, side := range []string{"application", "peer"} {
		t.Run(side, func(t *testing.T) {
			parker := value(smcr.NewParker(time.Millisecond, nil))(t)
			t.Cleanup(func() { must(t, parker.Close()) })
			app, appFar := loopback(t)
			tcp, tcpFar := loopback(t)
			must(t, errors.Join(resetOnClose(app), resetOnClose(tcp)))
			near, far, other := app, appFar, tcpFar
			if side == "peer" {
				near, far, other = tcp, tcpFar, appFar
			}
			reset(far)
			eventually(t, func() string {
				if _, err := near.Write([]byte("x")); err == nil {
					return "a write succeeds"
				}
				return ""
			})
			ended := make(chan error, 1)
			newRelay(parker, app, plainTCP{tcp, time.Now()}, tcp, func(_, _ int64, err error) { ended <- err }).start()
			wantReset(t, other)
			reset(other) // ends a relay that goes on
			if err := <-ended; !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the relay ended with %v", err)
			}
		})
	}
}

// TestAgent_idleSessions: an agent's idle sessions have no goroutines, keep their places in the
// budget until they end, go on when something comes, and end when the agent does.
func TestAgent_idleSessions(t *testing.T) {
	const n = 100
	b := newBench(t, "", preferAll)
	var view View
	b.cfg.Observe = func(v View) { view = v }
	p := b.attach("a", 1)
	l := value(net.Listen("tcp4", "127.0.0.1:0"))(t).(*net.TCPListener)
	t.Cleanup(func() { _ = l.Close() })
	p.dst = addrPort(l.Addr())
	b.start()
	var apps, peers []*net.TCPConn
	trip := func(k int) {
		t.Helper()
		value(apps[k].Write([]byte("x")))(t)
		value(io.ReadFull(peers[k], make([]byte, 1)))(t)
		value(peers[k].Write([]byte("y")))(t)
		value(io.ReadFull(apps[k], make([]byte, 1)))(t)
	}
	open := func() {
		t.Helper()
		apps = append(apps, b.dial(p, 0))
		c := value(l.AcceptTCP())(t)
		t.Cleanup(func() { _ = c.Close() })
		must(t, c.SetDeadline(time.Now().Add(waitLimit)))
		peers = append(peers, c)
		trip(len(apps) - 1)
	}
	idle := func(most int) {
		t.Helper()
		eventually(t, func() string {
			if now := runtime.NumGoroutine(); now > most {
				return fmt.Sprintf("%d goroutines, want %d at most", now, most)
			}
			return ""
		})
	}
	before := runtime.NumGoroutine()
	open()
	idle(before + 2)
	for range n - 1 {
		open()
	}
	idle(before + n/10)
	if s := b.status(); s.Conns.Live != n || view.a.ledger.info().ConnsUsed != n {
		t.Errorf("%d sessions, %d in the budget, want %d", s.Conns.Live, view.a.ledger.info().ConnsUsed, n)
	}
	for k := range apps {
		trip(k)
	}
	reset(apps[0])
	wantReset(t, peers[0])
	eventually(t, func() string {
		if used := view.a.ledger.info().ConnsUsed; used != n-1 {
			return fmt.Sprintf("%d connections in the budget, want %d", used, n-1)
		}
		return ""
	})
	idle(before + n/10)
	b.stop()
	for k := 1; k < n; k++ {
		wantReset(t, apps[k])
		wantReset(t, peers[k])
	}
}

// BenchmarkRelay is a stream through a relay on loopback, with the buffers that a
// relay gets, and with those that grow as the kernel likes (0).
func BenchmarkRelay(b *testing.B) {
	for name, size := range map[string]struct{ app, net int }{
		"grow": {}, "best": {appBufferBytes, netBufferBest}, "least": {appBufferBytes, netBufferLeast},
	} {
		b.Run(name, func(b *testing.B) {
			parker := value(smcr.NewParker(parkAfter, nil))(b)
			b.Cleanup(func() { must(b, parker.Close()) })
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
				ended := make(chan struct{}) // with the benchmark
				newRelay(parker, app, plainTCP{tcp, time.Now()}, tcp, func(_, _ int64, _ error) { close(ended) }).start()
				<-ended
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
