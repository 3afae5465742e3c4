// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// An Inet is an IPv4 address of an interface. Net is the network that it is in or, of a
// point-to-point address, the peer's.
type Inet struct {
	Local netip.Addr   `json:"local"`
	Net   netip.Prefix `json:"net"`
}

// A NamedAddr is an IPv4 address and the name of the interface that has it.
type NamedAddr struct {
	Name string     `json:"name"`
	Addr netip.Addr `json:"addr"`
}

// VethsWith returns which interfaces of kind veth of a pod have some of these addresses. It bounds what it reads.
func VethsWith(ns *NetNS, addrs []netip.Addr) (found []NamedAddr, err error) {
	all, err := Addresses(ns)
	if err != nil {
		return nil, err
	}
	err = withHandle(ns, func(h *netlink.Handle) error {
		links, err := listFew(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, h.LinkList)
		for _, l := range links {
			name := l.Attrs().Name
			for _, p := range all[name] {
				if l.Type() == "veth" && p.Addr().Is4() && slices.Contains(addrs, p.Addr()) {
					found = append(found, NamedAddr{name, p.Addr()})
				}
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look for the veths of %s: %w", ns, err)
	}
	return found, nil
}

// InterfacesWith returns the names of the interfaces of the host that have an IPv4 address.
func InterfacesWith(ns *NetNS, a netip.Addr) (names []string, err error) {
	err = withHandle(ns, func(h *netlink.Handle) error {
		all, err := RetryDump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
		for i := range all {
			if !all[i].IP.Equal(a.AsSlice()) {
				continue
			}
			name := fmt.Sprintf("interface %d", all[i].LinkIndex)
			if l, err := h.LinkByIndex(all[i].LinkIndex); err == nil {
				name = l.Attrs().Name
			}
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look which interface of %s has %v: %w", ns, a, err)
	}
	return names, nil
}

// Inets returns the name of an interface and its IPv4 addresses, those that the kernel takes first first.
func Inets(ns *NetNS, index int) (name string, all []Inet, err error) {
	err = withHandle(ns, func(h *netlink.Handle) error {
		l, err := h.LinkByIndex(index)
		if err != nil {
			return err
		}
		name = l.Attrs().Name
		list, err := RetryDump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_V4) })
		for i := range list {
			of := list[i].IPNet
			if list[i].Peer != nil {
				of = list[i].Peer
			}
			local, _ := netip.AddrFromSlice(list[i].IP.To4())
			first, _ := netip.AddrFromSlice(of.IP.To4())
			bits, _ := of.Mask.Size()
			all = append(all, Inet{local, netip.PrefixFrom(first, bits).Masked()})
		}
		return err
	})
	if err != nil {
		return "", nil, fmt.Errorf("addresses of interface %d of %s: %w", index, ns, err)
	}
	return name, all, nil
}

// AddInet gives an interface a point-to-point address, without a route to the peer's network, or to an address of
// that. Where the address is there already, the routes go that the kernel made since, as the interface came up again.
func AddInet(ns *NetNS, index int, a Inet) error {
	_, others, err := Inets(ns, index)
	if err == nil {
		err = withHandle(ns, func(h *netlink.Handle) error {
			err := h.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, peerAddr(a))
			if err != nil && !errors.Is(err, unix.EEXIST) {
				return err
			}
			return dropBroadcasts(h, index, a, slices.DeleteFunc(others, func(o Inet) bool { return o == a || o.Local != a.Local }))
		})
	}
	if err != nil {
		return fmt.Errorf("give interface %d of %s the address %v for %v: %w", index, ns, a.Local, a.Net, err)
	}
	return nil
}

// dropBroadcasts deletes the routes of broadcasts that the kernel makes with an address to the last one of its network, and
// before Linux 5.18 to the first one: in a peer's network that may be a pod's. A route that is the same address's in another
// network, too, stays.
func dropBroadcasts(h *netlink.Handle, index int, a Inet, others []Inet) error {
	for _, to := range broadcastsOf(a.Net) {
		if slices.ContainsFunc(others, func(o Inet) bool { return slices.Contains(broadcastsOf(o.Net), to) }) {
			continue
		}
		err := h.RouteDel(&netlink.Route{
			LinkIndex: index, Dst: hostNet(to), Src: a.Local.AsSlice(), Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_BROADCAST, Scope: netlink.SCOPE_LINK,
		})
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("delete the route of broadcasts to %v: %w", to, err)
		}
	}
	return nil
}

// broadcastsOf are the first and the last address of a network that has addresses beside them.
func broadcastsOf(p netip.Prefix) []netip.Addr {
	if p.Bits() > 30 {
		return nil
	}
	r := prefixRange(p)
	return []netip.Addr{r.first, r.last}
}

// RemoveInet takes back AddInet. It is no error if there is no such address, or interface.
func RemoveInet(ns *NetNS, index int, a Inet) error {
	err := withHandle(ns, func(h *netlink.Handle) error {
		err := h.AddrDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, peerAddr(a))
		if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("take the address %v for %v from interface %d of %s: %w", a.Local, a.Net, index, ns, err)
	}
	return nil
}

func peerAddr(a Inet) *netlink.Addr {
	return &netlink.Addr{IPNet: hostNet(a.Local), Peer: ipNet(a.Net), Broadcast: net.IPv4zero, Flags: unix.IFA_F_NOPREFIXROUTE}
}
