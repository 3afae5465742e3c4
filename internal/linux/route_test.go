// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// TestRouteTo: on the subnet, behind a router, itself, and nowhere.
func TestRouteTo(t *testing.T) {
	pod, peer := newPair(t)
	macs := map[*NetNS]net.HardwareAddr{}
	for _, ns := range []*NetNS{pod, peer} {
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByName("eth0")
			if err == nil {
				macs[ns] = l.Attrs().HardwareAddr
			}
			return err
		})())
	}
	ask := func(src, dst netip.Addr) (r Route) {
		mustDo(t, pod.Do(func() (err error) {
			r, err = RouteTo(src, dst)
			return err
		}))
		return r
	}
	for i, f := range families {
		t.Run(f.name, func(t *testing.T) {
			far := []netip.Addr{netip.MustParseAddr("10.55.1.1"), netip.MustParseAddr("fd55::1")}[i]
			if r := ask(f.pod, far); r.Found {
				t.Errorf("without a route: %+v", r)
			}
			if r := ask(f.pod, f.peer); !r.Found || r.Gateway {
				t.Errorf("on the subnet: %+v", r)
			}
			if r := ask(f.pod, f.pod); !r.Found || r.Gateway {
				t.Errorf("to itself: %+v", r)
			}
			mustDo(t, inNetlink(pod, func(h *netlink.Handle) error {
				return h.RouteAdd(&netlink.Route{Gw: f.peer.AsSlice(), Dst: &net.IPNet{IP: far.AsSlice(), Mask: net.CIDRMask(far.BitLen(), far.BitLen())}})
			})())
			// The router has not spoken yet: the first call asks it.
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			deadline := time.Now().Add(waitLimit)
			for {
				r := ask(f.pod, far)
				if !r.Found || !r.Gateway {
					t.Fatalf("behind a router: %+v", r)
				}
				if r.MAC.String() == macs[peer].String() {
					break
				}
				if r.MAC != nil || time.Now().After(deadline) {
					t.Fatalf("the router's MAC address is %v, want %v", r.MAC, macs[peer])
				}
				<-tick.C
			}
		})
	}
}

// TestRoute_elsewhere: the way to the subnet of the one interface leads through it from that interface's own
// address, and from the other's is elsewhere; what stays on the machine is not.
func TestRoute_elsewhere(t *testing.T) {
	pod, _ := newPair(t)
	other := []netip.Prefix{netip.MustParsePrefix("10.88.0.1/32"), netip.MustParsePrefix("fd88::1/128")}
	mustDo(t, inNetlink(pod, func(h *netlink.Handle) error {
		la := netlink.NewLinkAttrs()
		la.Name = "second"
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: "secondpeer"}); err != nil {
			return err
		}
		return upWith(h, "second", other...)
	})())
	for i, f := range families {
		second := other[i].Addr()
		awaitOwnRoute(t, pod, f.pod)
		for _, tc := range []struct {
			src, dst netip.Addr
			want     bool
		}{{f.pod, f.peer, false}, {second, f.peer, true}, {second, f.pod, false}, {f.pod, f.pod, false}} {
			mustDo(t, pod.Do(func() error {
				r, err := RouteTo(tc.src, tc.dst)
				if err != nil {
					return err
				}
				if got, err := r.Elsewhere(tc.src); got != tc.want || err != nil || !r.Found {
					t.Errorf("%v to %v by %+v: elsewhere %t, %v", tc.src, tc.dst, r, got, err)
				}
				return nil
			}))
		}
	}
	if got, err := (Route{}).Elsewhere(families[0].pod); got || err != nil {
		t.Errorf("no way: %t, %v", got, err)
	}
}
