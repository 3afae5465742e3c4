// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"

	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// listFew calls list if the kernel's answer to a request, which the libraries read as a
// whole, is short enough. The family is the first byte of the request's header.
func listFew[T any](request uint16, family, header int, list func() ([]T, error)) ([]T, error) {
	if err := fewEnough(request, family, header, newAllowance()); err != nil {
		return nil, err
	}
	return RetryDump(list)
}

func fewEnough(request uint16, family, header int, left *allowance) error {
	body := make([]byte, header)
	body[0] = byte(family)
	return dump(unix.NETLINK_ROUTE, request, body, left, func([]byte) (bool, error) { return true, nil })
}

// RetryDump calls list, and calls it again if the kernel's list changed while it was read.
func RetryDump[T any](list func() ([]T, error)) (out []T, err error) {
	for range dumpTries {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// withHandle calls f with a route netlink handle of ns.
func withHandle(ns *NetNS, f func(*netlink.Handle) error) error {
	return ns.Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open route netlink: %w", err)
		}
		defer h.Close()
		return f(h)
	})
}

// ParentsElsewhere returns the indexes of the interfaces in other namespaces that interfaces of ns
// are the children of, as those of macvlan and ipvlan are.
func ParentsElsewhere(ns *NetNS) (indexes []int, err error) {
	err = withHandle(ns, func(h *netlink.Handle) error {
		links, err := listFew(unix.RTM_GETLINK, unix.AF_UNSPEC, unix.SizeofIfInfomsg, h.LinkList)
		for _, l := range links {
			switch a := l.Attrs(); l.(type) {
			case *netlink.Macvlan, *netlink.IPVlan:
				if a.ParentIndex != 0 && a.NetNsID >= 0 {
					indexes = append(indexes, a.ParentIndex)
				}
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the network interfaces of %s: %w", ns, err)
	}
	return indexes, nil
}

// linkGroups are the kernel's notices about network interfaces and addresses.
const linkGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)

// LinkChanges returns a channel that gets a value when a network interface of the
// process's namespace, or one of its addresses, appears, disappears or changes. One value
// may stand for many changes. The channel is closed when ctx ends, or when the kernel ends
// the subscription.
func LinkChanges(ctx context.Context) (<-chan struct{}, error) {
	conn, err := mdnetlink.Dial(unix.NETLINK_ROUTE, &mdnetlink.Config{Groups: linkGroups})
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of network interfaces: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // it was only read
	out := make(chan struct{}, 1)
	go func() {
		defer close(out)
		defer func() {
			if stop() {
				_ = conn.Close() // it was only read
			}
		}()
		for {
			// Notices were lost in a burst: the receiver has to look in any case.
			if _, err := conn.Receive(); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			select {
			case out <- struct{}{}:
			default: // the channel has a value already
			}
		}
	}()
	return out, nil
}
