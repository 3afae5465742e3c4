// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// hooks replace parts of this package in tests.
type hooks struct {
	rdma rdmaKernel // nil: the kernel's
	caps *Capabilities
	// macvlan makes the children of kind macvlan, for kernels without ipvlan.
	macvlan   bool
	dyingWait time.Duration // 0: dyingWait
	// after is called after each change. If it returns an error, the call ends there
	// without taking anything back, like a process that was killed.
	after func(step string) error
	// read is called after the journal of a device was read. If it returns an error, the read fails
	// with it.
	read func(id string) error
}

// errKilled is the error that hooks.after returns to end a call.
var errKilled = errors.New("killed")

// A task is one call that changes a device, under its lock.
type task struct {
	h    Host
	rdma rdmaKernel
	home *linux.NetNS // the host's namespace, where devices are that no pod has
	pod  *linux.NetNS // the pod's namespace; nil if it is gone
	j    *journal
	// homeName is the interface's name after it came back to the host; "" if the
	// interface is gone.
	homeName string
	// assigned says that the PF has assigned the VF an address that the VF's driver
	// does not know yet. chosen says that the original address was the driver's choice.
	assigned, chosen bool
	// moved says that this call brought the interface back.
	moved bool
}

// newTask opens the namespace of the host. The caller closes the task.
func (h Host) newTask(j *journal) (*task, error) {
	t := &task{h: h, rdma: h.hooks.rdma, j: j}
	if t.rdma == nil {
		t.rdma = netlinkRDMA{}
	}
	var err error
	if t.home, err = h.openHome(); err != nil {
		return nil, err
	}
	return t, nil
}

func (h Host) openHome() (*linux.NetNS, error) {
	if h.NetNS != "" {
		return linux.OpenNetNS(h.NetNS)
	}
	return linux.CurrentNetNS()
}

func (t *task) close() {
	_ = t.home.Close() // closes descriptors
	if t.pod != nil {
		_ = t.pod.Close()
	}
}

// w is the wiring that the attachment has, or is to get.
func (t *task) w() *Wiring { return &t.j.Wiring }

// Attach wires a device into a pod. After an error it brings the device back to its
// original state. If it cannot, or the process was killed, the next Detach, Collect, or
// Attach of the device does.
func (h Host) Attach(ctx context.Context, r Request) (Wiring, error) {
	if err := r.validate(); err != nil {
		return Wiring{}, fmt.Errorf("attach device: %w", err)
	}
	unlock, err := h.lock(ctx, r.Device)
	if err != nil {
		return Wiring{}, fmt.Errorf("attach device: %w", err)
	}
	defer unlock()
	owner := Owner{ContainerID: r.ContainerID, IfName: r.IfName, Network: r.Network, Pod: r.Pod, NetNS: r.NetNSPath}
	if err := h.takeBackLeftover(ctx, r.Device, owner); err != nil {
		return Wiring{}, fmt.Errorf("attach device: %w", err)
	}
	d, err := h.Device(r.Device)
	if err == nil {
		err = d.Usable()
	}
	if err != nil {
		return Wiring{}, fmt.Errorf("attach device: %w", err)
	}
	t, err := h.newTask(&journal{
		Asked:  r.Settings,
		Wiring: Wiring{Device: d, Owner: owner, Mode: r.Mode, IfName: cmp.Or(r.PodIfName, r.IfName), Settings: r.Settings},
	})
	if err != nil {
		return Wiring{}, fmt.Errorf("attach device %s: %w", d.ID, err)
	}
	defer t.close()
	if err := t.attach(ctx); err != nil {
		return Wiring{}, fmt.Errorf("attach device %s to %s: %w", d.ID, owner, err)
	}
	return *t.w(), nil
}

func (r *Request) validate() error {
	switch {
	case r.ContainerID == "" || len(r.ContainerID) > maxContainerIDBytes || !idPattern.MatchString(r.ContainerID):
		return fmt.Errorf("container ID %.120q: it is empty, longer than %d bytes, or no name", r.ContainerID, maxContainerIDBytes)
	case !validName(r.IfName) || !validName(cmp.Or(r.PodIfName, r.IfName)):
		return fmt.Errorf("interface name %.40q: the kernel takes 1 to %d bytes without slash, colon and space", cmp.Or(r.PodIfName, r.IfName), maxNameBytes)
	case r.Mode != ModeAuto && r.Mode != ModeMove && r.Mode != ModeIPVlan:
		return fmt.Errorf("mode %.40q: it is none of %q, %q and %q", r.Mode, ModeAuto, ModeMove, ModeIPVlan)
	}
	return r.Settings.validate()
}

// attach does the steps of Attach. The journal is written before the first change, and
// after an error everything is taken back.
func (t *task) attach(ctx context.Context) error {
	if err := t.look(ctx); err != nil {
		return err
	}
	if err := t.h.write(t.j); err != nil {
		return err
	}
	err := t.did("journal")
	for _, s := range t.steps() {
		if err != nil {
			break
		}
		if err = ctx.Err(); err != nil {
			break
		}
		if err = s.do(ctx); err != nil {
			err = fmt.Errorf("%s: %w", s.name, err)
			break
		}
		err = t.did(s.name)
	}
	if err == nil {
		t.j.Complete = true
		if err = t.h.write(t.j); err == nil {
			err = t.did("complete")
		}
	}
	if err == nil || errors.Is(err, errKilled) {
		return err
	}
	// The error may be the end of ctx: take back without it.
	if back := t.restore(context.WithoutCancel(ctx)); back != nil {
		return errors.Join(err, fmt.Errorf("take back: %w", back))
	}
	return errors.Join(err, t.forget())
}

// forget removes the journal: the device is in its original state.
func (t *task) forget() error {
	if err := t.h.forget(t.w().Device.ID); err != nil {
		return err
	}
	return t.did("journal removed")
}

// did is called after each change.
func (t *task) did(step string) error {
	Step(step)
	if t.h.hooks.after == nil {
		return nil
	}
	return t.h.hooks.after(step)
}

// look opens the pod's namespace, reads the original state and decides on the mode.
func (t *task) look(ctx context.Context) error {
	w := t.w()
	pod, err := linux.OpenNetNS(w.Owner.NetNS)
	if err != nil {
		return err
	}
	t.pod = pod
	w.Owner.NetNSID = pod.ID()
	if pod.ID() == t.home.ID() {
		return fmt.Errorf("network namespace %s is that of the host: a pod with hostNetwork uses the devices of the host and can get none", w.Owner.NetNS)
	}
	if err := t.decideMode(ctx); err != nil {
		return err
	}
	if err := in(t.pod, func(h *netlink.Handle) error {
		if l, err := find(h, w.IfName); l != nil || err != nil {
			return errors.Join(err, fmt.Errorf("interface %s: %w: choose another name for one of the two", w.IfName, ErrNameTaken))
		}
		return nil
	}); err != nil {
		return err
	}
	return in(t.home, t.lookHome)
}

// lookHome reads the original state of the interface in the host.
func (t *task) lookHome(h *netlink.Handle) error {
	w := t.w()
	l, err := find(h, w.Device.NetDev)
	if err != nil {
		return err
	}
	if l == nil {
		return fmt.Errorf("interface %s: %w", w.Device.NetDev, ErrNotFound)
	}
	a := l.Attrs()
	o := &w.Original
	*o = Original{Name: a.Name, MAC: a.HardwareAddr.String(), MTU: a.MTU, Up: isUp(l), Alias: a.Alias, RDMA: w.Device.RDMA, Parent: a.ParentDev, Traits: traitsOf(l)}
	if o.Addresses, err = addresses(h, l); err != nil {
		return err
	}
	if err := t.lookRDMA(); err != nil {
		return err
	}
	if w.Mode == ModeMove || w.Settings.MAC != nil { // both take the interface down
		if err := mayLeave(h, l, w.Mode); err != nil {
			return err
		}
	}
	if w.Device.VF < 0 {
		w.Warnings, err = noVF(&w.Settings)
		return err
	}
	return t.lookPF(h)
}

// lookRDMA stores the numbers of the software RDMA devices, which the kernel removes when
// the interface moves.
func (t *task) lookRDMA() error {
	if t.w().Device.SoftRDMA == "" || t.w().Mode != ModeMove {
		return nil
	}
	for _, name := range t.w().Original.RDMA {
		p, err := t.port(t.home, name)
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
		number(&t.j.AtHome, name, p.device)
	}
	return nil
}

func (t *task) port(ns *linux.NetNS, name string) (p rdmaPort, err error) {
	err = ns.Do(func() error {
		p, err = t.rdma.Port(name)
		return err
	})
	return p, err
}

// mayLeave refuses interfaces that the host needs.
func mayLeave(h *netlink.Handle, l netlink.Link, m Mode) error {
	a := l.Attrs()
	if a.MasterIndex != 0 && m == ModeMove {
		return fmt.Errorf("interface %s: %w: it belongs to a bridge, bond or VRF", a.Name, ErrInUse)
	}
	def, err := hasDefaultRoute(h, l)
	if err != nil {
		return err
	}
	if def {
		return fmt.Errorf("interface %s: %w: it has the default route; use mode %q without a MAC", a.Name, ErrInUse, ModeIPVlan)
	}
	return nil
}

// lookPF reads the settings that the PF has made for the VF, and checks that the PF is up:
// while it is down, the VF's driver chooses an address of its own and sends nothing.
func (t *task) lookPF(h *netlink.Handle) error {
	w := t.w()
	if w.Device.PF == "" {
		return fmt.Errorf("PF %s: %w: bind it to its driver", w.Device.PFPCI, ErrUnbound)
	}
	pf, err := t.findPF(h)
	if err != nil {
		return err
	}
	if pf == nil {
		return fmt.Errorf("PF %s: %w: it is not in the host's network namespace", w.Device.PF, ErrNotFound)
	}
	w.Device.PF = pf.Attrs().Name
	if !isUp(pf) {
		return fmt.Errorf("PF %s: %w: ip link set %s up", w.Device.PF, ErrPFDown, w.Device.PF)
	}
	w.Original.PF = pfSettings(pf, w.Device.VF)
	if w.Original.PF == nil {
		return fmt.Errorf("PF %s knows no VF %d: its driver is being reset; try again", w.Device.PF, w.Device.VF)
	}
	// Some PFs report an address that the VF's driver chose like one that they assigned
	// themselves. Its original state is: no address assigned.
	if p := w.Original.PF; p.MAC == w.Original.MAC && t.choseMAC(w.Device.NetDev) {
		p.MAC = noMAC
	}
	return nil
}

// decideMode replaces ModeAuto by a mode that works here, and refuses a mode that does not.
func (t *task) decideMode(ctx context.Context) error {
	w := t.w()
	if w.Device.SoftRDMA == "" {
		if w.Mode == ModeAuto {
			w.Mode = ModeMove
		}
		return nil
	}
	if w.Mode == ModeIPVlan {
		return nil
	}
	caps := t.h.capabilities(ctx)
	switch {
	case caps.SoftRoCEInPods && w.Device.SoftRDMA == kindRXE:
		w.Mode = ModeMove
	case w.Mode == ModeMove:
		return fmt.Errorf("mode %q: the RDMA device %s of software carries no traffic in a pod on this kernel: use mode %q, or %q",
			w.Mode, first(w.Device.RDMA), ModeIPVlan, "auto")
	case !caps.IPVlan:
		return fmt.Errorf("the RDMA device %s of software carries no traffic in a pod on this kernel, and it has no ipvlan: "+
			"load the module ipvlan, or use a newer kernel", first(w.Device.RDMA))
	default:
		w.Mode = ModeIPVlan
	}
	return nil
}

func first(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

// A step of attach. It does not say how to take it back: task.restore restores the
// original state, whichever step was the last.
type step struct {
	name string
	do   func(context.Context) error
}

func (t *task) steps() []step {
	steps := []step{{"mark", t.inHome(t.mark)}}
	if t.w().Device.VF >= 0 {
		steps = append(steps, step{"settings", func(context.Context) error { return in(t.home, t.applyPF) }})
	}
	steps = append(steps, step{"address", t.inHome(t.setMAC)})
	if t.w().Device.VF >= 0 && t.w().Settings.Trust != nil {
		// The driver of a trusted VF keeps its own address.
		steps = append(steps, step{"trust", func(context.Context) error { return in(t.home, t.applyTrust) }})
	}
	if t.w().Mode == ModeIPVlan {
		steps = append(steps, step{"parent", t.inHome(t.prepareParent)}, step{"child", t.inHome(t.addChild)}, step{"up", t.upChild})
	} else {
		steps = append(steps, step{"move", t.alone(t.inHome(t.move))}, step{"mtu", t.inPod(t.configure)}, step{"up", t.inPod(t.up)}, step{"rdma", t.followRDMA})
	}
	return append(steps, step{"port", t.waitPorts})
}

func (t *task) mark(h *netlink.Handle, l netlink.Link) error { return h.LinkSetAlias(l, t.w().alias()) }

func (t *task) applyPF(h *netlink.Handle) error {
	return t.byPF(h, func(p vfPort) ([]Warning, error) { return p.apply(&t.w().Settings, *t.w().Original.PF) })
}

func (t *task) applyTrust(h *netlink.Handle) error {
	return t.byPF(h, func(p vfPort) ([]Warning, error) { return p.applyTrust(&t.w().Settings) })
}

// byPF makes settings through the PF, and adds the warnings to the wiring.
func (t *task) byPF(h *netlink.Handle, set func(vfPort) ([]Warning, error)) error {
	w := t.w()
	pf, err := t.findPF(h)
	if err != nil {
		return err
	}
	if pf == nil {
		return fmt.Errorf("PF %s: %w: another program removed or moved it", w.Device.PF, ErrNotFound)
	}
	more, err := set(vfPort{h, pf, w.Device.VF})
	w.Warnings = append(w.Warnings, more...)
	return err
}

func (t *task) move(h *netlink.Handle, l netlink.Link) error {
	if err := setUp(h, l, false); err != nil {
		return err
	}
	err := moveLink(l, t.w().IfName, t.pod)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("interface %s: %w: %w", t.w().IfName, ErrNameTaken, err)
	}
	return err
}

// inHome calls f with the device's interface in the host.
func (t *task) inHome(f func(*netlink.Handle, netlink.Link) error) func(context.Context) error {
	return func(context.Context) error {
		name := t.w().Original.Name
		return withLink(t.home, name, "interface "+name, f)
	}
}

// inPod calls f with the interface that the pod got.
func (t *task) inPod(f func(*netlink.Handle, netlink.Link) error) func(context.Context) error {
	return func(context.Context) error {
		name := t.w().IfName
		return withLink(t.pod, name, "interface "+name+" in the pod", f)
	}
}

// withLink calls f with an interface of a namespace; what names the interface in the error that it
// is not there.
func withLink(ns *linux.NetNS, name, what string, f func(*netlink.Handle, netlink.Link) error) error {
	return in(ns, func(h *netlink.Handle) error {
		l, err := find(h, name)
		if err == nil && l == nil {
			err = fmt.Errorf("%s: %w: another program removed or moved it", what, ErrNotFound)
		}
		if err != nil {
			return err
		}
		return f(h, l)
	})
}

// configure makes the settings that must be made before the interface is up.
func (t *task) configure(h *netlink.Handle, l netlink.Link) error {
	if err := t.noRouterAdvertisements(); err != nil {
		return err
	}
	return t.setMTU(h, l)
}

func (t *task) setMTU(h *netlink.Handle, l netlink.Link) error {
	want := t.w().Settings.MTU
	if want == nil || *want == l.Attrs().MTU {
		return nil
	}
	if err := h.LinkSetMTU(l, *want); err != nil {
		return fmt.Errorf("%w: set MTU of %s to %d, which the device or its PF may not allow: %w", ErrSetting, l.Attrs().Name, *want, err)
	}
	return nil
}

// noRouterAdvertisements makes the interface ignore router advertisements, so that the pod
// has only the addresses and routes of its network's IPAM.
func (t *task) noRouterAdvertisements() error {
	err := linux.SetSysctl(t.pod, "net/ipv6/conf/"+t.w().IfName+"/accept_ra", "0")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // without IPv6
	}
	return err
}

// up sets the pod's interface up and reads its state.
func (t *task) up(h *netlink.Handle, l netlink.Link) error {
	if err := setUp(h, l, true); err != nil {
		return fmt.Errorf("set %s up: %w", l.Attrs().Name, err)
	}
	l, err := find(h, t.w().IfName)
	if err != nil || l == nil {
		return errors.Join(err, fmt.Errorf("interface %s in the pod: %w", t.w().IfName, ErrNotFound))
	}
	t.w().MAC, t.w().MTU = l.Attrs().HardwareAddr.String(), l.Attrs().MTU
	return nil
}

// prepareParent sets the interface that stays in the host up, with the MTU.
func (t *task) prepareParent(h *netlink.Handle, l netlink.Link) error {
	if err := t.setMTU(h, l); err != nil {
		return err
	}
	return setUp(h, l, true)
}

// addChild makes the ipvlan child directly in the pod's namespace, with its final name.
func (t *task) addChild(h *netlink.Handle, l netlink.Link) error {
	return t.pod.WithFD(func(fd int) error {
		a := netlink.NewLinkAttrs()
		a.Name, a.ParentIndex, a.Namespace = t.w().IfName, l.Attrs().Index, netlink.NsFd(fd)
		err := h.LinkAdd(t.child(a))
		switch {
		case errors.Is(err, unix.EEXIST):
			return fmt.Errorf("interface %s: %w: %w", t.w().IfName, ErrNameTaken, err)
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("make ipvlan child of %s: %w: it has children of another kind (macvlan, bridge)", l.Attrs().Name, err)
		case err != nil:
			return fmt.Errorf("make ipvlan child of %s: %w", l.Attrs().Name, err)
		}
		return nil
	})
}

// child is the interface that a pod gets with ModeIPVlan.
func (t *task) child(a netlink.LinkAttrs) netlink.Link {
	if t.h.hooks.macvlan {
		return &netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_PRIVATE}
	}
	return &netlink.IPVlan{LinkAttrs: a, Mode: netlink.IPVLAN_MODE_L2}
}

func (t *task) upChild(ctx context.Context) error {
	if err := t.noRouterAdvertisements(); err != nil {
		return err
	}
	if err := t.inPod(t.up)(ctx); err != nil {
		return err
	}
	for _, name := range t.w().Device.RDMA {
		t.w().RDMA = append(t.w().RDMA, RDMADevice{Name: name, GIDNetDev: t.w().Original.Name, Soft: t.w().Device.SoftRDMA})
	}
	return nil
}

// followRDMA moves the RDMA devices after the interface, or makes software devices again.
func (t *task) followRDMA(ctx context.Context) error {
	w := t.w()
	if len(w.Device.RDMA) == 0 {
		return nil
	}
	if w.Device.SoftRDMA != "" {
		for _, name := range w.Device.RDMA {
			n, err := t.addRDMA(ctx, t.pod, name, w.IfName)
			if err != nil {
				return err
			}
			number(&t.j.InPod, name, n)
			w.RDMA = append(w.RDMA, RDMADevice{Name: name, GIDNetDev: w.IfName, Soft: w.Device.SoftRDMA})
		}
		return nil
	}
	exclusive, err := t.exclusive()
	if err != nil {
		return err
	}
	for _, name := range w.Device.RDMA {
		r := RDMADevice{Name: name, GIDNetDev: w.IfName}
		if exclusive {
			if err := t.moveRDMA(name, t.home, t.pod); err != nil {
				return err
			}
			r.NetNS = w.Owner.NetNS
		}
		w.RDMA = append(w.RDMA, r)
	}
	return nil
}

func (t *task) exclusive() (exclusive bool, err error) {
	err = t.home.Do(func() error {
		mode, err := t.rdma.Mode()
		exclusive = mode == rdmaExclusive
		return err
	})
	return exclusive, err
}

func (t *task) moveRDMA(name string, from, to *linux.NetNS) error {
	return to.WithFD(func(fd int) error {
		return from.Do(func() error { return t.rdma.Move(name, fd) })
	})
}

// alone makes sure that no software device is made while another one is being removed. The
// devices of a namespace share sockets, which the kernel closes with the last device, and
// Linux 7.2 may give a new device the sockets that are just being closed.
func (t *task) alone(do func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if t.w().Device.SoftRDMA != "" {
			unlock, err := t.h.lock(ctx, softLock)
			if err != nil {
				return err
			}
			defer unlock()
		}
		return do(ctx)
	}
}

// addRDMA makes a software device again, on an interface whose former device the kernel
// removed when the interface moved, and returns the kernel's number of the new device. The
// name is free only after the kernel has removed the former device, for which it waits
// until all processes that have the device open close it.
func (t *task) addRDMA(ctx context.Context, ns *linux.NetNS, name, netdev string) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	for pause := poll; ; pause = min(2*pause, maxPause) { // growing pauses: a failed try is much work for the kernel too
		err := t.alone(func(context.Context) error {
			return ns.Do(func() error { return t.rdma.Add(name, t.w().Device.SoftRDMA, netdev) })
		})(ctx)
		if err == nil {
			p, err := t.port(t.home, name) // software devices are listed in the host, whatever the namespace of their interface
			return p.device, err
		}
		if !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENFILE) && !errors.Is(err, unix.EBUSY) {
			return 0, err
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: a process still has the former device open", err)
		case <-time.After(pause):
		}
	}
}

// waitPorts waits until the pod's RDMA ports are active, which they are once the interface
// has a carrier. If they do not become active, there is a warning, and the pod is on plain
// TCP; but if the reason is that the PF is down, that is an error.
func (t *task) waitPorts(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, portWait)
	defer cancel()
	for _, r := range t.w().RDMA {
		if err := t.waitPort(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func (t *task) waitPort(ctx context.Context, r RDMADevice) error {
	ns := t.home
	if r.NetNS != "" {
		ns = t.pod
	}
	for {
		p, err := t.port(ns, r.Name)
		if err != nil {
			return err
		}
		if p.active {
			return nil
		}
		select {
		case <-ctx.Done():
			if t.w().Device.VF >= 0 {
				if err := in(t.home, t.pfUp); err != nil {
					return err
				}
			}
			t.w().Warnings = append(t.w().Warnings, Warning{
				Text: fmt.Sprintf("the port of RDMA device %s is not active: look for the carrier of %s", r.Name, r.GIDNetDev),
			})
			return nil
		case <-time.After(poll):
		}
	}
}

func (t *task) pfUp(h *netlink.Handle) error {
	pf, err := t.findPF(h)
	if err != nil {
		return err
	}
	if pf == nil || !isUp(pf) {
		return fmt.Errorf("PF %s: %w since: ip link set %s up", t.w().Device.PF, ErrPFDown, t.w().Device.PF)
	}
	return nil
}
