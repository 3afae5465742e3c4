// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// manyAddresses makes a namespace with interfaces few, with two addresses, and many, with 300, and returns their indexes.
func manyAddresses(t *testing.T) (ns *NetNS, few, many int) {
	t.Helper()
	ns = newNS(t)
	var b strings.Builder
	b.WriteString("link add few type veth peer name many\naddress add 10.2.0.1/24 dev few\naddress add fd02::1/64 dev few nodad\n")
	for i := range 300 {
		fmt.Fprintf(&b, "address add 10.1.%d.%d/32 dev many\n", i/250, 1+i%250)
	}
	inNS(t, ns, b.String(), "ip", "-batch", "-")
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		for name, index := range map[string]*int{"few": &few, "many": &many} {
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			*index = l.Attrs().Index
		}
		return nil
	})())
	return ns, few, many
}

// TestInterfacesByIndex: those that are there, each with its own addresses.
func TestInterfacesByIndex(t *testing.T) {
	ns, few, many := manyAddresses(t)
	all, err := InterfacesByIndex(ns, []int{few, many + 1000, many})
	mustDo(t, err)
	if len(all) != 2 || all[0].Index != few || all[0].Name != "few" || len(all[0].MAC) != 6 || all[1].Name != "many" || len(all[1].Addrs) != 300 {
		t.Fatalf("interfaces %+v", all)
	}
	if want := []netip.Prefix{netip.MustParsePrefix("10.2.0.1/24"), netip.MustParsePrefix("fd02::1/64")}; !slices.Equal(all[0].Addrs, want) {
		t.Errorf("addresses %v, want %v", all[0].Addrs, want)
	}
	if _, err := InterfacesByIndex(&NetNS{}, []int{few}); err == nil {
		t.Error("a namespace that is not open has interfaces")
	}
}

// TestInterfacesByIndex_tooMany: addresses of other interfaces cost nothing, and one allowance is for all that are looked up.
func TestInterfacesByIndex_tooMany(t *testing.T) {
	ns, few, many := manyAddresses(t)
	for _, c := range []struct {
		name    string
		indexes []int
		entries int
		err     error
	}{
		{"beside one with many", []int{few}, 10, nil},
		{"many", []int{many}, 299, ErrTooMuch},
		{"enough for each, not for both", []int{many, few}, 301, ErrTooMuch},
		{"enough for both", []int{many, few}, 302, nil},
	} {
		mustDo(t, ns.Do(func() error {
			all, err := interfacesByIndex(c.indexes, &allowance{entries: c.entries, bytes: 1 << 20})
			if !errors.Is(err, c.err) || err == nil && len(all) != len(c.indexes) {
				t.Errorf("%s: %d interfaces, %v; want %v", c.name, len(all), err, c.err)
			}
			return nil
		}))
	}
}
