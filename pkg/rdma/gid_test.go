// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net/netip"
	"testing"
)

func TestGIDEntry_OnLink(t *testing.T) {
	entry := func(addr string, bits int) GIDEntry {
		return GIDEntry{GID: GIDFromAddr(netip.MustParseAddr(addr)), PrefixBits: bits}
	}
	for _, tc := range []struct {
		name  string
		entry GIDEntry
		peer  string
		want  bool
	}{
		{"IPv4 neighbour", entry("192.0.2.1", 24), "192.0.2.200", true},
		{"IPv4 elsewhere", entry("192.0.2.1", 24), "198.51.100.1", false},
		{"IPv6 neighbour", entry("2001:db8::1", 64), "2001:db8::ffff", true},
		{"IPv6 elsewhere", entry("2001:db8::1", 64), "2001:db8:1::1", false},
		{"other family", entry("2001:db8::1", 1), "192.0.2.1", false},
		{"unknown subnet", entry("192.0.2.1", 0), "192.0.2.2", false},
	} {
		if got := tc.entry.OnLink(GIDFromAddr(netip.MustParseAddr(tc.peer))); got != tc.want {
			t.Errorf("%s: %t", tc.name, got)
		}
	}
}
