// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	vm "github.com/smcr-io/kube-smcr/test/vm/lab"
)

// RNICNetwork is the file with the network of a node's new pods that [Cluster.RNICPods] makes.
const RNICNetwork = "/etc/cni/net.d/05-rnic.conflist"

// RNICPods lets a node's new pods have a child (macvlan) of the RNIC's interface eth0, in its network, until undo is
// called: as in a cluster whose network is that of the RNICs. An agent chains its plugin in [RNICNetwork], too.
func (c *Cluster) RNICPods(ctx context.Context, n *Node) (undo func(context.Context) error, err error) {
	dir, err := c.vm.BuildCNIPlugins(ctx)
	if err != nil {
		return nil, err
	}
	first := netip.AddrFrom4([4]byte{10, 250, 0, 64 + 16*n.Address().As4()[3]%128})
	last := netip.AddrFrom4([4]byte{10, 250, 0, first.As4()[3] + 15})
	conf := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "rnic", "plugins": [{"type": "macvlan", "master": "eth0", "mode": "bridge",
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.250.0.0/24", "rangeStart": "%s", "rangeEnd": "%s"}]], "routes": [%s]}}]}`,
		first, last, c.podRoutes())
	_, err = n.Guest.Shell(ctx, fmt.Sprintf(`cp %[1]s/macvlan /opt/cni/bin/
		cat >%[2]s.tmp <<-'EOF'
		%[3]s
		EOF
		mv %[2]s.tmp %[2]s`, dir, RNICNetwork, conf))
	return func(ctx context.Context) error {
		_, err := n.Guest.Shell(ctx, "rm -f "+RNICNetwork+"; rm -rf /var/lib/cni/networks/rnic")
		return err
	}, err
}

// podRoutes are the routes from the RNICs' network to the pods of the nodes, as CNI has them.
func (c *Cluster) podRoutes() string {
	routes := []string{`{"dst": "0.0.0.0/0", "gw": "10.250.0.1"}`}
	for _, n := range c.Nodes {
		routes = append(routes, fmt.Sprintf(`{"dst": %q, "gw": %q}`, n.PodCIDR(), n.Address()))
	}
	return strings.Join(routes, ", ")
}

// contactPort is where [Cluster.KernelContact] serves.
const contactPort = 7199

// KernelContact makes a link group between the kernels of two nodes, which connections of pods on the kernels' SMC-R then
// join: soft RoCE of Linux 6.12 cannot send from the address of a pod's interface, which the server's kernel would
// choose for a new link group. An RNIC can.
func (c *Cluster) KernelContact(ctx context.Context, server, client *Node) error {
	const test = "github.com/smcr-io/kube-smcr/test/"
	for _, pkg := range []string{"cluster/traffic", "vm/peer/kernelsmc"} {
		if _, err := c.vm.Build(ctx, test+pkg, vm.BuildOptions{}); err != nil {
			return err
		}
	}
	at := netip.AddrPortFrom(server.Address(), contactPort).String()
	p, err := server.Guest.Start(context.WithoutCancel(ctx), "traffic", "serve", at, "--smc")
	if err != nil {
		return err
	}
	defer func() {
		if p.Signal(unix.SIGTERM) == nil {
			_ = p.Wait() // ended by us
		}
	}()
	before, err := clientContacts(ctx, client)
	if err != nil {
		return err
	}
	for {
		// The server may not listen yet, and the first rendezvous be too late.
		if _, err = client.Guest.Run(ctx, "traffic", "once", at, "--smc"); err == nil {
			now, err := clientContacts(ctx, client)
			if now > before || err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("no link group of the kernels of %s and %s: %w", server.Name, client.Name, ctx.Err()), err)
		case <-time.After(time.Second):
		}
	}
}

// clientContacts is how many connections on SMC-R version 2 a node's kernel has had as client.
func clientContacts(ctx context.Context, n *Node) (uint64, error) {
	text, err := n.Guest.Run(ctx, "kernelsmc")
	if err != nil {
		return 0, err
	}
	var k struct{ Counters struct{ ClientV2 uint64 } }
	if err := json.Unmarshal([]byte(text), &k); err != nil {
		return 0, fmt.Errorf("kernelsmc on %s: %w", n.Name, err)
	}
	return k.Counters.ClientV2, nil
}
