// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// InterfaceIPs are the addresses of one interface of a pod, and the routes
// through it.
type InterfaceIPs struct {
	Addresses []netip.Prefix
	Routes    []InterfaceRoute
}

// An InterfaceRoute is a route through the interface that it is set on.
type InterfaceRoute struct {
	Dst     netip.Prefix
	Gateway netip.Addr // zero: the hosts of Dst are on the link
	// Zero and nil leave the choice to the kernel.
	MTU, AdvMSS, Priority int
	Table, Scope          *int
}

// String is the route as ip route prints it.
func (r InterfaceRoute) String() string {
	var b strings.Builder
	b.WriteString(r.Dst.String())
	if r.Gateway.IsValid() {
		fmt.Fprintf(&b, " via %v", r.Gateway)
	}
	if r.Table != nil {
		fmt.Fprintf(&b, " table %d", *r.Table)
	}
	if r.Priority != 0 {
		fmt.Fprintf(&b, " metric %d", r.Priority)
	}
	return b.String()
}

// SetInterfaceIPs sets addresses and routes of an interface in ns that is up. The
// addresses can be used at once: the kernel does not look for duplicates, which takes
// seconds, because IPAM has to know that the addresses are free. An address or route that
// is there already is no error. After an error some are set; they are deleted together
// with the interface.
func SetInterfaceIPs(ns *NetNS, ifName string, c InterfaceIPs) error {
	return inNetlink(ns, func(h *netlink.Handle) error {
		l, err := h.LinkByName(ifName)
		if err != nil {
			return fmt.Errorf("find interface %s in %s: %w", ifName, ns, err)
		}
		if slices.ContainsFunc(c.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
			if err := errors.Join(allowIPv6(ifName), allowIPv6("lo")); err != nil {
				return err
			}
		}
		for _, p := range c.Addresses {
			a := &netlink.Addr{IPNet: ipNet(p)}
			if p.Addr().Is6() {
				a.Flags = unix.IFA_F_NODAD
			}
			if err := h.AddrAdd(l, a); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("add address %v to %s: %w", p, ifName, err)
			}
		}
		awaitLocal(h, c.Addresses)
		for _, r := range c.Routes {
			// There may be a route to the same destination through another interface.
			// Both stay: the configuration of the networks decides which is preferred.
			if err := h.RouteAddEcmp(r.route(l.Attrs().Index)); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("add route %v through %s: %w", r, ifName, err)
			}
		}
		return nil
	})()
}

// awaitLocal waits until the namespace takes packets to its addresses of IPv6 for its own, for a moment at most: the kernel sees to that in a
// thread of its own, after it has told that an address is there. One on an interface without carrier may take longer.
func awaitLocal(h *netlink.Handle, addrs []netip.Prefix) {
	poll := time.NewTicker(time.Millisecond)
	defer poll.Stop()
	for end := time.Now().Add(localPatience); time.Now().Before(end); <-poll.C {
		if !slices.ContainsFunc(addrs, func(p netip.Prefix) bool {
			if !p.Addr().Is6() {
				return false
			}
			r, err := h.RouteGet(p.Addr().AsSlice())
			return err != nil || len(r) == 0 || r[0].Type != unix.RTN_LOCAL
		}) {
			return
		}
	}
}

// CheckInterfaceIPs returns an error about the first address that the interface does not
// have or cannot use, or the first route that its namespace does not have. A route for which no
// table was named may be in any one: others, as the CNI plugins sbr and vrf do, move an interface's routes to another table.
func CheckInterfaceIPs(ns *NetNS, ifName string, c InterfaceIPs) error {
	return inNetlink(ns, func(h *netlink.Handle) error {
		l, err := h.LinkByName(ifName)
		if err != nil {
			return fmt.Errorf("find interface %s in %s: %w", ifName, ns, err)
		}
		if err := checkAddresses(h, l, c.Addresses); err != nil {
			return err
		}
		for _, r := range c.Routes {
			if ok, err := hasRoute(h, l, r); err != nil || !ok {
				return errors.Join(err, fmt.Errorf("route %v through %s is missing", r, ifName))
			}
		}
		return nil
	})()
}

func checkAddresses(h *netlink.Handle, l netlink.Link, want []netip.Prefix) error {
	name := l.Attrs().Name
	have, err := listFew(unix.RTM_GETADDR, unix.AF_UNSPEC, unix.SizeofIfAddrmsg, func() ([]netlink.Addr, error) {
		return h.AddrList(l, netlink.FAMILY_ALL)
	})
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, p := range want {
		i := slices.IndexFunc(have, func(a netlink.Addr) bool { return a.IPNet != nil && a.IPNet.String() == p.String() })
		switch {
		case i < 0:
			return fmt.Errorf("address %v of %s is missing", p, name)
		case have[i].Flags&unix.IFA_F_DADFAILED != 0:
			return fmt.Errorf("address %v of %s is a duplicate: another machine has it", p, name)
		case have[i].Flags&unix.IFA_F_TENTATIVE != 0:
			return fmt.Errorf("address %v of %s is tentative: the kernel still looks for duplicates", p, name)
		}
	}
	return nil
}

func hasRoute(h *netlink.Handle, l netlink.Link, want InterfaceRoute) (bool, error) {
	filter, mask := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE // all tables
	if want.Table != nil {
		filter.Table = *want.Table
	}
	family := familyOf(want.Dst.Addr())
	have, err := listFew(unix.RTM_GETROUTE, family, unix.SizeofRtMsg, func() ([]netlink.Route, error) {
		return h.RouteListFiltered(family, filter, mask)
	})
	if err != nil {
		return false, fmt.Errorf("list routes: %w", err)
	}
	return slices.ContainsFunc(have, func(r netlink.Route) bool {
		if want.Priority != 0 && r.Priority != want.Priority {
			return false
		}
		if want.Table == nil && r.Table != unix.RT_TABLE_MAIN && (r.Table == unix.RT_TABLE_LOCAL || !isThrough(r, l.Attrs().Index)) {
			return false
		}
		return dstOf(r) == want.Dst.Masked() && gatewayIs(r, want.Gateway)
	}), nil
}

// isThrough tells whether a route leads through the interface with an index.
func isThrough(r netlink.Route, link int) bool {
	return r.LinkIndex == link || slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return n.LinkIndex == link })
}

// dstOf is the destination of a route; the kernel leaves out that of a default
// route.
func dstOf(r netlink.Route) netip.Prefix {
	if r.Dst == nil {
		if r.Family == netlink.FAMILY_V6 {
			return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	p, err := netip.ParsePrefix(r.Dst.String())
	if err != nil {
		return netip.Prefix{} // equals none
	}
	return p
}

func gatewayIs(r netlink.Route, want netip.Addr) bool {
	is := func(ip net.IP) bool {
		a, ok := netip.AddrFromSlice(ip)
		return ok && a.Unmap() == want
	}
	if !want.IsValid() {
		return len(r.Gw) == 0 && len(r.MultiPath) == 0
	}
	return is(r.Gw) || slices.ContainsFunc(r.MultiPath, func(n *netlink.NexthopInfo) bool { return is(n.Gw) })
}

func (r InterfaceRoute) route(link int) *netlink.Route {
	out := &netlink.Route{
		LinkIndex: link, Dst: ipNet(r.Dst.Masked()), Family: familyOf(r.Dst.Addr()),
		MTU: r.MTU, AdvMSS: r.AdvMSS, Priority: r.Priority,
	}
	if r.Gateway.IsValid() {
		out.Gw = r.Gateway.AsSlice()
	} else {
		out.Scope = netlink.SCOPE_LINK
	}
	if r.Table != nil {
		out.Table = *r.Table
	}
	if r.Scope != nil {
		out.Scope = netlink.Scope(*r.Scope)
	}
	return out
}

// allowIPv6 switches IPv6 on for an interface of the thread's namespace. Container
// runtimes switch IPv6 off in the pods of clusters that have IPv4 only, on loopback, too, where
// a pod reaches its own addresses.
func allowIPv6(ifName string) error {
	name := "net/ipv6/conf/" + ifName + "/disable_ipv6"
	b, err := os.ReadFile("/proc/sys/" + name)
	if err == nil && strings.TrimSpace(string(b)) != "0" {
		err = setSysctl(name, "0")
	}
	if err != nil {
		return fmt.Errorf("switch IPv6 on for %s, which gets an IPv6 address: %w", ifName, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}
