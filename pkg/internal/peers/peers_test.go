// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/internal/peers"
)

// All addresses of a network of IPv6 are one peer, and so are the forms of an address of IPv4.
func TestOf(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		one  bool
	}{
		{"192.0.2.1:1", "192.0.2.1:2", true},
		{"192.0.2.1:1", "192.0.2.2:1", false},
		{"192.0.2.1:1", "[::ffff:192.0.2.1]:1", true},
		{"[2001:db8:0:1::1]:1", "[2001:db8:0:1:ffff::2]:2", true},
		{"[2001:db8:0:1::1]:1", "[2001:db8:0:2::1]:1", false},
		{"[fe80::1%a]:1", "[fe80::2%a]:1", true},
	} {
		of := func(s string) netip.Addr { return peers.Of(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(s))) }
		if x, y := of(tc.a), of(tc.b); (x == y) != tc.one {
			t.Errorf("%s is %v, %s is %v, want one peer: %t", tc.a, x, tc.b, y, tc.one)
		}
	}
}

// A peer has so many places and not one more, whatever others have, and again when it gives one back.
func TestPlaces(t *testing.T) {
	p := peers.New(2)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for i, tc := range []struct {
		peer netip.Addr
		want bool
	}{{a, true}, {a, true}, {a, false}, {b, true}} {
		if got := p.Take(tc.peer); got != tc.want {
			t.Errorf("%d: %v has a place: %t", i, tc.peer, got)
		}
	}
	p.GiveBack(a)
	if !p.Take(a) || p.Take(a) {
		t.Error("a place that was given back is not there once")
	}
}
