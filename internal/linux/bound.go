// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// Where reports whether a held connection's socket still waits for the answer to its SYN, and whether the socket is bound to an
// interface: by SO_BINDTODEVICE, or as that of a connection to a link-local address. A connection of a bound socket cannot be
// diverted to loopback, because the kernel looks for a way there by that interface only:
//
//	SYN to 10.0.0.2:80, by eth0
//	diverted to 127.0.0.1:55820, still by eth0, where that address is a martian: dropped
//
// A kernel without socket diagnosis does not say that a socket waits, or is bound.
func (h *Holder) Where(c synqueue.Conn) (waits, bound bool, err error) {
	state, err := h.ns.tupleState(c.Src, c.Dst, 0)
	if err != nil || state != 0 {
		return state == tcpSYNSent, false, err
	}
	var links []int
	err = withHandle(h.ns, func(h *netlink.Handle) (err error) {
		links, err = otherLinks(h)
		return err
	})
	for _, index := range links {
		state, err := h.ns.tupleState(c.Src, c.Dst, index)
		if err != nil || state != 0 {
			return state == tcpSYNSent, state != 0, err
		}
	}
	if err != nil {
		return false, false, fmt.Errorf("look to which interface of %s a socket is bound: %w", h.ns, err)
	}
	return false, false, nil
}

// otherLinks are the indexes of the first maxBoundLinks interfaces that are not loopback. The error is [ErrTooMuch] if there
// are more than are read.
func otherLinks(h *netlink.Handle) (indexes []int, err error) {
	links, err := listFew(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, h.LinkList)
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		err = nil // most of them are there
	}
	for _, l := range links {
		if l.Attrs().Flags&net.FlagLoopback == 0 && len(indexes) < maxBoundLinks {
			indexes = append(indexes, l.Attrs().Index)
		}
	}
	return indexes, err
}
