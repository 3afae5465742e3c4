// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Sizes of the messages of socket diagnosis: struct nlmsghdr, and struct
// inet_diag_req_v2 behind it.
const (
	nlHeaderSize = 16
	diagReqSize  = 56
	// tcpListen is the state of a listener, which the kernel returns when no
	// connection matches.
	tcpListen = 10
	// tcpSYNSent is the state of a connection whose SYN has no answer yet.
	tcpSYNSent = 2
)

// askDiag asks a socket for diagnosis for the state of its namespace's connection with these two ends, by an interface; 0: there
// is none. The kernel answers as if a packet came by that interface: a socket that is bound to another is not found, and with 0 none
// that is bound to any.
func askDiag(fd int, local, remote netip.AddrPort, iface uint32) (state byte, err error) {
	if err := unix.Sendto(fd, appendDiagRequest(nil, local, remote, iface), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, os.NewSyscallError("send to NETLINK_SOCK_DIAG", err)
	}
	var buf [1024]byte
	n, _, err := unix.Recvfrom(fd, buf[:], 0)
	if err != nil {
		return 0, os.NewSyscallError("receive from NETLINK_SOCK_DIAG", err)
	}
	return parseDiagAnswer(buf[:n])
}

// appendDiagRequest appends the request for the connection with exactly these ends.
func appendDiagRequest(b []byte, local, remote netip.AddrPort, iface uint32) []byte {
	fam := byte(unix.AF_INET6)
	if local.Addr().Is4() {
		fam = unix.AF_INET
	}
	b = binary.NativeEndian.AppendUint32(b, nlHeaderSize+diagReqSize)
	b = binary.NativeEndian.AppendUint16(b, unix.SOCK_DIAG_BY_FAMILY)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...) // sequence and port: one exchange at a time

	b = append(b, fam, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, 1<<32-1) // all states
	b = binary.BigEndian.AppendUint16(b, local.Port())
	b = binary.BigEndian.AppendUint16(b, remote.Port())
	for _, a := range []netip.Addr{local.Addr(), remote.Addr()} {
		var full [16]byte
		copy(full[:], a.AsSlice())
		b = append(b, full[:]...)
	}
	b = binary.NativeEndian.AppendUint32(b, iface)
	return binary.NativeEndian.AppendUint64(b, 1<<64-1) // any cookie
}

// parseDiagAnswer reads the answer: an error, or a socket with its state. The state is 0 if there is no connection.
func parseDiagAnswer(b []byte) (state byte, err error) {
	if len(b) < nlHeaderSize+4 {
		return 0, fmt.Errorf("socket diagnosis: answer of %d bytes", len(b))
	}
	switch binary.NativeEndian.Uint16(b[4:]) {
	case unix.NLMSG_ERROR:
		errno := unix.Errno(-int32(binary.NativeEndian.Uint32(b[nlHeaderSize:])))
		if errno == unix.ENOENT { // no such connection, or no diagnosis of TCP
			return 0, nil
		}
		return 0, fmt.Errorf("socket diagnosis: %w", errno)
	case unix.SOCK_DIAG_BY_FAMILY:
		if state = b[nlHeaderSize+1]; state == tcpListen {
			return 0, nil
		}
		return state, nil
	default:
		return 0, fmt.Errorf("socket diagnosis: answer of type %d", binary.NativeEndian.Uint16(b[4:]))
	}
}
