// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func row(index int, typ rdma.GIDType, addr string) rdma.GIDEntry {
	return rdma.GIDEntry{Index: index, Type: typ, GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), NetDev: "eth0"}
}

func TestChooseGID(t *testing.T) {
	const v1, v2 = rdma.GIDTypeRoCEv1, rdma.GIDTypeRoCEv2
	linkLocal := []rdma.GIDEntry{row(0, v1, "fe80::1"), row(1, v2, "fe80::1")}
	v6 := append(linkLocal[:2:2], row(2, v1, "fd00::1"), row(3, v2, "fd00::1"), row(4, v2, "2001:db8::1"))
	both := append(v6[:5:5], row(5, v1, "10.0.0.1"), row(6, v2, "10.0.0.1"), row(7, v2, "10.0.0.2"))
	child := row(8, v2, "10.0.0.0")
	child.NetDev = "net1"
	elsewhere := row(2, v2, "10.9.0.5")
	elsewhere.NetDev = ""
	pods := append(linkLocal[:2:2], elsewhere)
	for _, c := range []struct {
		name  string
		table []rdma.GIDEntry
		want  GIDWish
		index int // -1: none
		why   string
	}{
		{"IPv4 before IPv6", both, GIDWish{}, 6, "first IPv4 address"},
		{"RoCE v1 only if asked for", both, GIDWish{Type: v1}, 5, "GID 5, RoCE v1, 10.0.0.1 of eth0: the first IPv4 address"},
		{"configured address", both, GIDWish{Addr: netip.MustParseAddr("10.0.0.2")}, 7, "the address that is configured"},
		{"configured address, mapped", both, GIDWish{Addr: netip.MustParseAddr("::ffff:10.0.0.2")}, 7, "configured"},
		{"configured address with RoCE v1", both, GIDWish{Addr: netip.MustParseAddr("fd00::1"), Type: v1}, 2, "configured"},
		{"configured link-local address with zone", both, GIDWish{Addr: netip.MustParseAddr("fe80::1%eth0")}, 1, "configured"},
		{"global before unique local", v6, GIDWish{}, 4, "first global IPv6 address"},
		{"unique local before link-local", v6[:4], GIDWish{}, 3, "first unique local"},
		{"link-local as the last", linkLocal, GIDWish{}, 1, "does not reach beyond the segment"},
		{"of an interface", append(both[:8:8], child), GIDWish{NetDev: "net1"}, 8, "10.0.0.0 of net1: the first IPv4 address"},
		{"not of another interface", append(v6[:5:5], child), GIDWish{NetDev: "eth0"}, 4, "first global IPv6 address"},
		{"not of a child in a pod", pods, GIDWish{}, 1, "of eth0: only a link-local address is there"},
		{"of a child in a pod, as configured", pods, GIDWish{Addr: netip.MustParseAddr("10.9.0.5")}, 2, "the address that is configured"},
		{"of a child in a pod, as there is no other", []rdma.GIDEntry{linkLocal[0], row(1, v1, "10.0.0.1"), elsewhere}, GIDWish{}, 2, "first IPv4 address"},
		{"no such interface", both, GIDWish{NetDev: "net1"}, -1, "no RoCE v2 GID of interface net1: the port has 0:"},
		{"no such address", both, GIDWish{Addr: netip.MustParseAddr("10.0.0.3")}, -1, "no RoCE v2 GID of address 10.0.0.3: the port has 0: fe80::1 (RoCE v1), 1:"},
		{"no such type", []rdma.GIDEntry{row(0, v1, "10.0.0.1")}, GIDWish{}, -1, "no RoCE v2 GID: the port has 0: 10.0.0.1 (RoCE v1)"},
		{"empty table", nil, GIDWish{}, -1, "none at all: give its network interface an IP address"},
		{"row that no queue pair can name", []rdma.GIDEntry{row(256, v2, "10.0.0.1")}, GIDWish{}, -1, "256"},
		{"unset GID", []rdma.GIDEntry{{Type: v2}}, GIDWish{}, -1, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, why, err := ChooseGID(c.table, c.want)
			if c.index < 0 {
				if !errors.Is(err, ErrNoGID) || !strings.Contains(err.Error(), c.why) {
					t.Errorf("%+v, %v, want ErrNoGID with %q", e, err, c.why)
				}
				return
			}
			if err != nil || e.Index != c.index || !strings.Contains(why, c.why) {
				t.Errorf("GID %d, %q, %v, want %d, %q", e.Index, why, err, c.index, c.why)
			}
			if diff := cmp.Diff(c.table[c.index], e); diff != "" {
				t.Errorf("entry (-table +got):\n%s", diff)
			}
		})
	}
}

// TestDescribeRows: an interface has the index 2 here and another one in a pod,
// whose GID must not be taken for one of ours.
func TestDescribeRows(t *testing.T) {
	mac := rdma.MAC{2, 0, 0, 0, 0, 1}
	var asked [][]int
	lookUp := func(indexes []int) (map[int]Interface, error) {
		asked = append(asked, indexes)
		return map[int]Interface{2: {Name: "eth2", MAC: mac, Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("fd00::1/128")}}}, nil
	}
	gid := func(addr string) rdma.GIDEntry {
		return rdma.GIDEntry{GID: rdma.GIDFromAddr(netip.MustParseAddr(addr)), Type: rdma.GIDTypeRoCEv2}
	}
	want := []rdma.GIDEntry{gid("fe80::1"), gid("10.0.0.1"), gid("fd00::1"), gid("10.0.0.9"), gid("10.0.0.1")}
	got := slices.Clone(want)
	for i := range want[:3] {
		want[i].NetDev, want[i].MAC = "eth2", mac
	}
	want[1].PrefixBits = 24
	if err := describeRows(got, []int{2, 2, 2, 2, 5}, lookUp); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([][]int{{2, 5}}, asked); diff != "" {
		t.Errorf("look-ups, of which there is one for all rows (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GIDs (-want +got):\n%s", diff)
	}
	tooMuch := errors.New("too many addresses")
	if err := describeRows(got, []int{2, 2, 2, 2, 5}, func([]int) (map[int]Interface, error) { return nil, tooMuch }); !errors.Is(err, tooMuch) {
		t.Errorf("an interface that cannot be looked up: %v", err)
	}
}
