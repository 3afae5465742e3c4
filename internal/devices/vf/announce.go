// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Ethernet and what is sent in it.
const (
	etherARP  = 0x0806
	etherIPv6 = 0x86dd

	protoICMPv6      = 58
	ndAdvertisement  = 136
	ndOverride       = 0x20
	ndTargetLinkAddr = 2
	ndHopLimit       = 255 // RFC 4861 §7.1.2: neighbours ignore a message with any other hop limit
)

// Announce tells the neighbours of a pod's interface where its addresses are
// now, by gratuitous ARP (RFC 5227 §3) and unsolicited neighbour advertisements
// (RFC 4861 §7.2.6).
func Announce(ctx context.Context, netns, ifName string, addrs []netip.Addr) (err error) {
	ns, err := linux.OpenNetNS(netns)
	if err != nil {
		return fmt.Errorf("announce addresses of %s: %w", ifName, err)
	}
	defer func() { err = errors.Join(err, ns.Close()) }()
	return ns.Do(func() error {
		if err := announce(ctx, ifName, addrs); err != nil {
			return fmt.Errorf("announce addresses of %s: %w", ifName, err)
		}
		return nil
	})
}

func announce(ctx context.Context, ifName string, addrs []netip.Addr) error {
	l, err := netlink.LinkByName(ifName)
	if err != nil {
		return err
	}
	mac := l.Attrs().HardwareAddr
	if len(mac) != 6 {
		return nil // not Ethernet: neighbours do not use MAC addresses
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // receives nothing
	if err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	defer unix.Close(fd)
	for _, a := range addrs {
		if err := ctx.Err(); err != nil {
			return err
		}
		frame := announcement(mac, a.Unmap())
		to := &unix.SockaddrLinklayer{Ifindex: l.Attrs().Index, Halen: 6}
		copy(to.Addr[:], frame[:6])
		if err := unix.Sendto(fd, frame, 0, to); err != nil {
			return fmt.Errorf("send announcement of %s: %w", a, err)
		}
	}
	return nil
}

// announcement is the broadcast frame that says that mac has the address a.
func announcement(mac net.HardwareAddr, a netip.Addr) []byte {
	if a.Is4() {
		return gratuitousARP(mac, a.As4())
	}
	return advertisement(mac, a.As16())
}

func gratuitousARP(mac net.HardwareAddr, a [4]byte) []byte {
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac...)
	b = binary.BigEndian.AppendUint16(b, etherARP)
	b = append(b, 0, 1, 8, 0, 6, 4, 0, 1) // Ethernet, IPv4, a request
	b = append(append(b, mac...), a[:]...)
	b = append(append(b, 0, 0, 0, 0, 0, 0), a[:]...)
	return b
}

func advertisement(mac net.HardwareAddr, a [16]byte) []byte {
	all := netip.IPv6LinkLocalAllNodes().As16()
	icmp := append([]byte{ndAdvertisement, 0, 0, 0, ndOverride, 0, 0, 0}, a[:]...)
	icmp = append(append(icmp, ndTargetLinkAddr, 1), mac...)
	binary.BigEndian.PutUint16(icmp[2:], checksum(a, all, icmp))

	b := append([]byte{0x33, 0x33, 0, 0, 0, 1}, mac...)
	b = binary.BigEndian.AppendUint16(b, etherIPv6)
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(len(icmp)))
	b = append(b, protoICMPv6, ndHopLimit)
	b = append(append(b, a[:]...), all[:]...)
	return append(b, icmp...)
}

// checksum is that of ICMPv6, over the pseudo header too (RFC 8200 §8.1).
func checksum(from, to [16]byte, icmp []byte) uint16 {
	b := append(append([]byte{}, from[:]...), to[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(icmp)))
	b = append(append(b, 0, 0, 0, protoICMPv6), icmp...) // of even length
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
