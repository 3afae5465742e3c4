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
	"slices"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// Versions are the versions of CNI that the plugin speaks.
func Versions() version.PluginInfo { return version.PluginSupports("0.4.0", "1.0.0", "1.1.0") }

// Plugin is the CNI plugin. One value serves one execution.
type Plugin struct {
	Stdout io.Writer        // the result
	Stderr io.Writer        // what the operator may want to know
	Now    func() time.Time // for the record
}

// Funcs are the plugin's verbs for skel.
func (p Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{Add: p.add, Del: p.del, Check: p.check, GC: p.gc, Status: p.status}
}

// add leaves a record, wakes the agent, and prints the previous result.
func (p Plugin) add(args *skel.CmdArgs) error {
	c, a, err := p.attachment(args)
	if err != nil {
		return err
	}
	a.Created = p.Now().UTC()
	store := c.store()
	if err := store.Write(a); err != nil {
		return storeError(err)
	}
	event := Event{Verb: "ADD", ContainerID: a.ContainerID, IfName: a.IfName}
	if err := p.nudge(c, event); err != nil && c.Required {
		// The runtime will not call DEL for an ADD that it takes as not done.
		err = errors.Join(err, store.Delete(a.ContainerID, a.IfName))
		return types.NewError(types.ErrTryAgainLater, `the agent did not take the pod, and the network says "required"`, err.Error())
	}
	return p.print(c.prevResult)
}

// attachment makes the record of what the runtime says.
func (p Plugin) attachment(args *skel.CmdArgs) (NetConf, Attachment, error) {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return NetConf{}, Attachment{}, err
	}
	if err := checkKey(args.ContainerID, args.IfName); err != nil {
		return NetConf{}, Attachment{}, envError("CNI_CONTAINERID", "%v", err)
	}
	ips, err := c.addresses(args.IfName)
	if err != nil {
		return NetConf{}, Attachment{}, err
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
		NetNS: args.Netns, NetNSID: id, Network: c.Name, Pod: pod, IPs: ips,
	}, nil
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
		_, _ = fmt.Fprintf(p.Stderr, "smcr-cni: %s goes on without the agent, which will read the record later: %v\n", event.Verb, err)
	}
	return err
}

// print writes the previous result as it came.
func (p Plugin) print(result json.RawMessage) error {
	if _, err := p.Stdout.Write(append(bytes.TrimSpace(result), '\n')); err != nil {
		return types.NewError(types.ErrIOFailure, "print result", err.Error())
	}
	return nil
}

// del removes the record. It needs neither the agent nor the namespace, and
// what is not there is removed already.
func (p Plugin) del(args *skel.CmdArgs) error {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if err := c.store().Delete(args.ContainerID, args.IfName); err != nil {
		return storeError(err)
	}
	_ = p.nudge(c, Event{Verb: "DEL", ContainerID: args.ContainerID, IfName: args.IfName}) // it said so on stderr
	return nil
}

// check compares the record with what the runtime says.
func (p Plugin) check(args *skel.CmdArgs) error {
	c, want, err := p.attachment(args)
	if err != nil {
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
	return nil
}

// gc removes the records of this network that the runtime does not know.
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
	if err := c.store().CollectGarbage(c.Name, valid, p.Now()); err != nil {
		return storeError(err)
	}
	_ = p.nudge(c, Event{Verb: "GC"}) // it said so on stderr
	return nil
}

// status tells whether ADD would work.
func (p Plugin) status(args *skel.CmdArgs) error {
	c, err := ParseNetConf(args.StdinData)
	if err != nil {
		return err
	}
	if err := c.store().CheckWritable(); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, "ADD cannot write its record", err.Error())
	}
	if !c.Required {
		return nil
	}
	if err := p.nudge(c, Event{Verb: "STATUS"}); err != nil {
		return types.NewError(types.ErrPluginNotAvailable, `the agent does not answer, and the network says "required"`, err.Error())
	}
	return nil
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
