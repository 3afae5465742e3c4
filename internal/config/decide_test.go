// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"testing"
)

func TestOnlyPeersMoved(t *testing.T) {
	policy := func(mode Mode, addrs ...string) Policy {
		p := Policy{Name: "p", Mode: mode, NoPeers: len(addrs) == 0}
		for _, a := range addrs {
			p.Addresses = append(p.Addresses, netip.MustParseAddr(a))
		}
		return p
	}
	all := Policy{Name: "all"}
	must := Policy{Name: "must", Mode: ModeRequired}
	port := policy(ModePrefer, "10.0.0.1")
	port.Ports = []PortRange{{80, 80}}
	for _, tt := range []struct {
		name    string
		was, is []Policy
		want    bool
	}{
		{"the same", []Policy{policy(ModeRequired, "10.0.0.1")}, []Policy{policy(ModeRequired, "10.0.0.1")}, true},
		{"one more", []Policy{policy(ModePrefer, "10.0.0.1")}, []Policy{policy(ModePrefer, "10.0.0.1", "10.0.0.2")}, true},
		{"the first", []Policy{policy(ModePrefer)}, []Policy{policy(ModePrefer, "10.0.0.1")}, true},
		{"the last one gone", []Policy{policy(ModePrefer, "10.0.0.1"), all}, []Policy{policy(ModePrefer), all}, true},
		{"another port", []Policy{policy(ModePrefer, "10.0.0.1")}, []Policy{port}, false},
		{"another mode", []Policy{policy(ModePrefer, "10.0.0.1")}, []Policy{policy(ModeRequired, "10.0.0.1")}, false},
		{"another policy", []Policy{policy(ModePrefer, "10.0.0.1")}, []Policy{policy(ModePrefer, "10.0.0.1"), all}, false},
		{"all addresses", []Policy{policy(ModeRequired, "10.0.0.1")}, []Policy{{Name: "p", Mode: ModeRequired}}, false},
		{"one more is required", []Policy{policy(ModeRequired, "10.0.0.1")}, []Policy{policy(ModeRequired, "10.0.0.1", "10.0.0.2")}, false},
		{"one less is required", []Policy{policy(ModeRequired, "10.0.0.1", "10.0.0.2")}, []Policy{policy(ModeRequired, "10.0.0.2")}, true},
		{"one more before what is required", []Policy{policy(ModePrefer, "10.0.0.1"), must}, []Policy{policy(ModePrefer, "10.0.0.1", "10.0.0.2"), must}, true},
		{"one less before what is required", []Policy{policy(ModePrefer, "10.0.0.1"), must}, []Policy{policy(ModePrefer), must}, false},
		{"one less after what is required", []Policy{must, policy(ModePrefer, "10.0.0.1")}, []Policy{must, policy(ModePrefer)}, true},
	} {
		if got := OnlyPeersMoved(tt.was, tt.is); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
