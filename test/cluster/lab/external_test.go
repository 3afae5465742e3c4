// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"slices"
	"testing"
	"time"
)

// An external node has the addresses and routes that it would have as one of the cluster's own
// machines, of the versions of IP that the cluster has.
func TestNode_External(t *testing.T) {
	for _, tt := range []struct {
		name              string
		ipv6              bool
		addresses, routes int
	}{
		{"IPv4", false, 1, 3},
		{"both", true, 2, 6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Cluster{info: info{IPv6: tt.ipv6, Images: []string{"pause.tar"}, Nodes: make([]nodeInfo, 3)}}
			c.info.Nodes[2] = nodeInfo{Name: "n3", Root: "/machines/n3/root"}
			n := &Node{Name: "n3", cluster: c, number: 3, external: true}
			e, ok := n.External()
			if !ok || e.Files != "/machines/n3/root" || !slices.Equal(e.Images, c.info.Images) || len(e.Services) != 3 {
				t.Errorf("External() = %+v, %t", e, ok)
			}
			if len(e.Addresses) != tt.addresses || e.Addresses[0].Addr() != n.Address() {
				t.Errorf("addresses %v, want %d, %s the first", e.Addresses, tt.addresses, n.Address())
			}
			if len(e.Routes) != tt.routes {
				t.Errorf("%d routes, want %d: to the pods of two nodes, and all others: %v", len(e.Routes), tt.routes, e.Routes)
			}
			for _, r := range e.Routes {
				if r.To.Addr().Is6() != r.Via.Is6() || r.To == pods4(3) || r.To == pods6(3) || r.Via == n.Address() {
					t.Errorf("route %s via %s", r.To, r.Via)
				}
			}
		})
	}
	if _, ok := (&Node{Name: "n1"}).External(); ok {
		t.Error("a node of the cluster's own is external")
	}
}

// What this machine lacks is no matter of a node on another one.
func TestSettings_elsewhere(t *testing.T) {
	here := settings{proxyMode: "nftables", cniVersion: "1.0.0", restrictOOM: true, snapshotter: "native", grace: time.Second}
	want := settings{proxyMode: "nftables", cniVersion: "1.0.0", snapshotter: "overlayfs", slow: true, grace: time.Second}
	if got := here.elsewhere(); got != want {
		t.Errorf("elsewhere() = %+v, want %+v", got, want)
	}
}
