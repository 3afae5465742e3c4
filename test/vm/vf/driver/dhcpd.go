// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Layout of a DHCP message (RFC 2131 §2), and the options (RFC 2132) that a client
// cannot do without.
const (
	dhcpYourAddr  = 16
	dhcpServer    = 20
	dhcpClientMAC = 28
	dhcpOptions   = 240
	dhcpMaxBytes  = 1500

	dhcpOptMask    = 1
	dhcpOptRouter  = 3
	dhcpOptLease   = 51
	dhcpOptType    = 53
	dhcpOptID      = 54
	dhcpOptEnd     = 255
	dhcpDiscover   = 1
	dhcpOffer      = 2
	dhcpRequest    = 3
	dhcpACK        = 5
	dhcpLeaseHours = 1
)

var dhcpNames = map[byte]string{dhcpDiscover: "DISCOVER", dhcpRequest: "REQUEST"}

// dhcpd is a DHCP server on one interface with one address to give away. It writes
// down what it was asked, and ends with the process.
func (o options) dhcpd(ctx context.Context) (_ any, err error) {
	lease, err := netip.ParsePrefix(o.lease)
	if err != nil {
		return nil, err
	}
	server, err := netip.ParseAddr(o.server)
	if err != nil {
		return nil, err
	}
	listen := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var errs error
		err := c.Control(func(fd uintptr) {
			errs = errors.Join(unix.BindToDevice(int(fd), o.ifName), unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1))
		})
		return errors.Join(err, errs)
	}}
	c, err := listen.ListenPacket(ctx, "udp4", ":67")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for buf := make([]byte, dhcpMaxBytes); ; {
		n, _, err := c.ReadFrom(buf)
		if err != nil {
			return nil, err
		}
		kind := dhcpType(buf[:n])
		if dhcpNames[kind] == "" {
			continue
		}
		if _, err := fmt.Fprintln(os.Stdout, dhcpNames[kind], net.HardwareAddr(buf[dhcpClientMAC:dhcpClientMAC+6])); err != nil {
			return nil, err
		}
		answer := dhcpAnswer(buf[:dhcpOptions], kind, lease, server)
		if _, err := c.WriteTo(answer, &net.UDPAddr{IP: net.IPv4bcast, Port: 68}); err != nil {
			return nil, err
		}
	}
}

// dhcpType is the kind of a message, 0 if it is none.
func dhcpType(msg []byte) byte {
	for at := dhcpOptions; at+2 < len(msg) && msg[at] != dhcpOptEnd; {
		switch msg[at] {
		case 0: // padding
			at++
		case dhcpOptType:
			return msg[at+2]
		default:
			at += 2 + int(msg[at+1])
		}
	}
	return 0
}

func dhcpAnswer(question []byte, kind byte, lease netip.Prefix, server netip.Addr) []byte {
	msg := append([]byte(nil), question...)
	msg[0] = 2 // BOOTREPLY
	copy(msg[dhcpYourAddr:], lease.Addr().AsSlice())
	copy(msg[dhcpServer:], server.AsSlice())
	answer := byte(dhcpOffer)
	if kind == dhcpRequest {
		answer = dhcpACK
	}
	option := func(code byte, value ...byte) { msg = append(append(msg, code, byte(len(value))), value...) }
	option(dhcpOptType, answer)
	option(dhcpOptID, server.AsSlice()...)
	option(dhcpOptLease, binary.BigEndian.AppendUint32(nil, dhcpLeaseHours*3600)...)
	option(dhcpOptMask, net.CIDRMask(lease.Bits(), 32)...)
	option(dhcpOptRouter, server.AsSlice()...)
	return append(msg, dhcpOptEnd)
}
