// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// Versions are the versions of CNI that the plugin supports: all that have chains of
// plugins. Most networks of Kubernetes still write 0.3.1 into their configuration.
func Versions() version.PluginInfo {
	return version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// Plugin is the CNI plugin. One value serves one execution.
type Plugin struct {
	Stdout io.Writer        // the result
	Stderr io.Writer        // messages for the operator
	Now    func() time.Time // the time that a record gets
	// Host gives access to the machine's devices, with the journals in dataDir; nil is
	// the machine that the plugin runs on.
	Host func(dataDir string) Host
	// DevInfoDir is where device plugins put their device-info files; "" is the
	// usual place.
	DevInfoDir string
}

// Host is a machine with devices for pods, as [vf.Host].
type Host interface {
	Device(id string) (vf.Device, error)
	Devices() ([]vf.Device, error)
	Attach(ctx context.Context, r vf.Request) (vf.Wiring, error)
	Wiring(containerID, ifName, device string) (vf.Wiring, error)
	Check(ctx context.Context, w vf.Wiring) error
	Detach(ctx context.Context, d vf.Detachment) error
	Collect(ctx context.Context, valid func(vf.Owner) bool) error
}

// Funcs are the plugin's verbs for skel.
func (p Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{Add: p.add, Del: p.del, Check: p.check, GC: p.gc, Status: p.status}
}

// add makes the pod's interface if the network names a device and no plugin before made
// the interface, and further interfaces if the pod claimed devices. Otherwise add writes
// a record, tells the agent, and prints the previous result. If the record or the agent
// fails then, the pod starts all the same and stays on plain TCP, unless the network says
// "required".
func (p Plugin) add(args *skel.CmdArgs) error {
	c, a, err := p.attachment(args)
	if err != nil {
		return err
	}
	if c.wires(args.IfName) {
		return p.addWired(c, a, args)
	}
	if c.isMade(a) {
		return p.passOn(c, a)
	}
	if err := c.nothingToSet(args.IfName); err != nil {
		return err
	}
	if a.IPs, err = c.addresses(args.IfName); err != nil {
		return err
	}
	if a.Devices, err = p.chainedDevice(c); err != nil {
		return err
	}
	requests, err := p.claimed(c, a)
	if err != nil {
		return err
	}
	if len(requests) > 0 {
		return p.wire(c, a, args, requests...)
	}
	if err := c.isNew(args); err != nil {
		return err
	}
	a.Created = p.Now().UTC()
	store := c.store()
	if err := store.Write(a); err != nil {
		e := storeError(err)
		if c.Required {
			return e
		}
		p.tell("ADD goes on without a record, and this pod stays on plain TCP: %s: %s", e.Msg, e.Details)
		return p.printPrevious(c)
	}
	event := Event{Verb: "ADD", ContainerID: a.ContainerID, IfName: a.IfName}
	if err := p.notifyAgent(c, event); err != nil && c.Required {
		// The runtime may not call DEL after an ADD that failed.
		return notTaken(errors.Join(err, store.Delete(a.ContainerID, a.IfName)))
	}
	return p.printPrevious(c)
}

// notTaken is the CNI error for an agent that does not answer.
func notTaken(err error) error {
	return types.NewError(types.ErrTryAgainLater, `the agent did not take the pod, and the network says "required": start the node agent`, err.Error())
}

// attachment makes the record from what the runtime says, without the addresses.
func (p Plugin) attachment(args *skel.CmdArgs) (NetConf, Attachment, error) {
	c, err := trustedConf(args.StdinData)
	if err != nil {
		return NetConf{}, Attachment{}, err
	}
	if f := c.RuntimeConfig.CNIDeviceInfoFile; f != "" && !deviceinfo.IsOfCNI(f) {
		return NetConf{}, Attachment{}, confError("runtimeConfig.CNIDeviceInfoFile", "%q is not a file in %s", f, deviceinfo.CNIDir)
	}
	if err := checkKey(args.ContainerID, args.IfName); err != nil {
		return NetConf{}, Attachment{}, envError("CNI_CONTAINERID", "%v", err)
	}
	pod, err := parsePod(args.Args)
	if err != nil {
		return NetConf{}, Attachment{}, err
	}
	id, err := netnsID(args)
	if err != nil {
		return NetConf{}, Attachment{}, err
	}
	return c, Attachment{
		SchemaVersion: SchemaVersion,
		ContainerID:   args.ContainerID, IfName: args.IfName,
		NetNS: realPath(args.Netns), NetNSID: id, Network: c.Name, Pod: pod,
	}, nil
}

// realPath is name without symbolic links in its directory. For example, a runtime says
// /var/run/netns/a, where /var/run is a link to /run on the node; the agent's container
// has only /run/netns. A last element that is a link stays. So does a name in /proc,
// where links lead elsewhere for each process.
func realPath(name string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(name))
	if err != nil || strings.HasPrefix(name, "/proc/") {
		return name
	}
	return filepath.Join(dir, filepath.Base(name))
}

// netnsID is the inode of the pod's namespace. It refuses the plugin's own namespace, as
// skel does too, but only after the plugin has written something.
func netnsID(args *skel.CmdArgs) (uint64, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(args.Netns, &st); err != nil {
		code := types.ErrInvalidNetNS
		if errors.Is(err, fs.ErrNotExist) {
			code = types.ErrUnknownContainer
		}
		return 0, types.NewError(code, "CNI_NETNS", fmt.Sprintf("open %s: %v", args.Netns, err))
	}
	own, cerr := ns.CheckNetNS(args.Netns)
	if cerr != nil {
		return 0, cerr
	}
	if override := args.NetnsOverride; own && override != "1" && override != "true" && override != "TRUE" {
		return 0, types.NewError(types.ErrInvalidNetNS, "CNI_NETNS", args.Netns+" is the namespace of the plugin itself")
	}
	return st.Ino, nil
}

// notifyAgent tells the agent about event, and tells the operator if that failed.
func (p Plugin) notifyAgent(c NetConf, event Event) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.agentTimeout())
	defer cancel()
	err := Notify(ctx, c.AgentSocket, event)
	if err != nil {
		p.tell("%s goes on without the agent, which will read the record later: %v", event.Verb, err)
	}
	return err
}

// tell prints a line for the operator: runtimes log what a plugin prints on stderr.
func (p Plugin) tell(format string, args ...any) {
	_, _ = fmt.Fprintf(p.Stderr, "smcr-cni: "+format+"\n", args...)
}

// printPrevious prints the previous result unchanged.
func (p Plugin) printPrevious(c NetConf) error {
	if _, err := p.Stdout.Write(append(bytes.TrimSpace(c.prevResult), '\n')); err != nil {
		return types.NewError(types.ErrIOFailure, "print result", err.Error())
	}
	return nil
}

// del takes back what ADD made: the addresses, the record, and the devices. It needs
// neither the agent nor the pod's namespace. What is missing counts as taken back, and
// after a failure del goes on with the rest; but devices stay while it is not known what addresses
// the pod had, of which they tell. The record goes first, then the agent is
// told, so that the agent has closed the device before the device leaves the pod.
func (p Plugin) del(args *skel.CmdArgs) error {
	c, err := p.formerConf(args.StdinData)
	if err != nil {
		return err
	}
	if !validKey(args.ContainerID, args.IfName) {
		return nil // ADD refuses this key: there is no such attachment
	}
	if err := c.checkDataDir(); err != nil { // which ADD refuses as well
		p.tell("DEL leaves the data directory alone: %v", err)
		return nil
	}
	unlock, err := p.lock(context.Background(), c, args)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EROFS):
		// Without a file for the lock no other call has it.
	case err != nil:
		return lockError(err)
	default:
		defer unlock()
	}
	unknown, err := p.endRecord(c, args)
	if unknown {
		return err
	}
	errs := []error{err, p.delDevices(c, args)}
	if f := c.RuntimeConfig.CNIDeviceInfoFile; f != "" && !deviceinfo.IsOfCNI(f) {
		p.tell("DEL leaves the device-info file %s alone, which is not in %s", f, deviceinfo.CNIDir)
	} else if err := deviceinfo.Remove(f); err != nil {
		p.tell("DEL: %v", err)
	}
	return firstError(errs)
}

// formerConf reads the configuration of attachments that end. It accepts a field that the plugin does
// not know: a later version of the plugin may have made the attachment. It also accepts a value that
// ADD refuses: otherwise whoever writes a pod or a network could keep the runtime from ever ending
// the pod.
func (p Plugin) formerConf(b []byte) (NetConf, error) {
	c, unknown, err := parseAnyNetConf(b)
	if len(unknown) > 0 {
		p.tell("the network configuration has %s, which this version does not know and leaves alone", strings.Join(unknown, ", "))
	}
	if err == nil || c.raw == nil {
		return c, err
	}
	f, ferr := c.former()
	if ferr == nil {
		p.tell("the network configuration is read without what only ADD goes by, which ADD refuses: %v", err)
	}
	return f, ferr
}

// endRecord gives the addresses of an attachment back, removes its record, and tells the agent. unknown is that of delIPAM.
func (p Plugin) endRecord(c NetConf, args *skel.CmdArgs) (unknown bool, err error) {
	store := c.store()
	mustStay, unknown, err := p.delIPAM(c, args)
	errs := []error{err}
	if !mustStay {
		if err := store.Delete(args.ContainerID, args.IfName); err != nil {
			errs = append(errs, storeError(err))
		}
	}
	vf.Step("record removed")
	if err := store.dir.RemoveStale(); err != nil {
		p.tell("DEL: %v", err)
	}
	_ = p.notifyAgent(c, Event{Verb: "DEL", ContainerID: args.ContainerID, IfName: args.IfName}) // the error is on stderr
	return unknown, firstError(errs)
}

// firstError is the first of several errors, with the texts of all in its details: a CNI
// error has one code.
func firstError(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(errs) == 0 {
		return nil
	}
	var ce *types.Error
	if len(errs) == 1 || !errors.As(errs[0], &ce) {
		return errs[0]
	}
	return types.NewError(ce.Code, ce.Msg, joined(ce.Details, errors.Join(errs[1:]...)))
}

// delIPAM gives back the addresses of an attachment to the IPAM plugin that gave them: those of all
// interfaces that its record names or, without a record, those that it may have, see unrecorded.
//
// If that fails, the next DEL needs the record, so delIPAM moves it to the store owing. If it cannot,
// mustStay tells the caller not to delete the record. unknown says that for want of descriptors or memory it is not known which
// addresses those are.
func (p Plugin) delIPAM(c NetConf, args *skel.CmdArgs) (mustStay, unknown bool, err error) {
	a, rerr := c.store().Get(args.ContainerID, args.IfName)
	if records.IsShortage(rerr) {
		return true, true, unknownAddresses(rerr)
	}
	owed, recorded := owing(c.DataDir), rerr == nil
	if !recorded {
		switch was, err := owed.Get(args.ContainerID, args.IfName); {
		case records.IsShortage(err):
			return false, true, unknownAddresses(err)
		case err == nil:
			a, rerr = was, nil
		}
	}
	unknown, err = p.giveBack(context.Background(), c, args, a, rerr)
	var kerr error
	switch {
	case err == nil:
		kerr = owed.Delete(args.ContainerID, args.IfName)
	case recorded:
		kerr = c.store().dir.MoveTo(owed.dir, a.FileName())
		mustStay = kerr != nil
	}
	if kerr != nil {
		p.tell("DEL: what addresses the pod had: %v", kerr)
	}
	return mustStay, unknown, err
}

// unknownAddresses is the CNI error if records of addresses cannot be read just now.
func unknownAddresses(err error) error {
	return types.NewError(types.ErrTryAgainLater, "it is not known what addresses the pod had", err.Error())
}

// gcOwing gives back the addresses of attachments that are not valid, and whose DEL could not give
// them back.
func (p Plugin) gcOwing(c NetConf, args *skel.CmdArgs, valid func(containerID, ifName string) bool) error {
	owed := owing(c.DataDir)
	all, _, err := owed.List()
	errs := []error{err, owed.dir.RemoveStale()}
	ctx, cancel := context.WithTimeout(context.Background(), ipamTimeout)
	defer cancel()
	for _, a := range all {
		if a.Network != c.Name || valid(a.ContainerID, a.IfName) {
			continue
		}
		if ctx.Err() != nil {
			p.tell("GC: there was no time to give the addresses of container %s back, which is tried again", a.ContainerID)
			break
		}
		one := *args
		one.ContainerID, one.IfName, one.Netns, one.Args = a.ContainerID, a.IfName, "", podArgs(a.ContainerID, a.Pod)
		if _, err := p.giveBack(ctx, c, &one, a, nil); err != nil { // the plugin may be gone for good
			p.tell("GC: addresses of container %s are not given back, and are tried again: %v", a.ContainerID, err)
			continue
		}
		errs = append(errs, owed.Delete(a.ContainerID, a.IfName))
	}
	return firstError(errs)
}

// giveBack gives the addresses of an attachment back. a is its record; if there is none, rerr says
// why. unknown says that there may be further addresses, which cannot be known just now.
func (p Plugin) giveBack(ctx context.Context, c NetConf, args *skel.CmdArgs, a Attachment, rerr error) (unknown bool, err error) {
	var names []string
	for _, d := range a.wired() {
		if a.hasAddresses(d) {
			names = append(names, d.IfName)
		}
	}
	var errs []error
	if rerr != nil {
		var err error
		names, err = p.unrecorded(c, args)
		unknown = err != nil
		errs = append(errs, err)
	}
	if len(a.IPAM) > 0 {
		was, err := c.withIPAM(a)
		if err != nil {
			p.tell("DEL: %v", err)
		}
		c = was
	}
	for _, name := range names {
		errs = append(errs, ipam{conf: c, args: args, ifName: name}.del(ctx))
	}
	return unknown, firstError(errs)
}

// unrecorded are the names of the interfaces that an attachment without a record may have addresses
// for, from all that may still tell of them:
//
//	a reboot                   no record, journal or claim is left, but the addresses are taken:
//	                           the runtime has the result of the ADD or, before CNI 0.4.0, the
//	                           IPAM plugin has what it keeps
//	an ADD that was killed     the journals of devices or, before there was one, the pod's claims
//
// The error unknown says that there may be further interfaces, which cannot be known just now.
func (p Plugin) unrecorded(c NetConf, args *skel.CmdArgs) (names []string, unknown error) {
	if c.IPAM.Type == "" {
		return nil, nil
	}
	if id, _ := c.deviceID(); id != "" || c.prevResult == nil {
		names = []string{args.IfName}
	}
	all, err := p.host(c).Devices()
	switch {
	case records.IsShortage(err):
		unknown = deviceError("", err)
	case err != nil:
		p.tell("DEL goes on without the list of devices: %v", err)
	}
	for _, d := range all {
		if d.Owner != nil && d.Owner.Is(args.ContainerID, args.IfName) {
			names = appendNew(names, d.PodIfName)
		}
	}
	pod, _ := parsePod(args.Args) // ADD has refused such arguments
	requests, err := p.claimed(c, Attachment{ContainerID: args.ContainerID, IfName: args.IfName, Pod: pod})
	if err != nil {
		unknown = err
	}
	for _, r := range requests {
		names = appendNew(names, r.ifName)
	}
	var r result
	if c.prevResult == nil {
		kept, err := p.keptNames(c, args)
		return appendNew(names, kept...), firstError([]error{unknown, err})
	}
	if json.Unmarshal(c.prevResult, &r) != nil {
		return names, unknown
	}
	for _, it := range r.Interfaces {
		if it.Sandbox != "" && it.Name != args.IfName {
			names = appendNew(names, it.Name)
		}
	}
	return names, unknown
}

// appendNew appends those of more that names does not have yet.
func appendNew(names []string, more ...string) []string {
	for _, name := range more {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// delDevices takes back all devices of the attachment, and the device that the runtime
// names: the attachment may have that one without a journal that says so.
func (p Plugin) delDevices(c NetConf, args *skel.CmdArgs) error {
	ids := []string{""}
	if id, shared := c.deviceID(); id != "" && !shared {
		ids = append(ids, id)
	}
	for _, id := range ids {
		if err := p.detach(c, args, id); err != nil {
			return deviceError(id, err)
		}
	}
	return nil
}

// hasDevices reports whether devices of the host belong to the attachment. If so, ADD has written a
// record.
func (p Plugin) hasDevices(c NetConf, args *skel.CmdArgs) (bool, error) {
	all, err := p.host(c).Devices()
	return slices.ContainsFunc(all, func(d vf.Device) bool {
		return d.Owner != nil && d.Owner.Is(args.ContainerID, args.IfName)
	}), err
}

// check compares the record with what the runtime says, and the device, its interface and addresses
// with what ADD left. Without a record it succeeds if ADD may have started the pod without one.
func (p Plugin) check(args *skel.CmdArgs) error {
	c, want, err := p.attachment(args)
	if err != nil {
		return err
	}
	if want.IPs, err = c.addresses(args.IfName); err != nil {
		return err
	}
	got, err := c.store().Get(args.ContainerID, args.IfName)
	if errors.Is(err, ErrNoAttachment) && !c.Required {
		if has, herr := p.hasDevices(c, args); !has && herr == nil {
			p.tell("CHECK: no record, so this pod stays on plain TCP: ADD went on without it, or it was removed")
			return nil
		}
	}
	if err != nil {
		return types.NewError(CodeRecord, "attachment record", err.Error())
	}
	for _, f := range []struct {
		field     string
		same      bool
		got, want any
	}{
		{"network", got.Network == want.Network || c.isMade(want), got.Network, want.Network}, // a delegate's list may have made it
		{"netns", got.NetNS == want.NetNS, got.NetNS, want.NetNS},
		{"netnsID", got.NetNSID == want.NetNSID, got.NetNSID, want.NetNSID},
		{"pod", want.Pod == records.Pod{} || got.Pod == want.Pod, got.Pod, want.Pod},
		{"ips", slices.Equal(got.IPs, want.IPs), got.IPs, want.IPs},
	} {
		if !f.same {
			return types.NewError(CodeRecord, "attachment record: "+f.field, fmt.Sprintf("is %v, the runtime says %v", f.got, f.want))
		}
	}
	return p.checkWired(c, got, args)
}

// gc removes the records of this network that the runtime does not know, and
// takes their devices and addresses back.
func (p Plugin) gc(args *skel.CmdArgs) error {
	c, err := p.formerConf(args.StdinData)
	if err == nil {
		err = c.checkDataDir()
	}
	if err != nil {
		return err
	}
	// A missing list must not be taken for an empty one, with which all records are removed. Nor may
	// null: CRI-O passes null for each network that it put no pod into itself, and Multus may have
	// put pods into that network.
	if !c.hasValid {
		return confError("cni.dev/valid-attachments", "is missing")
	}
	valid := func(containerID, ifName string) bool {
		return slices.Contains(c.valid, types.GCAttachment{ContainerID: containerID, IfName: ifName})
	}
	var errs []error
	if err := c.store().CollectGarbage(c.Name, owing(c.DataDir), valid); err != nil {
		errs = append(errs, storeError(err))
	}
	_ = p.notifyAgent(c, Event{Verb: "GC"}) // the error is on stderr
	return firstError(append(errs, p.gcWired(c, args, valid), p.gcOwing(c, args, valid)))
}

// status fails if new pods would not be attached, but only where the network says
// "reportStatus". To a runtime an error means that the network cannot make pods: the
// node becomes NotReady, and its pods lose their traffic, while all that is missing is
// the acceleration of new pods. Without "reportStatus" status checks nothing: runtimes
// call it every few seconds.
func (p Plugin) status(args *skel.CmdArgs) error {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if !c.ReportStatus {
		return nil
	}
	if err := c.checkDataDir(); err != nil {
		return err
	}
	if err := c.store().CheckWritable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "ADD cannot write its record", err.Error())
	}
	if err := p.notifyAgent(c, Event{Verb: "STATUS"}); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "the agent does not answer", err.Error())
	}
	return p.statusWired(c, args)
}

// Main runs the plugin with the environment and the standard streams of the
// process, and returns its exit code.
func Main(about string) int {
	p := Plugin{Stdout: os.Stdout, Stderr: os.Stderr, Now: time.Now}
	e := skel.PluginMainFuncsWithError(p.Funcs(), Versions(), about)
	if e == nil {
		return 0
	}
	if err := e.Print(); err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "smcr-cni: print error: %v: %v\n", err, e)
	}
	return 1
}
