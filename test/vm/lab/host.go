// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// hostDev is the NIC of a Host in its namespace, and the name by which QEMU knows it.
const hostDev = "lab0"

// A Host is this machine as one more member of the guests' segment: a network namespace
// with one NIC there. What a test does in it is done with the machine's own kernel and
// speed, and guests see it as they see each other.
type Host struct {
	ns    *linux.NetNS
	guest *Guest // whose QEMU has the NIC
}

// Join makes this machine a member of the segment, once at a time. It takes the rights of
// [testenv.NetAdmin] and /dev/net/tun. The caller closes the Host before the Lab.
func (l *Lab) Join(ctx context.Context) (*Host, error) {
	ns, err := linux.ScratchNetNS()
	if err != nil {
		return nil, fmt.Errorf("join the guests: %w", err)
	}
	h := &Host{ns: ns, guest: l.guests[0]}
	if err := h.plug(ctx, l.cfg.MTU); err != nil {
		return nil, fmt.Errorf("join the guests: %w", errors.Join(err, ns.Close()))
	}
	return h, nil
}

// plug makes the NIC and gives it to QEMU, with which it goes.
func (h *Host) plug(ctx context.Context, mtu int) error {
	var tap *os.File
	err := h.ns.Do(func() (err error) {
		if tap, err = NewTAP(hostDev); err == nil {
			err = setUpHost(mtu)
		}
		return err
	})
	if tap != nil {
		defer func() { _ = tap.Close() }()
	}
	if err != nil {
		return err
	}
	return h.guest.plug(ctx, hostDev, tap)
}

// Plug puts a TAP device of this machine, one that [NewTAP] made, on the segment, under the
// name by which [Lab.Unplug] takes it off again. The caller may close the file. The device
// goes with the QEMU of guest 0.
func (l *Lab) Plug(ctx context.Context, name string, tap *os.File) error {
	return l.guests[0].plug(ctx, name, tap)
}

// Unplug takes off what Plug put on the segment.
func (l *Lab) Unplug(ctx context.Context, name string) error {
	return l.guests[0].unplug(ctx, name)
}

// plug gives a TAP device to the guest's QEMU, which puts it on the guest's hub of the segment.
func (g *Guest) plug(ctx context.Context, name string, tap *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	err := g.tryOrders(
		ctx,
		request{Execute: "getfd", Arguments: map[string]any{"fdname": name}, file: tap},
		request{Execute: "netdev_add", Arguments: map[string]any{"type": "tap", "id": name, "fd": name}},
		request{Execute: "netdev_add", Arguments: map[string]any{"type": "hubport", "id": "hub-" + name, "hubid": nicSegment, "netdev": name}},
	)
	if err != nil {
		return fmt.Errorf("%s: give QEMU a NIC of this machine: %w", g.Name(), errors.Join(err, g.failure()))
	}
	return nil
}

func (g *Guest) unplug(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, monitorTimeout)
	defer cancel()
	err := g.tryOrders(
		ctx,
		request{Execute: "netdev_del", Arguments: map[string]any{"id": "hub-" + name}},
		request{Execute: "netdev_del", Arguments: map[string]any{"id": name}},
	)
	if g.failure() != nil {
		return nil // it went with QEMU
	}
	return err
}

// NewTAP makes a TAP device of that name in the network namespace of the thread. The device
// goes when the last descriptor of the file is closed.
func NewTAP(name string) (*os.File, error) {
	const device = "/dev/net/tun"
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, request)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a NIC of %s: %w", device, err), f.Close())
	}
	return f, nil
}

// setUpHost gives the NIC its addresses, in the namespace of the thread.
func setUpHost(mtu int) error {
	link, err := netlink.LinkByName(hostDev)
	if err != nil {
		return fmt.Errorf("find %s: %w", hostDev, err)
	}
	if err := netlink.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("set the MTU of %s to %d: %w", hostDev, mtu, err)
	}
	if err := netlink.LinkSetHardwareAddr(link, wire.HostMAC()); err != nil {
		return fmt.Errorf("set the hardware address of %s: %w", hostDev, err)
	}
	for _, a := range []*netlink.Addr{
		{IPNet: &net.IPNet{IP: wire.HostAddr().AsSlice(), Mask: net.CIDRMask(24, 32)}},
		{IPNet: &net.IPNet{IP: wire.HostAddr6().AsSlice(), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD},
	} {
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("add address %v to %s: %w", a, hostDev, err)
		}
	}
	for _, name := range []string{"lo", hostDev} {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

// Close removes the NIC and forgets the namespace. Connections that are open there stay,
// and nothing comes through them any more.
func (h *Host) Close() error {
	return errors.Join(h.guest.unplug(context.Background(), hostDev), h.ns.Close())
}

// Addr is the IPv4 address of the machine among the guests.
func (h *Host) Addr() netip.Addr { return wire.HostAddr() }

// Addr6 is its IPv6 address.
func (h *Host) Addr6() netip.Addr { return wire.HostAddr6() }

// NetNS is its namespace, for what makes sockets by itself.
func (h *Host) NetNS() *linux.NetNS { return h.ns }

// Dial connects to a guest.
func (h *Host) Dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	return linux.DialInNS(ctx, h.ns, nil, netip.Addr{}, to)
}

// Listen listens for guests, at one of the two addresses and a port; 0 is any.
func (h *Host) Listen(ctx context.Context, at netip.AddrPort) (*net.TCPListener, error) {
	return linux.ListenInNS(ctx, h.ns, nil, at)
}
