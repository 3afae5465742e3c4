// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Route is the way of packets to an address.
type Route struct {
	Found   bool
	Gateway bool             // the way leads through a router
	MAC     net.HardwareAddr // the router's; nil while it is not known
	Link    int              // index of the interface that packets leave by, 0: they stay here
}

// Elsewhere reports whether the way leads through another interface than that which has the
// address src, in the namespace of the calling thread. The error is [ErrTooMuch] if that interface has more
// addresses than are read.
func (r Route) Elsewhere(src netip.Addr) (bool, error) {
	if r.Link == 0 {
		return false, nil
	}
	own := false
	err := eachAddress(r.Link, newAllowance(), func(p netip.Prefix) bool {
		own = p.Addr() == src.Unmap()
		return !own
	})
	if err != nil {
		return false, fmt.Errorf("addresses of interface %d of a route from %v: %w", r.Link, src, err)
	}
	return !own, nil
}

// RouteTo asks the kernel, in the namespace of the calling thread, how packets from the
// local address src reach dst. If the router's MAC address is not known, RouteTo makes the
// kernel ask for it, but does not wait: a later call may have the address.
func RouteTo(src, dst netip.Addr) (Route, error) {
	found, err := netlink.RouteGetWithOptions(dst.AsSlice(), &netlink.RouteGetOptions{SrcAddr: src.AsSlice()})
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), err == nil && len(found) == 0:
		return Route{}, nil // there is no route, or it is of type unreachable or prohibit
	case err != nil:
		return Route{}, fmt.Errorf("route from %v to %v: %w", src, dst, err)
	}
	r := &found[0]
	if r.Type == unix.RTN_LOCAL {
		return Route{Found: true}, nil
	}
	router := r.Gw
	if via, ok := r.Via.(*netlink.Via); ok && router == nil {
		router = via.Addr
	}
	if router == nil {
		return Route{Found: true, Link: r.LinkIndex}, nil
	}
	mac, err := neighbour(r.LinkIndex, router)
	if err != nil {
		return Route{}, fmt.Errorf("router %v from %v to %v: %w", router, src, dst, err)
	}
	return Route{Found: true, Gateway: true, MAC: mac, Link: r.LinkIndex}, nil
}

// neighKnown are the states in which a neighbour's MAC address can be used.
const neighKnown = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE

// neighbour returns the MAC address of a neighbour, nil if it is not known yet.
func neighbour(link int, ip net.IP) (net.HardwareAddr, error) {
	family := netlink.FAMILY_V6
	if ip.To4() != nil {
		family = netlink.FAMILY_V4
	}
	n, err := oneNeighbour(link, family, ip)
	if err != nil {
		return nil, fmt.Errorf("ask for neighbour: %w", err)
	}
	if n != nil && n.State&neighKnown != 0 {
		return n.HardwareAddr, nil
	}
	ask := netlink.Neigh{LinkIndex: link, Family: family, IP: ip, Flags: netlink.NTF_USE}
	if err := netlink.NeighSet(&ask); err != nil && !errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("look up MAC address: %w", err)
	}
	return nil, nil
}

// oneNeighbour asks for one entry of the neighbour table, and not for all: a pod can have
// very many. It returns nil if there is no such entry.
func oneNeighbour(link, family int, ip net.IP) (*netlink.Neigh, error) {
	if family == netlink.FAMILY_V4 {
		ip = ip.To4()
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	req.AddData(&netlink.Ndmsg{Family: uint8(family), Index: uint32(link)})
	req.AddData(nl.NewRtAttr(netlink.NDA_DST, ip))
	answers, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) || err == nil && len(answers) == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return netlink.NeighDeserialize(answers[0])
}
