// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// sysctls let every NIC of the one segment answer for its own address only, and
// take what comes for it.
var sysctls = map[string]string{
	"net/ipv4/conf/all/arp_ignore":       "1",
	"net/ipv4/conf/default/arp_ignore":   "1",
	"net/ipv4/conf/all/arp_announce":     "2",
	"net/ipv4/conf/default/arp_announce": "2",
	"net/ipv4/conf/all/rp_filter":        "0",
	"net/ipv4/conf/default/rp_filter":    "0",
	// A task that hangs is told of on the console while the test still runs, with
	// its stack, which is information to the kernel.
	"kernel/hung_task_timeout_secs": "40",
	"kernel/printk":                 "7",
}

// firstTable is the routing table of NIC 0. Each has one, so that what has its
// address leaves by it.
const firstTable = 100

// maxPFMTU is the largest MTU of igb.
const maxPFMTU = 9216

func network(s settings) error {
	for name, value := range sysctls {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0o644); err != nil {
			return err
		}
	}
	if err := up("lo"); err != nil {
		return err
	}
	for n := range s.nics {
		if err := nic(s, n); err != nil {
			return fmt.Errorf("NIC %d: %w", n, err)
		}
	}
	return pfs(s)
}

// pfs names the igb NICs, which the kernel finds in any order, and sets them up.
// They get no addresses: their VFs have those.
func pfs(s settings) error {
	if s.pfs == 0 {
		return nil
	}
	if text, err := exec.Command("/usr/sbin/modprobe", "igb").CombinedOutput(); err != nil {
		return fmt.Errorf("load module igb: %w: %s", err, text)
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	for n := range s.pfs {
		i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().HardwareAddr.String() == wire.PFMAC(s.guest, n) })
		if i < 0 {
			return fmt.Errorf("find PF %d: nothing has its address %s", n, wire.PFMAC(s.guest, n))
		}
		if err := netlink.LinkSetName(links[i], wire.PFDev(n)); err != nil {
			return fmt.Errorf("name %s %s: %w", links[i].Attrs().Name, wire.PFDev(n), err)
		}
		if err := netlink.LinkSetMTU(links[i], min(s.mtu, maxPFMTU)); err != nil {
			return fmt.Errorf("set the MTU of %s: %w", wire.PFDev(n), err)
		}
		if err := up(wire.PFDev(n)); err != nil {
			return err
		}
	}
	return nil
}

func up(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

func nic(s settings, n int) error {
	name := wire.NetDev(n)
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	if err := netlink.LinkSetMTU(link, s.mtu); err != nil {
		return fmt.Errorf("set the MTU to %d: %w", s.mtu, err)
	}
	// Nor could anybody have its link-local address.
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/accept_dad", []byte("0"), 0o644); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set it up: %w", err)
	}
	for _, addr := range []struct {
		ip   net.IP
		bits int
	}{{wire.Addr(s.guest, n).AsSlice(), 24}, {wire.Addr6(s.guest, n).AsSlice(), 64}} {
		width := len(addr.ip) * 8
		prefix := &net.IPNet{IP: addr.ip, Mask: net.CIDRMask(addr.bits, width)}
		a := &netlink.Addr{IPNet: prefix}
		if width > 32 {
			a.Flags |= unix.IFA_F_NODAD // it can be used at once: there is nobody who could have it too
		}
		if n > 0 {
			a.Flags |= unix.IFA_F_NOPREFIXROUTE // the subnet is reached by NIC 0, unless one says otherwise
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("add address %s: %w", addr.ip, err)
		}
		network := &net.IPNet{IP: addr.ip.Mask(prefix.Mask), Mask: prefix.Mask}
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: network, Table: firstTable + n, Scope: netlink.SCOPE_LINK}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("add its route to %s: %w", network, err)
		}
		rule := netlink.NewRule()
		rule.Src = &net.IPNet{IP: addr.ip, Mask: net.CIDRMask(width, width)}
		rule.Table, rule.Priority = firstTable+n, firstTable+n
		if width > 32 {
			rule.Family = netlink.FAMILY_V6
		}
		if err := netlink.RuleAdd(rule); err != nil {
			return fmt.Errorf("add its rule for %s: %w", addr.ip, err)
		}
	}
	return nil
}
