// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// metric is the sum of a metric of the node's agent over all labels.
func (n *testNode) metric(t testing.TB, name string) int {
	t.Helper()
	sum := 0
	for _, v := range n.series(t, name) {
		sum += v
	}
	return sum
}

// series are the values of a metric of the node's agent, by their labels: name="value",name="value".
func (n *testNode) series(t testing.TB, name string) map[string]int {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", n.node.APISocket)
	}}}
	resp := value(c.Get("http://agent" + agentapi.PathMetrics))(t)
	defer resp.Body.Close()
	out := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^kube_smcr_`+name+`(?:\{(.*)\})? ([0-9.e+]+)$`).FindAllStringSubmatch(string(value(io.ReadAll(resp.Body))(t)), -1) {
		out[m[1]] = int(value(strconv.ParseFloat(m[2], 64))(t))
	}
	return out
}

// listeners are the ports on loopback of a pod on which somebody listens.
func (s *space) listeners(t testing.TB) []uint16 {
	t.Helper()
	var out []uint16
	must(t, s.ns.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/tcp")
		for _, line := range strings.Split(string(b), "\n") {
			// "N: ADDRESS:PORT ADDRESS:PORT STATE ...", 0A being LISTEN.
			if f := strings.Fields(line); len(f) > 3 && f[3] == "0A" && strings.HasPrefix(f[1], "0100007F:") {
				out = append(out, uint16(value(strconv.ParseUint(f[1][len("0100007F:"):], 16, 16))(t)))
			}
		}
		return err
	}))
	return out
}

// TestAttack_selfConnectLoop: a program in a pod connects to the agent's listeners there.
// One connection made the agent dial itself without end. It is refused by the pod's
// table and, where there is no rule, reset by the agent.
func TestAttack_selfConnectLoop(t *testing.T) {
	l := newProcessLab(t)
	p := l.b.spawnProcess(t)
	ports := l.b.pod.listeners(t)
	if len(ports) != 2 {
		t.Fatalf("the agent listens on %v, want two", ports)
	}
	before := p.files()
	attack := func(t *testing.T) {
		t.Helper()
		for _, port := range ports {
			for _, c := range []struct{ from, to string }{
				{"", "127.0.0.1"},
				{"127.0.0.2", "127.0.0.1"},
				{"", "127.0.0.2"},
				{podB, "127.0.0.1"},
				{"", podB},
				{"", "::ffff:127.0.0.1"},
				{"", "::1"},
				{podB6, "::1"},
				{"", podB6},
			} {
				conn, err := l.b.pod.connect(c.from, netip.AddrPortFrom(netip.MustParseAddr(c.to), port))
				if err == nil {
					defer conn.Close()
					_ = conn.SetDeadline(time.Now().Add(waitLimit))
					_, err = conn.Read(make([]byte, 1))
				}
				if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
					t.Errorf("from %q to %s, port %d: %v, want a reset", c.from, c.to, port, err)
				}
			}
		}
		eventually(t, func() string {
			if now := p.files(); now > before {
				return fmt.Sprintf("%d descriptors, %d before", now, before)
			}
			return ""
		})
	}
	undiverted := func() int { return l.b.metric(t, "undiverted_connections_total") }
	t.Run("the table", func(t *testing.T) {
		attack(t)
		if n := undiverted(); n != 0 {
			t.Errorf("%d connections reached the agent, want 0", n)
		}
	})
	t.Run("the agent", func(t *testing.T) {
		must(t, l.b.pod.ns.Do(func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			c.FlushChain(&nftables.Chain{Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: "kube-smcr"}, Name: "doors"})
			return c.Flush()
		}))
		attack(t)
		if n := undiverted(); n != 2*6 { // not those to addresses without a listener
			t.Errorf("%d connections were reset by the agent, want 12", n)
		}
	})
	// The listeners still do what they are for.
	l.a.spawnProcess(t)
	ln := l.b.pod.listen(t, podB+":0")
	wantCarried(t, l, ln)
}

// connect connects as root.
func (s *space) connect(from string, to netip.AddrPort) (*net.TCPConn, error) {
	return s.connectAs(0, from, to)
}

// connectAs connects from the pod as a user, from an address if one is given, and to addresses
// as they are written: ::ffff:127.0.0.1 is of a socket for IPv6.
func (s *space) connectAs(uid int, from string, to netip.AddrPort) (*net.TCPConn, error) {
	var fd int
	domain, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())})
	if to.Addr().Is4() {
		domain, sa = unix.AF_INET, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	if err := s.ns.Do(func() (err error) {
		// Of the thread alone: the user of a socket is who makes it.
		unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
		defer unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0)
		fd, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "tcp")
	defer f.Close()
	if from != "" {
		a, local := netip.MustParseAddr(from), unix.Sockaddr(nil)
		if local = (&unix.SockaddrInet6{Addr: a.As16()}); a.Is4() {
			local = &unix.SockaddrInet4{Addr: a.As4()}
		}
		if err := unix.Bind(fd, local); err != nil {
			return nil, err
		}
	}
	if err := unix.Connect(fd, sa); err != nil {
		return nil, err
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}
