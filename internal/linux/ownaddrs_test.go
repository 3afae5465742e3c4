// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestLasting: the first address of an interface is one that stays.
func TestLasting(t *testing.T) {
	addr := func(text string, flags int) netlink.Addr {
		p := netip.MustParsePrefix(text)
		return netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: flags, LinkIndex: 3}
	}
	other := addr("2001:db8::1/64", 0)
	other.LinkIndex = 4
	for _, tt := range []struct {
		name string
		have []netlink.Addr
		want []string
	}{
		{"none", []netlink.Addr{other, addr("fe80::1/64", 0), addr("2001:db8::2/64", unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED)}, nil},
		{"IPv4, as the kernel has them", []netlink.Addr{addr("192.0.2.7/24", 0), addr("192.0.2.1/24", unix.IFA_F_SECONDARY), addr("2001:db8::7/64", 0)}, []string{"192.0.2.7", "192.0.2.1", "2001:db8::7"}},
		{"the lowest", []netlink.Addr{other, addr("2001:db8::7/64", 0), addr("2001:db8::5/64", 0), addr("fd00::5/64", 0)}, []string{"2001:db8::5", "2001:db8::7", "fd00::5"}},
		{"a temporary one", []netlink.Addr{addr("2001:db8::3/64", unix.IFA_F_TEMPORARY), addr("2001:db8::7/64", unix.IFA_F_MANAGETEMPADDR)}, []string{"2001:db8::7", "2001:db8::3"}},
		{"of a prefix that goes", []netlink.Addr{addr("2001:db8:1::7/64", unix.IFA_F_DEPRECATED), addr("2001:db8:2::7/64", 0)}, []string{"2001:db8:2::7", "2001:db8:1::7"}},
		{"not ready", []netlink.Addr{addr("2001:db8:1::7/64", unix.IFA_F_TENTATIVE), addr("2001:db8:2::7/64", 0)}, []string{"2001:db8:2::7", "2001:db8:1::7"}},
		{"one alone", []netlink.Addr{addr("2001:db8::1/128", 0), addr("2001:db8::7/64", 0)}, []string{"2001:db8::7", "2001:db8::1"}},
		{"nothing better", []netlink.Addr{addr("2001:db8::9/64", unix.IFA_F_TEMPORARY), addr("2001:db8::8/64", unix.IFA_F_TEMPORARY|unix.IFA_F_DEPRECATED)}, []string{"2001:db8::9", "2001:db8::8"}},
		{"leased, and a temporary one", []netlink.Addr{addr("2001:db8::3/64", unix.IFA_F_TEMPORARY), addr("2001:db8::7/128", 0)}, []string{"2001:db8::7", "2001:db8::3"}},
	} {
		var got []string
		for _, a := range lasting(tt.have, 3) {
			got = append(got, a.String())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestLastingAddresses: each interface has its own addresses.
func TestLastingAddresses(t *testing.T) {
	pod, _ := newPair(t)
	mustDo(t, pod.Do(func() error {
		all, err := LastingAddresses()
		if err != nil {
			return err
		}
		if want := []netip.Addr{families[0].pod, families[1].pod}; !slices.Equal(all["eth0"], want) {
			t.Errorf("eth0 has %v, want %v", all["eth0"], want)
		}
		if !slices.Contains(all["lo"], families[0].loopback) {
			t.Errorf("lo has %v", all["lo"])
		}
		return nil
	}))
}
