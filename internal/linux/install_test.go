// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

// wantClean fails unless the namespace has nothing of ours.
func wantClean(t *testing.T, ns *NetNS) {
	t.Helper()
	conn, err := openNFT(ns)
	mustDo(t, err)
	tables, err := conn.ListTables()
	mustDo(t, err)
	mustDo(t, conn.CloseLasting())
	for _, table := range tables {
		t.Errorf("nftables table %s is left", table.Name)
	}
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rules, err := h.RuleList(fam)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Table == routeTable || r.Mark != 0 {
					t.Errorf("rule is left: %v", r)
				}
			}
			routes, err := h.RouteListFiltered(fam, &netlink.Route{Table: routeTable}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				t.Errorf("route is left: %v", r)
			}
		}
		for _, s := range sysctls {
			_, want := s.values()
			if v, err := s.read(); err != nil || v != want {
				t.Errorf("%s is left at %d, %v; want %d", s, v, err, want)
			}
		}
		return nil
	})())
}

func TestInstallRedirect_failsEachStep(t *testing.T) {
	ns := newNS(t)
	boom := errors.New("boom")
	n := len((&Redirect{ns: ns}).installSteps())
	for i := range n {
		r := &Redirect{ns: ns, cfg: testConfig(families[0])}
		steps := r.installSteps()
		t.Run(fmt.Sprintf("%d %s", i, steps[i].Name), func(t *testing.T) {
			before := openFDs(t)
			steps[i].Do = func() error { return boom }
			var u undo.Stack
			if err := u.Run(steps...); !errors.Is(err, boom) || !strings.Contains(err.Error(), steps[i].Name) {
				t.Fatalf("run: %v, want boom with the name of the step", err)
			}
			wantClean(t, ns)
			if after := openFDs(t); after != before {
				t.Errorf("%d files are open, %d before", after, before)
			}
		})
	}
}

// TestInstallRedirect_failsInherited: whatever step of a set-up fails, the table, rules
// and sysctls of an earlier agent stay, which may still have connections.
func TestInstallRedirect_failsInherited(t *testing.T) {
	ns := newNS(t)
	mustDo(t, install(t, ns, testConfig(families[0])).Close())
	boom := errors.New("boom")
	n := len((&Redirect{ns: ns}).installSteps())
	for i := range n {
		r := &Redirect{ns: ns, cfg: testConfig(families[0])}
		steps := r.installSteps()
		t.Run(fmt.Sprintf("%d %s", i, steps[i].Name), func(t *testing.T) {
			steps[i].Do = func() error { return boom }
			var u undo.Stack
			if err := u.Run(steps...); !errors.Is(err, boom) {
				t.Fatalf("run: %v, want boom", err)
			}
			mustDo(t, ns.Do(func() error {
				conn, err := nftables.New()
				if err != nil {
					return err
				}
				_, err = conn.ListChain(kubeTable(), chainOutboundTo)
				return err
			}))
			if has, err := hasRules(ns); !has || err != nil {
				t.Errorf("has routing rules %t, %v", has, err)
			}
			if v := sysctlNow(t, ns, fwmarkAccept); v != 1 {
				t.Errorf("%v is %d", fwmarkAccept, v)
			}
			found, err := readFound(ns)
			if _, ok := found[fwmarkAccept]; !ok || err != nil {
				t.Errorf("found %v, %v", found, err)
			}
		})
	}
	mustDo(t, Sweep(ns))
	wantClean(t, ns)
}

func TestRedirectConfig_Validate(t *testing.T) {
	for _, c := range []struct {
		name, field string
		change      func(*RedirectConfig)
	}{
		{"no mark", "Mark", func(c *RedirectConfig) { c.Mark = 0 }},
		{"no application mark", "AppMark", func(c *RedirectConfig) { c.AppMark = 0 }},
		{"equal marks", "AppMark", func(c *RedirectConfig) { c.AppMark = c.Mark }},
		{"no outbound port", "OutboundPort", func(c *RedirectConfig) { c.OutboundPort = 0 }},
		{"no inbound port", "InboundPort", func(c *RedirectConfig) { c.InboundPort = 0 }},
		{"equal ports", "InboundPort", func(c *RedirectConfig) { c.InboundPort = c.OutboundPort }},
		{"short ttl", "FailOpenTTL", func(c *RedirectConfig) { c.FailOpenTTL = time.Millisecond }},
		{"long ttl", "FailOpenTTL", func(c *RedirectConfig) { c.FailOpenTTL = time.Hour }},
		{"negative ttl", "FailOpenTTL", func(c *RedirectConfig) { c.FailOpenTTL = -1 }},
		{"many rules", "Outbound", func(c *RedirectConfig) { c.Outbound = make([]OutboundRule, maxOutboundRules+1) }},
		{"many ranges", "Inbound", func(c *RedirectConfig) { c.Inbound = make([]PortRange, maxInboundRanges+1) }},
		{"many port ranges", "Outbound", func(c *RedirectConfig) { c.Outbound[0].Ports = make([]PortRange, maxOutboundRanges+1) }},
		{"no prefix", "Outbound[0].Prefix", func(c *RedirectConfig) { c.Outbound[0].Prefix = netip.Prefix{} }},
		{"many required rules", "Required", func(c *RedirectConfig) { c.Required = make([]OutboundRule, maxOutboundRules+1) }},
		{"no required prefix", "Required[0].Prefix", func(c *RedirectConfig) { c.Required = []OutboundRule{{}} }},
		{"mapped prefix", "Outbound[0].Prefix", func(c *RedirectConfig) {
			c.Outbound[0].Prefix = netip.MustParsePrefix("::ffff:10.0.0.0/104")
		}},
		{"reversed ports", "Outbound[0].Ports[1]", func(c *RedirectConfig) {
			c.Outbound[0].Ports = []PortRange{{1, 2}, {4, 3}}
		}},
		{"many exceptions", "InboundExcept", func(c *RedirectConfig) { c.InboundExcept = make([]netip.Addr, maxInboundExcept+1) }},
		{"no exception", "InboundExcept[0]", func(c *RedirectConfig) { c.InboundExcept = make([]netip.Addr, 1) }},
		{"many ranges that stay", "InboundAlways", func(c *RedirectConfig) { c.InboundAlways = make([]PortRange, maxInboundRanges+1) }},
		{"reversed range that stays", "InboundAlways[0]", func(c *RedirectConfig) { c.InboundAlways = []PortRange{{2, 1}} }},
		{"reversed range", "Inbound[0]", func(c *RedirectConfig) { c.Inbound = []PortRange{{2, 1}} }},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(families[0])
			c.change(&cfg)
			var ce *ConfigError
			if err := cfg.Validate(); !errors.As(err, &ce) || ce.Field != c.field {
				t.Fatalf("validate: %v, want a ConfigError of %s", err, c.field)
			}
			if _, err := InstallRedirect(nil, cfg); !errors.As(err, &ce) {
				t.Errorf("install: %v, want a ConfigError", err)
			}
		})
	}
	cfg := testConfig(families[0])
	cfg.FailOpenTTL = 0
	mustDo(t, cfg.Validate())
}

func TestProbe(t *testing.T) {
	newNS(t) // has the needs of the probes
	before := openFDs(t)
	mustDo(t, Probe())
	if after := openFDs(t); after != before {
		t.Errorf("%d files are open, %d before", after, before)
	}
	err := feature("f", "remedy", os.ErrInvalid)
	var fe *FeatureError
	if !errors.As(err, &fe) || !errors.Is(err, os.ErrInvalid) || !strings.Contains(err.Error(), "remedy") {
		t.Errorf("feature error is %v", err)
	}
}

// TestInstallRedirect_withoutIPv6 is a pod on a cluster with IPv4 only: many
// runtimes switch IPv6 off in it.
func TestInstallRedirect_withoutIPv6(t *testing.T) {
	ns := newNS(t)
	for _, scope := range []string{"all", "default", "lo"} {
		giveSysctl(t, ns, "net/ipv6/conf/"+scope+"/disable_ipv6", "1")
	}
	r := install(t, ns, testConfig(families[0]))
	mustDo(t, errors.Join(r.Update(testConfig(families[0])), r.Renew(), r.Remove(), Sweep(ns)))
	wantClean(t, ns)
}

func TestInstallRedirect_loopbackDown(t *testing.T) {
	ns := newNS(t)
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		return h.LinkSetDown(lo)
	})())
	if _, err := InstallRedirect(ns, testConfig(families[0])); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Fatalf("install: %v, want an error about loopback", err)
	}
	wantClean(t, ns)
}

func TestInstallRedirect_oneRule(t *testing.T) {
	ns := newNS(t)
	for _, mark := range []uint32{testAppMark, testAppMark, testAppMark + 1} {
		cfg := testConfig(families[0])
		cfg.AppMark = mark
		mustDo(t, install(t, ns, cfg).Close())
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			for _, fam := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
				rules, err := h.RuleList(fam)
				if err != nil {
					return err
				}
				var marks []uint32
				for _, r := range rules {
					if r.Priority == rulePriority {
						marks = append(marks, r.Mark)
					}
				}
				if diff := cmp.Diff([]uint32{mark}, marks); diff != "" {
					t.Errorf("rules %s: %s", familyName(fam), diff)
				}
			}
			return nil
		})())
	}
}
