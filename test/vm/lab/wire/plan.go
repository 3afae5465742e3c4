// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"net"
	"net/netip"
)

const (
	// MaxGuests and MaxNICs are what the plan of addresses has room for.
	MaxGuests = 9
	MaxNICs   = 9

	// MaxPFs is how many igb NICs a guest may have: more than two show nothing new.
	MaxPFs = 4

	// hostNumber is behind the last address of a guest.
	hostNumber = 100

	// nicStep lies between the addresses of two NICs of a guest.
	nicStep = 10
)

// Addr is the IPv4 address of a NIC, both from 0: all are in 10.0.0.0/24, because
// the kernel takes a second SMC-Rv2 link only within the subnet of the first.
func Addr(guest, nic int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + guest + nicStep*nic)})
}

// Addr6 is the IPv6 address of a NIC: all are in fd00::/64.
func Addr6(guest, nic int) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(1 + guest + nicStep*nic)})
}

// HostAddr is the IPv4 address of the machine that runs the guests, where it joins them.
func HostAddr() netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, hostNumber}) }

// HostAddr6 is its IPv6 address.
func HostAddr6() netip.Addr { return netip.AddrFrom16([16]byte{0: 0xfd, 15: hostNumber}) }

// HostMAC is its hardware address. One that changed each time would leave guests with the
// one before: they keep what they know for some 60 s.
func HostMAC() net.HardwareAddr { return net.HardwareAddr{0x52, 0x54, 0, 2, 0, hostNumber} }

// MAC is the hardware address of a NIC.
func MAC(guest, nic int) string { return fmt.Sprintf("52:54:00:00:%02x:%02x", nic, guest+1) }

// PFMAC is the hardware address of an igb NIC, from 0.
func PFMAC(guest, pf int) string { return fmt.Sprintf("52:54:00:01:%02x:%02x", pf, guest+1) }

// PFDev is the name of an igb NIC in its guest.
func PFDev(pf int) string { return fmt.Sprintf("pf%d", pf) }

// NetDev is the name of a NIC in its guest.
func NetDev(nic int) string { return fmt.Sprintf("eth%d", nic) }
