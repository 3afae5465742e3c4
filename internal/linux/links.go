// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// linkGroups are the kernel's notices about network interfaces and addresses.
const linkGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)

// LinkChanges tells when a network interface of the process's namespace, or one
// of its addresses, comes, goes or changes. One value may stand for many changes.
// The channel is closed when ctx ends, or when the kernel ends the subscription.
func LinkChanges(ctx context.Context) (<-chan struct{}, error) {
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: linkGroups})
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
			// A burst that overflows the socket is one value all the same.
			if _, err := conn.Receive(); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			select {
			case out <- struct{}{}:
			default: // one is waiting already
			}
		}
	}()
	return out, nil
}
