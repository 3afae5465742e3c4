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

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/undo"
)

// host is the machine whose devices the plugin wires.
func (p Plugin) host(c NetConf) Host {
	if p.Host != nil {
		return p.Host(c.DataDir)
	}
	return vf.Host{DataDir: c.DataDir}
}

// A wiring is one ADD that makes interfaces: what the ADD is asked for, what it has made,
// and how to take that back.
type wiring struct {
	p    Plugin
	c    NetConf
	args *skel.CmdArgs
	a    Attachment // the record; gets each device that was wired
	ns   *linux.NetNS
	res  *types100.Result // the result; gets each interface that was made
	undo undo.Stack
}

// An ifRequest is one interface that the pod is to have.
type ifRequest struct {
	device   string
	ifName   string // in the pod
	settings vf.Settings
	mode     vf.Mode
}

// addWired makes the interface that ADD was called for.
func (p Plugin) addWired(c NetConf, a Attachment, args *skel.CmdArgs) error {
	id, shared := c.deviceID()
	switch {
	case id == "":
		return confError("prevResult", "is missing: list this plugin behind the one that makes the interface, or give it a deviceID")
	case shared:
		return confError("deviceID", "%s is shared by pods, so that its interface can go to none: list this plugin behind one that makes an interface, "+
			"as macvlan or ipvlan on %s does", id, id)
	}
	return p.wire(c, a, args, ifRequest{device: id, ifName: args.IfName, settings: c.settings(), mode: c.mode()})
}

// podInterface is the interface of a pod's first attachment, as Kubernetes' runtimes call it.
const podInterface = "eth0"

// claimed are the interfaces for the devices that the pod claimed. They are made with the pod's first
// attachment, and get addresses of its network. Multus may have called the plugins of other networks
// before that: devices that another attachment of the pod has are left out, and so are devices that
// pods share, which get no interface. The error says that it cannot be known now what the pod claimed.
func (p Plugin) claimed(c NetConf, a Attachment) ([]ifRequest, error) {
	if a.Pod.UID == "" || a.IfName != podInterface {
		return nil, nil // outside Kubernetes, or a further network of the pod
	}
	devices, err := claims.NewStore(c.DataDir).OfPod(a.Pod.UID)
	if records.IsShortage(err) { // other errors may last, and must not keep pods from starting: most have no claims
		return nil, types.NewError(types.ErrTryAgainLater, "it is not known which devices the pod claimed", err.Error())
	}
	if err != nil { // some records could not be read; they may be of other pods
		p.tell("some claims are left out: %v", err)
	}
	var out []ifRequest
	named := func(name string) bool { // by a claim, or chosen before
		return slices.ContainsFunc(devices, func(d claims.Device) bool { return d.IfName == name }) ||
			slices.ContainsFunc(out, func(o ifRequest) bool { return o.ifName == name })
	}
	for _, d := range devices {
		dev, err := p.host(c).Device(d.ID)
		if d.Shared || err == nil && dev.Owner != nil && dev.Owner.ContainerID == a.ContainerID && dev.Owner.IfName != a.IfName {
			continue
		}
		name := d.IfName
		for n := len(out); name == "" || d.IfName == "" && named(name); n++ {
			name = fmt.Sprintf("smcr%d", n)
		}
		out = append(out, ifRequest{device: d.ID, ifName: name})
	}
	return out, nil
}

// wire makes interfaces, writes the record, tells the agent, and prints the result. After
// an error nothing of that is left.
func (p Plugin) wire(c NetConf, a Attachment, args *skel.CmdArgs, requests ...ifRequest) (err error) {
	ctx := context.Background()
	unlock, err := p.lock(ctx, c, args)
	if err != nil {
		return lockError(err)
	}
	defer unlock()
	if err := c.isNew(args); err != nil {
		return err
	}
	w := &wiring{p: p, c: c, args: args, a: a}
	if w.ns, err = openPod(args.Netns); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.ns.Close()) }()
	if w.res, err = c.previous(); err != nil {
		return err
	}
	for _, one := range requests {
		if err = w.one(ctx, one); err != nil {
			return w.back(err)
		}
	}
	if err = w.finish(); err != nil {
		return w.back(err)
	}
	return nil
}

// isNew refuses a second ADD of an attachment that has devices: its record would replace that of the
// first ADD, which says what DEL has to give back.
func (c NetConf) isNew(args *skel.CmdArgs) error {
	if got, err := c.store().Get(args.ContainerID, args.IfName); err == nil && len(got.wired()) > 0 {
		return types.NewError(CodeDeviceBusy, "the attachment exists already: call DEL before another ADD",
			fmt.Sprintf("interface %s of container %s has device %s", args.IfName, args.ContainerID, got.wired()[0].ID))
	}
	return nil
}

// isMade tells whether the plugin was already called in this ADD, and made the attachment: the list of a
// network may name the plugin, and also that of its delegate, as with Multus. Then the previous result
// has the interfaces of all devices of the record, while in a second ADD it has none.
func (c NetConf) isMade(a Attachment) bool {
	got, err := c.store().Get(a.ContainerID, a.IfName)
	if err != nil || got.NetNS != a.NetNS || got.NetNSID != a.NetNSID {
		return false
	}
	var r result
	if c.prevResult == nil || json.Unmarshal(c.prevResult, &r) != nil {
		return false
	}
	inPod := map[string]bool{}
	for _, it := range r.Interfaces {
		if it.Sandbox != "" && realPath(it.Sandbox) == got.NetNS {
			inPod[it.Name] = true
		}
	}
	wired := got.wired()
	return len(wired) > 0 && !slices.ContainsFunc(wired, func(d AttachedDevice) bool { return !inPod[d.IfName] })
}

// passOn is the ADD of an attachment for which isMade is true. The agent is told again if this network
// says "required", as the one for which the attachment was made may not.
func (p Plugin) passOn(c NetConf, a Attachment) error {
	if c.Required {
		if err := p.notifyAgent(c, Event{Verb: "ADD", ContainerID: a.ContainerID, IfName: a.IfName}); err != nil {
			return notTaken(err)
		}
	}
	return p.printPrevious(c)
}

// back takes all steps back after err, and returns err together with the errors of
// taking back.
func (w *wiring) back(err error) error {
	left := w.undo.Back()
	if left == nil {
		return err
	}
	var ce *types.Error
	if !errors.As(err, &ce) {
		ce = types.NewError(types.ErrInternal, err.Error(), "")
	}
	left = fmt.Errorf("not all could be taken back, DEL or GC will try again: %w", left)
	return types.NewError(ce.Code, ce.Msg, joined(ce.Details, left))
}

// joined is the text of details, if there are any, followed by that of err.
func joined(details string, err error) string {
	if details == "" {
		return err.Error()
	}
	return details + "; " + err.Error()
}

// one makes one interface. The IPAM plugin runs at the same time, unless it needs the
// interface first.
func (w *wiring) one(ctx context.Context, one ifRequest) error {
	dev, err := w.mayUse(one.device)
	if err != nil {
		return err
	}
	i := ipam{conf: w.c, args: w.args, ifName: one.ifName}
	var addresses func() (*types100.Result, error)
	if !i.needsInterface() {
		addresses = w.allocate(ctx, i)
	}
	wired, err := w.attachAfter(ctx, one, w.former(dev))
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
	if one.ifName != w.args.IfName {
		w.dropDefaults(one.ifName, res)
	}
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

// dropDefaults takes the default routes out of what the IPAM plugin gave to the interface of a claimed
// device: such a route, which a DHCP server gives to everybody, would replace the pod's own. A route
// with a table or priority replaces none, and stays.
func (w *wiring) dropDefaults(ifName string, res *types100.Result) {
	res.Routes = slices.DeleteFunc(res.Routes, func(r *types.Route) bool {
		bits, _ := r.Dst.Mask.Size()
		takes := bits == 0 && r.Table == nil && r.Priority == 0
		if takes {
			w.p.tell("the IPAM plugin's default route for %s is left out: the pod has its own by %s", ifName, w.args.IfName)
		}
		return takes
	})
}

// allocate starts to ask the IPAM plugin for addresses, and returns a function that waits
// for the answer.
func (w *wiring) allocate(ctx context.Context, i ipam) func() (*types100.Result, error) {
	answer := start(func() (*types100.Result, error) { return i.add(ctx) })
	w.undo.Did("allocate addresses", func() error {
		_, failed := answer()
		if err := i.del(ctx); failed == nil {
			return err
		}
		return nil // ADD of the IPAM plugin failed: there may be nothing to give back
	})
	return answer
}

// start calls f in a goroutine and returns a function that waits for its answer. That
// function may be called any number of times.
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

// mayUse returns the device, and checks that the network may use it. It does not check that the device
// is free: Attach does, which may have to take the device back from an ended pod first.
func (w *wiring) mayUse(id string) (vf.Device, error) {
	dev, err := w.host().Device(id)
	if err != nil {
		return dev, deviceError(id, err)
	}
	if !w.c.uses(dev) {
		return dev, types.NewError(CodeDevice, "device "+id+": correct pfNames, or the resource that handed it out",
			fmt.Sprintf("it is a VF of %q (%s), the network uses %s", dev.PF, dev.PFPCI, strings.Join(w.c.PFNames, ", ")))
	}
	return dev, nil
}

func (w *wiring) host() Host { return w.p.host(w.c) }

func (w *wiring) attach(ctx context.Context, one ifRequest) (vf.Wiring, error) {
	ctx, cancel := context.WithTimeout(ctx, wireTimeout)
	defer cancel()
	wired, err := w.host().Attach(ctx, vf.Request{
		Device: one.device, ContainerID: w.args.ContainerID, IfName: w.args.IfName, PodIfName: one.ifName,
		Network: w.c.Name, NetNSPath: w.args.Netns, Pod: w.a.Pod, Mode: one.mode, Settings: one.settings,
	})
	if err != nil { // Attach has taken its own steps back
		return vf.Wiring{}, deviceError(one.device, err)
	}
	w.undo.Did("attach device "+one.device, func() error { return w.p.detach(w.c, w.args, one.device) })
	return wired, nil
}

// detach takes a device back; if device is "", all devices of the attachment.
func (p Plugin) detach(c NetConf, args *skel.CmdArgs, device string) error {
	ctx, cancel := context.WithTimeout(context.Background(), wireTimeout)
	defer cancel()
	return p.host(c).Detach(ctx, vf.Detachment{
		ContainerID: args.ContainerID, IfName: args.IfName, Device: device, NetNSPath: args.Netns,
	})
}

// setIPs gives the interface its addresses and routes, and announces the addresses to
// the neighbours.
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
		w.p.tell("addresses of interface %s not announced: neighbours with an old entry for them may not reach the pod for a while: %v", ifName, err)
	}
	return nil
}

// record adds a device that was wired to the attachment's record and to the result.
func (w *wiring) record(one ifRequest, wired vf.Wiring, res *types100.Result) {
	dev := wired.Device
	d := attachedDevice(dev)
	d.Mode, d.IfName, d.MAC, d.RDMA = string(wired.Mode), one.ifName, wired.MAC, nil
	for _, r := range wired.RDMA {
		d.RDMA = append(d.RDMA, r.Name)
	}
	ips, _ := interfaceIPs(res) // setIPs has seen an error
	for _, r := range ips.Routes {
		d.Routes = append(d.Routes, AttachedRoute{Dst: r.Dst, Gateway: r.Gateway, Priority: r.Priority, Table: r.Table})
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
	w.a.IPAM = w.c.rawIPAM()
	w.res.Routes = append(w.res.Routes, res.Routes...)
	if w.res.DNS.IsEmpty() {
		w.res.DNS = res.DNS
	}
}

// finish writes the device-info file and the record, tells the agent, and prints the
// result.
func (w *wiring) finish() error {
	if err := w.deviceInfo(); err != nil {
		return types.NewError(types.ErrIOFailure, "runtimeConfig.CNIDeviceInfoFile", err.Error())
	}
	store := w.c.store()
	w.a.Created = w.p.Now().UTC()
	if err := store.Write(w.a); err != nil {
		return storeError(err)
	}
	w.undo.Did("write record", func() error {
		err := store.Delete(w.a.ContainerID, w.a.IfName)
		// As with DEL: the agent may have opened the device since, and closes it before the device leaves the pod.
		_ = w.p.notifyAgent(w.c, Event{Verb: "DEL", ContainerID: w.a.ContainerID, IfName: w.a.IfName}) // the error is on stderr
		return err
	})
	vf.Step("record written")
	if err := w.p.notifyAgent(w.c, Event{Verb: "ADD", ContainerID: w.a.ContainerID, IfName: w.a.IfName}); err != nil && w.c.Required {
		return notTaken(err)
	}
	return w.p.printResult(w.c, w.res)
}

// deviceInfo reads what the device plugin wrote about each device, and writes the
// runtime's device-info file, if there is to be one and nobody wrote it.
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
			// The host does not see the RDMA device: it is in the pod's namespace already.
			d.RDMA = info.RDMA()
		}
		if file == "" || name == file || d.PCI == "" {
			continue
		}
		pci := deviceinfo.PCI{Address: d.PCI, PF: d.PFPCI, RDMA: strings.Join(d.RDMA, ",")}
		if err := deviceinfo.Write(file, pci); err != nil {
			return err
		}
		w.undo.Did("write device-info file", func() error { return deviceinfo.Remove(file) })
		vf.Step("device-info file written")
	}
	return nil
}

func (p Plugin) devInfoDir() string {
	if p.DevInfoDir != "" {
		return p.DevInfoDir
	}
	return deviceinfo.DefaultDir
}

// attachedDevice is the record of a device as the host sees it.
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

// lock locks the attachment, and returns the function that unlocks it. See lockError for its
// error.
func (p Plugin) lock(ctx context.Context, c NetConf, args *skel.CmdArgs) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	l, err := lockAttachment(ctx, c.DataDir, args.ContainerID, args.IfName)
	if err != nil {
		return nil, err
	}
	return func() {
		if err := l.Remove(); err != nil {
			p.tell("%v", err)
		}
	}, nil
}

// lockError is the CNI error for an error of lock.
func lockError(err error) *types.Error {
	if errors.Is(err, context.DeadlineExceeded) {
		return types.NewError(types.ErrTryAgainLater, "attachment", err.Error())
	}
	return storeError(err)
}

// openPod opens the pod's namespace.
func openPod(path string) (*linux.NetNS, error) {
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return nil, types.NewError(types.ErrInvalidNetNS, "CNI_NETNS", err.Error())
	}
	return ns, nil
}

// previous is the previous result; if there is none, an empty result.
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

// hasInterface tells whether a plugin before made the interface. If the previous result
// lists no interfaces but has addresses, one did: old plugins do not list interfaces.
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

// nothingToSet refuses settings of an interface that another plugin made: they would
// have no effect. A network without a deviceID may have ipam, which is for that other
// plugin.
func (c NetConf) nothingToSet(ifName string) error {
	field := c.firstSetting()
	id, _ := c.deviceID()
	switch {
	case field == "" || field == "ipam" && id == "":
		return nil
	case id == "":
		return confError(field, "is about a device, and the network has no deviceID: add one, or remove this field")
	}
	return confError(field, "is about an interface that this plugin makes, but the plugin before made %s: remove this field here, and set it for that plugin", ifName)
}

// uses tells whether the network uses a device.
func (c NetConf) uses(d vf.Device) bool {
	return len(c.PFNames) == 0 || slices.Contains(c.PFNames, d.PF) || slices.Contains(c.PFNames, d.PFPCI)
}
