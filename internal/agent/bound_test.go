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
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// onDevice binds a socket to an interface.
func onDevice(name string) linux.Control {
	return func(_, _ string, raw syscall.RawConn) error {
		var err error
		cerr := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), name) })
		return errors.Join(cerr, err)
	}
}

// TestHold_boundSocket: a connection whose socket is bound to an interface is plain TCP at once, or refused where SMC-R is
// required, and says why. Others to the same destination are on SMC-R.
func TestHold_boundSocket(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		want         error
	}{{"prefer", preferAll, nil}, {"required", "policies:\n- {name: must, mode: Required}\n", syscall.ECONNREFUSED}} {
		t.Run(c.name, func(t *testing.T) {
			l := newHoldLab(t, c.policy)
			l.a.start(t)
			l.b.start(t)
			for dst, src := range map[string]string{podB + ":80": podA, "[" + podB6 + "]:80": podA6} {
				serve(t, l.b.pod.listen(t, dst), echo)
				l.carried(t, dst) // the first packets to a new neighbour may be lost
				ctx, stop := context.WithTimeout(t.Context(), time.Second)
				conn, err := linux.DialInNS(ctx, l.a.pod.ns, onDevice("eth0"), netip.Addr{}, netip.MustParseAddrPort(dst))
				stop()
				if !errors.Is(err, c.want) {
					t.Errorf("connect to %s: %v, want %v", dst, err, c.want)
				}
				if err == nil {
					exchange(t, conn, 1000)
				}
				e := value(l.a.client.Explain(t.Context(), src, dst))(t)
				if len(e.Recent) == 0 || !strings.Contains(string(e.Recent[0].Reason)+e.Recent[0].Detail, string(agentapi.CodeUndiverted)) {
					t.Errorf("explanation %+v, want %s", e, agentapi.CodeUndiverted)
				}
				l.carried(t, dst)
			}
		})
	}
}

// TestHold_boundListener: connections to a listener that is bound to an interface are on SMC-R.
func TestHold_boundListener(t *testing.T) {
	l := newHoldLab(t, preferAll)
	l.a.start(t)
	l.b.start(t)
	for _, dst := range []string{podB + ":80", "[" + podB6 + "]:80"} {
		ln := value(linux.ListenInNS(t.Context(), l.b.pod.ns, onDevice("eth0"), netip.MustParseAddrPort(dst)))(t)
		t.Cleanup(func() { _ = ln.Close() })
		serve(t, ln, echo)
		l.carried(t, dst)
	}
}

// carried connects until a connection of pod A to dst is on SMC-R: the first rendezvous may be late on a busy machine.
func (l *lab) carried(t testing.TB, dst string) {
	t.Helper()
	before := l.a.status(t).Conns.TotalSMCR
	eventually(t, func() string {
		if c, err := l.a.pod.dial(t, dst); err == nil {
			exchange(t, c, 1000)
		}
		if s := l.a.status(t); s.Conns.TotalSMCR == before {
			return fmt.Sprintf("no connection to %s is on SMC-R: %+v, reasons %v", dst, s.Conns, s.Reasons)
		}
		return ""
	})
}

// TestHold_ownRoute: a connection that has a way which the agent's own does not have, since a routing rule is for its user only,
// goes that way by itself, or does not come to be where SMC-R is required: the kernel may drop its SYN instead of refusing it, as
// it looks for a route of user 0 once the verdict marks the SYN.
func TestHold_ownRoute(t *testing.T) {
	const user, far, table = 1234, "10.79.2.1", 99
	for _, c := range []struct {
		policies string
		code     agentapi.Code
		detail   string
	}{
		{preferAll, agentapi.CodeUndiverted, linux.ErrUnsent.Error()},
		{requireAll, agentapi.CodeRequired, string(agentapi.CodeUndiverted)},
	} {
		t.Run(string(c.code), func(t *testing.T) {
			l := newHoldLab(t, c.policies)
			l.b.pod.links(t, func(h *netlink.Handle) error {
				lo := value(h.LinkByName("lo"))(t)
				return h.AddrAdd(lo, value(netlink.ParseAddr(far+"/32"))(t))
			})
			l.a.pod.links(t, func(h *netlink.Handle) error {
				rule := netlink.NewRule()
				rule.Family, rule.Table, rule.UIDRange = netlink.FAMILY_V4, table, netlink.NewRuleUIDRange(user, user)
				return errors.Join(h.RuleAdd(rule), h.RouteAdd(&netlink.Route{Dst: value(netlink.ParseIPNet(far + "/32"))(t), Gw: net.ParseIP(podB), Table: table}))
			})
			must(t, l.a.pod.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_syn_retries", []byte("1"), 0) }))
			serve(t, l.b.pod.listen(t, far+":80"), echo)
			l.a.start(t)
			conn, err := l.a.pod.connectAs(user, "", netip.MustParseAddrPort(far+":80"))
			if (err == nil) != (c.code == agentapi.CodeUndiverted) {
				t.Fatalf("%s: connect: %v", c.code, err)
			}
			if err == nil {
				exchange(t, conn, 1000)
				must(t, conn.Close())
			}
			eventually(t, func() string {
				e := value(l.a.client.Explain(t.Context(), podA, far+":80"))(t)
				if len(e.Recent) == 0 || e.Recent[0].Reason != c.code || !strings.Contains(e.Recent[0].Detail, c.detail) {
					return fmt.Sprintf("explanation %+v, want %s", e, c.code)
				}
				return ""
			})
		})
	}
}

// TestHold_lost: where something in a pod drops what goes to the agent, a connection says so, and the next one to its
// destination goes directly.
func TestHold_lost(t *testing.T) {
	l := newHoldLab(t, preferAll)
	l.a.cfg.arrivalPatience = 300 * time.Millisecond
	l.a.start(t)
	l.b.start(t)
	dst := podB + ":80"
	serve(t, l.b.pod.listen(t, dst), says("server"))
	l.a.pod.dropLoopback(t)
	if r := l.a.pod.try(t, attempt{dst: dst, limit: 600 * time.Millisecond}); r.errno != unix.EINPROGRESS {
		t.Fatal(r)
	}
	eventually(t, func() string {
		if e := value(l.a.client.Explain(t.Context(), podA, dst))(t); e.Code != agentapi.CodeUndiverted || len(e.Recent) == 0 || e.Recent[0].Mode != agentapi.ModeConnecting {
			return fmt.Sprintf("explanation %+v, want %s", e, agentapi.CodeUndiverted)
		}
		return ""
	})
	if r := l.a.pod.try(t, attempt{dst: dst, limit: waitLimit / 2}); r.who != "server" {
		t.Error(r)
	}
}

// whereHolder is a holder whose connections' sockets wait for the answer to their SYN, or do not.
type whereHolder struct {
	holder
	waits bool
}

func (h whereHolder) Where(synqueue.Conn) (waits, bound bool, err error) { return h.waits, false, nil }

// TestHold_lostWaits: only a connection whose SYN was not answered is lost. One that reached a listener of the agent, from which
// it came too late, says nothing about its destination, nor does one that ended.
func TestHold_lostWaits(t *testing.T) {
	for _, waits := range []bool{true, false} {
		b := newAbleBare(t, "  negativeCacheTTL: 100s\n", preferAll)
		p := b.proxy("a")
		s := p.outboundTo("192.0.2.9:80")
		h := &hold{px: p.px, holder: whereHolder{waits: waits}}
		h.lost(s, synqueue.Conn{Src: s.src, Dst: s.dst})
		if len(p.redir.bypassed) > 0 != waits || len(b.a.decisions.list()) > 0 != waits {
			t.Errorf("waits %t: left alone %v, decisions %+v", waits, p.redir.bypassed, b.a.decisions.list())
		}
		if got := b.a.metrics.sum().reasons[agentapi.CodeUndiverted] > 0; got != waits {
			t.Errorf("waits %t: metrics %+v", waits, b.a.metrics.sum())
		}
	}
}

// dropLoopback drops the SYNs that go to 127.0.0.1 by loopback.
func (s *space) dropLoopback(t testing.TB) {
	t.Helper()
	must(t, s.ns.Do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "strict"})
		chain := c.AddChain(&nftables.Chain{
			Name: "input", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
			&expr.Cmp{Register: 1, Data: []byte{127, 0, 0, 1}},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
		return c.Flush()
	}))
}
