// SPDX-License-Identifier: Apache-2.0

package smcnl

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDumpFew: a list that is read with a bound is what it is without. The list is of the kernel's generic netlink families, which each kernel
// has; that it is bounded, and how, is the business of package linux.
func TestDumpFew(t *testing.T) {
	const family = "nlctrl"
	all, err := dump(family, unix.CTRL_CMD_GETFAMILY)
	if err != nil {
		t.Fatal(err)
	}
	few, err := dumpFew(family, unix.CTRL_CMD_GETFAMILY)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 || !slices.EqualFunc(all, few, slices.Equal) {
		t.Errorf("%x\nwithout a bound: %x", few, all)
	}
	if _, err := dumpFew("KUBESMCR", cmdListPNets); !errors.Is(err, ErrNoSMC) {
		t.Errorf("a family that the kernel has not: %v, want ErrNoSMC", err)
	}
}
