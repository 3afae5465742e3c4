// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestNoFamily: a kernel that was started with ipv6.disable=1 refuses rules of IPv6 by another error than routes.
func TestNoFamily(t *testing.T) {
	for _, c := range []struct {
		fam  int
		err  error
		want bool
	}{
		{netlink.FAMILY_V6, unix.EAFNOSUPPORT, true},
		{netlink.FAMILY_V6, unix.EOPNOTSUPP, true},
		{netlink.FAMILY_V6, unix.EPERM, false},
		{netlink.FAMILY_V6, nil, false},
		{netlink.FAMILY_V4, unix.EOPNOTSUPP, false},
		{netlink.FAMILY_V4, unix.EAFNOSUPPORT, false},
	} {
		if got := noFamily(c.fam, c.err); got != c.want {
			t.Errorf("%s %v: %t", familyName(c.fam), c.err, got)
		}
	}
}
