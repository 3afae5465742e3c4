// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// in calls f on a thread in the namespace ns, with a netlink handle of that namespace.
func in(ns *linux.NetNS, f func(h *netlink.Handle) error) error {
	return ns.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open route netlink: %w", err)
		}
		defer h.Close()
		return f(h)
	})
}

// find looks for an interface by name; nil is none.
func find(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none), errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for interface %s: %w", name, err)
	}
	return l, nil
}

// search returns the first interface for which right is true; nil if there is none.
func search(h *netlink.Handle, right func(netlink.Link) bool) (netlink.Link, error) {
	links, err := linux.RetryDump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if right(l) {
			return l, nil
		}
	}
	return nil, nil
}

// isOf reports whether an interface of the calling thread's namespace is of a device, such as a PCI
// function. Linux says so with the interface since 5.14, and before that to ethtool only.
func isOf(a *netlink.LinkAttrs, device string) bool {
	if a.ParentDev != "" {
		return a.ParentDev == device
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(s) }()
	info, err := unix.IoctlGetEthtoolDrvinfo(s, a.Name)
	return err == nil && unix.ByteSliceToString(info.Bus_info[:]) == device
}

// moveLink moves an interface into another namespace and renames it in one message, so that
// it does not matter if the old name is in use in the new namespace.
func moveLink(l netlink.Link, name string, to *linux.NetNS) error {
	return to.WithFD(func(fd int) error {
		req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
		msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
		msg.Index = int32(l.Attrs().Index)
		req.AddData(msg)
		req.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(fd))))
		req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

// isUp tells whether an interface is set up by its administrator.
func isUp(l netlink.Link) bool { return l.Attrs().Flags&net.FlagUp != 0 }

// setUp brings an interface up or down if it is not yet.
func setUp(h *netlink.Handle, l netlink.Link, up bool) error {
	switch {
	case isUp(l) == up:
		return nil
	case up:
		return h.LinkSetUp(l)
	}
	return h.LinkSetDown(l)
}

// addresses are the addresses of an interface, without those that the kernel makes itself.
func addresses(h *netlink.Handle, l netlink.Link) ([]string, error) {
	list, err := linux.RetryDump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
	}
	var out []string
	for _, a := range list {
		if a.IP.IsLinkLocalUnicast() && a.IP.To4() == nil || a.Flags&unix.IFA_F_PERMANENT == 0 {
			continue
		}
		if len(out) == maxAddresses {
			return nil, fmt.Errorf("interface %s has more than %d addresses: %w", l.Attrs().Name, maxAddresses, ErrInUse)
		}
		out = append(out, a.IPNet.String())
	}
	return out, nil
}

// hasDefaultRoute tells whether an interface has a default route of the host.
func hasDefaultRoute(h *netlink.Handle, l netlink.Link) (bool, error) {
	routes, err := linux.RetryDump(func() ([]netlink.Route, error) { return h.RouteList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return false, fmt.Errorf("list routes over %s: %w", l.Attrs().Name, err)
	}
	for _, r := range routes {
		if r.Dst == nil {
			return true, nil
		}
		if ones, _ := r.Dst.Mask.Size(); ones == 0 {
			return true, nil
		}
	}
	return false, nil
}
