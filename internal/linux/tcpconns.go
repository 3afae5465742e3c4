// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// TCPConn is a TCP connection of a namespace, by its two ends.
type TCPConn struct {
	Local, Peer netip.AddrPort
}

// connectedStates are the states of TCP in which a connection has two ends that tell it from others: all
// but those of SYNs, TIME_WAIT, and of what is closed or listens.
const connectedStates = 1<<1 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11 // ESTABLISHED, FIN_WAIT1 and 2, CLOSE_WAIT, LAST_ACK, CLOSING

// TCPConns lists the TCP connections of a namespace, those of the kernel itself included, as under its
// sockets of SMC. The error is [ErrTooMuch] if there are more than are looked through.
func TCPConns(ns *NetNS) ([]TCPConn, error) {
	var all []TCPConn
	err := ns.Do(func() error {
		left := newAllowance()
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			err := dump(unix.NETLINK_INET_DIAG, unix.SOCK_DIAG_BY_FAMILY, connsRequest(family), left, func(b []byte) (bool, error) {
				c, err := parseConn(b)
				if err != nil {
					return false, err
				}
				all = append(all, c)
				return true, nil
			})
			if err != nil && (family != unix.AF_INET6 || !errors.Is(err, unix.ENOENT)) { // a kernel without IPv6
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the TCP connections of %s: %w", ns, err)
	}
	return all, nil
}

// connsRequest is struct inet_diag_req_v2 that asks for all connections of a family.
func connsRequest(family byte) []byte {
	b := append(make([]byte, 0, diagReqSize), family, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, connectedStates)
	return b[:diagReqSize]
}

// parseConn reads struct inet_diag_msg.
//
//	0 family, 1 state, 2 timer, 3 retransmissions, 4 ports, 8 source, 24 destination, 40 interface, cookie, 52 ...
func parseConn(b []byte) (TCPConn, error) {
	const least = 40
	if len(b) < least {
		return TCPConn{}, fmt.Errorf("socket diagnosis: answer of %d bytes", len(b))
	}
	addr := func(off int) netip.Addr {
		if b[0] == unix.AF_INET {
			return netip.AddrFrom4([4]byte(b[off:]))
		}
		return netip.AddrFrom16([16]byte(b[off:])).Unmap()
	}
	return TCPConn{
		Local: netip.AddrPortFrom(addr(8), binary.BigEndian.Uint16(b[4:])),
		Peer:  netip.AddrPortFrom(addr(24), binary.BigEndian.Uint16(b[6:])),
	}, nil
}
