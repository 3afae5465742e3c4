// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// set adds settings of the node to its configuration.
func (l *lab) set(t testing.TB, n *testNode, settings string) {
	t.Helper()
	n.configure(t, l.option, settings+preferAll)
}

// reach lets the pod of a connect to that of b and exchange something.
func (l *lab) reach(t testing.TB) (dst netip.AddrPort) {
	t.Helper()
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	c, err := l.a.pod.dial(t, ln.Addr().String())
	must(t, err)
	exchange(t, c, 100_000)
	return addrPort(ln.Addr())
}

// TestAgent_versions: what the configurations of two nodes say about versions
// and enterprise IDs decides, and the answers show it.
func TestAgent_versions(t *testing.T) {
	t.Parallel() // the test mostly waits
	for _, tc := range []struct {
		name, a, b string
		want       agentapi.LinkGroup
		reason     agentapi.Code // of TCP
		noV2       agentapi.Code // at b
	}{
		{"out of the box", "", "", agentapi.LinkGroup{Version: 2, EID: "KUBE-SMCR", Release: 1, PeerClaimedName: "b"}, "", ""},
		{"version 1", "  versions: v1\n", "", agentapi.LinkGroup{Version: 1}, "", ""},
		{"other IDs, one subnet", "  eids: [ACME]\n", "", agentapi.LinkGroup{Version: 1}, "", "NOUEID"},
		{"other IDs, version 2 only", "  eids: [ACME]\n", "  versions: v2\n", agentapi.LinkGroup{}, "NOUEID", ""},
		{"an ID in common", "  eids: [ACME, B-2.X]\n", "  eids: [B-2.X]\n", agentapi.LinkGroup{Version: 2, EID: "B-2.X", Release: 1, PeerClaimedName: "b"}, "", ""},
		{"no version in common", "  versions: v1\n", "  versions: v2\n", agentapi.LinkGroup{}, "VERSMISMAT", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newLab(t)
			l.set(t, l.a, tc.a)
			l.set(t, l.b, tc.b)
			l.a.start(t)
			l.b.start(t)
			dst := l.reach(t)
			if tc.reason != "" {
				eventually(t, func() string {
					e := value(l.a.client.Explain(t.Context(), podA, dst.String()))(t)
					if e.Code != tc.reason || len(e.Recent) != 1 || !e.Recent[0].PeerDeclined || e.Advice == "" {
						return fmt.Sprintf("explanation %+v", e)
					}
					return ""
				})
				return
			}
			g := value(l.a.client.Links(t.Context()))(t).LinkGroups
			if len(g) != 1 {
				t.Fatalf("%d link groups", len(g))
			}
			if d := cmp.Diff(tc.want, g[0], cmpopts.IgnoreFields(agentapi.LinkGroup{},
				"ID", "Pod", "Role", "PeerID", "State", "Dialect", "Redundancy", "Conns", "RMBBytes", "Opened", "Links", "Error")); d != "" {
				t.Errorf("link group (-want +got):\n%s", d)
			}
			if g := value(l.b.client.Links(t.Context()))(t).LinkGroups; len(g) != 1 || g[0].NoV2 != tc.noV2 {
				t.Errorf("node b: %+v; want no version 2 because of %q", g, tc.noV2)
			}
		})
	}
}

// TestAgent_routedRNICs: the RDMA addresses of the two nodes are in different
// subnets, and a router is between them.
func TestAgent_routedRNICs(t *testing.T) {
	l := newLab(t)
	router := newSpace(t)
	must(t, router.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }))
	addr := func(subnet, host int) string { return fmt.Sprintf("10.79.%d.%d", subnet, host) }
	for i, n := range []*testNode{l.a, l.b} {
		own, gateway := addr(i, 1), addr(i, 254)
		join(t, fmt.Sprintf("routed%d", i), n.host, router, []string{own + "/24"}, []string{gateway + "/24"})
		n.host.links(t, func(h *netlink.Handle) error {
			return h.RouteAdd(&netlink.Route{
				Dst: &net.IPNet{IP: net.ParseIP(addr(1-i, 0)).To4(), Mask: net.CIDRMask(24, 32)}, Gw: net.ParseIP(gateway),
			})
		})
		n.roce = []string{own}
		l.set(t, n, "")
	}
	l.a.start(t)
	l.b.start(t)
	l.reach(t)
	for _, n := range []*testNode{l.a, l.b} {
		g := value(n.client.Links(t.Context()))(t).LinkGroups
		if len(g) != 1 || g[0].Version != 2 || len(g[0].Links) == 0 {
			t.Errorf("node %s: link groups %+v", n.name, g)
		}
	}
	// Without the way back the server has no route, and says so.
	l.b.host.links(t, func(h *netlink.Handle) error {
		return h.RouteDel(&netlink.Route{Dst: &net.IPNet{IP: net.ParseIP(addr(0, 0)).To4(), Mask: net.CIDRMask(24, 32)}})
	})
	must(t, l.a.stop())
	l.set(t, l.a, "  versions: v2\n")
	l.a.start(t)
	dst := l.reach(t)
	eventually(t, func() string {
		e := value(l.a.client.Explain(t.Context(), podA, dst.String()))(t)
		if e.Code != "NOROUTE" || e.Advice == "" {
			return fmt.Sprintf("explanation %+v", e)
		}
		return ""
	})
}
