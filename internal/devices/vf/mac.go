// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// How a VF gets its address:
//
// The VF's driver chooses an address, or the PF assigns one. The driver asks the PF for
// an assigned address only when the driver is reset, which it is when the interface goes
// down. Until then the PF refuses every address that the interface is set to. igbvf, once
// refused, forgets the address that it has: the interface still shows it, but frames to it
// are lost, and setting the same address again has no effect, because the kernel does not
// pass an address to the driver that the interface has already.
//
// So the driver is always reset before an address is set. An address that the driver chose
// is restored in four steps:
//
//	PF      assigns the address to the VF
//	driver  reset: asks the PF, and uses the address
//	PF      takes the assignment back
//	driver  reset: keeps the address, and tells the PF
//
// Of a VF to which it has assigned no address, a PF reports the address that the driver
// told it, or none: after a reset of the PF the driver has not told it yet, and some PFs
// never know. Both reports mean the same state.

// noMAC is the address that a PF reports if it has assigned none and knows none. Setting
// it takes an assignment back.
const noMAC = "00:00:00:00:00:00"

// addrRandom is the addr_assign_type of an interface whose driver chose an address.
const addrRandom = 1

// choseMAC tells whether an interface of the host has an address that its driver chose.
func (t *task) choseMAC(name string) bool {
	return t.h.sys().number(0, classNet, name, "addr_assign_type") == addrRandom
}

// setMAC makes the driver use the address that the PF assigned.
func (t *task) setMAC(h *netlink.Handle, l netlink.Link) error {
	if t.w().Settings.MAC == nil {
		return nil
	}
	return t.takeMAC(h, l, *t.w().Settings.MAC)
}

// takeMAC gives an interface the address want, and leaves the interface down.
func (t *task) takeMAC(h *netlink.Handle, l netlink.Link, want string) error {
	mac, err := net.ParseMAC(want)
	if err != nil {
		return err
	}
	for try := 1; ; try++ {
		if t.w().Device.VF >= 0 {
			err = resetVF(h, l)
		} else {
			err = setUp(h, l, false)
		}
		if err != nil {
			return err
		}
		now, err := h.LinkByIndex(l.Attrs().Index)
		if err != nil {
			return fmt.Errorf("look at %s again: %w", l.Attrs().Name, err)
		}
		if now.Attrs().HardwareAddr.String() == want {
			return nil
		}
		err = h.LinkSetHardwareAddr(now, mac)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EADDRNOTAVAIL) || try == macTries {
			return fmt.Errorf("set MAC of %s to %s: %w", l.Attrs().Name, mac, err)
		}
	}
}

// resetVF resets the driver of a VF: the driver asks the PF for an assigned address, or
// tells the PF its own. The interface is down afterwards.
func resetVF(h *netlink.Handle, l netlink.Link) error {
	now, err := h.LinkByIndex(l.Attrs().Index)
	if err == nil {
		err = setUp(h, now, true)
	}
	if err == nil {
		err = h.LinkSetDown(l)
	}
	if err != nil {
		return fmt.Errorf("reset %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// restoreMAC restores the address of an interface. It resets the driver of a VF also if
// the interface shows the right address already, because the driver may not know yet that
// the PF has assigned it.
func (t *task) restoreMAC(h *netlink.Handle, l netlink.Link) error {
	want := t.w().Original.MAC
	if !t.assigned && l.Attrs().HardwareAddr.String() == want {
		return nil
	}
	err := t.takeMAC(h, l, want)
	// The PF had assigned another address before the pod got the device.
	if pf := t.w().Original.PF; err != nil && pf != nil && pf.MAC != want && pf.MAC != noMAC && errors.Is(err, unix.EADDRNOTAVAIL) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("bring back: %w", err)
	}
	if !t.chosen {
		return nil
	}
	return t.unassignMAC(h, l)
}

// unassignMAC makes the address of a VF its driver's own choice again.
func (t *task) unassignMAC(h *netlink.Handle, l netlink.Link) error {
	w := t.w()
	for try := 1; ; try++ {
		pf, err := t.findPF(h)
		if err != nil || pf == nil { // without a PF there is no VF
			return err
		}
		if err := (vfPort{h, pf, w.Device.VF}).setMAC(noMAC); err != nil {
			return fmt.Errorf("take back the MAC that %s assigned to VF %d: %w", w.Device.PF, w.Device.VF, err)
		}
		if err := t.did("assignment of the MAC"); err != nil {
			return err
		}
		if err := resetVF(h, l); err != nil {
			return err
		}
		if pf, err = t.findPF(h); err != nil || pf == nil {
			return err
		}
		now := pfSettings(pf, w.Device.VF)
		switch {
		case now == nil || now.MAC == w.Original.MAC, now.MAC == noMAC && try == macTries: // a PF that never knows
			return nil
		case try == macTries:
			return fmt.Errorf("bring back MAC of VF %d: %s reports %s, not %s", w.Device.VF, w.Device.PF, now.MAC, w.Original.MAC)
		}
	}
}

// restoreAssignment makes the PF assign the VF's original address, if the address that
// Attach asked for is assigned, or may be.
func (t *task) restoreAssignment(p vfPort) error {
	w := t.w()
	now := pfSettings(p.pf, p.vf)
	if now == nil {
		return nil
	}
	want := w.Original.MAC
	switch had := w.Original.PF; {
	case had == nil: // not known, because the journal is lost
		t.chosen = now.MAC != want || t.choseMAC(t.homeName)
		t.assigned = t.chosen
	case t.j.Asked.MAC != nil:
		t.assigned, t.chosen = true, had.MAC == noMAC
		if !t.chosen {
			want = had.MAC
		}
	}
	if t.chosen && t.homeName == "" { // there is no interface whose driver could use the address
		want = noMAC
	}
	if !t.assigned || now.MAC == want {
		return nil
	}
	if err := p.setMAC(want); err != nil {
		return fmt.Errorf("bring back MAC of VF %d by %s: %w", p.vf, p.pf.Attrs().Name, err)
	}
	return nil
}
