// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// TCPConn is a TCP connection of a namespace, by its two ends.
type TCPConn struct {
	Local, Peer netip.AddrPort
}

// connectedStates are the states of TCP in which a connection has two ends that tell it from others: all
// but those of SYNs, TIME_WAIT, and of what is closed or listens.
const connectedStates = 1<<1 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11 // ESTABLISHED, FIN_WAIT1 and 2, CLOSE_WAIT, LAST_ACK, CLOSING

// A TCPSocket is one of TCP's, as the kernel shows it.
type TCPSocket struct {
	TCPConn        // without a Peer if it listens
	Listens bool   // for connections
	Cgroup  uint64 // ID; 0: the kernel does not tell
}

// TCPConns lists the TCP connections of a namespace, those of the kernel itself included, as under its
// sockets of SMC. The error is [ErrTooMuch] if there are more than are looked through.
func TCPConns(ns *NetNS) (all []TCPConn, err error) {
	err = tcpSockets(ns, connectedStates, func(s TCPSocket) { all = append(all, s.TCPConn) })
	if err != nil {
		return nil, fmt.Errorf("list the TCP connections of %s: %w", ns, err)
	}
	return all, nil
}

// TCPSockets lists them with those that listen, and with their cgroups.
func TCPSockets(ns *NetNS) (all []TCPSocket, err error) {
	err = tcpSockets(ns, connectedStates|1<<tcpListen, func(s TCPSocket) { all = append(all, s) })
	if err != nil {
		return nil, fmt.Errorf("list the TCP sockets of %s: %w", ns, err)
	}
	return all, nil
}

// tcpSockets calls f for the sockets in some states.
func tcpSockets(ns *NetNS, states uint32, f func(TCPSocket)) error {
	return ns.Do(func() error {
		left := newAllowance()
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			err := dump(unix.NETLINK_INET_DIAG, unix.SOCK_DIAG_BY_FAMILY, socketsRequest(family, states), left, func(b []byte) (bool, error) {
				s, err := parseSocket(b)
				if err != nil {
					return false, err
				}
				f(s)
				return true, nil
			})
			if err != nil && (family != unix.AF_INET6 || !errors.Is(err, unix.ENOENT)) { // a kernel without IPv6
				return err
			}
		}
		return nil
	})
}

// socketsRequest is struct inet_diag_req_v2 that asks for all sockets of a family in these states.
func socketsRequest(family byte, states uint32) []byte {
	b := append(make([]byte, 0, diagReqSize), family, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, states)
	return b[:diagReqSize]
}

// inetDiagSize is the size of struct inet_diag_msg, and inetDiagCgroup the attribute INET_DIAG_CGROUP_ID behind it.
const (
	inetDiagSize   = 72
	inetDiagCgroup = 21
)

// parseSocket reads struct inet_diag_msg, and the attributes behind it.
//
//	0 family, 1 state, 2 timer, 3 retransmissions, 4 ports, 8 source, 24 destination, 40 interface, cookie, 52 ...
func parseSocket(b []byte) (s TCPSocket, err error) {
	if len(b) < inetDiagSize {
		return s, fmt.Errorf("socket diagnosis: answer of %d bytes", len(b))
	}
	addr := func(off int) netip.Addr {
		if b[0] == unix.AF_INET {
			return netip.AddrFrom4([4]byte(b[off:]))
		}
		return netip.AddrFrom16([16]byte(b[off:])).Unmap()
	}
	s.Local = netip.AddrPortFrom(addr(8), binary.BigEndian.Uint16(b[4:]))
	if s.Listens = b[1] == tcpListen; !s.Listens {
		s.Peer = netip.AddrPortFrom(addr(24), binary.BigEndian.Uint16(b[6:]))
	}
	attributes, err := netlink.NewAttributeDecoder(b[inetDiagSize:])
	if err != nil {
		return s, fmt.Errorf("socket diagnosis: %w", err)
	}
	for attributes.Next() {
		if attributes.Type() == inetDiagCgroup {
			s.Cgroup = attributes.Uint64()
		}
	}
	if err := attributes.Err(); err != nil {
		return s, fmt.Errorf("socket diagnosis: %w", err)
	}
	return s, nil
}
