// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LastingAddresses returns the addresses of each network interface of the process's namespace, which is the host's, in the
// order in which others had better remember them: those of IPv4 as the kernel takes them, and then those of IPv6,
// of which one that changes by itself (RFC 8981) comes behind one that stays. Link-local addresses, and duplicates
// of another machine's, are left out.
func LastingAddresses() (map[string][]netip.Addr, error) {
	links, err := RetryDump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("network interfaces: %w", err)
	}
	list, err := RetryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("addresses of network interfaces: %w", err)
	}
	out := map[string][]netip.Addr{}
	for _, l := range links {
		if addrs := lasting(list, l.Attrs().Index); len(addrs) > 0 {
			out[l.Attrs().Name] = addrs
		}
	}
	return out, nil
}

// lasting is LastingAddresses of one interface.
func lasting(list []netlink.Addr, index int) (out []netip.Addr) {
	ranks := map[netip.Addr]int{}
	for i := range list {
		if list[i].IPNet == nil {
			continue
		}
		a, ok := netip.AddrFromSlice(list[i].IP)
		if a = a.Unmap(); !ok || list[i].LinkIndex != index || a.IsLinkLocalUnicast() || list[i].Flags&unix.IFA_F_DADFAILED != 0 {
			continue
		}
		ranks[a] = unrest(&list[i], a)
		out = append(out, a)
	}
	slices.SortStableFunc(out, func(a, b netip.Addr) int {
		if a.Is4() && b.Is4() {
			return 0
		}
		return cmp.Or(cmp.Compare(ranks[a], ranks[b]), a.Compare(b))
	})
	return out
}

// unrest ranks an address by what may take it away: 0 for IPv4, whose flag of a second address is that of a temporary one of IPv6.
func unrest(a *netlink.Addr, addr netip.Addr) (rank int) {
	if addr.Is4() {
		return 0
	}
	rank = 1
	if ones, _ := a.Mask.Size(); ones == addr.BitLen() {
		rank++ // leased (DHCPv6), or one for a service that moves
	}
	for i, flag := range []int{unix.IFA_F_TENTATIVE, unix.IFA_F_DEPRECATED, unix.IFA_F_TEMPORARY} {
		if a.Flags&flag != 0 {
			rank += 2 << i
		}
	}
	return rank
}
