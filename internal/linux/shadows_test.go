// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestAddShadow_keepsTheWay: while the kernel's local route of a shadow is still there, packets to the address go where they went
// before, on link and by a gateway. Without the guard they are the host's own.
func TestAddShadow_keepsTheWay(t *testing.T) {
	ns := newNS(t)
	inNS(t, ns, `link add v0 type veth peer name v1
link set v0 up
link set v1 up
address add 10.9.0.1/24 dev v0
route add 10.9.1.0/24 via 10.9.0.7
link add s0 type bridge
`, "ip", "-batch", "-")
	mustDo(t, withHandle(ns, func(h *netlink.Handle) error {
		l, err := h.LinkByName("s0")
		if err != nil {
			return err
		}
		v0, err := h.LinkByName("v0")
		if err != nil {
			return err
		}
		wayTo := func(a netip.Addr) netlink.Route {
			found, err := h.RouteGet(a.AsSlice())
			if err != nil || len(found) != 1 {
				t.Fatalf("routes to %v: %v, %v", a, found, err)
			}
			return found[0]
		}
		for addr, via := range map[string]string{"10.9.0.2": "", "10.9.1.2": "10.9.0.7"} {
			a := netip.MustParseAddr(addr)
			if err := addShadow(h, l, a); err != nil {
				return err
			}
			r := wayTo(a)
			gw := ""
			if r.Gw != nil {
				gw = r.Gw.String()
			}
			if r.Type != unix.RTN_UNICAST || r.LinkIndex != v0.Attrs().Index || gw != via {
				t.Errorf("packets to %s go by %v, want interface %d, gateway %q", addr, r, v0.Attrs().Index, via)
			}
		}
		if err := dropGuards(h); err != nil {
			return err
		}
		if r := wayTo(netip.MustParseAddr("10.9.0.2")); r.Type != unix.RTN_LOCAL {
			t.Errorf("without a guard packets go by %v, want the local route, which this test is about", r)
		}
		return nil
	}))
}
