// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// serve accepts connections and runs f on each, until the listener ends.
func serve(t testing.TB, l *net.TCPListener, f func(*net.TCPConn)) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			wg.Go(func() {
				f(c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
}

func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

// exchange sends what an echo server returns, ends its own direction and reads
// until the end.
func exchange(t testing.TB, c *net.TCPConn, size int) {
	t.Helper()
	sent := make([]byte, size)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(sent)
	errs := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		errs <- errors.Join(err, c.CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("after %d of %d bytes: %v", len(got), size, err)
	}
	must(t, <-errs)
	if sha256.Sum256(got) != sha256.Sum256(sent) {
		i := 0
		for i < min(len(got), len(sent)) && got[i] == sent[i] {
			i++
		}
		t.Fatalf("%d bytes came back of %d, the first difference at %d", len(got), size, i)
	}
}

func TestAgent_carries(t *testing.T) {
	l := newLab(t)
	l.a.start(t)
	l.b.start(t)
	for _, addr := range []string{podB, podB6} {
		for _, size := range []int{0, 1, 5000, 3 << 20} {
			t.Run(fmt.Sprintf("%s/%d", addr, size), func(t *testing.T) {
				peers := make(chan netip.AddrPort, 4)
				ln := l.b.pod.listen(t, netip.AddrPortFrom(netip.MustParseAddr(addr), 0).String())
				serve(t, ln, func(c *net.TCPConn) {
					peers <- addrPort(c.RemoteAddr())
					echo(c)
				})
				before := [2]agentapi.Status{l.a.status(t), l.b.status(t)}
				c, err := l.a.pod.dial(t, ln.Addr().String())
				must(t, err)
				if got := addrPort(c.RemoteAddr()); got != addrPort(ln.Addr()) {
					t.Errorf("the client sees peer %v, want %v", got, ln.Addr())
				}
				exchange(t, c, size)
				if got := (<-peers).Addr(); got != addrPort(c.LocalAddr()).Addr() {
					t.Errorf("the server sees client %v, want %v", got, c.LocalAddr())
				}
				for i, n := range []*testNode{l.a, l.b} {
					eventually(t, func() string {
						s := n.status(t)
						if s.Conns.TotalSMCR != before[i].Conns.TotalSMCR+1 || s.Conns.Live != 0 {
							return fmt.Sprintf("node %s: %+v after %+v", n.name, s, before[i].Conns)
						}
						if got := s.Conns.BytesSMCR - before[i].Conns.BytesSMCR; got != uint64(2*size) {
							return fmt.Sprintf("node %s: %d bytes on SMC-R, want %d", n.name, got, 2*size)
						}
						return ""
					})
				}
			})
		}
	}
	links := value(l.a.client.Links(t.Context()))(t)
	if len(links.LinkGroups) == 0 || len(links.LinkGroups[0].Links) == 0 {
		t.Errorf("no links: %+v", links)
	}
}

// TestAgent_linkGroupLost: when no way to the peer's node is left what was carried is reset, and explain says
// why.
func TestAgent_linkGroupLost(t *testing.T) {
	t.Parallel() // the test mostly waits
	l := newLab(t)
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	client, server := wantCarried(t, l, ln)
	for _, name := range []string{"roce0", "roce1"} {
		l.b.host.links(t, func(h *netlink.Handle) error {
			link, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			return h.LinkSetDown(link)
		})
	}
	for name, c := range map[string]*net.TCPConn{"client": client, "server": server} {
		must(t, c.SetDeadline(time.Now().Add(waitLimit)))
		_, err := c.Write([]byte("x"))
		if err == nil {
			_, err = io.Copy(io.Discard, c)
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v, want ECONNRESET", name, err)
		}
	}
	eventually(t, func() string { // the node that finds out first: the other's connection is reset by it
		var all []agentapi.Decision
		for _, n := range []*testNode{l.a, l.b} {
			all = append(all, value(n.client.Explain(t.Context(), podA, ln.Addr().String()))(t).Recent...)
		}
		if !slices.ContainsFunc(all, func(d agentapi.Decision) bool {
			return d.Reason == agentapi.CodeGroupLost && d.Mode == agentapi.ModeReset
		}) {
			return fmt.Sprintf("decisions %+v", all)
		}
		return ""
	})
}

// TestAgent_devices: the status shows every device with the state of its port,
// and one whose port is down keeps neither the agent from starting nor
// connections from working.
func TestAgent_devices(t *testing.T) {
	l := newLab(t)
	port := func(up bool) {
		l.a.host.links(t, func(h *netlink.Handle) error {
			link, err := h.LinkByName("roce1")
			if err == nil && up {
				return h.LinkSetUp(link)
			} else if err == nil {
				return h.LinkSetDown(link)
			}
			return err
		})
	}
	want := []agentapi.Device{
		{Name: "soft0", Provider: "soft", Address: "10.77.0.1", Interface: "roce0", MTU: 4096, Port: "ACTIVE"},
		{Name: "soft1", Provider: "soft", Address: "10.77.1.1", Interface: "roce1", MTU: 4096, Port: "DOWN"},
	}
	shown := func(problems int) {
		t.Helper()
		eventually(t, func() string {
			s := l.a.status(t)
			if len(s.Problems) != problems {
				return fmt.Sprintf("problems %q", s.Problems)
			}
			return cmp.Diff(want, s.Devices, cmpopts.IgnoreFields(agentapi.Device{}, "Since"))
		})
	}
	port(false)
	l.a.start(t)
	l.b.start(t)
	shown(1)
	// The kernel tells of a carrier up to a second late.
	eventually(t, func() string {
		if d := l.b.status(t).Devices; d[0].Port != "ACTIVE" || d[1].Port != "DOWN" {
			return fmt.Sprintf("node b: %+v", d)
		}
		return ""
	})
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	carried := func() {
		t.Helper()
		before := l.a.status(t).Conns.TotalSMCR
		c, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		exchange(t, c, 1000)
		if s := l.a.status(t); s.Conns.TotalSMCR != before+1 {
			t.Errorf("not on SMC-R: %+v", s.Reasons)
		}
	}
	carried()
	port(true)
	want[1].Port = "ACTIVE"
	shown(0)
	carried()
	for _, n := range []*testNode{l.a, l.b} {
		eventually(t, func() string {
			links := value(n.client.Links(t.Context()))(t)
			var devices []string
			for _, g := range links.LinkGroups {
				for _, k := range g.Links {
					devices = append(devices, k.Device+" "+k.State)
				}
			}
			slices.Sort(devices)
			if len(links.LinkGroups) != 1 || links.LinkGroups[0].Redundancy != "SYMMETRIC" {
				return fmt.Sprintf("node %s: %+v", n.name, links)
			}
			return cmp.Diff([]string{"soft0 ACTIVE", "soft1 ACTIVE"}, devices)
		})
	}
}

// TestAgent_needsEveryDevice: an agent with a device that is not there says
// which one, and does not start.
func TestAgent_needsEveryDevice(t *testing.T) {
	l := newLab(t)
	l.a.roce[1] = "10.99.0.1"
	l.a.configure(t, l.option, preferAll)
	err := Run(t.Context(), l.a.cfg)
	if !errors.Is(err, syscall.EADDRNOTAVAIL) || !strings.Contains(err.Error(), "node.devices[1], 10.99.0.1") {
		t.Errorf("Run = %v", err)
	}
}

func TestAgent_plainPeer(t *testing.T) {
	l := newLab(t)
	l.a.start(t) // the peer's node has no agent
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 1<<20)
	var e agentapi.Explanation
	eventually(t, func() string {
		e = value(l.a.client.Explain(t.Context(), "test/a", ln.Addr().String()))(t)
		if len(e.Live) > 0 {
			return "the connection does not end"
		}
		return ""
	})
	if e.Code != "PEERNOSMC" || e.Bypassed == nil || len(e.Recent) != 1 || e.Recent[0].Mode != "TCP" {
		t.Errorf("explanation %+v", e)
	}
	// The next connection is not diverted.
	c, err = l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 1000)
	if s := l.a.status(t); s.Conns.TotalTCP != 1 || s.Reasons["PEERNOSMC"] != 1 {
		t.Errorf("status %+v", s)
	}
}

func TestAgent_required(t *testing.T) {
	l := newLab(t)
	l.a.configure(t, l.option, "policies:\n- {name: must, mode: Required}\n")
	l.a.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	for range 2 { // the second one must not find a bypass
		c, err := l.a.pod.dial(t, ln.Addr().String())
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read = %v, want ECONNRESET", err)
		}
	}
	eventually(t, func() string {
		e := value(l.a.client.Explain(t.Context(), podA, ln.Addr().String()))(t)
		if e.Code != agentapi.CodeRequired || !e.Required || len(e.Recent) != 1 || e.Recent[0].Count != 2 {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
	l.b.start(t)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 1000)
}

func TestAgent_refused(t *testing.T) {
	l := newLab(t)
	l.a.start(t)
	for _, withPeer := range []bool{false, true} {
		t.Run(fmt.Sprintf("peer agent %t", withPeer), func(t *testing.T) {
			if withPeer {
				l.b.start(t)
			}
			c, err := l.a.pod.dial(t, podB+":9")
			if err == nil {
				_, err = c.Read(make([]byte, 1))
			}
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("read = %v, want a reset", err)
			}
		})
	}
}

// TestAgent_backlog: a connection to an application whose backlog is full waits for it, as without SMC-R; and
// no client that wants SMC-R is kept waiting.
func TestAgent_backlog(t *testing.T) {
	l := newLab(t)
	l.b.cfg.appPatience = 300 * time.Millisecond
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	raw := value(ln.SyscallConn())(t)
	var err error
	must(t, raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) }))
	must(t, err)
	first := value(l.b.pod.dial(t, ln.Addr().String()))(t) // the only one for which the backlog has a place

	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	eventually(t, func() string {
		if s := l.a.status(t); s.Reasons[agentapi.CodeOf(clc.ReasonInternal)] != 1 {
			return fmt.Sprintf("node a: reasons %v, want a connection that the peer declined", s.Reasons)
		}
		return ""
	})
	serve(t, ln, echo)
	exchange(t, c, 100_000)
	must(t, first.Close())
	if s := l.b.status(t); s.Reasons[agentapi.CodeBacklog] != 1 || s.Conns.TotalTCP != 1 {
		t.Errorf("node b: reasons %v, %+v, want one connection that is TCP for %s", s.Reasons, s.Conns, agentapi.CodeBacklog)
	}
}

// TestAgent_reset sees that each side's reset reaches the other, and that an
// end of one direction is not an end of both.
func TestAgent_ends(t *testing.T) {
	l := newLab(t)
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	accepted := func(t *testing.T) (client, server *net.TCPConn) {
		t.Helper()
		client, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		server = value(ln.AcceptTCP())(t)
		t.Cleanup(func() { _ = server.Close() })
		for _, p := range [][2]*net.TCPConn{{client, server}, {server, client}} {
			value(p[0].Write([]byte("x")))(t)
			value(io.ReadFull(p[1], make([]byte, 1)))(t)
		}
		return client, server
	}
	t.Run("client resets", func(t *testing.T) {
		client, server := accepted(t)
		reset(client)
		if _, err := server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("server reads %v", err)
		}
	})
	t.Run("server resets", func(t *testing.T) {
		client, server := accepted(t)
		reset(server)
		if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("client reads %v", err)
		}
	})
	t.Run("half close", func(t *testing.T) {
		client, server := accepted(t)
		must(t, client.CloseWrite())
		if b, err := io.ReadAll(server); err != nil || len(b) > 0 {
			t.Errorf("server reads %q, %v", b, err)
		}
		value(server.Write([]byte("still here")))(t)
		must(t, server.Close())
		if b, err := io.ReadAll(client); err != nil || !bytes.Equal(b, []byte("still here")) {
			t.Errorf("client reads %q, %v", b, err)
		}
	})
	t.Run("agent stops", func(t *testing.T) {
		client, server := accepted(t)
		l.b.cfg.Node.DrainTimeout = 0
		must(t, l.b.stop())
		for _, c := range []*net.TCPConn{client, server} {
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read %v", err)
			}
		}
		// New connections work without it.
		c, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		s := value(ln.AcceptTCP())(t)
		must(t, s.Close())
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("read %v, want the end", err)
		}
	})
}

// TestAgent_manyAtOnce carries more connections at a time than share an RMB,
// and more than the budget allows: those are TCP, some of them past the agent, and
// none fails.
func TestAgent_manyAtOnce(t *testing.T) {
	l := newLab(t)
	const most = 20
	l.a.configure(t, l.option, fmt.Sprintf("  negativeCacheTTL: 0s\n  budgets: {pod: {connections: %d}}\n", most)+preferAll)
	l.a.start(t)
	l.b.start(t)
	// Each server begins to answer when all connections are there.
	const conns = 2 * most
	ln := l.b.pod.listen(t, podB+":0")
	var arrived sync.WaitGroup
	arrived.Add(conns)
	serve(t, ln, func(c *net.TCPConn) {
		arrived.Done()
		arrived.Wait()
		echo(c)
	})
	var wg sync.WaitGroup
	for range conns {
		wg.Go(func() {
			c, err := l.a.pod.dial(t, ln.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			b := make([]byte, 100_000)
			go func() { _, _ = c.Write(b) }() // a failure shows in the read
			if _, err := io.ReadFull(c, make([]byte, len(b))); err != nil {
				t.Error(err)
			}
			_ = c.Close()
		})
	}
	wg.Wait()
	s := l.a.status(t)
	if over := s.Reasons[agentapi.CodeBudgetConns]; s.Conns.TotalSMCR != most || over == 0 || over > conns-most {
		t.Errorf("%+v, reasons %v", s.Conns, s.Reasons)
	}
}

// TestAgent_sameNode: two pods of one node, so one agent with two stacks on
// one device.
func TestAgent_sameNode(t *testing.T) {
	l := newLab(t)
	l.b.dir = l.a.dir
	l.b.attach(t, podB+"/24", podB6+"/64")
	l.a.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	for range 3 {
		c, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		exchange(t, c, 1<<20)
	}
	eventually(t, func() string {
		if s := l.a.status(t); s.Conns.TotalSMCR != 6 || s.Conns.Live != 0 || s.Pods.Ready != 2 {
			return fmt.Sprintf("%+v %+v", s.Conns, s.Reasons)
		}
		return ""
	})
}
