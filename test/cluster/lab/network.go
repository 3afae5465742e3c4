// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

// A room is the inside of a machine's network namespace.
type room struct {
	*netlink.Handle
	ns   netns.NsHandle
	ipv6 bool
}

func enter(m *machine.Machine, ipv6 bool) (*room, error) {
	ns, err := netns.GetFromPath(m.NetNS())
	if err != nil {
		return nil, fmt.Errorf("open the network of %s: %w", m.Spec.Name, err)
	}
	handle, err := netlink.NewHandleAt(ns)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the network of %s: %w", m.Spec.Name, err), ns.Close())
	}
	return &room{Handle: handle, ns: ns, ipv6: ipv6}, nil
}

func (r *room) close() {
	r.Close()
	_ = r.ns.Close()
}

// up gives an interface its addresses and starts it.
func (r *room) up(name string, addrs ...netip.Prefix) error {
	link, err := r.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	for _, a := range addrs {
		if a.Addr().Is6() && !r.ipv6 {
			continue
		}
		addr := &netlink.Addr{IPNet: ipNet(a)}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // the plan has no address twice
		}
		if err := r.AddrReplace(link, addr); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, a, err)
		}
	}
	if err := r.LinkSetUp(link); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	return nil
}

func (r *room) route(route Route) error {
	if route.To.Addr().Is6() && !r.ipv6 {
		return nil
	}
	if err := r.RouteReplace(&netlink.Route{Dst: ipNet(route.To), Gw: route.Via.AsSlice()}); err != nil {
		return fmt.Errorf("route %s via %s: %w", route.To, route.Via, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// wireControlPlane makes the bridges that are the networks between the
// machines, and routes to the nodes' pods.
func wireControlPlane(m *machine.Machine, nodes int, ipv6 bool) error {
	r, err := enter(m, ipv6)
	if err != nil {
		return err
	}
	defer r.close()
	if err := r.up("lo"); err != nil {
		return err
	}
	for i, n := range networks {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.bridge, HardwareAddr: hardware(i, controlPlaneHost)}}
		if err := r.LinkAdd(bridge); err != nil {
			return fmt.Errorf("make bridge %s: %w", n.bridge, err)
		}
		if err := r.up(n.bridge, address4(i, controlPlaneHost), address6(i, controlPlaneHost)); err != nil {
			return err
		}
	}
	return r.routeAll(podRoutes(nodes, 0))
}

// wireNode connects a node to the networks and routes the other nodes' pods.
func wireNode(control, m *machine.Machine, number, nodes int, ipv6 bool) error {
	hub, err := enter(control, ipv6)
	if err != nil {
		return err
	}
	defer hub.close()
	r, err := enter(m, ipv6)
	if err != nil {
		return err
	}
	defer r.close()
	if err := r.up("lo"); err != nil {
		return err
	}
	host := nodeHost(number)
	for i, n := range networks {
		port := portName(number, n.nic)
		// What a machine that was powered off leaves goes with its namespace,
		// but not at once.
		if old, err := hub.LinkByName(port); err == nil {
			if err := hub.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("remove the cable of a former boot: %w", err)
			}
		}
		bridge, err := hub.LinkByName(n.bridge)
		if err != nil {
			return fmt.Errorf("find bridge %s: %w", n.bridge, err)
		}
		veth := &netlink.Veth{
			LinkAttrs:        netlink.LinkAttrs{Name: port, MasterIndex: bridge.Attrs().Index},
			PeerName:         n.nic,
			PeerHardwareAddr: hardware(i, host),
			PeerNamespace:    netlink.NsFd(r.ns),
		}
		if err := hub.LinkAdd(veth); err != nil {
			return fmt.Errorf("connect %s of %s: %w", n.nic, m.Spec.Name, err)
		}
		if err := hub.up(port); err != nil {
			return err
		}
		if err := r.up(n.nic, address4(i, host), address6(i, host)); err != nil {
			return err
		}
	}
	return r.routeAll(routes(nodes, number))
}

func portName(number int, nic string) string { return fmt.Sprintf("n%d-%s", number, nic) }

// A Route is a route of a node.
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// routes are the routes of a node.
func routes(nodes, number int) []Route {
	// Nobody answers there, but without a default route a node does not even try
	// to reach a Service: that comes before kube-proxy's rules.
	return append(
		podRoutes(nodes, number),
		Route{netip.PrefixFrom(netip.IPv4Unspecified(), 0), address4(0, controlPlaneHost).Addr()},
		Route{netip.PrefixFrom(netip.IPv6Unspecified(), 0), address6(0, controlPlaneHost).Addr()},
	)
}

// podRoutes are the routes to the pods of all nodes but self.
func podRoutes(nodes, self int) []Route {
	var all []Route
	for n := 1; n <= nodes; n++ {
		if n == self {
			continue
		}
		all = append(
			all,
			Route{pods4(n), address4(0, nodeHost(n)).Addr()},
			Route{pods6(n), address6(0, nodeHost(n)).Addr()},
		)
	}
	return all
}

func (r *room) routeAll(routes []Route) error {
	for _, route := range routes {
		if err := r.route(route); err != nil {
			return err
		}
	}
	return nil
}

// setPort starts or stops the switch's port that a node's interface is
// connected to: the node's side loses its carrier, as with a pulled cable.
func setPort(control *machine.Machine, number int, nic string, up bool) error {
	hub, err := enter(control, false)
	if err != nil {
		return err
	}
	defer hub.close()
	link, err := hub.LinkByName(portName(number, nic))
	if err != nil {
		return fmt.Errorf("find the port of %s on node %d: %w", nic, number, err)
	}
	if up {
		return hub.LinkSetUp(link)
	}
	return hub.LinkSetDown(link)
}

// dialIn connects from a machine's network to an address of it.
func dialIn(m *machine.Machine, to netip.AddrPort) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result, 1)
	go func() {
		// The thread is not unlocked: it ends with this goroutine, and with it
		// that it was in another namespace.
		runtime.LockOSThread()
		conn, err := dialLocked(m, to)
		done <- result{conn, err}
	}()
	r := <-done
	return r.conn, r.err
}

func dialLocked(m *machine.Machine, to netip.AddrPort) (net.Conn, error) {
	ns, err := netns.GetFromPath(m.NetNS())
	if err != nil {
		return nil, fmt.Errorf("open the network of %s: %w", m.Spec.Name, err)
	}
	defer func() { _ = ns.Close() }()
	if err := netns.Set(ns); err != nil {
		return nil, fmt.Errorf("enter the network of %s: %w", m.Spec.Name, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	f := os.NewFile(uintptr(fd), to.String())
	defer func() { _ = f.Close() }()
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
		return nil, fmt.Errorf("connect to %s on %s: %w", to, m.Spec.Name, err)
	}
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use a socket: %w", err)
	}
	return conn, nil
}
