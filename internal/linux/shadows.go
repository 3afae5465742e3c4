// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ShadowLink is the interface of [SetShadows].
const ShadowLink = "kube-smcr-veth"

// shadowProtocol marks routes of SetShadows, as routing daemons mark theirs.
const shadowProtocol netlink.RouteProtocol = 0xe2

// SetShadows gives a namespace exactly these IPv4 addresses on an interface of their own, [ShadowLink], and no routes to
// them: the kernel takes them as source of what it sends, and packets to them go where they went before, without a moment in between. With no address the
// interface goes. It is down, and the addresses have the scope of the host: nobody chooses them, or
// answers for them.
func SetShadows(ns *NetNS, want []netip.Addr) error {
	err := withHandle(ns, func(h *netlink.Handle) error {
		l, err := shadowLink(h, len(want) > 0)
		if err == nil && l != nil {
			err = setShadows(h, l, want)
		}
		return errors.Join(err, dropGuards(h))
	})
	if err != nil {
		return fmt.Errorf("give interface %s of %s the addresses %v: %w", ShadowLink, ns, want, err)
	}
	return nil
}

// shadowLink finds the interface; nil: there is none, and none was to be made.
func shadowLink(h *netlink.Handle, make bool) (netlink.Link, error) {
	l, err := h.LinkByName(ShadowLink)
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		if !make {
			return nil, nil
		}
		if err = addDummy(h, ShadowLink); err == nil {
			l, err = h.LinkByName(ShadowLink)
		}
	}
	if err != nil {
		return nil, err
	}
	if l.Type() != "dummy" && !make {
		return nil, nil // it is not ours
	}
	if l.Type() != "dummy" {
		return nil, fmt.Errorf("there is one of that name and of kind %s, which is somebody else's: rename it", l.Type())
	}
	return l, nil
}

// addDummy makes an interface of kind dummy. If the kernel loads the module for that, it makes one that nobody asked for, too.
func addDummy(h *netlink.Handle, name string) error {
	_, loaded := os.Stat("/sys/module/dummy")
	err := h.LinkAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name}})
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("the kernel has no interfaces of kind dummy, load the module dummy: %w", err)
	}
	if err != nil || !errors.Is(loaded, fs.ErrNotExist) {
		return err
	}
	if l, err := h.LinkByName("dummy0"); err == nil && l.Type() == "dummy" && l.Attrs().Flags&net.FlagUp == 0 {
		_ = h.LinkDel(l) // it does no harm
	}
	return nil
}

func setShadows(h *netlink.Handle, l netlink.Link, want []netip.Addr) error {
	if len(want) == 0 {
		return h.LinkDel(l)
	}
	have, err := RetryDump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_V4) })
	if err != nil {
		return err
	}
	there := map[netip.Addr]bool{}
	for i := range have {
		a, _ := netip.AddrFromSlice(have[i].IP.To4())
		if slices.Contains(want, a) {
			there[a] = true
			continue
		}
		if err := h.AddrDel(l, &have[i]); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("take %v away: %w", a, err)
		}
	}
	for _, a := range want {
		if !there[a] {
			if err := addShadow(h, l, a); err != nil {
				return fmt.Errorf("add %v: %w", a, err)
			}
		}
		// The kernel makes the route again when somebody puts the interface up.
		if err := h.RouteDel(shadowRoute(l, a)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("take the local route of %v away: %w", a, err)
		}
	}
	return nil
}

// addShadow adds an address behind a guard: the kernel makes it a local route, after the guard, which is the way that packets to the address have
// now. Without one packets that come before the local route is gone would be refused as the host's own, and with them the
// connections of the pod.
func addShadow(h *netlink.Handle, l netlink.Link, a netip.Addr) error {
	found, err := h.RouteGet(a.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), err == nil && len(found) == 0: // no way to it
	case err != nil:
		return err
	case found[0].Type == unix.RTN_LOCAL:
		return errors.New("the host takes packets to it for its own (ip route get), though no interface has the address")
	default:
		guard := &netlink.Route{
			Table: unix.RT_TABLE_LOCAL, Dst: hostNet(a), LinkIndex: found[0].LinkIndex, Scope: netlink.SCOPE_LINK, Protocol: shadowProtocol, Type: unix.RTN_UNICAST,
		}
		if gw := found[0].Gw; gw != nil {
			guard.Gw, guard.Scope, guard.Flags = gw, netlink.SCOPE_UNIVERSE, int(netlink.FLAG_ONLINK)
		}
		if err := h.RouteAdd(guard); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("keep the way to it: %w", err)
		}
	}
	return h.AddrAdd(l, &netlink.Addr{IPNet: hostNet(a), Scope: unix.RT_SCOPE_HOST})
}

// shadowRoute is what the kernel makes for an address.
func shadowRoute(l netlink.Link, a netip.Addr) *netlink.Route {
	return &netlink.Route{Table: unix.RT_TABLE_LOCAL, Dst: hostNet(a), LinkIndex: l.Attrs().Index, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Protocol: unix.RTPROT_KERNEL}
}

// dropGuards removes all guards, also those of a process that was killed.
func dropGuards(h *netlink.Handle) error {
	filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, Protocol: shadowProtocol}
	guards, err := RetryDump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	})
	for i := range guards {
		if derr := h.RouteDel(&guards[i]); derr != nil && !errors.Is(derr, unix.ESRCH) {
			err = errors.Join(err, derr)
		}
	}
	if err != nil {
		return fmt.Errorf("remove routes of protocol %#x in table local: %w", int(shadowProtocol), err)
	}
	return nil
}

func hostNet(a netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(a, a.BitLen())) }
