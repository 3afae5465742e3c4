// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// Detach brings a device back to its original state. It may be called again, and for an
// attachment that has no device (any more). It leaves a device of another owner alone.
func (h Host) Detach(ctx context.Context, d Detachment) error {
	ids := []string{d.Device}
	if d.Device == "" {
		journals, err := h.journals()
		if err != nil {
			return fmt.Errorf("detach: %w", err)
		}
		ids = nil
		for id, j := range journals {
			if j.Wiring.Owner.Is(d.ContainerID, d.IfName) {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
	}
	var errs []error
	for _, id := range ids {
		if err := h.detach(ctx, id, d); err != nil {
			errs = append(errs, fmt.Errorf("detach device %s from interface %s of container %s: %w", id, d.IfName, d.ContainerID, err))
		}
	}
	return errors.Join(errs...)
}

func (h Host) detach(ctx context.Context, id string, d Detachment) error {
	if checkID(id) != nil {
		return nil // it is no device's ID, so no attachment has it
	}
	unlock, err := h.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	j, err := h.readJournal(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return h.detachByAlias(ctx, id, d)
	case err != nil:
		return err
	case !j.Wiring.Owner.Is(d.ContainerID, d.IfName):
		return nil // another attachment has the device by now
	}
	return h.takeBack(ctx, j)
}

// takeBack brings back the device of a journal, and removes the journal.
func (h Host) takeBack(ctx context.Context, j *journal) error {
	t, err := h.newTask(j)
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.restore(ctx); err != nil {
		return err
	}
	return t.forget()
}

// detachByAlias is Detach for a device whose journal is lost.
func (h Host) detachByAlias(ctx context.Context, id string, d Detachment) error {
	for _, path := range []string{d.NetNSPath, h.NetNS} {
		ns, err := h.openMaybe(path, path == d.NetNSPath && path != h.NetNS)
		if err != nil {
			return err
		}
		if ns == nil {
			continue
		}
		j, err := h.markedDevice(ns, id)
		err = errors.Join(err, ns.Close())
		if err != nil {
			return err
		}
		if j == nil || !j.Wiring.Owner.Is(d.ContainerID, d.IfName) {
			continue
		}
		if d.NetNSPath != "" {
			j.Wiring.Owner.NetNS, j.Wiring.Owner.NetNSID = d.NetNSPath, 0
		}
		return h.takeBack(ctx, j)
	}
	return nil
}

// openMaybe opens a pod's namespace, or the host's. It returns nil if the pod's is gone.
func (h Host) openMaybe(path string, pod bool) (*linux.NetNS, error) {
	if !pod {
		return h.openHome()
	}
	if path == "" {
		return nil, nil
	}
	ns, err := linux.OpenNetNS(path)
	if errors.Is(err, linux.ErrGone) {
		return nil, nil
	}
	return ns, err
}

// markedDevice makes a journal from the alias of the device's interface in ns. It returns
// nil if the interface is not there, or has no alias of ours.
//
// A pod can write any alias to its interfaces. That an interface is the VF that its alias
// names is certain by its PCI address. For other devices, whose ID is the name of their
// interface in the host, the alias does not count if the host has another interface of
// that name: that one is the device.
func (h Host) markedDevice(ns *linux.NetNS, id string) (*journal, error) {
	var found *journal
	index := 0
	err := in(ns, func(nh *netlink.Handle) error {
		_, err := search(nh, func(l netlink.Link) bool {
			j := h.fromAlias(l.Attrs())
			if j != nil && j.Wiring.Device.ID == id {
				found, index = j, l.Attrs().Index
			}
			return found != nil && l.Attrs().Name == id // the best: there may be liars beside it
		})
		return err
	})
	if err != nil || found == nil || found.Wiring.Device.PCI != "" {
		return found, err
	}
	home, err := h.openHome()
	if err != nil {
		return nil, err
	}
	err = in(home, func(nh *netlink.Handle) error {
		l, err := find(nh, id)
		if l != nil && (ns.ID() != home.ID() || l.Attrs().Index != index) {
			found = nil
		}
		return err
	})
	return found, errors.Join(err, home.Close())
}

// fromAlias makes a journal from the alias of an interface in the calling thread's namespace, nil
// if the alias is not ours.
func (h Host) fromAlias(a *netlink.LinkAttrs) *journal {
	w, ok := parseAlias(a.Alias)
	if !ok {
		return nil
	}
	w.Device.NetDev = w.Original.Name
	if pciAddress.MatchString(w.Device.ID) {
		if !isOf(a, w.Device.ID) {
			return nil
		}
		w.Device.PCI = w.Device.ID
		s := h.sys()
		if pf := s.link(busPCI, w.Device.PCI, "physfn"); pf != "" {
			w.Device.PFPCI, w.Device.VF = pf, s.vfIndex(pf, w.Device.PCI)
			w.Device.PF = s.ownNetDev(pf)
		}
	}
	return &journal{Wiring: w, marked: true}
}

// takeBackLeftover brings back a device that is still an attachment's although no Detach will come: the
// call was killed, or the pod has ended, or got another sandbox. next is the attachment that is to have
// the device. The error is a *BusyError if a pod has the device.
func (h Host) takeBackLeftover(ctx context.Context, id string, next Owner) error {
	j, err := h.readJournal(id)
	if errors.Is(err, fs.ErrNotExist) {
		home, err := h.openHome()
		if err != nil {
			return err
		}
		j, err = h.markedDevice(home, id)
		if err := errors.Join(err, home.Close()); err != nil || j == nil {
			return err
		}
		// With ModeMove, an interface in the host was put back by the kernel: its pod ended.
		j.Complete = j.Wiring.Mode == ModeIPVlan
	} else if err != nil {
		return err
	}
	if j.Complete && (j.marked || !j.Wiring.Owner.ReplacedBy(next)) {
		lives, err := alive(j.Wiring.Owner)
		switch {
		case err != nil:
			return fmt.Errorf("see whether %s, which has device %s, is gone: %w", j.Wiring.Owner, id, err)
		case lives:
			return &BusyError{Device: id, Owner: j.Wiring.Owner, IfName: j.Wiring.IfName}
		}
	}
	if err := h.takeBack(ctx, j); err != nil {
		return fmt.Errorf("take device %s back from %s, which is gone: %w", id, j.Wiring.Owner, err)
	}
	return nil
}

// alive tells whether the owner's network namespace still exists at its path. The error says that this is
// not known, because the namespace cannot be opened just now.
func alive(o Owner) (bool, error) {
	ns, err := linux.OpenNetNS(o.NetNS)
	switch {
	case records.IsShortage(err):
		return false, err
	case err != nil:
		return false, nil
	}
	defer func() { _ = ns.Close() }() // closes descriptors
	return ns.ID() == o.NetNSID, nil
}

// Collect brings back every device whose owner is not valid, and every device that a killed
// call left. It skips a device that another call works on.
func (h Host) Collect(ctx context.Context, valid func(Owner) bool) error {
	journals, err := h.journals()
	if err != nil {
		return fmt.Errorf("collect devices: %w", err)
	}
	ids := map[string]bool{}
	for id := range journals {
		ids[id] = true
	}
	home, err := h.openHome()
	if err != nil {
		return fmt.Errorf("collect devices: %w", err)
	}
	err = in(home, func(nh *netlink.Handle) error {
		_, err := search(nh, func(l netlink.Link) bool {
			if j := h.fromAlias(l.Attrs()); j != nil {
				ids[j.Wiring.Device.ID] = true
			}
			return false
		})
		return err
	})
	if err := errors.Join(err, home.Close()); err != nil {
		return fmt.Errorf("collect devices: %w", err)
	}
	errs := []error{h.records().RemoveStale()}
	for id := range ids {
		if err := h.collect(ctx, id, valid); err != nil {
			errs = append(errs, fmt.Errorf("collect device %s: %w", id, err))
		}
	}
	return errors.Join(errs...)
}

func (h Host) collect(ctx context.Context, id string, valid func(Owner) bool) error {
	unlock, err := h.lockWithin(ctx, 0, id)
	if errors.Is(err, files.ErrLocked) && ctx.Err() == nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	j, err := h.readJournal(id)
	if err == nil && j.Complete && !valid(j.Wiring.Owner) {
		return h.takeBack(ctx, j)
	}
	// The device has no journal, or one of an Attach that was killed.
	var busy *BusyError
	if err := h.takeBackLeftover(ctx, id, Owner{}); err != nil && !errors.As(err, &busy) {
		return err
	}
	if busy != nil && !valid(busy.Owner) {
		return h.detachByAlias(ctx, id, Detachment{ContainerID: busy.Owner.ContainerID, IfName: busy.Owner.IfName, NetNSPath: busy.Owner.NetNS})
	}
	return nil
}

// restore brings the device to its original state, whatever its state is. It changes only
// what differs, so it may be called after any step, and again.
func (t *task) restore(ctx context.Context) error {
	if err := t.openPod(); err != nil {
		return err
	}
	if t.pod != nil {
		if err := t.leavePod(ctx); err != nil {
			return fmt.Errorf("take the device out of the pod: %w", err)
		}
	}
	name, err := t.awaitReturn(ctx)
	if err != nil {
		return err
	}
	t.homeName = name
	return in(t.home, func(h *netlink.Handle) error {
		if err := errors.Join(t.restorePF(h), t.did("PF's settings")); err != nil {
			return err
		}
		if name == "" {
			return nil // the device is gone
		}
		l, err := find(h, name)
		if err != nil || l == nil {
			return errors.Join(err, fmt.Errorf("interface %s: %w: another program removed or moved it; try again", name, ErrNotFound))
		}
		return t.restoreLink(ctx, h, l)
	})
}

// openPod opens the owner's namespace, if it still exists at its path.
func (t *task) openPod() error {
	if t.pod != nil {
		return nil
	}
	o := t.w().Owner
	if o.NetNS == "" {
		return nil
	}
	pod, err := linux.OpenNetNS(o.NetNS)
	if errors.Is(err, linux.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	if o.NetNSID != 0 && pod.ID() != o.NetNSID || pod.ID() == t.home.ID() {
		return pod.Close() // the path leads to another namespace
	}
	t.pod = pod
	return nil
}

// leavePod takes the device out of the pod. The RDMA device is moved before its interface:
// the kernel does not move it back once its interface is gone.
func (t *task) leavePod(ctx context.Context) error {
	w := t.w()
	if w.Mode == ModeIPVlan {
		return t.removeChild()
	}
	if w.Device.SoftRDMA == "" && len(w.Device.RDMA) > 0 {
		if err := t.returnRDMA(); err != nil {
			return err
		}
	}
	return in(t.pod, func(h *netlink.Handle) error {
		l, err := find(h, w.IfName)
		if err != nil {
			return err
		}
		if l == nil || !t.ours(l) {
			if l, err = search(h, t.ours); err != nil || l == nil { // the interface was renamed in the pod, or is not there (yet)
				return err
			}
		}
		if err := setUp(h, l, false); err != nil {
			return err
		}
		// The kernel moves no interface that has a further name which is in use in the host.
		if err := errors.Join(dropNames(h, l, w.traits().AltNames), t.did("names")); err != nil {
			return err
		}
		if err := t.alone(func(context.Context) error { return t.moveHome(h, l) })(ctx); err != nil {
			return err
		}
		t.moved = true
		return t.did("moved back")
	})
}

// moveHome moves an interface of the pod to the host, under its original name, or under a
// temporary one if another interface of the host has the original name. h is of the pod.
func (t *task) moveHome(h *netlink.Handle, l netlink.Link) error {
	err := moveLink(l, t.w().Original.Name, t.home)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	// The kernel has moved the interface all the same, if the name that it has in the pod was free
	// in the host: then it is not in the pod any more.
	if there, ferr := search(h, func(o netlink.Link) bool { return o.Attrs().Index == l.Attrs().Index }); ferr != nil || there == nil {
		return ferr
	}
	if err := dropNames(h, l, nil); err != nil { // the host may have given one to another interface
		return err
	}
	return moveLink(l, t.w().temporaryName(), t.home)
}

// temporaryName is a name for the interface that no other device of this node has. The interface keeps
// it as long as another interface of the host has the original name.
func (w *Wiring) temporaryName() string {
	s := strings.Map(func(r rune) rune {
		if strings.ContainsRune("0123456789abcdefghijklmnopqrstuvwxyz", r) {
			return r
		}
		return -1
	}, w.Device.ID)
	s = "vf" + s
	return s[:min(len(s), maxNameBytes)]
}

// returnRDMA moves RDMA devices back that followed the interface.
func (t *task) returnRDMA() error {
	exclusive, err := t.exclusive()
	if err != nil || !exclusive {
		return err
	}
	var there []string
	if err := t.pod.Do(func() (err error) { there, err = t.rdma.Names(); return err }); err != nil {
		return err
	}
	for _, name := range t.w().Device.RDMA {
		if !slices.Contains(there, name) {
			continue
		}
		if err := t.moveRDMA(name, t.pod, t.home); err != nil {
			return err
		}
		if err := t.did("RDMA device moved back"); err != nil {
			return err
		}
	}
	return nil
}

// ours tells whether an interface is that of the task's device. A pod can change name, MAC and
// alias, but not the device of hardware that the interface is of. An interface of software
// has none, and no kernel brings it back. The calling thread is in the interface's namespace.
func (t *task) ours(l netlink.Link) bool {
	a, w := l.Attrs(), t.w()
	switch {
	case w.Device.PCI != "":
		return isOf(a, w.Device.PCI)
	case w.Original.Parent != "":
		return a.ParentDev == w.Original.Parent
	}
	m, ok := parseAlias(a.Alias)
	return ok && m.Owner.Is(w.Owner.ContainerID, w.Owner.IfName) && m.Original.Name == w.Original.Name
}

// removeChild deletes the pod's ipvlan child, if the device's interface is its parent.
func (t *task) removeChild() error {
	parent := 0
	if err := in(t.home, func(h *netlink.Handle) error {
		l, err := t.findHome(h)
		if l != nil {
			parent = l.Attrs().Index
		}
		return err
	}); err != nil || parent == 0 {
		return err
	}
	return in(t.pod, func(h *netlink.Handle) error {
		// The child may have been renamed in the pod.
		l, err := search(h, func(l netlink.Link) bool { return t.isChild(l, parent) })
		if err != nil || l == nil {
			return err
		}
		if err := h.LinkDel(l); err != nil {
			return err
		}
		return t.did("child deleted")
	})
}

// isChild tells whether l, in a pod, is an ipvlan child of the host's interface
// of that index.
func (t *task) isChild(l netlink.Link, parent int) bool {
	a := l.Attrs()
	return l.Type() == t.child(netlink.LinkAttrs{}).Type() && a.ParentIndex == parent && a.NetNsID >= 0 // the parent is in another namespace
}

// findHome looks for the device's interface in the host; nil if it is not there. The
// kernel may have given it another name when it put the interface back.
func (t *task) findHome(h *netlink.Handle) (netlink.Link, error) {
	w := t.w()
	if w.Device.PCI != "" {
		for _, name := range t.h.sys().list(busPCI, w.Device.PCI, "net") {
			if l, err := find(h, name); err != nil || l != nil {
				return l, err
			}
		}
		return search(h, t.ours)
	}
	if t.j.marked {
		// What the alias says may be a lie, but of the interface that has it: no other one
		// is touched because of it.
		return search(h, t.ours)
	}
	l, err := find(h, w.Original.Name)
	if err != nil {
		return nil, err
	}
	// An interface without our alias is unchanged: the alias is the first change.
	if l != nil && (t.ours(l) || l.Attrs().Alias == w.Original.Alias && l.Attrs().HardwareAddr.String() == w.Original.MAC) {
		return l, nil
	}
	return search(h, t.ours)
}

// awaitReturn waits until the interface is in the host, and returns its name. The name is
// "" if there is no interface (any more) that could come back.
func (t *task) awaitReturn(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, returnWait)
	defer cancel()
	for {
		name := ""
		if err := in(t.home, func(h *netlink.Handle) error {
			l, err := t.findHome(h)
			if l != nil {
				name = l.Attrs().Name
			}
			return err
		}); err != nil || name != "" {
			return name, err
		}
		if !t.comesBack() {
			return "", nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("device %s: %w: end the processes that are still in the network namespace of %s",
				t.w().Device.ID, ErrNotReturned, t.w().Owner)
		case <-time.After(poll):
		}
	}
}

// comesBack tells whether the kernel puts the interface back into the host when the pod's
// namespace ends. It does so with interfaces of hardware; it deletes interfaces of software
// together with the namespace.
func (t *task) comesBack() bool {
	w, s := t.w(), t.h.sys()
	if w.Device.PCI == "" {
		return w.Device.Driver != ""
	}
	driver := s.link(busPCI, w.Device.PCI, "driver")
	return driver != "" && !strings.HasPrefix(driver, "vfio")
}

func (t *task) restorePF(h *netlink.Handle) error {
	w := t.w()
	if w.Device.PF == "" && w.Device.PFPCI == "" {
		return nil
	}
	pf, err := t.findPF(h)
	if err != nil {
		return err
	}
	if pf == nil {
		return t.withoutPF()
	}
	p := vfPort{h, pf, w.Device.VF}
	if w.Original.PF == nil { // not known, because the journal is lost
		err = p.reset()
	} else {
		err = p.restore(&t.j.Asked, *w.Original.PF)
	}
	return errors.Join(err, t.restoreAssignment(p))
}

// restoreLink brings an interface that is in the host to its original state.
func (t *task) restoreLink(ctx context.Context, h *netlink.Handle, l netlink.Link) error {
	o := &t.w().Original
	if err := errors.Join(t.restoreMAC(h, l), t.did("original MAC")); err != nil {
		return err
	}
	if err := errors.Join(t.restoreTraits(h, l), t.did("flags and names")); err != nil {
		return err
	}
	if err := t.restoreName(h, l); err != nil {
		return err
	}
	if err := t.restoreMTU(h, l); err != nil {
		return err
	}
	now, err := h.LinkByIndex(l.Attrs().Index)
	if err != nil {
		return fmt.Errorf("look at %s again: %w", l.Attrs().Name, err)
	}
	if err := setUp(h, now, o.Up); err != nil {
		return fmt.Errorf("set %s up: %w", now.Attrs().Name, err)
	}
	if err := t.did("original state"); err != nil {
		return err
	}
	if err := errors.Join(restoreAddresses(h, now, o.Addresses), t.did("addresses")); err != nil {
		return err
	}
	if err := errors.Join(t.restoreRDMA(ctx, now), t.did("RDMA device")); err != nil {
		return err
	}
	// The alias comes last: if the call is killed before, the alias still names the owner.
	if now.Attrs().Alias != o.Alias {
		if err := h.LinkSetAlias(now, o.Alias); err != nil {
			return fmt.Errorf("set alias of %s: %w", now.Attrs().Name, err)
		}
		return t.did("original alias")
	}
	return nil
}

// restoreName gives an interface its original name, or a temporary one if another interface of the
// host has the original name by now: the pod's name must not stay.
func (t *task) restoreName(h *netlink.Handle, l netlink.Link) error {
	want := t.w().Original.Name
	if l.Attrs().Name == want {
		return nil
	}
	if err := setUp(h, l, false); err != nil {
		return err
	}
	err := h.LinkSetName(l, want)
	if errors.Is(err, unix.EEXIST) {
		if err = h.LinkSetName(l, t.w().temporaryName()); errors.Is(err, unix.EEXIST) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", l.Attrs().Name, want, err)
	}
	return t.did("original name")
}

// restoreMTU gives an interface its original MTU. If the PF, or the interface below, allows only a
// lower MTU by now, the device comes back with that.
func (t *task) restoreMTU(h *netlink.Handle, l netlink.Link) error {
	want := t.w().Original.MTU
	if l.Attrs().MTU == want {
		return nil
	}
	if err := h.LinkSetMTU(l, want); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ERANGE) {
		return fmt.Errorf("set MTU of %s to %d: %w", l.Attrs().Name, want, err)
	}
	return t.did("original MTU")
}

func restoreAddresses(h *netlink.Handle, l netlink.Link, want []string) error {
	if len(want) == 0 {
		return nil
	}
	have, err := addresses(h, l)
	if err != nil {
		return err
	}
	for _, s := range want {
		if slices.Contains(have, s) {
			continue
		}
		a, err := netlink.ParseAddr(s)
		if err != nil {
			return fmt.Errorf("bring back address %s of %s: %w", s, l.Attrs().Name, err)
		}
		if err := h.AddrReplace(l, a); err != nil {
			return fmt.Errorf("bring back address %s of %s: %w", s, l.Attrs().Name, err)
		}
	}
	return nil
}

// restoreRDMA makes RDMA devices of software again.
func (t *task) restoreRDMA(ctx context.Context, l netlink.Link) error {
	if t.w().Device.SoftRDMA == "" {
		return nil
	}
	for _, name := range t.w().Original.RDMA {
		there, err := t.livesOn(ctx, name, l)
		if err != nil {
			return err
		}
		if there {
			continue // the device was never removed
		}
		n, err := t.addRDMA(ctx, t.home, name, l.Attrs().Name)
		if err != nil {
			return fmt.Errorf("bring back RDMA device: %w", err)
		}
		number(&t.j.AtHome, name, n)
		// On a full disk the number is not noted. Then a call after this one, if it is killed,
		// waits and sees, see livesOn.
		if err := t.h.write(t.j); err != nil && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
			return err
		}
	}
	return nil
}

// livesOn tells whether a software RDMA device is on its interface in the host, and stays
// there. The device that the pod had is listed on the same interface until the kernel has
// removed it, and only its number, if it is known, tells it from one that stays:
//
//	interface and rxe device 7 in the pod
//	interface moves to the host
//	rxe device 7 is listed in the host      the kernel is about to remove it
//	no rxe device                           the original device can be made again
func (t *task) livesOn(ctx context.Context, name string, l netlink.Link) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(t.h.hooks.dyingWait, dyingWait))
	defer cancel()
	for {
		p, err := t.port(t.home, name)
		inPod, made := t.j.InPod[name]
		switch {
		case errors.Is(err, unix.ENODEV):
			return false, nil
		case err != nil:
			return false, err
		case p.ifindex != l.Attrs().Index, t.moved, made && p.device == inPod:
			return false, nil
		case t.w().Mode != ModeMove, p.device == t.j.AtHome[name]:
			return true, nil
		}
		// The number is not known, because Attach was killed or the journal is lost: wait
		// and see whether the device is still there.
		select {
		case <-ctx.Done():
			return true, nil
		case <-time.After(poll):
		}
	}
}
