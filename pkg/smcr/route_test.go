// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// routeDevice is a device of which nothing but the name is asked.
type routeDevice struct{ rdma.Device }

func (routeDevice) Name() string { return "d" }

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
