// SPDX-License-Identifier: Apache-2.0

package portmapper

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// destination returns the address that a datagram was sent to, from what the kernel said of
// it. It is false where that is not an address of this host alone.
func destination(oob []byte) (netip.Addr, bool) {
	for len(oob) > 0 {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			break
		}
		switch {
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			// struct in_pktinfo: the interface, our address there, and that in the header.
			local, sent := netip.AddrFrom4([4]byte(data[4:])), netip.AddrFrom4([4]byte(data[8:]))
			return sent, local == sent
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			sent := netip.AddrFrom16([16]byte(data))
			return sent, !sent.IsMulticast()
		}
		oob = rest
	}
	return netip.Addr{}, false
}

// source has the kernel send a datagram from an address. What has a zone leaves by it as it is.
func source(a netip.Addr) []byte {
	if a.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
}
