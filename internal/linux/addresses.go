// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Addresses returns the addresses of each network interface in ns, with the length of
// their prefix. It leaves out loopback and link-local addresses. The error is [ErrTooMuch]
// if there are more than are read.
func Addresses(ns *NetNS) (out map[string][]netip.Prefix, err error) {
	err = ns.Do(func() (err error) {
		for range dumpTries {
			left := newAllowance()
			if out, err = addresses(left); err != nil || !left.changed {
				return err
			}
		}
		return nil // interfaces may have changed in between; the result is as good as any
	})
	if err != nil {
		return nil, fmt.Errorf("addresses in %s: %w", ns, err)
	}
	return out, nil
}

// addresses is Addresses for the thread's namespace.
func addresses(left *allowance) (map[string][]netip.Prefix, error) {
	out := map[string][]netip.Prefix{}
	names, err := interfaceNames(left)
	if err != nil {
		return nil, err
	}
	// struct ifaddrmsg: the family, the length of the prefix, and at 4 the
	// index of the interface.
	err = dump(unix.NETLINK_ROUTE, unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg), left, func(b []byte) (bool, error) {
		if len(b) < unix.SizeofIfAddrmsg {
			return false, fmt.Errorf("address of %d bytes", len(b))
		}
		name, known := names[binary.NativeEndian.Uint32(b[4:])]
		a, err := addressIn(b[unix.SizeofIfAddrmsg:])
		if known && a.IsValid() && !a.IsLinkLocalUnicast() {
			out[name] = append(out[name], netip.PrefixFrom(a, int(b[1])))
		}
		return err == nil, err
	})
	return out, err
}

// addressIn returns the address in the attributes of struct ifaddrmsg; of a
// point-to-point interface, its local address.
func addressIn(b []byte) (a netip.Addr, err error) {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return a, err
	}
	local := false
	for ad.Next() {
		switch ad.Type() {
		case unix.IFA_LOCAL:
			a, local = netip.AddrFromSlice(ad.Bytes())
		case unix.IFA_ADDRESS:
			if !local {
				a, _ = netip.AddrFromSlice(ad.Bytes())
			}
		}
	}
	return a, ad.Err()
}

// interfaceNames are the names by index of the thread's network interfaces, but
// loopback.
func interfaceNames(left *allowance) (map[uint32]string, error) {
	names := map[uint32]string{}
	err := dump(unix.NETLINK_ROUTE, unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg), left, func(b []byte) (bool, error) {
		// struct ifinfomsg: at 4 the index, at 8 the flags.
		if len(b) < unix.SizeofIfInfomsg {
			return false, fmt.Errorf("interface of %d bytes", len(b))
		}
		if binary.NativeEndian.Uint32(b[8:])&unix.IFF_LOOPBACK != 0 {
			return true, nil
		}
		ad, err := netlink.NewAttributeDecoder(b[unix.SizeofIfInfomsg:])
		if err != nil {
			return false, err
		}
		for ad.Next() {
			if ad.Type() == unix.IFLA_IFNAME {
				names[binary.NativeEndian.Uint32(b[4:])] = ad.String()
			}
		}
		return true, ad.Err()
	})
	return names, err
}
