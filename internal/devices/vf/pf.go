// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/vishvananda/netlink"
)

// findPF looks for the interface of the VF's PF in the host; nil if there is none. It looks by the PF's
// PCI address, as names may change while a pod has the VF: when the PF's driver is loaded anew, for
// example, the PF's interface may get another name, and another interface the former one.
func (t *task) findPF(h *netlink.Handle) (netlink.Link, error) {
	d := &t.w().Device
	if d.PFPCI == "" {
		return find(h, d.PF)
	}
	names := t.h.sys().list(busPCI, d.PFPCI, "net")
	if i := slices.Index(names, d.PF); i > 0 {
		names = slices.Concat([]string{d.PF}, slices.Delete(names, i, i+1))
	}
	var first netlink.Link
	for _, name := range names { // a PF may have further interfaces, which know no VFs
		l, err := find(h, name)
		if err != nil || l != nil && pfSettings(l, d.VF) != nil {
			return l, err
		}
		if first == nil {
			first = l
		}
	}
	return first, nil
}

// representor matches phys_port_name of an interface that stands for a VF or SF of a PF in mode
// switchdev, such as "pf0vf3" or "c1pf0sf88". That of the PF's own port is "p0", or there is none.
var representor = regexp.MustCompile(`^(c\d+)?pf\d+`)

// ownNetDev is the interface of a PCI function's own port, "" if the function has none.
func (s sysfs) ownNetDev(pci string) string {
	names := s.list(busPCI, pci, "net")
	for _, name := range names {
		if !representor.MatchString(s.text(classNet, name, "phys_port_name")) {
			return name
		}
	}
	return ""
}

// withoutPF is the error if the PF's interface is not in the host, but the PF still has settings of the
// VF that are to be brought back: the next pod must not get the VLAN of the former one. A PF has no
// settings any more after it lost its driver or the VF.
func (t *task) withoutPF() error {
	d, s := &t.w().Device, t.h.sys()
	if !t.j.marked && !t.j.Asked.ofPF() || !s.isVF(d.PCI) || s.link(busPCI, d.PFPCI, "driver") == "" {
		return nil
	}
	return fmt.Errorf("bring back settings of VF %d: PF %s (%s): %w: put its interface back into the host's network namespace", d.VF, d.PF, d.PFPCI, errNoPF)
}

var errNoPF = errors.New("it has no interface in the host")

// ofPF tells whether there are settings that a PF makes.
func (s *Settings) ofPF() bool {
	return s.MAC != nil || s.VLAN != nil || s.SpoofCheck != nil || s.Trust != nil || s.MinTxRate != nil || s.MaxTxRate != nil || s.LinkState != nil
}
