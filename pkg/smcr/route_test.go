// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// routeDevice is a device of which nothing but the name is asked.
type routeDevice struct{ rdma.Device }

func (routeDevice) Name() string          { return "d" }
func (routeDevice) Attr() rdma.DeviceAttr { return rdma.DeviceAttr{} }

// activeDevice is one that a link may be made over.
type activeDevice struct{ routeDevice }

func (activeDevice) Port() rdma.PortAttr { return rdma.PortAttr{State: rdma.PortActive} }

// hostRouted is one whose packets take whichever way the host has.
type hostRouted struct{ routeDevice }

func (hostRouted) Attr() rdma.DeviceAttr { return rdma.DeviceAttr{HostRouted: true} }

func gid(addr string) rdma.GID { return rdma.GIDFromAddr(netip.MustParseAddr(addr)) }

func TestStack_route(t *testing.T) {
	router := rdma.MAC{2, 0, 0, 0, 0, 9}
	failed := 0
	known := func(_, dst netip.Addr) (clc.Route, error) {
		if dst == netip.MustParseAddr("198.51.100.7") {
			return clc.Route{}, errors.New("no route")
		}
		return clc.Route{Found: true, Gateway: true, MAC: router}, nil
	}
	own := rdma.GIDEntry{GID: gid("192.0.2.1"), PrefixBits: 24}
	for _, tc := range []struct {
		name  string
		route func(src, dst netip.Addr) (clc.Route, error)
		peer  string
		want  clc.Route
	}{
		{"in our subnet", known, "192.0.2.9", clc.Route{Found: true}},
		{"behind a router", known, "198.51.100.1", clc.Route{Found: true, Gateway: true, MAC: router}},
		{"devices find the way themselves", nil, "198.51.100.1", clc.Route{Found: true}},
		{"no route", known, "198.51.100.7", clc.Route{}},
		{"another family", known, "2001:db8::1", clc.Route{}},
		{"nobody", known, "0.0.0.0", clc.Route{}},
		{"everybody", known, "224.0.0.1", clc.Route{}},
		{"our loopback", known, "127.0.0.1", clc.Route{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &Stack{cfg: Config{Route: tc.route, Hooks: Hooks{Failed: func(string, error) { failed++ }}}}
			if got := s.route(&rnic{s: s, dev: routeDevice{}}, own, gid(tc.peer)); got != tc.want {
				t.Errorf("route %+v, want %+v", got, tc.want)
			}
		})
	}
	elsewhere := func(netip.Addr, netip.Addr) (clc.Route, error) { return clc.Route{Found: true, Elsewhere: true}, nil }
	for dev, want := range map[rdma.Device]bool{routeDevice{}: true, hostRouted{}: false} {
		s := &Stack{cfg: Config{Route: elsewhere}}
		if got := s.route(&rnic{s: s, dev: dev}, own, gid("198.51.100.1")); got.Elsewhere != want {
			t.Errorf("%T: %+v", dev, got)
		}
	}
	if failed != 1 {
		t.Errorf("%d failures were reported, want that of the missing route", failed)
	}
}

// A gateway whose MAC address is not known yet is asked for again, and a device that has
// its route is not.
func TestStack_routesToAwaitsGateway(t *testing.T) {
	asked := map[netip.Addr]int{}
	slow, fast := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("203.0.113.1")
	s := &Stack{cfg: Config{Route: func(src, _ netip.Addr) (clc.Route, error) {
		asked[src]++
		r := clc.Route{Found: true, Gateway: true}
		if src == fast || asked[src] == 3 {
			r.MAC = rdma.MAC{2, 0, 0, 0, 0, 9}
		}
		return r, nil
	}}}
	for i, a := range []netip.Addr{slow, fast} {
		r := &rnic{s: s, dev: routeDevice{}, index: uint8(i)}
		r.gids.v2 = rdma.GIDEntry{GID: rdma.GIDFromAddr(a), PrefixBits: 24}
		s.devices.list = append(s.devices.list, r)
	}
	to := s.routesTo(t.Context(), gid("198.51.100.1"))
	for i := range s.devices.list {
		if !to[i].Found || to[i].MAC == (rdma.MAC{}) {
			t.Errorf("device %d: %+v", i, to[i])
		}
	}
	if asked[slow] != 3 || asked[fast] != 1 || !to.any() {
		t.Errorf("asked %v", asked)
	}

	ended, end := context.WithCancel(t.Context())
	end()
	clear(asked)
	if to := s.routesTo(ended, gid("198.51.100.1")); to[0].MAC != (rdma.MAC{}) || asked[slow] != 1 {
		t.Errorf("a rendezvous that has ended waits: %+v, asked %v", to[0], asked)
	}
	if (&routes{}).any() {
		t.Error("no route is one")
	}
}

// TestRendezvous_checkRoutes: what the server says counts for the RNIC that was proposed, and for all others but those in the
// subnet of the server's RNIC.
func TestRendezvous_checkRoutes(t *testing.T) {
	direct, routed := clc.Route{Found: true}, clc.Route{Found: true, Gateway: true}
	for _, tc := range []struct {
		name    string
		direct  bool
		to      routes
		want    []int // of the devices that are left
		refused bool
	}{
		{"both direct", true, routes{direct, direct}, []int{0, 1}, false},
		{"both through a router", false, routes{routed, direct}, []int{0, 1}, false},
		{"the server sees a router, we do not", false, routes{direct, direct}, []int{1}, false},
		{"nor is another one of ours near", false, routes{direct}, nil, true},
		{"no route", true, routes{}, nil, true},
	} {
		s := &Stack{}
		for i, a := range []string{"192.0.2.1", "198.51.100.1"} {
			s.devices.put(&rnic{s: s, dev: routeDevice{}, index: uint8(i), gids: gids{v2: rdma.GIDEntry{GID: gid(a), PrefixBits: 24}}})
		}
		r := &rendezvous{s: s, with: contact{routes: tc.to}}
		a := clc.Accept{Endpoint: clc.Endpoint{GID: gid("198.51.100.9"), Ext: clc.FirstContactExtension{Direct: tc.direct}}}
		a.Version = clc.V2
		err := r.checkRoutes(&a)
		var left []int
		for i := range r.with.routes {
			if r.with.routes[i].Found {
				left = append(left, i)
			}
		}
		if !slices.Equal(left, tc.want) || (err != nil) != tc.refused {
			t.Errorf("%s: %v are left, %v, want %v", tc.name, left, err, tc.want)
		}
	}
}

// TestGroup_nextPeer: a server goes by the RNICs of the client that its devices reach, best those without a link, and looks
// for the way of a device to an RNIC once, however long the client's list is.
func TestGroup_nextPeer(t *testing.T) {
	all := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.8"}
	const first, second = "192.0.2.1", "198.51.100.1" // the first one carries a link
	for _, tc := range []struct {
		name    string
		devices []string
		routes  []string // from a device to an RNIC
		want    string
		asked   int // ways, but the last guess
	}{
		{"none is reached", []string{first, second}, nil, "", 16},
		{"by a device without a link", []string{first, second}, []string{first + " 10.0.0.1", second + " 10.0.0.3"}, "10.0.0.3", 6},
		{"by one with a link only", []string{first, second}, []string{first + " 10.0.0.2", first + " 10.0.0.5"}, "10.0.0.2", 16},
		{"there is no other device", []string{first}, []string{first + " 10.0.0.2"}, "10.0.0.2", 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			asked := map[string]int{}
			s := &Stack{cfg: Config{Route: func(src, dst netip.Addr) (clc.Route, error) {
				way := src.String() + " " + dst.String()
				asked[way]++
				return clc.Route{Found: slices.Contains(tc.routes, way)}, nil
			}}}
			for i, a := range tc.devices {
				r := tableRNIC(uint8(i), "d", a, 0)
				r.s, r.dev = s, activeDevice{}
				s.devices.put(r)
			}
			g := &group{s: s, version: clc.V2, lg: linkgroup.New(linkgroup.Config{Role: linkgroup.Server, Version: clc.V2, Rand: rand.New(rand.NewPCG(1, 1))})}
			g.lg.AddFirstLink(linkgroup.Endpoint{})
			for _, a := range all {
				g.gids.Add(gid(a))
			}
			peer, to := g.nextPeer(rdma.GID{})
			want := rdma.GID{} // whatever the client says
			if tc.want != "" {
				want = gid(tc.want)
			}
			if peer != want || !to.any() {
				t.Errorf("%v by %v, want %q", peer.Addr(), to, tc.want)
			}
			if len(asked) != tc.asked {
				t.Errorf("%d ways were looked for, want %d", len(asked), tc.asked)
			}
			for way, n := range asked {
				if n != 1 {
					t.Errorf("%s was looked for %d times", way, n)
				}
			}
		})
	}
}

// TestPreferred: it is remembered of a bounded number of peers.
func TestPreferred(t *testing.T) {
	p := preferred{}
	first := netip.MustParseAddr("10.0.0.0")
	for i, a := 0, first; i <= maxPreferred; i, a = i+1, a.Next() {
		p.set(a, uint8(i%8))
		if p[a] != uint8(i%8) {
			t.Fatalf("peer %v: %d", a, p[a])
		}
	}
	if len(p) != maxPreferred {
		t.Errorf("%d peers are remembered", len(p))
	}
}

// TestIsDirect: only a way of the RNIC's own without a router is.
func TestIsDirect(t *testing.T) {
	for to, want := range map[clc.Route]bool{
		{}: false, {Found: true}: true, {Found: true, Gateway: true}: false, {Found: true, Elsewhere: true}: false,
	} {
		if isDirect(to) != want {
			t.Errorf("%+v: %t", to, !want)
		}
	}
}
