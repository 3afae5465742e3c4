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

	"github.com/smcr-io/kube-smcr/internal/vf"
)

// Versions are the versions of CNI that the plugin speaks: all that have chains.
// Most networks of Kubernetes still write 0.3.1 into their configuration.
func Versions() version.PluginInfo {
	return version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
}

// Plugin is the CNI plugin. One value serves one execution.
type Plugin struct {
	Stdout io.Writer        // the result
	Stderr io.Writer        // what the operator may want to know
	Now    func() time.Time // for the record
	// Host gives the machine's devices, whose journals are in dataDir; nil is
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

// add gives the pod its interface if the network names a device and nobody made
// the interface before, and further ones if the pod claimed devices. Otherwise
// it leaves a record, wakes the agent, and prints the previous result: a pod
// without a record is a pod on plain TCP, so that it must not keep the pod from
// starting unless the network says "required".
func (p Plugin) add(args *skel.CmdArgs) error {
	c, a, err := p.attachment(args)
	if err != nil {
		return err
	}
	if c.wires(args.IfName) {
		return p.addWired(c, a, args)
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
	if wishes := p.claimed(c, a); len(wishes) > 0 {
		return p.wire(c, a, args, wishes...)
	}
	a.Created = p.Now().UTC()
	store := c.store()
	if err := store.Write(a); err != nil {
		e := storeError(err)
		if c.Required {
			return e
		}
		p.tell("ADD goes on without a record, and this pod stays on plain TCP: %s: %s", e.Msg, e.Details)
		return p.print(c.prevResult)
	}
	event := Event{Verb: "ADD", ContainerID: a.ContainerID, IfName: a.IfName}
	if err := p.nudge(c, event); err != nil && c.Required {
		// The runtime will not call DEL for an ADD that it takes as not done.
		return notTaken(errors.Join(err, store.Delete(a.ContainerID, a.IfName)))
	}
	return p.print(c.prevResult)
}

// notTaken is the CNI error for an agent that does not answer.
func notTaken(err error) error {
	return types.NewError(types.ErrTryAgainLater, `the agent did not take the pod, and the network says "required"`, err.Error())
}

// attachment makes the record of what the runtime says, but for the addresses.
func (p Plugin) attachment(args *skel.CmdArgs) (NetConf, Attachment, error) {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return NetConf{}, Attachment{}, err
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

// realPath is name without symbolic links in its directory. Runtimes say
// /var/run/netns, which is a link on the node and is not there in the agent's
// container; it has /run/netns. The name itself stays, and names in /proc: they
// are links that lead elsewhere for everybody, or nowhere.
func realPath(name string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(name))
	if err != nil || strings.HasPrefix(name, "/proc/") {
		return name
	}
	return filepath.Join(dir, filepath.Base(name))
}

// netnsID is the inode of the pod's namespace. It refuses the namespace of the
// plugin itself, as skel does, but before anything is written.
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

// nudge tells the agent, and tells the operator if that did not work.
func (p Plugin) nudge(c NetConf, event Event) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.agentTimeout())
	defer cancel()
	err := Notify(ctx, c.AgentSocket, event)
	if err != nil {
		p.tell("%s goes on without the agent, which will read the record later: %v", event.Verb, err)
	}
	return err
}

// tell says a line to the operator: runtimes keep what a plugin says on stderr.
func (p Plugin) tell(format string, args ...any) {
	_, _ = fmt.Fprintf(p.Stderr, "smcr-cni: "+format+"\n", args...)
}

// print writes the previous result as it came.
func (p Plugin) print(result json.RawMessage) error {
	if _, err := p.Stdout.Write(append(bytes.TrimSpace(result), '\n')); err != nil {
		return types.NewError(types.ErrIOFailure, "print result", err.Error())
	}
	return nil
}

// del takes back what ADD made: addresses, the record, and the device. It needs
// neither the agent nor the namespace, what is not there is back already, and a
// failure does not keep it from the rest. The agent lets go of the device before
// it leaves the pod.
func (p Plugin) del(args *skel.CmdArgs) error {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if !validKey(args.ContainerID, args.IfName) {
		return nil // such an attachment cannot exist
	}
	unlock, err := p.lock(context.Background(), c, args)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EROFS):
	case err != nil:
		return err
	default:
		defer unlock()
	}
	store := c.store()
	a, rerr := store.Get(args.ContainerID, args.IfName)
	errs := []error{p.delIPAM(c, args, a, rerr)}
	if err := store.Delete(args.ContainerID, args.IfName); err != nil {
		errs = append(errs, storeError(err))
	}
	vf.Step("record removed")
	if err := store.dir.RemoveStale(p.Now()); err != nil {
		p.tell("DEL: %v", err)
	}
	_ = p.nudge(c, Event{Verb: "DEL", ContainerID: args.ContainerID, IfName: args.IfName}) // it said so on stderr
	errs = append(errs, p.delDevices(c, args))
	if err := removeDeviceInfo(c.RuntimeConfig.CNIDeviceInfoFile); err != nil {
		p.tell("DEL: %v", err)
	}
	return firstError(errs)
}

// firstError is the first of several errors, with the texts of all: CNI has room
// for one code.
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

// delIPAM gives addresses back: of all interfaces that the record names, or, if
// there is none, of the one that ADD was about. rerr is why there is no record.
func (p Plugin) delIPAM(c NetConf, args *skel.CmdArgs, a Attachment, rerr error) error {
	var names []string
	for _, d := range a.wired() {
		names = append(names, d.IfName)
	}
	if id, _ := c.deviceID(); rerr != nil && (id != "" || c.prevResult == nil) {
		names = []string{args.IfName}
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, ipam{conf: c, args: args, ifName: name}.del(context.Background()))
	}
	return firstError(errs)
}

// delDevices takes back what the attachment has. The device that the runtime
// names may be the attachment's without a journal that says so.
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

// check compares the record with what the runtime says, and the device, its
// interface and addresses with what ADD left.
func (p Plugin) check(args *skel.CmdArgs) error {
	c, want, err := p.attachment(args)
	if err != nil {
		return err
	}
	if want.IPs, err = c.addresses(args.IfName); err != nil {
		return err
	}
	got, err := c.store().Get(args.ContainerID, args.IfName)
	if err != nil {
		return types.NewError(CodeRecord, "attachment record", err.Error())
	}
	for _, f := range []struct {
		field     string
		same      bool
		got, want any
	}{
		{"network", got.Network == want.Network, got.Network, want.Network},
		{"netns", got.NetNS == want.NetNS, got.NetNS, want.NetNS},
		{"netnsID", got.NetNSID == want.NetNSID, got.NetNSID, want.NetNSID},
		{"pod", want.Pod == Pod{} || got.Pod == want.Pod, got.Pod, want.Pod},
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
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if !c.hasValid { // an empty list would mean: remove all
		return confError("cni.dev/valid-attachments", "is missing")
	}
	valid := func(containerID, ifName string) bool {
		return slices.Contains(c.valid, types.GCAttachment{ContainerID: containerID, IfName: ifName})
	}
	var errs []error
	if err := c.store().CollectGarbage(c.Name, valid, p.Now()); err != nil {
		errs = append(errs, storeError(err))
	}
	_ = p.nudge(c, Event{Verb: "GC"}) // it said so on stderr
	return firstError(append(errs, p.gcWired(c, args, valid)))
}

// status tells whether new pods would be attached, but only where the network
// says "reportStatus": a runtime takes an error for a network that cannot make
// pods, the node becomes NotReady, and its pods lose their traffic, while all
// that is missing is the acceleration of new ones. Nor does it look, or say
// anything: runtimes ask every few seconds.
func (p Plugin) status(args *skel.CmdArgs) error {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if !c.ReportStatus {
		return nil
	}
	if err := c.store().CheckWritable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "ADD cannot write its record", err.Error())
	}
	if err := p.nudge(c, Event{Verb: "STATUS"}); err != nil {
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
