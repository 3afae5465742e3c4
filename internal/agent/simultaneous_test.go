// SPDX-License-Identifier: Apache-2.0

package agent

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

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// deafTo drops the SYNs that come to a port of the space, until hear is called. Who connects from there
// meanwhile, to who sent them, opens the connection from both sides.
func (s *space) deafTo(t testing.TB, port uint16) (hear func()) {
	t.Helper()
	in := func(f func(c *nftables.Conn)) {
		must(t, s.ns.Do(func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			f(c)
			return c.Flush()
		}))
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: "deaf"}
	in(func(c *nftables.Conn) {
		c.AddTable(table)
		chain := c.AddChain(&nftables.Chain{
			Name: "deaf", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		const flagsOffset, syn, ack = 13, 1 << 1, 1 << 4
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Register: 1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Register: 1, Data: []byte{byte(port >> 8), byte(port)}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: flagsOffset, Len: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
			&expr.Cmp{Register: 1, Data: []byte{syn}},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	})
	return func() { in(func(c *nftables.Conn) { c.DelTable(table) }) }
}

// begin starts to connect from a port, without waiting.
func (s *space) begin(t testing.TB, from, to netip.AddrPort) (fd int) {
	t.Helper()
	must(t, s.ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	}))
	t.Cleanup(func() { unix.Close(fd) })
	must(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: from.Addr().As4(), Port: int(from.Port())}))
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatal(os.NewSyscallError("connect", err))
	}
	return fd
}

// becomes waits for what the connection came to.
func becomes(t testing.TB, fd int, began time.Time) connectResult {
	t.Helper()
	n, err := 0, error(unix.EINTR) // by a signal of Go's runtime
	for end := time.Now().Add(waitLimit); errors.Is(err, unix.EINTR); {
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, int(time.Until(end).Milliseconds()))
	}
	must(t, err)
	r := connectResult{who: "the other", took: time.Since(began)}
	if n == 0 {
		r.errno = unix.EINPROGRESS
		return r
	}
	r.errno = unix.Errno(value(unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR))(t))
	return r
}

// TestHold_simultaneous: two programs connect to each other, from the ports to which the other connects.
func TestHold_simultaneous(t *testing.T) {
	l := newHoldLab(t, preferAll)
	port := uint16(5000)
	both := func() [2]connectResult {
		t.Helper()
		port++ // connection tracking remembers those that were used
		a, b := netip.AddrPortFrom(netip.MustParseAddr(podA), port), netip.AddrPortFrom(netip.MustParseAddr(podB), port)
		hear := l.b.pod.deafTo(t, port)
		defer hear()
		began := time.Now()
		fa := l.a.pod.begin(t, a, b)
		fb := l.b.pod.begin(t, b, a)
		return [2]connectResult{becomes(t, fa, began), becomes(t, fb, began)}
	}
	_ = l.a.pod.try(t, attempt{dst: podB + ":9"}) // the first packets to a new neighbour may be lost
	plain := both()
	compare := func(with string) {
		t.Helper()
		got := both()
		for i, name := range []string{"one", "the other"} {
			t.Logf("%-30s %-10s %-40v %v", with, name, plain[i], got[i])
			if got[i].errno != plain[i].errno || got[i].took > plain[i].took+slack {
				t.Errorf("%s: %s: %v, without agents %v", with, name, got[i], plain[i])
			}
		}
	}
	l.a.start(t)
	compare("one of them has an agent")
	l.b.start(t)
	compare("both have one")
}

// TestHold_simultaneousRequired: where one of the programs must be on SMC-R, which a connection that both open
// cannot be, neither is connected: the other's SYN does not open what waits for its verdict.
func TestHold_simultaneousRequired(t *testing.T) {
	t.Parallel() // the test mostly waits
	const none, prefer, requires = "", preferAll, requireAll
	for _, tt := range []struct{ name, a, b string }{
		{"one requires it", requires, none},
		{"one requires it, the other prefers it", requires, prefer},
		{"the other requires it", none, requires},
		{"one prefers it, the other requires it", prefer, requires},
		{"both require it", requires, requires},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t)
			_ = l.a.pod.try(t, attempt{dst: podB + ":9"}) // the first packets to a new neighbour may be lost
			for n, policies := range map[*testNode]string{l.a: tt.a, l.b: tt.b} {
				if policies != none {
					n.ttl = time.Minute // an agent that gets no processor is not taken for dead
					n.configure(t, l.option, holdSYNs+policies)
					n.start(t)
				}
			}
			port := uint16(5000)
			try := func(lost bool) {
				t.Helper()
				port++ // connection tracking remembers those that were used
				a, b := netip.AddrPortFrom(netip.MustParseAddr(podA), port), netip.AddrPortFrom(netip.MustParseAddr(podB), port)
				hear := func() {}
				if lost { // then the one waits when the other's SYN comes, until its own is repeated after a second
					hear = l.b.pod.deafTo(t, port)
				}
				began := time.Now()
				fa := l.a.pod.begin(t, a, b)
				fb := l.b.pod.begin(t, b, a)
				other := becomes(t, fb, began)
				hear()
				one := becomes(t, fa, began)
				refused := func(r connectResult) bool { // TCP repeats after a second what was lost, or came before the other's socket
					return (r.errno == unix.ECONNREFUSED || !lost && r.errno == unix.ECONNRESET) && (r.took < time.Second+slack || underRaceDetector)
				}
				if lost {
					t.Logf("%-45v %v", one, other)
				}
				if !refused(one) || !refused(other) {
					t.Errorf("SYNs are lost: %t: %v and %v, want that both are refused", lost, one, other)
				}
			}
			for range 3 {
				try(true)
			}
			for range 30 { // the SYNs meet at all moments
				try(false)
			}
			for n, at := range map[*testNode][3]string{l.a: {tt.a, podA, podB}, l.b: {tt.b, podB, podA}} {
				if at[0] != requires {
					continue
				}
				e := value(n.client.Explain(t.Context(), at[1], fmt.Sprintf("%s:%d", at[2], port)))(t)
				if len(e.Recent) == 0 || e.Recent[0].Reason != agentapi.CodeRequired || !strings.HasPrefix(e.Recent[0].Detail, string(agentapi.CodeConnect)+": ") {
					t.Errorf("explanation of %s: %+v, want %s because of %s", at[1], e, agentapi.CodeRequired, agentapi.CodeConnect)
				}
			}
		})
	}
}

// TestHold_refusedBy: a dial tells a reset from an ICMP error, which is the same errno, and an ICMP error does
// not end its connection later.
func TestHold_refusedBy(t *testing.T) {
	l := newLab(t)
	l.route(t)
	const refused, rejectedByPort = 81, rejected + 1
	for _, addr := range []string{podB, podB6} {
		serve(t, l.b.pod.listen(t, netip.AddrPortFrom(netip.MustParseAddr(addr), 80).String()), says("server"))
		dial := func(port uint16, control linux.Control) (*net.TCPConn, error) {
			ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
			defer cancel()
			return linux.DialInNS(ctx, l.a.pod.ns, control, netip.Addr{}, netip.AddrPortFrom(netip.MustParseAddr(addr), port))
		}
		for _, tt := range []struct {
			name    string
			port    uint16
			control linux.Control
			byReset bool
		}{
			{"reset", refused, linux.ControlRecvErr, true},
			{"ICMP", rejectedByPort, linux.ControlRecvErr, false},
			{"reset, not asked", refused, nil, false},
		} {
			_, err := dial(tt.port, tt.control)
			if !errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, linux.ErrByReset) != tt.byReset {
				t.Errorf("%s, %s: %v, want that it is refused, by a reset: %t", addr, tt.name, err, tt.byReset)
			}
		}
		c, err := dial(80, linux.ControlRecvErr)
		must(t, err)
		level, option := unix.SOL_IP, unix.IP_RECVERR
		if addr == podB6 {
			level, option = unix.SOL_IPV6, unix.IPV6_RECVERR
		}
		must(t, value(c.SyscallConn())(t).Control(func(fd uintptr) {
			if on, err := unix.GetsockoptInt(int(fd), level, option); err != nil || on != 0 {
				t.Errorf("IP_RECVERR of a connection is %d, %v", on, err)
			}
		}))
		must(t, c.Close())
	}
}
