// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// dhcp is the IPAM plugin that asks a server in the network for addresses, and so needs
// the interface first. Other IPAM plugins need no interface.
const dhcp = "dhcp"

// ipam calls the IPAM plugin of the configuration for one interface. If the
// configuration names none, each call succeeds, and there are no addresses.
type ipam struct {
	conf   NetConf
	args   *skel.CmdArgs
	ifName string
}

// rawIPAM is the configuration of the IPAM plugin as the network has it, for a record; nil
// if there is none, or one that is too long for a record.
func (c NetConf) rawIPAM() json.RawMessage {
	var f struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	if c.IPAM.Type == "" || json.Unmarshal(c.raw, &f) != nil || len(f.IPAM) > maxIPAMBytes {
		return nil
	}
	return f.IPAM
}

// withIPAM is the configuration with the IPAM plugin's configuration and the network's name from a
// record. IPAM plugins go by the name, and the call may be for another network, which has the
// record's as a delegate.
func (c NetConf) withIPAM(a Attachment) (NetConf, error) {
	var conf IPAMConf
	err := json.Unmarshal(a.IPAM, &conf)
	raw := c.raw
	if err == nil {
		raw, err = replaceKey(raw, "ipam", a.IPAM)
	}
	if err == nil && a.Network != "" {
		raw, err = replaceKey(raw, "name", a.Network)
	}
	if err != nil {
		return c, fmt.Errorf("ipam of the record: %w", err)
	}
	c.raw, c.IPAM = raw, conf
	return c, nil
}

// replaceKey gives a key of a JSON object another value.
func replaceKey(object []byte, key string, value any) ([]byte, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(object, &keys); err != nil {
		return nil, err
	}
	v, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	keys[key] = v
	return json.Marshal(keys)
}

func (i ipam) needsInterface() bool { return i.conf.IPAM.Type == dhcp }

// add asks for addresses.
func (i ipam) add(ctx context.Context) (*types100.Result, error) {
	if i.conf.IPAM.Type == "" {
		return &types100.Result{}, nil
	}
	out, err := i.call(ctx, "ADD")
	if err != nil {
		return nil, err
	}
	res, err := parseResult(i.conf.CNIVersion, out)
	if err != nil {
		return nil, i.fail("ADD", fmt.Errorf("result %.100q: %w", out, err))
	}
	if len(res.IPs) > maxIPs {
		return nil, i.fail("ADD", fmt.Errorf("gives %d addresses, at most %d are allowed", len(res.IPs), maxIPs))
	}
	return res, nil
}

// del, check, gc and status call the IPAM plugin with the CNI command of that name.
func (i ipam) del(ctx context.Context) error    { return i.run(ctx, "DEL") }
func (i ipam) check(ctx context.Context) error  { return i.run(ctx, "CHECK") }
func (i ipam) gc(ctx context.Context) error     { return i.run(ctx, "GC") }
func (i ipam) status(ctx context.Context) error { return i.run(ctx, "STATUS") }

func (i ipam) run(ctx context.Context, verb string) error {
	if i.conf.IPAM.Type == "" {
		return nil
	}
	_, err := i.call(ctx, verb)
	return err
}

// call executes the IPAM plugin as the CNI specification says. CNI's package invoke would
// do the same, but it depends on the standard HTTP client, which would triple the size of
// this plugin.
func (i ipam) call(ctx context.Context, verb string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, ipamTimeout)
	defer cancel()
	program, err := i.find()
	if err != nil {
		return nil, err
	}
	var out, errb bytes.Buffer
	for try := 0; ; try++ {
		out.Reset()
		cmd := exec.CommandContext(ctx, program)
		cmd.Env = append(os.Environ(),
			"CNI_COMMAND="+verb, "CNI_CONTAINERID="+i.args.ContainerID, "CNI_NETNS="+i.args.Netns, "CNI_IFNAME="+i.ifName,
			"CNI_ARGS="+i.args.Args, "CNI_PATH="+i.args.Path)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(i.conf.raw), &out, &errb
		cmd.WaitDelay = ipamTimeout // a child of the plugin may keep the output open
		err = cmd.Run()
		if !errors.Is(err, syscall.ETXTBSY) || try == busyTries {
			break
		}
		<-time.After(busyPoll) // an installer is writing the file
	}
	if err == nil {
		return out.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, i.fail(verb, fmt.Errorf("no answer within %v: %w", ipamTimeout, ctx.Err()))
	}
	var ce types.Error
	if json.Unmarshal(out.Bytes(), &ce) == nil && ce.Msg != "" {
		return nil, i.fail(verb, &ce)
	}
	return nil, i.fail(verb, fmt.Errorf("%w: %s", err, clip(out.String()+" "+errb.String())))
}

// find looks for the IPAM plugin in CNI_PATH.
func (i ipam) find() (string, error) {
	name := i.conf.IPAM.Type
	if strings.ContainsRune(name, filepath.Separator) {
		return "", confError("ipam.type", "%q is a path: it is the name of a plugin in CNI_PATH", name)
	}
	for _, dir := range filepath.SplitList(i.args.Path) {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", confError("ipam.type", "no plugin %q in CNI_PATH (%s): install it on the node, or name another", name, i.args.Path)
}

// fail is the CNI error for an error of the IPAM plugin: it names the plugin and keeps
// the plugin's error code.
func (i ipam) fail(verb string, err error) error {
	what := fmt.Sprintf("IPAM plugin %s, %s", i.conf.IPAM.Type, verb)
	var ce *types.Error
	switch {
	case errors.As(err, &ce):
		return types.NewError(ce.Code, what+": "+ce.Msg, ce.Details)
	case errors.Is(err, context.DeadlineExceeded):
		return types.NewError(types.ErrTryAgainLater, what, err.Error())
	}
	return types.NewError(types.ErrInternal, what, err.Error())
}

// parseResult reads a result of any version. version is that of the configuration, for a result
// without one.
func parseResult(version string, b []byte) (*types100.Result, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return nil, err
	}
	if v, ok := keys["cniVersion"]; ok {
		if err := json.Unmarshal(v, &version); err != nil {
			return nil, fmt.Errorf("cniVersion: %w", err)
		}
	} else {
		keys["cniVersion"] = json.RawMessage(strconv.Quote(version))
		var err error
		if b, err = json.Marshal(keys); err != nil {
			return nil, err
		}
	}
	r, err := create.Create(version, b)
	if err != nil {
		return nil, err
	}
	return types100.NewResultFromResult(r)
}

// interfaceIPs are the addresses and routes of a result of an IPAM plugin. A route
// without a gateway uses the first gateway of its address family, as with other
// plugins.
func interfaceIPs(r *types100.Result) (linux.InterfaceIPs, error) {
	var out linux.InterfaceIPs
	var gateways [2]netip.Addr // IPv4, IPv6
	for n, ip := range r.IPs {
		p, ok := prefixOf(ip.Address)
		if !ok {
			return out, fmt.Errorf("address %d, %v, is none", n, ip.Address)
		}
		out.Addresses = append(out.Addresses, p)
		if gw, ok := addrOf(ip.Gateway); ok && !gateways[family(gw)].IsValid() {
			gateways[family(gw)] = gw
		}
	}
	for n, route := range r.Routes {
		dst, ok := prefixOf(route.Dst)
		if !ok {
			return out, fmt.Errorf("route %d: destination %v is none", n, route.Dst)
		}
		gw, ok := addrOf(route.GW)
		if !ok && !onLink(route) {
			gw = gateways[family(dst.Addr())]
		}
		out.Routes = append(out.Routes, linux.InterfaceRoute{
			Dst: dst.Masked(), Gateway: gw, MTU: route.MTU, AdvMSS: route.AdvMSS, Priority: route.Priority,
			Table: route.Table, Scope: route.Scope,
		})
	}
	return out, nil
}

// onLink tells whether a route needs no gateway, because its scope is link or host.
func onLink(r *types.Route) bool {
	const host, link = 254, 253 // as in rtnetlink(7)
	return r.Scope != nil && (*r.Scope == link || *r.Scope == host)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func prefixOf(n net.IPNet) (netip.Prefix, bool) {
	a, ok := addrOf(n.IP)
	bits, size := n.Mask.Size()
	if !ok || size == 0 || size == 128 && a.Is4() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, bits), true
}

func addrOf(ip net.IP) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}
