// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// sidecarUser is the user whose connections a sidecar's rules leave alone: its
// own.
const sidecarUser = 1337

// inSpace runs a program in a namespace.
func inSpace(t testing.TB, s *space, stdin string, args ...string) {
	t.Helper()
	must(t, s.ns.Do(func() error {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%v: %w: %s", args, err, out)
		}
		return nil
	}))
}

// sidecar is the proxy of a service mesh in a pod.
type sidecar struct {
	pod  *space
	seen atomic.Int64 // connections that it got
}

// newSidecar starts the proxy: what comes to port 15001 goes where it was going.
func newSidecar(t testing.TB, pod *space) *sidecar {
	t.Helper()
	s := &sidecar{pod: pod}
	serve(t, pod.listen(t, "127.0.0.1:15001"), func(c *net.TCPConn) {
		s.seen.Add(1)
		dst, err := linux.OriginalDst(c)
		if err != nil {
			return
		}
		out, err := pod.connectAs(sidecarUser, "", dst)
		if err != nil {
			reset(c)
			return
		}
		defer out.Close()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = io.Copy(out, c)
			_ = out.CloseWrite()
		})
		_, _ = io.Copy(c, out)
		_ = c.CloseWrite()
		wg.Wait()
	})
	return s
}

// install adds the rules that bring connections to the proxy, before or after
// other rules at the same place.
func (s *sidecar) install(t testing.TB, first bool) {
	t.Helper()
	priority := -99
	if first {
		priority = -101
	}
	inSpace(t, s.pod, fmt.Sprintf(`table ip istio {
	chain out { type nat hook output priority %d;
		meta skuid %d return
		oifname "lo" return
		tcp dport 8000 redirect to :15001
	}
}`, priority, sidecarUser), "nft", "-f", "-")
}

func (s *sidecar) remove(t testing.TB) {
	t.Helper()
	inSpace(t, s.pod, "", "nft", "delete table ip istio")
}

// TestAttack_meshLoop: a sidecar's rules send the agent's connections to the
// sidecar, whose own connections would be diverted to the agent. One connection
// made 2,446 in a second. It passes the agent once at most: not at all when the
// rules are there before the agent, or have been noticed, and once when they have
// just come.
func TestAttack_meshLoop(t *testing.T) {
	t.Parallel() // it mostly waits
	const required = "policies:\n- {name: must, mode: Required}\n"
	for _, tt := range []struct {
		name, config string
		usedUp, full bool // the pod's budget, the negative cache
	}{
		{name: "free budget", config: preferAll},
		{name: "used-up budget", config: "  budgets: {pod: {connections: 1, memory: 16MiB}}\n" + preferAll, usedUp: true},
		{name: "full negative cache", config: preferAll, full: true},
		{name: "used-up budget and full negative cache", config: "  budgets: {pod: {connections: 1, memory: 16MiB}}\n" + preferAll, usedUp: true, full: true},
		{name: "required", config: required},
	} {
		for _, when := range []string{"rules first", "rules before the agent's later", "rules behind the agent's later"} {
			t.Run(tt.name+"/"+when, func(t *testing.T) {
				l := newProcessLab(t)
				l.a.writeConfig(t, tt.config)
				sc := newSidecar(t, l.a.pod)
				serve(t, l.b.pod.listen(t, podB+":8000"), echo)
				early := when == "rules first"
				if early {
					sc.install(t, true)
				}
				p := l.a.spawnProcess(t)
				if tt.usedUp && !early {
					l.b.spawnProcess(t)
					serve(t, l.b.pod.listen(t, podB+":9000"), echo)
					c := value(l.a.pod.dialPlain(podB + ":9000"))(t)
					defer c.Close()
					value(c.Write([]byte("x")))(t)
					value(io.ReadFull(c, make([]byte, 1)))(t)
				}
				if tt.full {
					l.fillCache(t)
				}
				before, carried := p.files(), l.a.passes(t)
				if !early {
					sc.install(t, when == "rules before the agent's later")
				}
				most := 0
				if !early {
					most = 1
				}
				use := func() {
					t.Helper()
					c, err := l.a.pod.dialPlain(podB + ":8000")
					if err == nil {
						defer c.Close()
						_ = c.SetDeadline(time.Now().Add(waitLimit))
					}
					if tt.config != required {
						must(t, err)
						exchange(t, c, 1000)
					} else if err == nil {
						if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
							t.Errorf("read %d bytes, %v, want an end: there is no SMC-R", n, err)
						}
					}
				}
				use()
				if n := l.a.passes(t) - carried; n > most {
					t.Errorf("the connection passed the agent %d times, want %d at most", n, most)
				}
				if n := sc.seen.Load(); n > 1+int64(most) {
					t.Errorf("the sidecar got %d connections of one, want %d at most", n, 1+most)
				}
				eventually(t, func() string {
					if now := p.files(); now > before {
						return fmt.Sprintf("%d descriptors, %d before", now, before)
					}
					return ""
				})
				l.wantMesh(t)
				must(t, l.a.client.Sync(t.Context()))
				sc.seen.Store(0)
				carried = l.a.passes(t)
				use()
				if n := l.a.passes(t) - carried; n > 0 || sc.seen.Load() > 1 {
					t.Errorf("with a redirector that is known: %d passes of the agent, the sidecar got %d connections", n, sc.seen.Load())
				}
			})
		}
	}
}

// passes counts what the agent dialed for and carried.
func (n *testNode) passes(t testing.TB) int {
	t.Helper()
	s := n.status(t).Conns
	return int(s.TotalTCP + s.TotalSMCR)
}

// wantMesh waits until the agent of node a says that there is another redirector.
func (l *lab) wantMesh(t testing.TB) {
	t.Helper()
	eventually(t, func() string {
		for _, a := range value(l.a.client.Attachments(t.Context()))(t).Attachments {
			if a.Reason != agentapi.CodeMesh || a.Detail == "" {
				return fmt.Sprintf("attachment %+v", a)
			}
		}
		e := value(l.a.client.Explain(t.Context(), "test/a", podB+":8001"))(t)
		if s := l.a.status(t); e.Code != agentapi.CodeMesh && !e.Required || len(s.Problems) == 0 {
			return fmt.Sprintf("explanation %+v, problems %q", e, s.Problems)
		}
		return ""
	})
}

// fillCache makes more destinations without SMC-R than the negative cache holds.
func (l *lab) fillCache(t testing.TB) {
	t.Helper()
	inSpace(t, l.b.pod, "table ip many {\n chain in { type nat hook prerouting priority -100; tcp dport 20000-22000 redirect to :8000\n }\n}", "nft", "-f", "-")
	for i := range 1100 {
		c := value(l.a.pod.dialPlain(fmt.Sprintf("%s:%d", podB, 20000+i)))(t)
		exchange(t, c, 1)
		_ = c.Close()
	}
}

// TestAttack_meshEnds: when the sidecar's rules are gone, connections are on SMC-R
// again.
func TestAttack_meshEnds(t *testing.T) {
	l := newProcessLab(t)
	l.b.spawnProcess(t)
	sc := newSidecar(t, l.a.pod)
	sc.install(t, true)
	l.a.spawnProcess(t)
	l.wantMesh(t)
	sc.remove(t)
	ln := l.b.pod.listen(t, podB+":8000")
	eventually(t, func() string {
		if a := value(l.a.client.Attachments(t.Context()))(t).Attachments[0]; a.Reason != "" {
			return fmt.Sprintf("attachment %+v", a)
		}
		return ""
	})
	must(t, l.a.client.Sync(t.Context()))
	wantCarried(t, l, ln)
}

// TestAttack_meshInbound: a sidecar that takes what comes from the network gets it
// although the client offers SMC-R, also right after its rules came. Before, the
// client was reset: the agent connected to the sidecar's own port.
func TestAttack_meshInbound(t *testing.T) {
	for _, when := range []string{"rules first", "rules later"} {
		t.Run(when, func(t *testing.T) {
			l := newProcessLab(t)
			rules := func() {
				inSpace(t, l.b.pod, "table ip istio {\n chain in { type nat hook prerouting priority -100; tcp dport 8000 redirect to :15006\n }\n}", "nft", "-f", "-")
			}
			var seen atomic.Int64
			serve(t, l.b.pod.listen(t, "0.0.0.0:15006"), func(c *net.TCPConn) {
				if dst, err := linux.OriginalDst(c); err != nil || dst != netip.MustParseAddrPort(podB+":8000") {
					t.Errorf("the sidecar gets a connection to %v, %v", dst, err)
				}
				seen.Add(1)
				echo(c)
			})
			l.b.pod.listen(t, podB+":8000")
			if when == "rules first" {
				rules()
			}
			l.b.spawnProcess(t)
			l.a.spawnProcess(t)
			if when != "rules first" {
				rules()
			}
			for range 3 {
				c := value(l.a.pod.dialPlain(podB + ":8000"))(t)
				exchange(t, c, 1000)
				_ = c.Close()
			}
			if n := seen.Load(); n != 3 {
				t.Errorf("the sidecar got %d connections, want 3", n)
			}
			if n := l.b.passes(t); n != 0 {
				t.Errorf("%d passed the server's agent, want 0", n)
			}
		})
	}
}

// TestAttack_ownerFirewall: a user whom a firewall in the pod forbids to connect cannot do so by way of the agent, which
// is another user. Without these rules the pod is served.
func TestAttack_ownerFirewall(t *testing.T) {
	const user, dst = 1234, podB + ":8001"
	for _, hold := range []string{holdSYNs, ""} {
		t.Run(strings.TrimSpace(hold), func(t *testing.T) {
			l := newLab(t)
			for _, n := range []*testNode{l.a, l.b} {
				n.configure(t, l.option, hold+preferAll)
			}
			serve(t, l.b.pod.listen(t, dst), echo)
			inSpace(t, l.a.pod, fmt.Sprintf("table inet f {\n chain out { type filter hook output priority 0; tcp dport 8001 meta skuid %d reject with tcp reset\n }\n}", user), "nft", "-f", "-")
			l.a.start(t)
			l.b.start(t)
			if c, err := l.a.pod.connectAs(user, "", netip.MustParseAddrPort(dst)); !errors.Is(err, unix.ECONNREFUSED) {
				_ = c.Close()
				t.Errorf("connected in spite of the pod's firewall: %v", err)
			}
			l.wantMesh(t)
			inSpace(t, l.a.pod, "", "nft", "delete table inet f")
			l.carried(t, dst)
		})
	}
}

// TestAttack_notTracked: a rule in a pod that excludes its packets from connection tracking, and so from the agent, lets nothing past that
// must be on SMC-R, and is said. Without it the pod is served.
func TestAttack_notTracked(t *testing.T) {
	const dst = podB + ":8001"
	for _, hold := range []string{holdSYNs, ""} {
		t.Run(strings.TrimSpace(hold), func(t *testing.T) {
			l := newLab(t)
			for _, n := range []*testNode{l.a, l.b} {
				n.configure(t, l.option, hold+requireAll)
			}
			serve(t, l.b.pod.listen(t, dst), echo)
			l.a.start(t)
			l.b.start(t)
			l.carried(t, dst)
			inSpace(t, l.a.pod, "table ip t {\n chain c { type filter hook output priority raw; ip protocol tcp notrack\n }\n}", "nft", "-f", "-")
			refused := func(when string) {
				t.Helper()
				if c, err := l.a.pod.connectAs(0, "", netip.MustParseAddrPort(dst)); !errors.Is(err, unix.ECONNREFUSED) {
					_ = c.Close()
					t.Errorf("%s: connected to what must be on SMC-R: %v", when, err)
				}
			}
			refused("before the agent's next look")
			l.wantMesh(t)
			refused("after it")
			inSpace(t, l.a.pod, "", "nft", "delete table ip t")
			eventually(t, func() string {
				return value(l.a.client.Attachments(t.Context()))(t).Attachments[0].Detail
			})
			l.carried(t, dst)
		})
	}
}

// TestAgent_untracked: once a pod has been without rules of others for a while,
// what is not diverted is kept from connection tracking there, which ends when
// somebody else has rules. A connection that is carried does not notice.
func TestAgent_untracked(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newLab(t)
	l.a.cfg.untrackAfter = time.Millisecond
	l.a.start(t)
	l.b.start(t)
	client, server := wantCarried(t, l, l.b.pod.listen(t, podB+":0"))
	awaitUntracked := func(want bool) {
		t.Helper()
		eventually(t, func() string {
			if o := value(linux.FindOthers(l.a.pod.ns))(t); o.Untracked != want {
				return fmt.Sprintf("%+v, want Untracked %t", o, want)
			}
			return ""
		})
		value(client.Write([]byte("x")))(t)
		value(io.ReadFull(server, make([]byte, 1)))(t)
	}
	awaitUntracked(true)
	inSpace(t, l.a.pod, "table inet firewall {\n chain in { type filter hook input priority 0; ct state established accept\n }\n}", "nft", "-f", "-")
	awaitUntracked(false)
	if a := value(l.a.client.Attachments(t.Context()))(t).Attachments[0]; a.Reason != "" {
		t.Errorf("a firewall is taken for a redirector: %+v", a)
	}
	inSpace(t, l.a.pod, "", "nft", "delete table inet firewall")
	awaitUntracked(true)
}
