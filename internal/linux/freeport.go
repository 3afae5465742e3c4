// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// freePort makes a socket that is bound to the client's address and to a port that the
// client does not use towards the application, and will not use soon.
//
// The client chooses a port for its next connection itself, and knows nothing of ours. If it chose
// the same one, its SYN would reach the application's end of our connection, and be answered on
// loopback: the client's connect() would hang for as long as our connection is open. Linux chooses
// from ip_local_port_range, and the client's is most likely the same as the pod's. So freePort looks
// outside of that range first:
//
//	32768 to 60999   the client's connections
//	61000 to 65535   ours
//
// When the ports tried there are in use or in TIME_WAIT, the kernel chooses one from the range. A
// port that is not free stays bound until the search ends: otherwise the kernel, which takes the
// next port that can be bound, would nearly always offer the same port again where most are in
// TIME_WAIT.
func (n *NetNS) freePort(client netip.Addr, mark uint32, dst netip.AddrPort) (*rawSocket, error) {
	r, err := n.portRange()
	if err != nil {
		return nil, err
	}
	var refused []*rawSocket
	defer func() {
		for _, s := range refused {
			s.close()
		}
	}()
	for i := range outsideTries + portTries {
		var port uint16 // 0: the kernel's choice
		if i < outsideTries {
			if port = r.outside(rand.IntN); port == 0 {
				continue
			}
		}
		s, free, err := n.foreignSocket(netip.AddrPortFrom(client, port), mark, dst)
		switch {
		case port != 0 && errors.Is(err, ErrNoPort):
		case err != nil || free:
			return s, err
		default:
			refused = append(refused, s)
		}
	}
	return nil, ErrNoPort
}

// portRange is a namespace's ip_local_port_range: the ports that the kernel chooses for connections,
// both ends included.
type portRange struct{ first, last uint16 }

// readPortRange reads the range of the thread's namespace.
func readPortRange() (r portRange, err error) {
	const name = "/proc/sys/net/ipv4/ip_local_port_range"
	b, err := os.ReadFile(name)
	if err != nil {
		return r, err
	}
	if _, err := fmt.Sscan(string(b), &r.first, &r.last); err != nil {
		return r, fmt.Errorf("read %s: %w", name, err)
	}
	return r, nil
}

// outside picks a port that is not in the range: from those above it or, if these are few, from
// those below, without the ports of system services. It returns 0 if these are few, too. n(k)
// returns a number from 0 to k-1.
func (r portRange) outside(n func(int) int) uint16 {
	const firstUserPort = 1024
	if above := 65535 - int(r.last); above >= minOutside {
		return r.last + 1 + uint16(n(above))
	}
	if below := int(r.first) - firstUserPort; below >= minOutside {
		return firstUserPort + uint16(n(below))
	}
	return 0
}

// foreignSocket makes a socket that is bound to local, the client's address and a port, and tells
// whether the client has no connection to dst with that port. If the port is 0, the kernel chooses
// one from the range from which the client chooses its own, so the client may have one. Then our
// SYN would kill that connection:
//
//	we           SYN from the client's address and port
//	application  acknowledges the data of the established connection
//	we           RST, as our socket does not know that connection; the sequence number fits
//	application  its connection with the client is reset
//
// The kernel's choice makes this rare, because Linux prefers odd ports for bind and even
// ones for connect. The look at the socket table excludes it, except in the instant between
// the look and the SYN. The error unwraps to ErrNoPort if the port cannot be bound.
func (n *NetNS) foreignSocket(local netip.AddrPort, mark uint32, dst netip.AddrPort) (s *rawSocket, free bool, err error) {
	s, err = n.socket(local.Addr())
	if err != nil {
		return nil, false, err
	}
	err = withFD(s.raw, func(fd int) error {
		err := errors.Join(setTransparent(fd, local.Addr().Is4()), setMark(fd, mark))
		if err == nil && local.Port() != 0 {
			// Connections to other applications may have the port, and a program may listen on it later.
			err = sockopt("SO_REUSEADDR", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
		}
		if err != nil {
			return err
		}
		if err := unix.Bind(fd, sockaddr(local)); err != nil {
			if errors.Is(err, unix.EADDRINUSE) {
				err = errors.Join(ErrNoPort, err)
			}
			return os.NewSyscallError("bind", err)
		}
		local, err = sockName(fd)
		return err
	})
	if err == nil {
		free, err = n.tupleFree(dst, local)
	}
	if err != nil {
		s.close()
		return nil, false, err
	}
	return s, free, nil
}
