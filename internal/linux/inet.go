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

// AddInet gives an interface a point-to-point address, without a route to the peer's network.
func AddInet(ns *NetNS, index int, a Inet) error {
	err := withHandle(ns, func(h *netlink.Handle) error {
		err := h.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, peerAddr(a))
		if errors.Is(err, unix.EEXIST) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("give interface %d of %s the address %v for %v: %w", index, ns, a.Local, a.Net, err)
	}
	return nil
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
