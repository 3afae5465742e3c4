// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Traits are what else a pod can change of its interface, besides name, address, MTU and alias, and what
// the interface keeps when it leaves the pod. They are restored: otherwise the next pod might get an
// interface that resolves no addresses, or the interface could not be moved because one of its further
// names is in use.
type Traits struct {
	AltNames     []string `json:"altNames,omitempty"` // further names, as udev gives them
	NoARP        bool     `json:"noARP,omitempty"`
	Promiscuous  bool     `json:"promiscuous,omitempty"`
	AllMulticast bool     `json:"allMulticast,omitempty"`
	NoMulticast  bool     `json:"noMulticast,omitempty"`
}

func traitsOf(l netlink.Link) *Traits {
	a := l.Attrs()
	has := func(flag uint32) bool { return a.RawFlags&flag != 0 }
	return &Traits{
		AltNames: a.AltNames, NoARP: has(unix.IFF_NOARP), Promiscuous: has(unix.IFF_PROMISC),
		AllMulticast: has(unix.IFF_ALLMULTI), NoMulticast: !has(unix.IFF_MULTICAST),
	}
}

// traits are those of the original state. If they are not known, because the journal is lost
// or of an earlier version, they are those of a new interface of Ethernet. udev gives the
// further names again when an interface appears in the host.
func (w *Wiring) traits() *Traits {
	if w.Original.Traits == nil {
		return &Traits{}
	}
	return w.Original.Traits
}

// dropNames removes the further names of an interface, except those in keep.
func dropNames(h *netlink.Handle, l netlink.Link, keep []string) error {
	for _, name := range l.Attrs().AltNames {
		if slices.Contains(keep, name) {
			continue
		}
		if err := h.LinkDelAltName(l, name); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove name %s of %s: %w", name, l.Attrs().Name, err)
		}
	}
	return nil
}

// restoreTraits brings an interface that was in a pod back to its traits. It comes before
// the original name, which the pod may have given as a further one.
func (t *task) restoreTraits(h *netlink.Handle, l netlink.Link) error {
	if t.w().Mode != ModeMove {
		return nil // the interface was in no pod
	}
	want, now := t.w().traits(), traitsOf(l)
	for _, f := range []struct {
		want, now bool
		on, off   func(netlink.Link) error
	}{
		{want.NoARP, now.NoARP, h.LinkSetARPOff, h.LinkSetARPOn},
		{want.Promiscuous, now.Promiscuous, h.SetPromiscOn, h.SetPromiscOff},
		{want.AllMulticast, now.AllMulticast, h.LinkSetAllmulticastOn, h.LinkSetAllmulticastOff},
		{want.NoMulticast, now.NoMulticast, h.LinkSetMulticastOff, h.LinkSetMulticastOn},
	} {
		set := f.off
		if f.want {
			set = f.on
		}
		if f.want == f.now {
			continue
		}
		if err := set(l); err != nil {
			return fmt.Errorf("bring back flags of %s: %w", l.Attrs().Name, err)
		}
	}
	if !t.moved { // the kernel brought the interface back, with all its names
		if err := dropNames(h, l, want.AltNames); err != nil {
			return err
		}
	}
	for _, name := range want.AltNames {
		if slices.Contains(now.AltNames, name) {
			continue
		}
		if err := h.LinkAddAltName(l, name); err != nil && !errors.Is(err, unix.EEXIST) { // udev, or another interface, has given it
			return fmt.Errorf("bring back name %s of %s: %w", name, l.Attrs().Name, err)
		}
	}
	return nil
}
