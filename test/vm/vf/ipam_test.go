// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// ipam: the reference plugins static and dhcp, with a DHCP server on the PF, give
// the pod's interface its address and route; DEL gives the lease back.
func (n *node) ipam(t *testing.T) {
	vf := n.vfs[0]
	const server, lease, static = "10.9.0.1", "10.9.0.7/24", "10.9.0.8/24"
	for _, c := range []struct {
		name, address string
		ipam          map[string]any
		route         string
	}{
		{
			name: "static", address: static, route: "10.77.0.0/16 via " + server,
			ipam: map[string]any{
				"type": "static", "addresses": []map[string]string{{"address": static}},
				"routes": []map[string]string{{"dst": "10.77.0.0/16", "gw": server}},
			},
		},
		{name: "dhcp", address: lease, route: "default via " + server, ipam: map[string]any{"type": "dhcp"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n.unchanged(t)
			asked := n.serveDHCP(t, server, lease)
			p := n.addPod(t, "ipam-"+c.name)
			conf := n.conf(t, "ipam-"+c.name, map[string]any{"mode": n.mode(), "ipam": c.ipam})
			p.must("add", conf, "net1", vf.PCI)
			if out := p.sh("ip -br address show net1; ip route"); !strings.Contains(out, c.address) || !strings.Contains(out, c.route) {
				t.Errorf("the pod has %s; want address %s and route %s", out, c.address, c.route)
			}
			p.must("check", conf, "net1", vf.PCI)
			p.must("del", conf, "net1", vf.PCI)
			if c.name != "dhcp" {
				return
			}
			// The plugin's release has no source address, so that no socket gets it.
			got := n.sh(t, "cut -d' ' -f1 "+asked+"; grep -o 'releasing lease' /run/dhcp.log")
			if got != "DISCOVER\nREQUEST\nreleasing lease" {
				t.Errorf("server and plugin say %q", got)
			}
		})
	}
}

// serveDHCP runs a DHCP server on the first PF and the daemon of the plugin dhcp
// until the test ends. The file has what the server was asked.
func (n *node) serveDHCP(t *testing.T, server, lease string) (asked string) {
	t.Helper()
	asked = "/run/dhcpd.log"
	n.sh(t, "rm -rf /run/cni; ip address add "+server+"/24 dev "+n.PF(0))
	for _, command := range []string{
		fmt.Sprintf("exec driver dhcpd -if %s -server %s -lease %s >%s", n.PF(0), server, lease, asked),
		"exec dhcp daemon >/run/dhcp.log 2>&1",
	} {
		d, err := n.Start(context.WithoutCancel(t.Context()), "bash", "-c", command)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = d.Signal(unix.SIGKILL)
			_ = d.Wait() // it was killed
		})
	}
	t.Cleanup(func() { n.sh(t, "ip address del "+server+"/24 dev "+n.PF(0)) })
	n.eventually(t, "the daemon of the plugin listens", func() error {
		_, err := n.Run(context.WithoutCancel(t.Context()), "bash", "-c", "[ -S /run/cni/dhcp.sock ] && ss -Hlun 'sport = :67' | grep -q .")
		return err
	})
	return asked
}
