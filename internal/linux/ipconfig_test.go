// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func podIPs() InterfaceIPs {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	table := 100
	return InterfaceIPs{
		Addresses: []netip.Prefix{prefix("10.98.1.2/24"), prefix("fd98::2/64")},
		Routes: []InterfaceRoute{
			{Dst: prefix("0.0.0.0/0"), Gateway: addr("10.98.1.1")},
			{Dst: prefix("::/0"), Gateway: addr("fd98::1")},
			{Dst: prefix("10.97.0.0/16"), Gateway: addr("10.98.1.1"), MTU: 1400, Priority: 50},
			{Dst: prefix("10.96.0.0/16")},
			{Dst: prefix("10.95.0.0/16"), Gateway: addr("10.98.1.1"), Table: &table},
		},
	}
}

// servedAt connects to a listener at an own address of the namespace.
func servedAt(t *testing.T, ns *NetNS, a netip.Addr) string {
	t.Helper()
	l := listen(t, ns, nil, a, 0)
	answer(t, l, "own address")
	return served(t, ns, nil, addrOf(l))
}

func TestSetInterfaceIPs(t *testing.T) {
	pod := newNS(t)
	joinNS(t, pod, newNS(t))
	for _, name := range []string{"eth0", "lo"} {
		giveSysctl(t, pod, "net/ipv6/conf/"+name+"/disable_ipv6", "1")
	}
	mustDo(t, inNetlink(pod, func(h *netlink.Handle) error {
		l, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return h.LinkSetUp(l)
	})())
	c := podIPs()
	for range 2 { // what is there already is no error
		mustDo(t, SetInterfaceIPs(pod, "eth0", c))
		mustDo(t, CheckInterfaceIPs(pod, "eth0", c))
	}
	want(t, servedAt(t, pod, c.Addresses[1].Addr()), "own address")
	for _, tt := range []struct {
		name, want string
		change     func(*InterfaceIPs)
	}{
		{"address", "address 10.98.1.3/24 of eth0 is missing", func(c *InterfaceIPs) { c.Addresses[0] = netip.MustParsePrefix("10.98.1.3/24") }},
		{"length of the prefix", "address fd98::2/48 of eth0 is missing", func(c *InterfaceIPs) { c.Addresses[1] = netip.MustParsePrefix("fd98::2/48") }},
		{"gateway", "route 0.0.0.0/0 via 10.98.1.9 through eth0 is missing", func(c *InterfaceIPs) { c.Routes[0].Gateway = netip.MustParseAddr("10.98.1.9") }},
		{"no gateway", "route ::/0 through eth0 is missing", func(c *InterfaceIPs) { c.Routes[1].Gateway = netip.Addr{} }},
		{"metric", "route 10.97.0.0/16 via 10.98.1.1 metric 51", func(c *InterfaceIPs) { c.Routes[2].Priority = 51 }},
		{"destination", "route 10.90.0.0/16 through", func(c *InterfaceIPs) { c.Routes[3].Dst = netip.MustParsePrefix("10.90.0.0/16") }},
		{"table", "route 10.95.0.0/16 via 10.98.1.1 table 101 through", func(c *InterfaceIPs) { *c.Routes[4].Table = 101 }},
		{"local route", "route 10.98.1.2/32 through", func(c *InterfaceIPs) { c.Routes[3].Dst = netip.MustParsePrefix("10.98.1.2/32") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := podIPs()
			tt.change(&c)
			if err := CheckInterfaceIPs(pod, "eth0", c); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
	t.Run("moved to another table", func(t *testing.T) {
		c := podIPs()
		c.Routes[4].Table = nil
		mustDo(t, CheckInterfaceIPs(pod, "eth0", c))
		if err := CheckInterfaceIPs(pod, "lo", InterfaceIPs{Routes: c.Routes[4:]}); err == nil || !strings.Contains(err.Error(), "through lo is missing") {
			t.Errorf("the route of another interface: %v", err)
		}
	})
	t.Run("no such interface", func(t *testing.T) {
		for _, err := range []error{SetInterfaceIPs(pod, "eth9", c), CheckInterfaceIPs(pod, "eth9", c)} {
			if err == nil || !strings.Contains(err.Error(), "find interface eth9") {
				t.Errorf("%v, want an error that names the interface", err)
			}
		}
	})
	t.Run("gateway out of reach", func(t *testing.T) {
		err := SetInterfaceIPs(pod, "eth0", InterfaceIPs{Routes: []InterfaceRoute{
			{Dst: netip.MustParsePrefix("10.94.0.0/16"), Gateway: netip.MustParseAddr("192.0.2.1")},
		}})
		if err == nil || !strings.Contains(err.Error(), "add route 10.94.0.0/16 via 192.0.2.1 through eth0") {
			t.Errorf("%v, want an error that names the route", err)
		}
	})
}
