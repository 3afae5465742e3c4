// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
)

// withIPAM is a file for the nodes of a cluster with these fields of dra.
func withIPAM(dra string) []byte {
	return []byte("node:\n  devices: []\n  cni: {install: true}\n  dra: " + dra + "\n")
}

func TestParse_ipam(t *testing.T) {
	for _, tt := range []struct{ name, dra, want string }{
		{"none", `{enabled: true}`, ``},
		{"empty", `{ipam: {}}`, ``},
		{"null", `{ipam: null, ipamOfNode: null}`, ``},
		{"whereabouts", `{ipam: {type: whereabouts, range: 192.0.2.0/24, exclude: [192.0.2.0/28]}}`, `{"exclude":["192.0.2.0/28"],"range":"192.0.2.0/24","type":"whereabouts"}`},
		{"part of a network", `{ipam: {type: whereabouts, range: 192.0.2.10-192.0.2.99/24}}`, `{"range":"192.0.2.10-192.0.2.99/24","type":"whereabouts"}`},
		{
			"two families", `{ipam: {type: whereabouts, ipRanges: [{range: 192.0.2.0/24, range_start: 192.0.2.9}, {range: '2001:db8::/64'}]}}`,
			`{"ipRanges":[{"range":"192.0.2.0/24","range_start":"192.0.2.9"},{"range":"2001:db8::/64"}],"type":"whereabouts"}`,
		},
		{
			"host-local", `{ipam: {type: host-local, ranges: [[{subnet: 192.0.2.0/24, rangeStart: 192.0.2.10, rangeEnd: 192.0.2.10}]], routes: [{dst: 198.51.100.0/24, gw: 192.0.2.1, mtu: 9000}]}}`,
			`{"ranges":[[{"rangeEnd":"192.0.2.10","rangeStart":"192.0.2.10","subnet":"192.0.2.0/24"}]],"routes":[{"dst":"198.51.100.0/24","gw":"192.0.2.1","mtu":9000}],"type":"host-local"}`,
		},
		{"host-local as of old", `{ipam: {type: host-local, subnet: '2001:db8::/64', gateway: '2001:db8::1'}}`, `{"gateway":"2001:db8::1","subnet":"2001:db8::/64","type":"host-local"}`},
		{"static", `{ipam: {type: static, addresses: [{address: 192.0.2.7/24, gateway: 192.0.2.1}]}}`, `{"addresses":[{"address":"192.0.2.7/24","gateway":"192.0.2.1"}],"type":"static"}`},
		{"dhcp", `{ipam: {type: dhcp}}`, `{"type":"dhcp"}`},
		{"another plugin", `{ipam: {type: acme-ipam, pool: [blue, 7, 1.5, true, null], n: {m: 123456789}}}`, `{"n":{"m":123456789},"pool":["blue",7,1.5,true,null],"type":"acme-ipam"}`},
		{"default route behind", `{ipam: {type: dhcp, routes: [{dst: 0.0.0.0/0, priority: 500}]}}`, `{"routes":[{"dst":"0.0.0.0/0","priority":500}],"type":"dhcp"}`},
		{"of this node", `{ipam: {type: dhcp}, ipamOfNode: {n1: {type: static, addresses: [{address: 192.0.2.1/24}]}, n2: {type: acme}}}`, `{"addresses":[{"address":"192.0.2.1/24"}],"type":"static"}`},
		{"of another node", `{ipam: {type: dhcp}, ipamOfNode: {n2: {type: acme}}}`, `{"type":"dhcp"}`},
		{"none on this node", `{ipam: {type: dhcp}, ipamOfNode: {n1: {}}}`, ``},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n, err := ParseOn(Machine{Cluster: true, Name: "n1"}, "t", withIPAM(tt.dra))
			if err != nil {
				t.Fatal(err)
			}
			if n.DRA.IPAM != tt.want {
				t.Errorf("got  %s\nwant %s", n.DRA.IPAM, tt.want)
			}
		})
	}
}

// What an IPAM plugin would refuse for each pod is refused once, with its place.
func TestParse_ipamMistakes(t *testing.T) {
	for _, tt := range []struct{ name, dra, want string }{
		{"no mapping", `{ipam: whereabouts}`, `t:4:15: node.dra.ipam: is a single value, want a mapping`},
		{"no type", `{ipam: {range: 192.0.2.0/24}}`, `node.dra.ipam.type: is missing: want the name of an IPAM plugin`},
		{"type is a path", `{ipam: {type: /opt/cni/bin/dhcp}}`, `node.dra.ipam.type: "/opt/cni/bin/dhcp", want the name`},
		{"type is a directory", `{ipam: {type: ..}}`, `node.dra.ipam.type: "..", want the name`},
		{"alias", `{ipam: {type: acme, a: &x [1], b: [*x]}}`, `node.dra.ipam.b: is an alias`},
		{"keys that are no texts", `{ipam: {type: acme, a: {[1]: 2}}}`, `cannot be written as JSON`},
		{"a key twice", `{ipam: {type: acme, type: acme}}`, `node.dra.ipam.type: is given twice`},
		{"too long", `{ipam: {type: acme, text: ` + strings.Repeat("x", maxIPAMBytes) + `}}`, `node.dra.ipam: has 16409 bytes, at most 16384 are allowed`},

		{"host-local: range for ranges", `{ipam: {type: host-local, range: 192.0.2.0/24}}`, `node.dra.ipam.ranges: is missing or empty: host-local wants lists of subnets, as in ranges: [[{subnet: 192.0.2.0/24}]]`},
		{"host-local: one list too few", `{ipam: {type: host-local, ranges: [{subnet: 192.0.2.0/24}]}}`, `node.dra.ipam.ranges[0]: is a mapping, want a list`},
		{"host-local: no subnet", `{ipam: {type: host-local, ranges: [[{rangeStart: 192.0.2.1}]]}}`, `node.dra.ipam.ranges[0][0].subnet: is missing`},
		{"host-local: no length", `{ipam: {type: host-local, subnet: 192.0.2.0}}`, `node.dra.ipam.subnet: "192.0.2.0", want an address and the length`},
		{"host-local: host bits", `{ipam: {type: host-local, subnet: 192.0.2.1/24}}`, `192.0.2.1/24 has bits set behind its length: did you mean 192.0.2.0/24?`},
		{"host-local: no room", `{ipam: {type: host-local, subnet: 192.0.2.0/31}}`, `192.0.2.0/31 has no room`},
		{"host-local: start outside", `{ipam: {type: host-local, subnet: 192.0.2.0/24, rangeStart: 192.0.3.1}}`, `node.dra.ipam.rangeStart: 192.0.3.1 is not in the subnet 192.0.2.0/24`},
		{"host-local: backwards", `{ipam: {type: host-local, subnet: 192.0.2.0/24, rangeStart: 192.0.2.9, rangeEnd: 192.0.2.8}}`, `node.dra.ipam.rangeEnd: 192.0.2.8 is before rangeStart, 192.0.2.9`},
		{"host-local: gateway", `{ipam: {type: host-local, subnet: 192.0.2.0/24, gateway: router}}`, `node.dra.ipam.gateway: "router", want an address`},

		{"whereabouts: no range", `{ipam: {type: whereabouts}}`, `node.dra.ipam.range: is missing: whereabouts wants a range such as 192.0.2.0/24`},
		{"whereabouts: an address", `{ipam: {type: whereabouts, range: 192.0.2.1}}`, `node.dra.ipam.range: "192.0.2.1", want a range`},
		{"whereabouts: two networks", `{ipam: {type: whereabouts, range: 198.51.100.1-192.0.2.9/24}}`, `node.dra.ipam.range: "198.51.100.1-192.0.2.9/24", want a range`},
		{"whereabouts: half a range", `{ipam: {type: whereabouts, range: x-192.0.2.9/24}}`, `node.dra.ipam.range: "x-192.0.2.9/24", want a range`},
		{"whereabouts: end outside", `{ipam: {type: whereabouts, range: 192.0.2.0/24, range_end: 192.0.3.1}}`, `node.dra.ipam.range_end: 192.0.3.1 is not in the range 192.0.2.0/24`},
		{"whereabouts: exclusion", `{ipam: {type: whereabouts, range: 192.0.2.0/24, exclude: [192.0.2.1]}}`, `node.dra.ipam.exclude[0]: "192.0.2.1", want a CIDR`},
		{"whereabouts: one of several", `{ipam: {type: whereabouts, ipRanges: [{range: 192.0.2.0/24}, {}]}}`, `node.dra.ipam.ipRanges[1].range: is missing`},

		{"static: none", `{ipam: {type: static}}`, `node.dra.ipam.addresses: is missing or empty: static wants addresses`},
		{"static: no length", `{ipam: {type: static, addresses: [{address: 192.0.2.7}]}}`, `node.dra.ipam.addresses[0].address: "192.0.2.7", want an address and the length`},

		{"default route", `{ipam: {type: dhcp, routes: [{dst: 0.0.0.0/0}]}}`, `node.dra.ipam.routes[0].dst: 0.0.0.0/0 is a default route`},
		{"default route of IPv6", `{ipam: {type: acme, routes: [{dst: '::/0'}]}}`, `node.dra.ipam.routes[0].dst: ::/0 is a default route`},
		{"gateway of a route", `{ipam: {type: dhcp, routes: [{dst: 192.0.2.0/24, gw: 1}]}}`, `node.dra.ipam.routes[0].gw: "1", want an address`},

		{"another node's", `{ipamOfNode: {n2: {type: whereabouts}}}`, `t:4:26: node.dra.ipamOfNode.n2.range: is missing`},
		{"no node", `{ipamOfNode: {'a b': {type: dhcp}}}`, `node.dra.ipamOfNode.a b: "a b", want a node's name`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, m := range []Machine{{Cluster: true, Name: "n1"}, {Cluster: true, Any: true}} {
				if _, err := ParseOn(m, "t", withIPAM(tt.dra)); err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%+v: error %v\nwant %q", m, err, tt.want)
				}
			}
		})
	}
	for _, dra := range []string{"ipam: {type: dhcp}", "ipamOfNode: {n2: {type: dhcp}}"} {
		_, err := Parse("t", []byte(minimal+"  dra: {"+dra+"}\n"))
		if err == nil || !strings.Contains(err.Error(), "cni.install is false: put it into the entry by hand") {
			t.Errorf("%s without the agent's entry: %v", dra, err)
		}
	}
}
