// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Requests and attributes of NETLINK_RDMA (linux/rdma/rdma_netlink.h).
const (
	rdmaNLDev        = 5 << 10 // RDMA_NL_NLDEV
	rdmaGetDevice    = rdmaNLDev | 1
	rdmaGetPort      = rdmaNLDev | 5
	rdmaAttrDevice   = 1  // RDMA_NLDEV_ATTR_DEV_INDEX
	rdmaAttrName     = 2  // RDMA_NLDEV_ATTR_DEV_NAME
	rdmaAttrNetIndex = 50 // RDMA_NLDEV_ATTR_NDEV_INDEX
)

// RDMADevicesIn returns the names of the RDMA devices of the kernel that have a port whose network interface is in a namespace: the
// device itself may be in all of them.
func RDMADevicesIn(ns *NetNS) (names []string, err error) {
	err = ns.Do(func() error {
		left := newAllowance()
		devices, err := rdmaDump(rdmaGetDevice, nil, left)
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			return nil // the kernel has no RDMA
		}
		if err != nil {
			return err
		}
		for _, d := range devices {
			ports, err := rdmaDump(rdmaGetPort, &d.index, left)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) {
				continue // it has just gone
			}
			if err != nil {
				return err
			}
			for _, p := range ports {
				if p.hasNetDev {
					names = append(names, d.name)
					break
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list the RDMA devices with an interface in %s: %w", ns, err)
	}
	return names, nil
}

// rdmaEntry is what an answer has of a device or a port. The kernel tells of interfaces of the asking namespace only.
type rdmaEntry struct {
	index     uint32
	name      string
	hasNetDev bool
}

// rdmaDump lists devices or, with the index of a device, its ports.
func rdmaDump(request uint16, device *uint32, left *allowance) (all []rdmaEntry, err error) {
	var body []byte
	if device != nil {
		e := netlink.NewAttributeEncoder()
		e.Uint32(rdmaAttrDevice, *device)
		if body, err = e.Encode(); err != nil {
			return nil, err
		}
	}
	err = dump(unix.NETLINK_RDMA, request, body, left, func(b []byte) (bool, error) {
		x, err := parseRDMA(b)
		all = append(all, x)
		return err == nil, err
	})
	return all, err
}

// parseRDMA reads the attributes of an entry.
func parseRDMA(b []byte) (x rdmaEntry, err error) {
	d, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return x, fmt.Errorf("RDMA netlink: %w", err)
	}
	for d.Next() {
		switch d.Type() {
		case rdmaAttrDevice:
			x.index = d.Uint32()
		case rdmaAttrName:
			x.name = d.String()
		case rdmaAttrNetIndex:
			x.hasNetDev = d.Uint32() != 0
		}
	}
	if err := d.Err(); err != nil {
		return x, fmt.Errorf("RDMA netlink: %w", err)
	}
	return x, nil
}
