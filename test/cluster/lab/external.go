// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

// An External is what whoever starts the machine of an external node makes of it. The machine
// has the programs of clustertools in /opt/tools, and an Ethernet connection to [Cluster.Switch].
type External struct {
	// Files is a directory of this machine with files that the node has: certificates and
	// configurations in etc, CNI plugins in opt.
	Files string
	// Addresses and Routes are those of the interface that is connected to the switch.
	Addresses []netip.Prefix
	Routes    []Route
	// Services are what runs there, in the order in which they start; kubelet wants
	// containerd to answer.
	Services []machine.Service
	// Images are the archives with the images that the node has from the start.
	Images []string
}

// External says what an external node wants; ok is false for one that the cluster itself starts.
func (n *Node) External() (e External, ok bool) {
	if !n.external {
		return External{}, false
	}
	i := n.cluster.info
	host := nodeHost(n.number)
	e = External{
		Files: n.Root(), Services: nodeServices(n.Name, n.number, i.IPv6), Images: i.Images,
		Addresses: []netip.Prefix{address4(0, host), address6(0, host)},
		Routes:    routes(len(i.Nodes), n.number),
	}
	for n := range e.Services {
		if s := &e.Services[n]; s.Name == kubelet { // looks at each container's usage: see settings.slow
			s.Args = append(s.Args, "--housekeeping-interval=30s", "--global-housekeeping-interval=1m")
		}
	}
	if !i.IPv6 {
		e.Addresses = e.Addresses[:1]
		e.Routes = slices.DeleteFunc(e.Routes, func(r Route) bool { return r.To.Addr().Is6() })
	}
	return e, true
}

// ContainerdSocket is where containerd of a node answers.
const ContainerdSocket = containerdSocket

// AwaitReady waits until the node has said, after some time, that it is ready.
func (n *Node) AwaitReady(ctx context.Context, since time.Time) error {
	return n.cluster.ask(ctx, request{Op: opAwait, Node: n.Name, Since: since})
}

// Switch is where the network of eth0 is, for machines of others to be connected with it: the
// path of a network namespace, and the name of a bridge there.
func (c *Cluster) Switch() (netns, bridge string) {
	return fmt.Sprintf("/proc/%d/ns/net", c.info.ControlPlane), networks[0].bridge
}
