// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

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
