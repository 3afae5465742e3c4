// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Interface is a network interface, as far as GIDs need it.
type Interface struct {
	Name  string
	MAC   rdma.MAC
	Addrs []netip.Prefix
}

// InterfacesByIndex looks interfaces up in the network namespace of the calling
// thread, and leaves out those that are not there. It reads the whole lists of
// that namespace, however long they are.
func InterfacesByIndex(indexes []int) (map[int]Interface, error) {
	all := make(map[int]Interface, len(indexes))
	for _, index := range indexes {
		if i, err := net.InterfaceByIndex(index); err == nil {
			all[index] = interfaceOf(i)
		}
	}
	return all, nil
}

func lookUpNet(name string) Interface {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return Interface{} // it is in another network namespace
	}
	return interfaceOf(i)
}

func interfaceOf(i *net.Interface) Interface {
	n := Interface{Name: i.Name}
	copy(n.MAC[:], i.HardwareAddr)
	addrs, err := i.Addrs()
	if err != nil {
		return n
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			n.Addrs = append(n.Addrs, p)
		}
	}
	return n
}

// describe fills in what the interface adds to a GID.
func (n *Interface) describe(g *rdma.GIDEntry) {
	g.MAC = n.MAC
	for _, p := range n.Addrs {
		// A single address tells nothing about who else is on its link.
		if p.Addr() == g.GID.Addr() && !p.IsSingleIP() {
			g.PrefixBits = p.Bits()
		}
	}
}

// has reports whether a GID can be the interface's. Indexes and names of
// interfaces say something only within their network namespace, and a GID's may
// be in another one: an ipvlan child in a pod, say, which adds a GID to the
// device of its parent. A port has GIDs of link-local addresses also where the
// interface has none.
func (n *Interface) has(g rdma.GIDEntry) bool {
	a := g.GID.Addr()
	if a.IsLinkLocalUnicast() {
		return true
	}
	for _, p := range n.Addrs {
		if p.Addr() == a {
			return true
		}
	}
	return false
}

// describeRows fills in what the network interfaces of GIDs, of which indexes
// has the numbers, tell. An interface that lookUp leaves out is in another
// network namespace, or gone.
func describeRows(gids []rdma.GIDEntry, indexes []int, lookUp func([]int) (map[int]Interface, error)) error {
	each := slices.Clone(indexes)
	slices.Sort(each)
	known, err := lookUp(slices.Compact(each))
	if err != nil {
		return fmt.Errorf("look up network interfaces: %w", err)
	}
	for i := range gids {
		n := known[indexes[i]]
		if g := &gids[i]; n.has(*g) {
			g.NetDev = n.Name
			n.describe(g)
		}
	}
	return nil
}
