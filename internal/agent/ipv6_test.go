// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// loopbackIPv6 switches IPv6 on loopback on or off.
func (s *space) loopbackIPv6(t testing.TB, on bool) {
	t.Helper()
	text := map[bool]string{true: "0", false: "1"}[on]
	must(t, s.ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/lo/disable_ipv6", []byte(text), 0)
	}))
}

// TestProxy_ipv6Later: without IPv6 on loopback, where the agent listens, a pod's connections of IPv6 go directly or, where
// SMC-R is required, nowhere. They are on SMC-R once it is there.
func TestProxy_ipv6Later(t *testing.T) {
	for _, required := range []bool{false, true} {
		for _, hold := range []bool{false, true} {
			t.Run(fmt.Sprintf("required %t/hold %t", required, hold), func(t *testing.T) {
				policy, wants := preferAll, "server"
				if required {
					policy, wants = requireAll, ""
				}
				l := newLab(t)
				if hold {
					policy = holdSYNs + policy
				}
				l.a.configure(t, l.option, policy)
				l.a.pod.loopbackIPv6(t, false)
				l.a.start(t)
				l.b.start(t)
				serve(t, l.b.pod.listen(t, podB+":80"), echo)
				l.carried(t, podB+":80")

				without, with := "["+podB6+"]:81", "["+podB6+"]:80"
				serve(t, l.b.pod.listen(t, without), says("server"))
				if r := l.a.pod.try(t, attempt{dst: without, limit: 3 * time.Second}); r.who != wants {
					t.Errorf("%v, want %q", r, wants)
				}
				if e := value(l.a.client.Explain(t.Context(), podA6, without))(t); e.Code != agentapi.CodeUndiverted {
					t.Errorf("explanation %+v, want %s", e, agentapi.CodeUndiverted)
				}

				l.a.pod.loopbackIPv6(t, true)
				serve(t, l.b.pod.listen(t, with), echo)
				l.carried(t, with)
			})
		}
	}
}

// TestProxy_ipv6Update: an update of a pod listens for IPv6, if the pod has it now, and the table diverts to that. A proxy
// that drains, or was released, leaves the port to others.
func TestProxy_ipv6Update(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before func(px *proxy)
		want   bool
	}{
		{"served", func(*proxy) {}, true},
		{"draining", func(px *proxy) { px.draining.Store(true) }, false},
		{"released", func(px *proxy) { px.released.Store(true) }, false},
		{"listeners closed", func(px *proxy) { must(t, px.out.close()) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newAbleBare(t, "", preferAll)
			p := b.proxy("a")
			p.k.change(func() { p.noIPv6 = true })
			for _, set := range []**listenerSet{&p.px.out, &p.px.in} {
				*set = value(p.px.openListeners(t.Context(), (*set).dir, nil, 0))(t)
			}
			t.Cleanup(func() {
				p.px.abort(agentapi.CodeDraining)
				p.px.tasks.Wait()
			})
			six := netip.MustParseAddr("fd00::9")
			update := func() linux.RedirectConfig {
				t.Helper()
				must(t, p.px.update(*p.px.atts.Load()))
				var cfg linux.RedirectConfig
				p.redir.look(func() { cfg = p.redir.cfg })
				return cfg
			}
			if cfg := update(); !cfg.IPv4Only || len(cfg.Outbound) != 1 || !p.px.out.lacks(six) {
				t.Errorf("without IPv6: %+v", cfg)
			}
			p.k.change(func() { p.noIPv6 = false })
			tt.before(p.px)
			if cfg := update(); cfg.IPv4Only == tt.want || len(cfg.Outbound) == 2 != tt.want || p.px.out.lacks(six) == tt.want {
				t.Errorf("with IPv6: %+v", cfg)
			}
			for _, set := range []*listenerSet{p.px.out, p.px.in} {
				if set.lacksIPv6() == tt.want && tt.name != "listeners closed" {
					t.Errorf("%s: lacks IPv6 %t", set.dir, !tt.want)
				}
			}
		})
	}
}

// TestListenerSet_lacks: what the agent cannot divert is of IPv6.
func TestListenerSet_lacks(t *testing.T) {
	four, six := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("fd00::1")
	for n, want := range map[int]bool{1: true, 2: false} {
		set := &listenerSet{listeners: make([]*net.TCPListener, n)}
		if set.lacks(four) || set.lacks(six) != want {
			t.Errorf("%d listeners: lacks IPv4 %t, IPv6 %t", n, set.lacks(four), set.lacks(six))
		}
	}
}

// TestWithoutIPv6: what a table without a listener for IPv6 selects.
func TestWithoutIPv6(t *testing.T) {
	rule := func(p string) linux.OutboundRule { return linux.OutboundRule{Prefix: netip.MustParsePrefix(p)} }
	got := withoutIPv6([]linux.OutboundRule{rule("0.0.0.0/0"), rule("::/0")}, []linux.OutboundRule{rule("10.0.0.0/8"), rule("fd00::/8")})
	if want := "[{0.0.0.0/0 [] false} {fd00::/8 [] false}]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestLinuxNet_listenIPv6: the listener for IPv6 comes as soon as the namespace has IPv6, on the port of the other one, and a later
// agent's succeeds it there.
func TestLinuxNet_listenIPv6(t *testing.T) {
	s := newSpace(t)
	s.loopbackIPv6(t, false)
	n := linuxNet{s.ns}
	ls, port, err := n.listen(t.Context(), nil, 40000)
	must(t, err)
	defer closeAll(t, ls)
	if len(ls) != 1 || port != 40000 {
		t.Fatalf("%d listeners on port %d", len(ls), port)
	}
	if _, err := n.listenIPv6(t.Context(), nil, port, port); err == nil || !strings.Contains(err.Error(), errNoIPv6.Error()) {
		t.Errorf("without IPv6: %v", err)
	}
	s.loopbackIPv6(t, true)
	six := value(n.listenIPv6(t.Context(), nil, port, port))(t)
	defer six.Close()
	if got := addrPort(six.Addr()); got != netip.AddrPortFrom(netip.IPv6Loopback(), port) {
		t.Errorf("listens at %v", got)
	}
	later, again, err := n.listen(t.Context(), nil, port)
	must(t, err)
	defer closeAll(t, later)
	if len(later) != 2 || again != port {
		t.Errorf("a later agent has %d listeners on port %d, want two on %d", len(later), again, port)
	}
	if _, err := n.listenIPv6(t.Context(), nil, 0, port); err == nil || strings.Contains(err.Error(), errNoIPv6.Error()) || !strings.Contains(err.Error(), unix.EADDRINUSE.Error()) {
		t.Errorf("a port that is taken: %v", err)
	}
}
