// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Interface is a network interface with all of its addresses.
type Interface struct {
	Index int
	Name  string
	MAC   net.HardwareAddr
	Addrs []netip.Prefix
}

// InterfacesByIndex looks network interfaces of ns up, and leaves out those that are not there. The error
// is [ErrTooMuch] if they have more addresses than are read: a program that may set up a pod's network can
// make as many as it likes, and the bound is for all of these interfaces together.
func InterfacesByIndex(ns *NetNS, indexes []int) (all []Interface, err error) {
	err = ns.Do(func() (err error) {
		all, err = interfacesByIndex(indexes, newAllowance())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("network interfaces of %s: %w", ns, err)
	}
	return all, nil
}

// interfacesByIndex is InterfacesByIndex for the thread's namespace.
func interfacesByIndex(indexes []int, left *allowance) (all []Interface, err error) {
	for _, index := range indexes {
		l, err := netlink.LinkByIndex(index) // one answer, however many interfaces there are
		if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("interface %d: %w", index, err)
		}
		i := Interface{Index: index, Name: l.Attrs().Name, MAC: l.Attrs().HardwareAddr}
		err = eachAddress(index, left, func(p netip.Prefix) bool {
			i.Addrs = append(i.Addrs, p)
			return true
		})
		if errors.Is(err, unix.ENODEV) {
			continue // it has just gone
		}
		if err != nil {
			return nil, fmt.Errorf("addresses of interface %s: %w", i.Name, err)
		}
		all = append(all, i)
	}
	return all, nil
}

// eachAddress goes through the addresses of one interface of the thread's namespace until f returns false.
// Kernels since 4.20 do not list those of other interfaces.
func eachAddress(index int, left *allowance, f func(netip.Prefix) bool) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	// With it the kernel heeds the index in the request; without it the loop below does.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	// struct ifaddrmsg: the family, the length of the prefix, and at 4 the index of the interface.
	body := make([]byte, unix.SizeofIfAddrmsg)
	binary.NativeEndian.PutUint32(body[4:], uint32(index))
	return dumpFrom(fd, unix.RTM_GETADDR, body, left, func(b []byte) (bool, error) {
		if len(b) < unix.SizeofIfAddrmsg {
			return false, fmt.Errorf("address of %d bytes", len(b))
		}
		a, err := addressIn(b[unix.SizeofIfAddrmsg:])
		if err != nil || !a.IsValid() || binary.NativeEndian.Uint32(b[4:]) != uint32(index) {
			return err == nil, err
		}
		return f(netip.PrefixFrom(a, int(b[1]))), nil
	})
}
