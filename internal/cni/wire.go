// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/internal/claims"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/vf"
)

// host is the machine whose devices the plugin wires.
func (p Plugin) host(c NetConf) Host {
	if p.Host != nil {
		return p.Host(c.DataDir)
	}
	return vf.Host{DataDir: c.DataDir}
}

// A wiring is the work of one ADD that makes interfaces: what it was asked, and
// what there is to take back.
type wiring struct {
	p    Plugin
	c    NetConf
	args *skel.CmdArgs
	a    Attachment // grows
	ns   *linux.NetNS
	res  *types100.Result // grows
	undo []func() error   // what takes back what was done, the last first
}

// A wish is one interface that the pod is to have.
type wish struct {
	device   string
	ifName   string // in the pod
	settings vf.Settings
	mode     vf.Mode
}

// addWired makes the interface that the network is about.
func (p Plugin) addWired(c NetConf, a Attachment, args *skel.CmdArgs) error {
	id, shared := c.deviceID()
	switch {
	case id == "":
		return confError("prevResult", "is missing: list this plugin behind the one that makes the interface, or give it a deviceID")
	case shared:
		return confError("deviceID", "%s is shared by pods, so that its interface can go to none: list this plugin behind one that makes an interface, "+
			"as macvlan or ipvlan on %s does", id, id)
	}
	return p.wire(c, a, args, wish{device: id, ifName: args.IfName, settings: c.settings(), mode: c.mode()})
}

// claimed are the devices that the pod claimed and nobody wired yet. They become
// further interfaces beside the one that the network is about. Devices that pods
// share stay where they are, and so does one that another network of the pod has.
func (p Plugin) claimed(c NetConf, a Attachment) []wish {
	if a.Pod.UID == "" {
		return nil // outside Kubernetes
	}
	devices, err := claims.NewStore(c.DataDir).OfPod(a.Pod.UID)
	if err != nil { // of other pods, or not to be read
		p.tell("ADD goes on without some claims: %v", err)
	}
	var out []wish
	for _, d := range devices {
		dev, err := p.host(c).Device(d.ID)
		if d.Shared || err == nil && dev.Owner != nil && dev.Owner.ContainerID == a.ContainerID {
			continue
		}
		name := d.IfName
		if name == "" {
			name = fmt.Sprintf("smcr%d", len(out))
		}
		out = append(out, wish{device: d.ID, ifName: name})
	}
	return out
}

// wire makes interfaces, records the attachment, wakes the agent, and prints
// the result. After an error nothing is left of it.
func (p Plugin) wire(c NetConf, a Attachment, args *skel.CmdArgs, wishes ...wish) (err error) {
	ctx := context.Background()
	unlock, err := p.lock(ctx, c, args)
	if err != nil {
		return err
	}
	defer unlock()
	if got, err := c.store().Get(args.ContainerID, args.IfName); err == nil && len(got.wired()) > 0 {
		return types.NewError(CodeDeviceBusy, "the attachment exists already: call DEL before another ADD",
			fmt.Sprintf("interface %s of container %s has device %s", args.IfName, args.ContainerID, got.wired()[0].ID))
	}
	w := &wiring{p: p, c: c, args: args, a: a}
	if w.ns, err = openPod(args.Netns); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.ns.Close()) }()
	if w.res, err = c.previous(); err != nil {
		return err
	}
	for _, one := range wishes {
		if err = w.one(ctx, one); err != nil {
			return w.back(err)
		}
	}
	if err = w.finish(); err != nil {
		return w.back(err)
	}
	return nil
}

// did notes how to take back what was just done.
func (w *wiring) did(undo func() error) { w.undo = append(w.undo, undo) }

// back takes everything back after err, and returns err with what went wrong
// on the way.
func (w *wiring) back(err error) error {
	var errs []error
	for _, undo := range slices.Backward(w.undo) {
		errs = append(errs, undo())
	}
	left := errors.Join(errs...)
	if left == nil {
		return err
	}
	var ce *types.Error
	if !errors.As(err, &ce) {
		ce = types.NewError(types.ErrInternal, err.Error(), "")
	}
	left = fmt.Errorf("not all is back as it was, DEL or GC will try again: %w", left)
	return types.NewError(ce.Code, ce.Msg, joined(ce.Details, left))
}

// joined is details, if there are any, and err.
func joined(details string, err error) string {
	if details == "" {
		return err.Error()
	}
	return details + "; " + err.Error()
}

// one makes one interface. The IPAM plugin works at the same time as the kernel,
// unless it needs the interface.
func (w *wiring) one(ctx context.Context, one wish) error {
	if err := w.mayUse(one.device); err != nil {
		return err
	}
	i := ipam{conf: w.c, args: w.args, ifName: one.ifName}
	var addresses func() (*types100.Result, error)
	if !i.needsInterface() {
		addresses = w.allocate(ctx, i)
	}
	wired, err := w.attach(ctx, one)
	if err != nil {
		return err
	}
	if i.needsInterface() {
		addresses = w.allocate(ctx, i)
	}
	res, err := addresses()
	if err != nil {
		return err
	}
	vf.Step("addresses allocated")
	if err := w.setIPs(ctx, one.ifName, res); err != nil {
		return err
	}
	vf.Step("addresses set")
	for _, warning := range wired.Warnings {
		w.p.tell("device %s: %s", one.device, warning.Text)
	}
	w.record(one, wired, res)
	return nil
}

// allocate asks the IPAM plugin for addresses, and returns what waits for them.
func (w *wiring) allocate(ctx context.Context, i ipam) func() (*types100.Result, error) {
	answer := start(func() (*types100.Result, error) { return i.add(ctx) })
	w.did(func() error {
		_, failed := answer()
		if err := i.del(ctx); failed == nil {
			return err
		}
		return nil // there may have been nothing to give back
	})
	return answer
}

// start calls f in a goroutine and returns what waits for its answer, any
// number of times.
func start[T any](f func() (T, error)) func() (T, error) {
	var v T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		v, err = f()
	}()
	return func() (T, error) { <-done; return v, err }
}

// mayUse looks whether the network may use the device. Whether it is free is for
// Attach to find out, which may have to take it back first.
func (w *wiring) mayUse(id string) error {
	dev, err := w.host().Device(id)
	if err != nil {
		return deviceError(id, err)
	}
	if !w.c.uses(dev) {
		return types.NewError(CodeDevice, "device "+id+": correct pfNames, or the resource that handed it out",
			fmt.Sprintf("it is a VF of %q (%s), the network uses %s", dev.PF, dev.PFPCI, strings.Join(w.c.PFNames, ", ")))
	}
	return nil
}

func (w *wiring) host() Host { return w.p.host(w.c) }

func (w *wiring) attach(ctx context.Context, one wish) (vf.Wiring, error) {
	ctx, cancel := context.WithTimeout(ctx, wireTimeout)
	defer cancel()
	wired, err := w.host().Attach(ctx, vf.Request{
		Device: one.device, ContainerID: w.args.ContainerID, IfName: w.args.IfName, PodIfName: one.ifName,
		Network: w.c.Name, NetNSPath: w.args.Netns, Pod: vf.Pod(w.a.Pod), Mode: one.mode, Settings: one.settings,
	})
	if err != nil { // the device is as it was
		return vf.Wiring{}, deviceError(one.device, err)
	}
	w.did(func() error { return w.p.detach(w.c, w.args, one.device) })
	return wired, nil
}

// detach takes a device back, or all that the attachment has if it is "".
func (p Plugin) detach(c NetConf, args *skel.CmdArgs, device string) error {
	ctx, cancel := context.WithTimeout(context.Background(), wireTimeout)
	defer cancel()
	return p.host(c).Detach(ctx, vf.Detachment{
		ContainerID: args.ContainerID, IfName: args.IfName, Device: device, NetNSPath: args.Netns,
	})
}

// setIPs gives the interface its addresses, and tells the neighbours.
func (w *wiring) setIPs(ctx context.Context, ifName string, res *types100.Result) error {
	ips, err := interfaceIPs(res)
	if err != nil {
		return types.NewError(CodeInterface, "result of the IPAM plugin "+w.c.IPAM.Type, err.Error())
	}
	if len(ips.Addresses)+len(ips.Routes) == 0 {
		return nil
	}
	if err := linux.SetInterfaceIPs(w.ns, ifName, ips); err != nil {
		return types.NewError(CodeInterface, "set addresses and routes: correct ipam", err.Error())
	}
	var addrs []netip.Addr
	for _, p := range ips.Addresses {
		addrs = append(addrs, p.Addr())
	}
	if err := vf.Announce(ctx, w.args.Netns, ifName, addrs); err != nil {
		w.p.tell("neighbours that knew the addresses elsewhere find them later: %v", err)
	}
	return nil
}

// record notes what the pod got.
func (w *wiring) record(one wish, wired vf.Wiring, res *types100.Result) {
	dev := wired.Device
	d := attachedDevice(dev)
	d.Mode, d.IfName, d.MAC, d.RDMA = string(wired.Mode), one.ifName, wired.MAC, nil
	for _, r := range wired.RDMA {
		d.RDMA = append(d.RDMA, r.Name)
	}
	made := &types100.Interface{Name: one.ifName, Mac: wired.MAC, Mtu: wired.MTU, Sandbox: w.args.Netns}
	if wired.Mode == vf.ModeIPVlan {
		w.res.Interfaces = append(w.res.Interfaces, &types100.Interface{Name: dev.NetDev, Mac: wired.MAC, PciID: dev.PCI})
	} else {
		made.PciID = dev.PCI
	}
	w.res.Interfaces = append(w.res.Interfaces, made)
	for _, ip := range res.IPs {
		ip.Interface = types100.Int(len(w.res.Interfaces) - 1)
		w.res.IPs = append(w.res.IPs, ip)
		p, ok := prefixOf(ip.Address)
		if !ok {
			continue
		}
		d.IPs = append(d.IPs, p)
		if one.ifName == w.args.IfName {
			w.a.IPs = append(w.a.IPs, p)
		}
	}
	w.a.Devices = append(w.a.Devices, d)
	w.res.Routes = append(w.res.Routes, res.Routes...)
	if w.res.DNS.IsEmpty() {
		w.res.DNS = res.DNS
	}
}

// finish writes what others read, and prints the result.
func (w *wiring) finish() error {
	if err := w.deviceInfo(); err != nil {
		return types.NewError(types.ErrIOFailure, "runtimeConfig.CNIDeviceInfoFile", err.Error())
	}
	store := w.c.store()
	w.a.Created = w.p.Now().UTC()
	if err := store.Write(w.a); err != nil {
		return storeError(err)
	}
	w.did(func() error { return store.Delete(w.a.ContainerID, w.a.IfName) })
	vf.Step("record written")
	if err := w.p.nudge(w.c, Event{Verb: "ADD", ContainerID: w.a.ContainerID, IfName: w.a.IfName}); err != nil && w.c.Required {
		return notTaken(err)
	}
	return w.p.printResult(w.c, w.res)
}

// deviceInfo reads what the device plugin says about the device, and says it
// for the pod if nobody did.
func (w *wiring) deviceInfo() error {
	file := w.c.RuntimeConfig.CNIDeviceInfoFile
	for n := range w.a.Devices {
		d := &w.a.Devices[n]
		info, name, err := readDeviceInfo(file, w.p.devInfoDir(), d.ID)
		if err != nil {
			w.p.tell("%v", err)
		}
		if pci := info.PCI; pci != nil && d.PCI != "" && !strings.EqualFold(pci.Address, d.PCI) {
			w.p.tell("device-info file %s is about %s, the device is %s", name, pci.Address, d.PCI)
		}
		if len(d.RDMA) == 0 {
			// One that the host does not see: it is in another namespace.
			d.RDMA = info.rdma()
		}
		if file == "" || name == file || d.PCI == "" {
			continue
		}
		if err := writeDeviceInfo(file, *d); err != nil {
			return err
		}
		w.did(func() error { return removeDeviceInfo(file) })
		vf.Step("device-info file written")
	}
	return nil
}

func (p Plugin) devInfoDir() string {
	if p.DevInfoDir != "" {
		return p.DevInfoDir
	}
	return defaultDevInfoDir
}

// attachedDevice is the record of a device as it was found.
func attachedDevice(d vf.Device) AttachedDevice {
	return AttachedDevice{
		ID: d.ID, PCI: d.PCI, RDMA: d.RDMA, NetDev: d.NetDev, PF: d.PF, PFPCI: d.PFPCI, VF: d.VF,
		NUMANode: d.NUMANode, Rail: d.Rail, Mode: modeChained,
	}
}

// chainedDevice is the record of the device behind an interface that another
// plugin made, if the network names one. Without it the pod's connections use
// the node's devices.
func (p Plugin) chainedDevice(c NetConf) ([]AttachedDevice, error) {
	id, shared := c.deviceID()
	if id == "" {
		return nil, nil
	}
	dev, err := p.host(c).Device(id)
	switch {
	case err == nil:
		return []AttachedDevice{attachedDevice(dev)}, nil
	case shared && errors.Is(err, vf.ErrNotFound): // a device that only the agent knows
		return []AttachedDevice{{ID: id, VF: -1, NUMANode: -1, Rail: -1, Mode: modeChained}}, nil
	case c.Required:
		return nil, deviceError(id, err)
	}
	p.tell("ADD goes on without device %s: %v", id, err)
	return nil, nil
}

// lock locks the attachment, and returns what unlocks it.
func (p Plugin) lock(ctx context.Context, c NetConf, args *skel.CmdArgs) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	l, err := lockAttachment(ctx, c.DataDir, args.ContainerID, args.IfName)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, types.NewError(types.ErrTryAgainLater, "attachment", err.Error())
	}
	if err != nil {
		return nil, storeError(err)
	}
	return func() {
		if err := l.unlock(); err != nil {
			p.tell("%v", err)
		}
	}, nil
}

// openPod opens the pod's namespace.
func openPod(path string) (*linux.NetNS, error) {
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, "CNI_NETNS", err.Error())
	}
	return ns, nil
}

// previous is the previous result, or an empty one.
func (c NetConf) previous() (*types100.Result, error) {
	if c.prevResult == nil {
		return &types100.Result{}, nil
	}
	r, err := parseResult(c.CNIVersion, c.prevResult)
	if err != nil {
		return nil, confError("prevResult", "%v", err)
	}
	return r, nil
}

// hasInterface tells whether another plugin made the interface already. A
// result that lists none but has addresses is of one that did.
func (c NetConf) hasInterface(ifName string) bool {
	var r result
	if c.prevResult == nil || json.Unmarshal(c.prevResult, &r) != nil {
		return false
	}
	if len(r.Interfaces) == 0 {
		return len(r.IPs) > 0
	}
	for _, it := range r.Interfaces {
		if it.Name == ifName && it.Sandbox != "" {
			return true
		}
	}
	return false
}

// wires tells whether ADD makes the interface itself.
func (c NetConf) wires(ifName string) bool {
	id, _ := c.deviceID()
	return id != "" && !c.hasInterface(ifName)
}

// nothingToSet refuses what is said about an interface that another plugin
// made: nothing would become of it. IPAM is said to whom it concerns.
func (c NetConf) nothingToSet(ifName string) error {
	field := c.firstSetting()
	id, _ := c.deviceID()
	switch {
	case field == "" || field == "ipam" && id == "":
		return nil
	case id == "":
		return confError(field, "is about a device, and the network has no deviceID: give it one, or take this away")
	}
	return confError(field, "is about an interface that this plugin makes, but the plugin before made %s: take this away here, and give it to that plugin", ifName)
}

// uses tells whether the network uses a device.
func (c NetConf) uses(d vf.Device) bool {
	return len(c.PFNames) == 0 || slices.Contains(c.PFNames, d.PF) || slices.Contains(c.PFNames, d.PFPCI)
}
