// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// checkWired compares the devices of an attachment, their interfaces, addresses
// and routes with what ADD left.
func (p Plugin) checkWired(c NetConf, a Attachment, args *skel.CmdArgs) error {
	devices := a.wired()
	if len(devices) == 0 {
		return nil
	}
	ns, err := openPod(args.Netns)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }() // closes descriptors
	res, err := c.previous()
	if err != nil {
		return err
	}
	if len(a.IPAM) > 0 {
		if c, err = c.withIPAM(a); err != nil {
			return types.NewError(CodeRecord, "attachment record", err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), wireTimeout)
	defer cancel()
	for _, d := range devices {
		if a.hasAddresses(d) {
			if err := (ipam{conf: c, args: args, ifName: d.IfName}).check(ctx); err != nil {
				return err
			}
		}
		wiring, err := p.host(c).Wiring(args.ContainerID, args.IfName, d.ID)
		if err == nil {
			err = p.host(c).Check(ctx, behindUs(wiring, res))
		}
		if err != nil {
			return types.NewError(CodeWiring, "device "+d.ID+" is not as ADD left it", err.Error())
		}
		if err := linux.CheckInterfaceIPs(ns, d.IfName, d.ipsIn(res)); err != nil {
			return types.NewError(CodeWiring, "interface "+d.IfName+" is not as ADD left it", err.Error())
		}
	}
	return nil
}

// behindUs is a wiring as a plugin behind this one in the chain may have changed it. The result has a
// new MAC address. It may lack a new MTU, as the plugin tuning does not put it there: so the MTU
// is checked only if the network asked this plugin for one.
func behindUs(w vf.Wiring, r *types100.Result) vf.Wiring {
	if w.Settings.MTU == nil {
		w.MTU = 0
	}
	i := slices.IndexFunc(r.Interfaces, func(it *types100.Interface) bool { return it.Name == w.IfName && it.Sandbox != "" })
	if i < 0 {
		return w
	}
	if mac, err := net.ParseMAC(r.Interfaces[i].Mac); err == nil && mac.String() != w.MAC {
		w.MAC, w.Settings.MAC = mac.String(), nil // the PF may say either
	}
	return w
}

// ipsIn are the addresses that a result gives to the device's interface, and the routes that ADD made
// through it. The other routes of the result are other plugins'.
func (d AttachedDevice) ipsIn(r *types100.Result) (ips linux.InterfaceIPs) {
	for _, ip := range r.IPs {
		p, ok := prefixOf(ip.Address)
		if i := ip.Interface; ok && i != nil && *i >= 0 && *i < len(r.Interfaces) && r.Interfaces[*i].Name == d.IfName {
			ips.Addresses = append(ips.Addresses, p)
		}
	}
	for _, r := range d.Routes {
		ips.Routes = append(ips.Routes, linux.InterfaceRoute{Dst: r.Dst, Gateway: r.Gateway, Priority: r.Priority, Table: r.Table})
	}
	return ips
}

// gcWired takes back the devices of this network whose attachment is not valid,
// and lets the IPAM plugin do the same.
func (p Plugin) gcWired(c NetConf, args *skel.CmdArgs, valid func(containerID, ifName string) bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), wireTimeout)
	defer cancel()
	err := p.host(c).Collect(ctx, func(o vf.Owner) bool { return o.Network != c.Name || valid(o.ContainerID, o.IfName) })
	if err != nil {
		err = types.NewError(CodeDevice, "take devices back", err.Error())
	}
	// Devices that take long to come back leave the IPAM plugin its time.
	ctx, cancel = context.WithTimeout(context.Background(), wireTimeout)
	defer cancel()
	return firstError([]error{err, p.gcIPAM(ctx, c, args)})
}

// gcIPAM lets the IPAM plugin give back the addresses of attachments that are not valid. The
// runtime does not know of the interfaces that this plugin made of claimed devices, but
// their addresses are in use, too.
func (p Plugin) gcIPAM(ctx context.Context, c NetConf, args *skel.CmdArgs) error {
	if c.IPAM.Type == "" {
		return nil
	}
	all, junk, err := c.store().List()
	if err != nil {
		return storeError(err)
	}
	if len(junk) > 0 { // one may be the record of an attachment that is valid
		p.tell("GC: the IPAM plugin is not asked to give addresses back while a record cannot be read: %v", junk[0])
		return nil
	}
	valid := slices.Clone(c.valid)
	for _, a := range all { // those that are not valid were removed before
		for _, d := range a.wired() {
			one := types.GCAttachment{ContainerID: a.ContainerID, IfName: d.IfName}
			if a.Network == c.Name && !slices.Contains(valid, one) {
				valid = append(valid, one)
			}
		}
	}
	if c.raw, err = replaceKey(c.raw, "cni.dev/valid-attachments", valid); err != nil {
		return types.NewError(types.ErrInternal, "valid attachments", err.Error())
	}
	return ipam{conf: c, args: args}.gc(ctx)
}

// statusWired fails if all VFs of the network are in pods, so that no further pod can
// have one, or if the IPAM plugin says that it can give no address.
func (p Plugin) statusWired(c NetConf, args *skel.CmdArgs) error {
	if len(c.PFNames) > 0 {
		all, err := p.host(c).Devices()
		if err != nil {
			return types.NewError(types.ErrPluginNotAvailable, "the node's devices cannot be listed", err.Error())
		}
		all = slices.DeleteFunc(all, func(d vf.Device) bool { return !c.uses(d) })
		if !slices.ContainsFunc(all, func(d vf.Device) bool { return d.Usable() == nil }) {
			return types.NewError(types.ErrPluginNotAvailable, "no VF is free",
				fmt.Sprintf("%s: %d VFs, all in pods or without their driver", strings.Join(c.PFNames, ", "), len(all)))
		}
	}
	return ipam{conf: c, args: args}.status(context.Background())
}

// printResult prints a result in the version of the configuration.
func (p Plugin) printResult(c NetConf, r *types100.Result) error {
	if before11(c.CNIVersion) {
		for _, it := range r.Interfaces {
			it.Mtu, it.PciID = 0, "" // fields of CNI 1.1
		}
	}
	r.CNIVersion = types100.ImplementedSpecVersion
	out, err := r.GetAsVersion(c.CNIVersion)
	if err == nil {
		err = out.PrintTo(p.Stdout)
	}
	if err != nil {
		return types.NewError(types.ErrIOFailure, "print result", err.Error())
	}
	return nil
}

func before11(v string) bool { return v == "1.0.0" || strings.HasPrefix(v, "0.") }
