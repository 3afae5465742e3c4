// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// withAddrs makes a veth, or a bridge, with addresses.
func withAddrs(t *testing.T, ns *NetNS, l netlink.Link, addrs ...string) (index int) {
	t.Helper()
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		if err := h.LinkAdd(l); err != nil {
			return err
		}
		made, err := h.LinkByName(l.Attrs().Name)
		if err != nil {
			return err
		}
		index = made.Attrs().Index
		for _, text := range addrs {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			if err := h.AddrAdd(made, a); err != nil {
				return err
			}
		}
		return h.LinkSetUp(made)
	})())
	return index
}

// Of the addresses of a pod's veths those count that somebody gave it, not those that its programs did.
func TestVethsWith_onlyGiven(t *testing.T) {
	ns := newNS(t)
	withAddrs(t, ns, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "v1"}, "192.0.2.1/24", "192.0.2.9/0", "fd00::1/64")
	withAddrs(t, ns, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}, "192.0.2.2/24")
	given := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("fd00::1")}
	got, err := VethsWith(ns, given)
	if err != nil || !slices.Equal(got, []NamedAddr{{"eth0", given[0]}}) {
		t.Errorf("%v, %v", got, err)
	}
	for a, want := range map[string]string{"192.0.2.2": "br0", "192.0.2.9": "eth0"} {
		if got, err := InterfacesWith(ns, netip.MustParseAddr(a)); err != nil || !slices.Equal(got, []string{want}) {
			t.Errorf("%s is of %v, %v, want %s", a, got, err, want)
		}
	}
}

// An address of ours comes after those of the interface, adds no route, and goes without those.
func TestAddInet(t *testing.T) {
	ns := newNS(t)
	index := withAddrs(t, ns, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}, "10.1.0.1/24")
	own := Inet{netip.MustParseAddr("10.1.0.1"), netip.MustParsePrefix("10.1.0.0/24")}
	ours := Inet{own.Local, netip.MustParsePrefix("10.0.0.0/8")}
	must := func(want ...Inet) {
		t.Helper()
		name, got, err := Inets(ns, index)
		if err != nil || name != "br0" || !slices.Equal(got, want) {
			t.Errorf("%s has %v, %v, want %v", name, got, err, want)
		}
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByIndex(index)
			if err != nil {
				return err
			}
			routes, err := h.RouteList(l, netlink.FAMILY_V4)
			if len(routes) != 1 {
				t.Errorf("routes %v", routes)
			}
			return err
		})())
	}
	must(own)
	for range 2 {
		mustDo(t, AddInet(ns, index, ours))
		must(own, ours)
	}
	for range 2 {
		mustDo(t, RemoveInet(ns, index, ours))
		must(own)
	}
	mustDo(t, RemoveInet(ns, index+100, ours))
}

// An address of ours is for a network any address of which may be a pod's: none is one of broadcasts, not when the interface has come up
// again, either. Those of the interface's own network are.
func TestAddInet_noBroadcast(t *testing.T) {
	ns := newNS(t)
	index := withAddrs(t, ns, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}, "10.1.0.1/24", "192.168.255.1/24")
	check := func(when string) {
		t.Helper()
		var got []string
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			routes, err := h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{LinkIndex: index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_BROADCAST},
				netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
			for _, r := range routes {
				if ones := r.Dst.IP.To4(); ones[3] == 255 { // older kernels have more
					got = append(got, r.Dst.IP.String())
				}
			}
			return err
		})())
		slices.Sort(got)
		if want := []string{"10.1.0.255", "192.168.255.255"}; !slices.Equal(got, want) {
			t.Errorf("%s: routes of broadcasts to %v, want %v", when, got, want)
		}
	}
	check("before")
	ours := []Inet{
		{netip.MustParseAddr("10.1.0.1"), netip.MustParsePrefix("10.0.0.0/8")},
		{netip.MustParseAddr("10.1.0.1"), netip.MustParsePrefix("203.0.113.0/24")},
		// The last address is that of the interface's own network, too.
		{netip.MustParseAddr("10.1.0.1"), netip.MustParsePrefix("192.168.0.0/16")},
		{netip.MustParseAddr("192.168.255.1"), netip.MustParsePrefix("192.168.0.0/16")},
	}
	for _, when := range []string{"added", "up again"} {
		for _, a := range ours {
			mustDo(t, AddInet(ns, index, a))
		}
		check(when)
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByIndex(index)
			return errors.Join(err, h.LinkSetDown(l), h.LinkSetUp(l))
		})())
	}
	for _, a := range ours {
		mustDo(t, AddInet(ns, index, a))
		mustDo(t, RemoveInet(ns, index, a))
	}
	check("removed")
}

func TestRoCEv2GIDs(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"gids/0": "fe80:0000:0000:0000:0000:00ff:fe00:0001", "gid_attrs/types/0": "RoCE v2",
		"gids/1": "0000:0000:0000:0000:0000:ffff:0a01:0001", "gid_attrs/types/1": "IB/RoCE v1",
		"gids/2": "0000:0000:0000:0000:0000:ffff:0a01:0002", "gid_attrs/types/2": "RoCE v2",
		"gids/3": "0000:0000:0000:0000:0000:0000:0000:0000", // free
		"gids/4": "0000:0000:0000:0000:0000:ffff:0a01:0001", "gid_attrs/types/4": "RoCE v2",
	} {
		file := filepath.Join(dir, name)
		mustDo(t, os.MkdirAll(filepath.Dir(file), 0o700))
		mustDo(t, os.WriteFile(file, []byte(text+"\n"), 0o600))
	}
	got := roceV2GIDs(dir)
	if want := []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("10.1.0.1")}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
