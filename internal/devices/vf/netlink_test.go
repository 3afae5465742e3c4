// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// TestIsOf: on Linux before 5.14 an interface does not say which device it is of, and ethtool does.
// That of a bridge stands for such a one: it has no device, and ethtool says "N/A".
func TestIsOf(t *testing.T) {
	e := newEnv(t, 1, 0)
	must(t, in(e.home, func(h *netlink.Handle) error {
		must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "old0"}}))
		for _, tt := range []struct {
			a      netlink.LinkAttrs
			device string
			want   bool
		}{
			{netlink.LinkAttrs{Name: "old0"}, "N/A", true},
			{netlink.LinkAttrs{Name: "old0"}, "0000:41:10.0", false},
			{netlink.LinkAttrs{Name: "old0", ParentDev: "0000:41:10.0"}, "0000:41:10.0", true},
			{netlink.LinkAttrs{Name: "old0", ParentDev: "0000:41:10.0"}, "N/A", false},
			{netlink.LinkAttrs{Name: "none0"}, "N/A", false},
			{netlink.LinkAttrs{Name: "none0"}, "", false},
		} {
			if got := isOf(&tt.a, tt.device); got != tt.want {
				t.Errorf("%s of %q is of %q: %t", tt.a.Name, tt.a.ParentDev, tt.device, got)
			}
		}
		return nil
	}))
}
