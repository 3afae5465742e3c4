// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route is how packets leave for an address.
type Route struct {
	Found   bool
	Gateway bool             // behind a router
	MAC     net.HardwareAddr // of the router; nil while it is not known
}

// RouteTo asks the kernel, in the namespace of the calling thread, how packets
// from the local address src reach dst. It does not wait: a router whose MAC
// address is not known is asked for it, and the next call may have it.
func RouteTo(src, dst netip.Addr) (Route, error) {
	found, err := netlink.RouteGetWithOptions(dst.AsSlice(), &netlink.RouteGetOptions{SrcAddr: src.AsSlice()})
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), err == nil && len(found) == 0:
		return Route{}, nil // there is none, or it says unreachable or prohibit
	case err != nil:
		return Route{}, fmt.Errorf("route from %v to %v: %w", src, dst, err)
	}
	r := &found[0]
	router := r.Gw
	if via, ok := r.Via.(*netlink.Via); ok && router == nil {
		router = via.Addr
	}
	if router == nil {
		return Route{Found: true}, nil
	}
	mac, err := neighbour(r.LinkIndex, router)
	if err != nil {
		return Route{}, fmt.Errorf("router %v from %v to %v: %w", router, src, dst, err)
	}
	return Route{Found: true, Gateway: true, MAC: mac}, nil
}

// neighKnown are the states in which a neighbour's MAC address can be used.
const neighKnown = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE

// neighbour returns the MAC address of a neighbour, nil if it is not known yet.
func neighbour(link int, ip net.IP) (net.HardwareAddr, error) {
	family := netlink.FAMILY_V6
	if ip.To4() != nil {
		family = netlink.FAMILY_V4
	}
	all, err := netlink.NeighList(link, family)
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	for i := range all {
		if n := &all[i]; n.IP.Equal(ip) && n.State&neighKnown != 0 {
			return n.HardwareAddr, nil
		}
	}
	ask := netlink.Neigh{LinkIndex: link, Family: family, IP: ip, Flags: netlink.NTF_USE}
	if err := netlink.NeighSet(&ask); err != nil && !errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("look up MAC address: %w", err)
	}
	return nil, nil
}
