// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// wantDirect sees that new connections work, and do not come by the agent: the
// server sees the client's own port.
func wantDirect(t testing.TB, l *lab, ln *net.TCPListener) {
	t.Helper()
	var c, s *net.TCPConn
	eventually(t, func() string {
		var err error
		if c, err = l.a.pod.dial(t, ln.Addr().String()); err != nil {
			return err.Error()
		}
		// A frozen agent's listener may have taken it.
		must(t, ln.SetDeadline(time.Now().Add(200*time.Millisecond)))
		for {
			if s, err = ln.AcceptTCP(); err != nil {
				_ = c.Close()
				return "the connection does not come directly: " + err.Error()
			}
			if addrPort(s.RemoteAddr()) == addrPort(c.LocalAddr()) {
				return ""
			}
			_ = s.Close() // it came by the agent, or late, from an earlier try
		}
	})
	must(t, ln.SetDeadline(time.Time{}))
	defer s.Close()
	value(s.Write([]byte("direct")))(t)
	must(t, s.CloseWrite())
	if b, err := io.ReadAll(c); err != nil || string(b) != "direct" {
		t.Errorf("read %q, %v", b, err)
	}
}

// wantCarried sees that new connections are on SMC-R.
func wantCarried(t testing.TB, l *lab, ln *net.TCPListener) (client, server *net.TCPConn) {
	t.Helper()
	before := l.a.status(t).Conns.TotalSMCR
	client, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	server = value(ln.AcceptTCP())(t)
	t.Cleanup(func() { _ = server.Close() })
	for _, p := range [][2]*net.TCPConn{{client, server}, {server, client}} {
		value(p[0].Write([]byte("x")))(t)
		value(io.ReadFull(p[1], make([]byte, 1)))(t)
	}
	if got := l.a.status(t).Conns.TotalSMCR; got != before+1 {
		t.Fatalf("%d connections on SMC-R, want %d: %+v", got, before+1, l.a.status(t))
	}
	return client, server
}

// TestAgent_dies goes through the deaths of an agent: what it carried is reset
// on both sides and never ends as if it were complete; new connections work.
func TestAgent_dies(t *testing.T) {
	for _, who := range []string{"client's", "server's"} {
		t.Run(who+" agent", func(t *testing.T) {
			l := newProcessLab(t)
			l.a.spawn(t)
			l.b.spawn(t)
			victim := l.a
			if who == "server's" {
				victim = l.b
			}
			ln := l.b.pod.listen(t, podB+":0")
			client, server := wantCarried(t, l, ln)

			if err := victim.kill(syscall.SIGKILL); err == nil {
				t.Error("a killed agent ended in order")
			}
			for name, c := range map[string]*net.TCPConn{"client": client, "server": server} {
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("%s reads %v, want ECONNRESET", name, err)
				}
			}
			if victim == l.b {
				// The client's agent finds a peer without SMC-R, and passes.
				c, err := l.a.pod.dial(t, ln.Addr().String())
				must(t, err)
				must(t, value(ln.AcceptTCP())(t).Close())
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
					t.Errorf("read %v, want the end", err)
				}
			}
			wantDirect(t, l, ln)

			// A new agent takes over what the dead one left.
			victim.spawn(t)
			if victim == l.a {
				wantCarried(t, l, ln)
			}
		})
	}
}

func TestAgent_hangs(t *testing.T) {
	l := newProcessLab(t)
	l.a.spawn(t)
	l.b.spawn(t)
	ln := l.b.pod.listen(t, podB+":0")
	client, server := wantCarried(t, l, ln)
	l.a.freeze(true)
	// What the other side sends meanwhile is not acknowledged, for longer than all
	// its tries would take without growing patience.
	value(server.Write([]byte("z")))(t)
	must(t, client.SetDeadline(time.Now().Add(2*time.Second)))
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read behind a frozen agent: %v", err)
	}
	wantDirect(t, l, ln)
	l.a.freeze(false)
	// It goes on where it was, and with what it had not taken.
	serve(t, ln, echo)
	for _, c := range []*net.TCPConn{client, server} {
		must(t, c.SetDeadline(time.Now().Add(waitLimit)))
	}
	value(io.ReadFull(client, make([]byte, 1)))(t)
	value(client.Write([]byte("y")))(t)
	value(io.ReadFull(server, make([]byte, 1)))(t)
	before := l.a.status(t).Conns.TotalSMCR
	eventually(t, func() string {
		c, err := l.a.pod.dial(t, ln.Addr().String())
		must(t, err)
		exchange(t, c, 10)
		if l.a.status(t).Conns.TotalSMCR == before {
			return "connections are not diverted again"
		}
		return ""
	})
}

// TestAgent_leavesNothing: after SIGTERM there is no table, rule or route of
// ours in the pod.
func TestAgent_leavesNothing(t *testing.T) {
	l := newProcessLab(t)
	l.a.spawn(t)
	if err := l.a.kill(syscall.SIGTERM); err != nil {
		t.Errorf("agent ended with %v", err)
	}
	left, err := os.ReadDir(l.a.dir)
	must(t, err)
	for _, e := range left {
		if e.Name() != "attachments" && e.Name() != "config.yaml" {
			t.Errorf("left behind: %s", e.Name())
		}
	}
	wantClean(t, l.a.pod)
	must(t, l.a.pod.ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_fwmark_accept")
		if err == nil && string(b) != "0\n" {
			t.Errorf("tcp_fwmark_accept is %q", b)
		}
		return err
	}))
}

// wantClean fails the test if there is anything of ours in a pod.
func wantClean(t testing.TB, s *space) {
	t.Helper()
	const ours = 7609 // table of routes and priority of rules
	must(t, s.ns.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := c.ListTables()
		for _, x := range tables {
			t.Errorf("%s: nftables table %s", s.path, x.Name)
		}
		if err != nil {
			return err
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Priority == ours {
					t.Errorf("%s: rule %v", s.path, r)
				}
			}
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: ours}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			if len(routes) != 0 {
				t.Errorf("%s: routes %v", s.path, routes)
			}
		}
		return nil
	}))
}

// TestAgent_leavesTheNode: an agent that is told to leave takes everything with
// it.
func TestAgent_leavesTheNode(t *testing.T) {
	l := newLab(t)
	l.b.dir = l.a.dir
	l.b.attach(t, podB+"/24")
	leave := make(chan struct{})
	l.a.cfg.Leave = leave
	l.a.cfg.Node.DrainTimeout = 100 * time.Millisecond
	l.a.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	s := value(ln.AcceptTCP())(t)
	defer s.Close()
	value(c.Write([]byte("x")))(t)
	value(io.ReadFull(s, make([]byte, 1)))(t)
	if st := l.a.status(t); st.Conns.LiveSMCR != 2 { // at both ends
		t.Fatalf("status %+v", st)
	}

	close(leave)
	for name, c := range map[string]*net.TCPConn{"client": c, "server": s} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s reads %v, want ECONNRESET", name, err)
		}
	}
	eventually(t, func() string {
		if left, err := os.ReadDir(l.a.dir); !errors.Is(err, os.ErrNotExist) {
			return fmt.Sprintf("the data directory is there with %v, %v", left, err)
		}
		return ""
	})
	must(t, l.a.stop())
	for _, s := range []*space{l.a.pod, l.b.pod} {
		wantClean(t, s)
	}
	wantDirect(t, l, ln)
}

// TestAgent_noDescriptorLeak opens and ends many connections and counts
// descriptors.
func TestAgent_noDescriptorLeak(t *testing.T) {
	l := newLab(t)
	l.a.start(t)
	l.b.start(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	round := func() {
		for i := range 20 {
			c, err := l.a.pod.dial(t, ln.Addr().String())
			must(t, err)
			switch i % 3 {
			case 0:
				exchange(t, c, 10_000)
			case 1:
				value(c.Write([]byte("x")))(t)
				value(io.ReadFull(c, make([]byte, 1)))(t)
				reset(c)
			}
			_ = c.Close() // in the other cases it is closed already
		}
		eventually(t, func() string {
			for _, n := range []*testNode{l.a, l.b} {
				if s := n.status(t); s.Conns.Live != 0 || s.NodeBudget.ConnsUsed != 0 {
					return fmt.Sprintf("node %s: %+v", n.name, s)
				}
			}
			return ""
		})
	}
	descriptors := func() int { return len(value(os.ReadDir("/proc/self/fd"))(t)) }
	round()
	eventually(t, func() string {
		before := descriptors()
		round()
		if after := descriptors(); after > before {
			return fmt.Sprintf("%d descriptors, %d after another round", before, after)
		}
		return ""
	})
}

// TestStore_diskFull: a record that could not be written leaves the old ones,
// and the agent goes on.
func TestStore_diskFull(t *testing.T) {
	l := newLab(t)
	small := t.TempDir()
	must(t, unix.Mount("none", small, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(small, unix.MNT_DETACH)) })
	l.a.dir = small
	l.a.configure(t, l.option, preferAll)
	l.a.attach(t, podA+"/24")
	l.a.start(t)
	fill := make([]byte, 64<<10)
	_ = os.WriteFile(filepath.Join(small, "filler"), fill, 0o600) // as much as fits
	if err := cni.NewStore(small).Write(cni.Attachment{ContainerID: "x", IfName: "eth0", NetNS: "/x"}); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("Write on a full disk = %v", err)
	}
	must(t, l.a.client.Sync(t.Context()))
	if s := l.a.status(t); s.Pods.Ready != 1 || s.Pods.Attached != 1 {
		t.Errorf("status %+v", s)
	}
}
