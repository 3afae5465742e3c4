// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Modes of the RDMA subsystem towards network namespaces.
const (
	rdmaShared    = "shared"
	rdmaExclusive = "exclusive"
)

// Kinds of RDMA devices that are made of software.
const (
	kindRXE = "rxe"
	kindSIW = "siw"
)

// rdmaKernel is the RDMA subsystem, seen from the network namespace of the
// calling thread. Tests have one of their own.
type rdmaKernel interface {
	// Mode is rdmaShared or rdmaExclusive.
	Mode() (string, error)
	// Names are the devices that the namespace sees.
	Names() ([]string, error)
	// Port looks at the first port of a device.
	Port(name string) (rdmaPort, error)
	// Move puts a device into another namespace.
	Move(name string, fd int) error
	// Add makes a device of software.
	Add(name, kind, netdev string) error
}

// rdmaPort is the first port of a device.
type rdmaPort struct {
	active bool
	// ifindex is the index of the port's interface, 0 if the interface is in another
	// namespace.
	ifindex int
	// device is the kernel's number of the device; no other device since the boot had it.
	device int
}

// Numbers of the RDMA netlink protocol that the library lacks.
const (
	rdmaCmdPortGet    = 5
	rdmaAttrNDevIndex = 50
	portActive        = 4 // IB_PORT_ACTIVE
)

// netlinkRDMA is the RDMA subsystem of the kernel.
type netlinkRDMA struct{}

func (netlinkRDMA) Mode() (string, error) {
	mode, err := netlink.RdmaSystemGetNetnsMode()
	if err != nil {
		return "", fmt.Errorf("read RDMA namespace mode: %w", err)
	}
	return mode, nil
}

// list lists the devices. The kernel counts the devices again for each one that it
// returns, so it skips a device when another one is removed in between:
//
//	devices a, b, c: returns a, the first
//	a is removed
//	devices b, c: returns c, the second; b is missing
//
// So list asks until two answers in a row are equal.
func (netlinkRDMA) list() ([]*netlink.RdmaLink, error) {
	var last []*netlink.RdmaLink
	for try := 0; ; try++ {
		links, err := linux.RetryDump(netlink.RdmaLinkList)
		if err != nil {
			return nil, fmt.Errorf("list RDMA devices: %w", err)
		}
		if try > 0 && sameDevices(links, last) || try == dumpTries {
			return links, nil
		}
		last = links
	}
}

func sameDevices(a, b []*netlink.RdmaLink) bool {
	return slices.EqualFunc(a, b, func(a, b *netlink.RdmaLink) bool {
		return a.Attrs.Index == b.Attrs.Index && a.Attrs.Name == b.Attrs.Name
	})
}

func (n netlinkRDMA) Names() ([]string, error) {
	links, err := n.list()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, l := range links {
		names = append(names, l.Attrs.Name)
	}
	return names, nil
}

func (n netlinkRDMA) find(name string) (*netlink.RdmaLink, error) {
	links, err := n.list()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(links, func(l *netlink.RdmaLink) bool { return l.Attrs.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("RDMA device %s: %w", name, unix.ENODEV)
	}
	return links[i], nil
}

func (n netlinkRDMA) Port(name string) (rdmaPort, error) {
	l, err := n.find(name)
	if err != nil {
		return rdmaPort{}, err
	}
	p := rdmaPort{device: int(l.Attrs.Index)}
	req := nl.NewNetlinkRequest(nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT|rdmaCmdPortGet, unix.NLM_F_ACK)
	req.AddData(nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, nl.Uint32Attr(l.Attrs.Index)))
	req.AddData(nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_PORT_INDEX, nl.Uint32Attr(1)))
	msgs, err := req.Execute(unix.NETLINK_RDMA, 0)
	if errors.Is(err, unix.EINVAL) { // the kernel's error for the number of a device that is gone
		err = fmt.Errorf("it was just removed: %w", unix.ENODEV)
	}
	if err != nil {
		return rdmaPort{}, fmt.Errorf("look at port of RDMA device %s: %w", name, err)
	}
	for _, m := range msgs {
		attrs, err := nl.ParseRouteAttr(m)
		if err != nil {
			return rdmaPort{}, fmt.Errorf("look at port of RDMA device %s: %w", name, err)
		}
		for _, a := range attrs {
			switch {
			case a.Attr.Type == nl.RDMA_NLDEV_ATTR_PORT_STATE && len(a.Value) >= 1:
				p.active = a.Value[0] == portActive
			case a.Attr.Type == rdmaAttrNDevIndex && len(a.Value) >= 4:
				p.ifindex = int(nl.NativeEndian().Uint32(a.Value))
			}
		}
	}
	return p, nil
}

func (n netlinkRDMA) Move(name string, fd int) error {
	l, err := n.find(name)
	if err != nil {
		return err
	}
	if err := netlink.RdmaLinkSetNsFd(l, uint32(fd)); err != nil {
		return fmt.Errorf("move RDMA device %s: %w", name, err)
	}
	return nil
}

func (netlinkRDMA) Add(name, kind, netdev string) error {
	if err := netlink.RdmaLinkAdd(name, kind, netdev); err != nil {
		return fmt.Errorf("make RDMA device %s (%s) on %s: %w", name, kind, netdev, err)
	}
	return nil
}

// del removes a software device. The kernel waits until all processes that have the device
// open close it.
func (n netlinkRDMA) del(name string) error {
	l, err := n.find(name)
	if err != nil {
		return err
	}
	req := nl.NewNetlinkRequest(nl.RDMA_NL_NLDEV<<nl.RDMA_NL_GET_CLIENT_SHIFT|nl.RDMA_NLDEV_CMD_DELLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewRtAttr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, nl.Uint32Attr(l.Attrs.Index)))
	if _, err := req.Execute(unix.NETLINK_RDMA, 0); err != nil {
		return fmt.Errorf("take RDMA device %s away: %w", name, err)
	}
	return nil
}
