// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// yamlLine finds the line in the messages of the YAML parser.
var yamlLine = regexp.MustCompile(`line (\d+): (.*)`)

// Machine is the machine that a file is read on: it has values that the file may leave
// out or refer to.
type Machine struct {
	// Cluster says that the policies are objects of a cluster, so that the file may have
	// none.
	Cluster bool
	// Name is the node's name if the file does not have one.
	Name string
	// Any says that the file is checked for all nodes, and not read on one of them: what a
	// node gives to the file, its name, its address and its interfaces, is not looked at.
	Any bool
	// Address is what "address: node" stands for.
	Address netip.Addr
	// Interfaces are the addresses of each network interface, the preferred one
	// first.
	Interfaces map[string][]netip.Addr
}

// Parse reads a configuration file's bytes; file is its name for messages. The
// error is [Errors]: every mistake that was found.
func Parse(file string, b []byte) (*Node, error) { return ParseOn(Machine{}, file, b) }

// ParseOn is Parse with the values of a machine.
func ParseOn(m Machine, file string, b []byte) (*Node, error) {
	d := &decoder{file: file, machine: m}
	top := func(problem string) error {
		return Errors{{File: file, Line: 1, Column: 1, Field: "file", Problem: problem}}
	}
	if len(b) > maxFileBytes {
		return nil, top(fmt.Sprintf("is %d bytes long, at most %d are allowed", len(b), maxFileBytes))
	}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		return nil, d.syntax(err)
	}
	var more yaml.Node
	if err := dec.Decode(&more); err == nil {
		return nil, Errors{{File: file, Line: more.Line, Column: more.Column, Field: "file", Problem: "has a second document; only one is read"}}
	}
	if len(doc.Content) != 1 {
		return nil, top("is empty, want node and policies")
	}
	n := defaults()
	fs := d.mapping(field{node: doc.Content[0]}, "node", "policies")
	if f, ok := fs.get("node"); ok {
		d.node(f, n)
	} else if len(d.errs) == 0 {
		d.errorf(fs.where("node"), "is missing")
	}
	f, ok := fs.get("policies")
	switch {
	case ok && m.Cluster:
		d.errorf(f, "are SMCRPolicy objects in a cluster: remove them from the file")
	case ok:
		d.policies(f, n)
	case m.Cluster:
		n.Pods = map[PodName]PodConfig{}
	}
	d.hostPolicies(n)
	if err := d.sorted(); err != nil {
		return nil, err
	}
	return n, nil
}

func (d *decoder) syntax(err error) error {
	e := &FieldError{File: d.file, Line: 1, Column: 1, Field: "file", Problem: err.Error()}
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		e.Line, _ = strconv.Atoi(m[1])
		e.Problem = "is not YAML: " + m[2]
	} else if err.Error() == "EOF" {
		e.Problem = "is empty, want node and policies"
	}
	return Errors{e}
}

func defaults() *Node {
	n := &Node{
		NodeBudget:      Budget{MemoryBytes: defaultNodeMemoryBytes, Conns: defaultNodeConns, Relays: defaultNodeRelays, Pending: defaultNodePending, SocketBytes: defaultNodeSocketBytes},
		PodBudget:       Budget{MemoryBytes: defaultPodMemoryBytes, Conns: defaultPodConns, Relays: defaultPodRelays, Pending: defaultPodPending, SocketBytes: defaultPodSocketBytes},
		RMBEBytes:       defaultBufferBytes,
		EIDs:            []clc.EID{defaultEID()},
		SendBufferBytes: defaultBufferBytes,
		DataDir:         defaultDataDir,
		APISocket:       defaultAPISocket,
		MetricsAddress:  netip.MustParseAddrPort(defaultMetricsAddress),
		Diversion:       Diversion{RedirectTTL: defaultRedirectTTL, NegativeCacheTTL: defaultNegativeCacheTTL, HoldSYNs: true},
		DrainTimeout:    defaultDrainTimeout,
		AnswerPoll:      defaultAnswerPoll,
		CNI:             CNI{BinDir: defaultCNIBinDir, ConfDir: defaultCNIConfDir},
		DevicePlugin: DevicePlugin{
			Slots: defaultSlots, Dir: defaultPluginDir, PodResources: defaultPodResources, InfoDir: defaultInfoDir,
		},
		DRA:          DRA{KubeletDir: defaultKubeletDir},
		DefaultPeers: Peers{CIDRs: privateNetworks()},
		Wire:         Wire{Filter: true},
	}
	n.PodMax = defaultPodMax(n)
	return n
}

// privateNetworks is the private address space, which the pods and Services of a cluster
// have. Outside of it are middleboxes and hosts that may not cope with the TCP option.
func privateNetworks() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("fc00::/7"),
	}
}

func (d *decoder) node(f field, n *Node) {
	fs := d.mapping(f, "name", "devices", "devicesOfNode", "budgets", "rmbe", "sendBuffer", "versions", "eids", "dialects", "anyPrefix", "dataDir",
		"apiSocket", "metricsAddress", "metricsAuth", "metricsTLS", "podsAsNode", "redirectTTL", "negativeCacheTTL", "drainTimeout", "answerPoll", "logLevel", "holdSYNs", "takeover", "hostPods", "kernelPath", "defaultPeers", "wire", "cni", "devicePlugin", "dra")
	n.Name = d.machine.Name
	d.text(fs, "name", &n.Name)
	if !validName(n.Name, "") && (n.Name != "" || !d.machine.Any) {
		d.errorf(fs.where("name"), "%q, want the node's name: letters, digits, '-', '_' and '.'", n.Name)
	}
	d.nodeDevices(fs, n)
	d.size(fs, "rmbe", &n.RMBEBytes)
	d.size(fs, "sendBuffer", &n.SendBufferBytes)
	for _, b := range []struct {
		key   string
		bytes int
	}{{"rmbe", n.RMBEBytes}, {"sendBuffer", n.SendBufferBytes}} {
		if b.bytes < minBufferBytes || b.bytes > maxBufferBytes || b.bytes&(b.bytes-1) != 0 {
			d.errorf(fs.where(b.key), "%d bytes, want a power of two from %d to %d", b.bytes, minBufferBytes, maxBufferBytes)
		}
	}
	if f, ok := fs.get("budgets"); ok {
		d.budgets(f, n)
	}
	n.Versions = Versions(d.choice(fs, "versions", "both", "v1", "v2"))
	if f, ok := fs.get("eids"); ok {
		n.EIDs = d.eids(f)
	}
	n.Dialects = Dialects(d.choice(fs, "dialects", "both", "linux"))
	d.boolean(fs, "anyPrefix", &n.AnyPrefix)
	d.text(fs, "dataDir", &n.DataDir)
	d.text(fs, "apiSocket", &n.APISocket)
	d.absolute(fs, "dataDir", n.DataDir)
	d.absolute(fs, "apiSocket", n.APISocket)
	if len(n.APISocket) > maxSocketPath {
		d.errorf(fs.where("apiSocket"), "is %d bytes long; the kernel allows %d", len(n.APISocket), maxSocketPath)
	}
	d.metricsAddress(fs, n)
	d.metricsAuth(fs, n)
	d.boolean(fs, "podsAsNode", &n.PodsAsNode)
	if f, ok := fs.get("podsAsNode"); ok && n.PodsAsNode && !d.machine.Cluster {
		d.errorf(f, "true, but there is no cluster: leave it out")
	}
	d.duration(fs, "redirectTTL", &n.RedirectTTL, minRedirectTTL, maxRedirectTTL)
	d.duration(fs, "negativeCacheTTL", &n.NegativeCacheTTL, 0, maxTTL)
	d.duration(fs, "drainTimeout", &n.DrainTimeout, 0, maxTTL)
	d.duration(fs, "answerPoll", &n.AnswerPoll, 0, maxAnswerPoll)
	n.LogLevel = LogLevel(d.choice(fs, "logLevel", "info", "debug", "warn", "error"))
	d.boolean(fs, "holdSYNs", &n.HoldSYNs)
	d.boolean(fs, "takeover", &n.Takeover)
	if f, ok := fs.get("hostPods"); ok {
		d.hostPods(f, n)
	}
	if f, ok := fs.get("kernelPath"); ok {
		d.boolean(d.mapping(f, "veth"), "veth", &n.KernelVeth)
	}
	if f, ok := fs.get("defaultPeers"); ok {
		n.DefaultPeers = d.defaultPeers(f)
	}
	if f, ok := fs.get("wire"); ok {
		d.wire(f, &n.Wire)
	}
	if f, ok := fs.get("cni"); ok {
		d.cni(f, &n.CNI)
	}
	if f, ok := fs.get("devicePlugin"); ok {
		d.devicePlugin(f, &n.DevicePlugin)
	}
	if f, ok := fs.get("dra"); ok {
		d.dra(f, n)
	}
}

func (d *decoder) defaultPeers(f field) Peers {
	ps := d.mapping(f, "cidrs", "except")
	p := Peers{CIDRs: privateNetworks()}
	if _, ok := ps.get("cidrs"); ok {
		if p.CIDRs = d.prefixes(ps, "cidrs"); len(p.CIDRs) == 0 {
			d.errorf(ps.where("cidrs"), "is empty: want CIDRs such as 10.0.0.0/8; leave it out for the private networks")
		}
	}
	p.Except = d.prefixes(ps, "except")
	d.exclusions(ps, Policy{Peers: p.CIDRs, Except: p.Except})
	return p
}

func (d *decoder) wire(f field, w *Wire) {
	fs := d.mapping(f, "filter", "peers", "interfaces")
	d.boolean(fs, "filter", &w.Filter)
	w.Peers = d.prefixes(fs, "peers")
	i, ok := fs.get("interfaces")
	if !ok {
		return
	}
	items := d.list(i)
	if len(items) > maxWireInterfaces {
		d.errorf(i, "has %d entries, at most %d are allowed", len(items), maxWireInterfaces)
		return
	}
	for _, item := range items {
		s, ok := d.scalar(item, "the name of a network interface")
		switch {
		case !ok:
		case !validName(s, "") || len(s) > maxInterfaceName:
			d.errorf(item, "%q, want the name of a network interface such as eth1 (ip link shows them)", s)
		case slices.Contains(w.Interfaces, s):
			d.errorf(item, "%q is given twice", s)
		default:
			w.Interfaces = append(w.Interfaces, s)
		}
	}
}

func (d *decoder) dra(f field, n *Node) {
	r := &n.DRA
	fs := d.mapping(f, "enabled", "kubeletDir", "ipam", "ipamOfNode")
	d.boolean(fs, "enabled", &r.Enabled)
	d.text(fs, "kubeletDir", &r.KubeletDir)
	d.absolute(fs, "kubeletDir", r.KubeletDir)
	if len(r.KubeletDir)+maxDriverSocketName > maxSocketPath {
		d.errorf(fs.where("kubeletDir"), "is too long for sockets below it, whose path the kernel allows %d bytes", maxSocketPath)
	}
	set := ""
	if f, ok := fs.get("ipam"); ok {
		if r.IPAM = d.ipam(f); r.IPAM != "" {
			set = "ipam"
		}
	}
	if f, ok := fs.get("ipamOfNode"); ok {
		of := d.anyMapping(f)
		for name, one := range of.at { // errors are sorted by their place
			if !validName(name, "") {
				d.errorf(one, "%q, want a node's name: letters, digits, '-', '_' and '.'", name)
			}
			text := d.ipam(one)
			if set = "ipamOfNode"; name == n.Name {
				r.IPAM = text
			}
		}
	}
	if set != "" && !n.CNI.Install {
		d.errorf(fs.where(set), "is for the entry of smcr-cni that the agent writes, but cni.install is false: put it into the entry by hand")
	}
}

// resourceName matches the name of an extended resource; VENDOR/* stands for all resources
// of a vendor.
var resourceName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\*)$`)

func (d *decoder) devicePlugin(f field, p *DevicePlugin) {
	fs := d.mapping(f, "enabled", "vfs", "slots", "dir", "podResources", "infoDir", "otherResources")
	d.boolean(fs, "enabled", &p.Enabled)
	d.boolean(fs, "vfs", &p.VFs)
	d.integer(fs, "slots", &p.Slots, 1, maxSlots)
	for _, path := range []struct {
		key  string
		into *string
	}{{"dir", &p.Dir}, {"podResources", &p.PodResources}, {"infoDir", &p.InfoDir}} {
		d.text(fs, path.key, path.into)
		d.absolute(fs, path.key, *path.into)
	}
	for _, path := range []struct {
		key   string
		bytes int
	}{{"dir", len(p.Dir) + maxSocketName}, {"podResources", len(p.PodResources)}} {
		if path.bytes > maxSocketPath {
			d.errorf(fs.where(path.key), "is too long for a socket, whose path the kernel allows %d bytes", maxSocketPath)
		}
	}
	if p.VFs && !p.Enabled {
		d.errorf(fs.where("vfs"), "needs enabled: true")
	}
	o, ok := fs.get("otherResources")
	if !ok {
		return
	}
	for _, item := range d.list(o) {
		s, ok := d.scalar(item, "a resource such as vendor.com/rdma_vf")
		switch {
		case !ok:
		case !resourceName.MatchString(s) || len(s) > maxNameLen:
			d.errorf(item, "%q, want a resource of a device plugin such as vendor.com/rdma_vf, or vendor.com/* for all of a vendor", s)
		case slices.Contains(p.OtherResources, s):
			d.errorf(item, "%q is given twice", s)
		default:
			p.OtherResources = append(p.OtherResources, s)
		}
	}
}

func (d *decoder) cni(f field, c *CNI) {
	fs := d.mapping(f, "install", "binDir", "confDir", "required", "reportStatus")
	d.boolean(fs, "install", &c.Install)
	d.text(fs, "binDir", &c.BinDir)
	d.text(fs, "confDir", &c.ConfDir)
	d.boolean(fs, "required", &c.Required)
	d.boolean(fs, "reportStatus", &c.ReportStatus)
	d.absolute(fs, "binDir", c.BinDir)
	d.absolute(fs, "confDir", c.ConfDir)
}

// absolute checks that a path is absolute and clean.
func (d *decoder) absolute(fs fields, key, p string) {
	if !path.IsAbs(p) || path.Clean(p) != p {
		d.errorf(fs.where(key), "%q, want an absolute path without . and ..", p)
	}
}

func defaultEID() clc.EID {
	e, err := clc.ParseUEID(DefaultEID)
	invariant.Must(err == nil, "config: the default enterprise ID is none")
	return e
}

// eids reads enterprise IDs.
func (d *decoder) eids(f field) []clc.EID {
	items := d.list(f)
	switch {
	case len(items) > clc.MaxEIDs:
		d.errorf(f, "has %d entries, at most %d are allowed", len(items), clc.MaxEIDs)
		return nil
	case len(items) == 0 && f.node.Kind == yaml.SequenceNode:
		d.errorf(f, "is empty: want 1 to %d enterprise IDs; versions: v1 does without", clc.MaxEIDs)
	}
	var out []clc.EID
	for _, item := range items {
		s, ok := d.scalar(item, "an enterprise ID such as "+DefaultEID)
		if !ok {
			continue
		}
		e, err := clc.ParseUEID(s)
		switch {
		case err != nil:
			hint := ""
			if _, err := clc.ParseUEID(strings.ToUpper(s)); err == nil {
				hint = fmt.Sprintf(" (did you mean %s?)", strings.ToUpper(s))
			}
			d.errorf(item, "%q, want 1 to %d capital letters, digits, dots and hyphens, the first a letter or digit%s", s, clc.EIDLen, hint)
		case slices.Contains(out, e):
			d.errorf(item, "%q is given twice", s)
		default:
			out = append(out, e)
		}
	}
	return out
}

func (d *decoder) metricsAddress(fs fields, n *Node) {
	f, ok := fs.get("metricsAddress")
	if !ok {
		return
	}
	s, ok := d.scalar(f, "an address and port, or none")
	if !ok {
		return
	}
	if s == "none" {
		n.MetricsAddress = netip.AddrPort{}
		return
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		d.errorf(f, "%q, want an address and port such as %s, or none", s, defaultMetricsAddress)
		return
	}
	n.MetricsAddress = a
}

// metricsAuth reads metricsAuth and metricsTLS. metricsAuth needs a cluster, whose API
// server says who may read metrics.
func (d *decoder) metricsAuth(fs fields, n *Node) {
	n.MetricsAuth = d.machine.Cluster
	d.boolean(fs, "metricsAuth", &n.MetricsAuth)
	if f, ok := fs.get("metricsAuth"); ok && n.MetricsAuth && !d.machine.Cluster {
		d.errorf(f, "true, but there is no cluster to ask who may read metrics: leave it out, and metricsAddress on loopback")
	}
	d.text(fs, "metricsTLS", &n.MetricsTLS)
	f, ok := fs.get("metricsTLS")
	if ok {
		d.absolute(fs, "metricsTLS", n.MetricsTLS)
	}
	if ok && !n.MetricsAuth {
		d.errorf(f, "a certificate without metricsAuth: metrics are plain HTTP then; leave it out")
	}
}

// nodeDevices reads the devices of all nodes and of those that are named, and takes this node's. Of
// the others' lists nothing is looked up on this machine.
func (d *decoder) nodeDevices(fs fields, n *Node) {
	lists, mine := map[string]field{}, ""
	f, ok := fs.get("devices")
	if ok {
		lists[""] = f
	} else if !fs.has("device") { // for the old name there is an error already
		d.errorf(fs.where("devices"), "is missing: want a list of soft: {address: ADDRESS} or rdma: NAME")
	}
	if f, ok := fs.get("devicesOfNode"); ok {
		of := d.anyMapping(f)
		for _, nodes := range slices.Sorted(maps.Keys(of.at)) {
			one := of.at[nodes]
			lists[nodes] = one
			switch {
			case !validName(nodes, "*"):
				d.errorf(one, "%q, want a node's name: letters, digits, '-', '_' and '.', and * for any characters", nodes)
			case n.Name == "" || !matchPattern(nodes, n.Name) || mine == n.Name:
			case mine != "" && nodes != n.Name:
				d.errorf(one, "%q and %q are both about node %s: name it, or make one of them narrower", mine, nodes, n.Name)
			default:
				mine = nodes
			}
		}
	}
	machine := d.machine
	for _, nodes := range slices.Sorted(maps.Keys(lists)) {
		d.machine.Any = machine.Any || nodes != mine
		if devices := d.devices(lists[nodes]); nodes == mine {
			n.Devices = devices
		}
		d.machine = machine
	}
}

// devices reads the list of RNICs. All must be of one kind, so that each can register
// the same memory, and software devices of one address family, because both ends of a
// link have the same. With an empty list only the pods that have devices for themselves
// use SMC-R.
func (d *decoder) devices(f field) []Device {
	items := d.list(f)
	switch {
	case len(items) > maxDevices:
		d.errorf(f, "has %d devices, at most %d are used", len(items), maxDevices)
		return nil
	}
	var out []Device
	for _, item := range items {
		before := len(d.errs)
		dev := d.device(item)
		if len(d.errs) > before {
			continue // comparing a device with errors would only cause further errors
		}
		i := slices.IndexFunc(out, func(o Device) bool { return o.String() == dev.String() })
		switch {
		case i >= 0 && out[i].Port != dev.Port:
			d.errorf(item, "%v is given already, with another port of it: one port of a device can be used", dev)
		case i >= 0:
			d.errorf(item, "%v is given twice", dev)
		case len(out) > 0 && out[0].Soft() != dev.Soft():
			d.errorf(item, "%v is of another kind than %v: use soft or rdma for all", dev, out[0])
		case len(out) > 0 && out[0].SoftAddress.IsValid() && dev.SoftAddress.IsValid() && out[0].SoftAddress.Is4() != dev.SoftAddress.Is4():
			d.errorf(item, "%v is of another address family than %v: use IPv4 or IPv6 for all", dev, out[0])
		}
		out = append(out, dev)
	}
	return out
}

func (d *decoder) device(f field) Device {
	fs := d.mapping(f, "soft", "rdma")
	var dev Device
	soft, isSoft := fs.get("soft")
	rdma, isRDMA := fs.get("rdma")
	switch {
	case isSoft && isRDMA:
		d.errorf(rdma, "contradicts soft: choose one of the two")
	case isRDMA:
		d.hardware(fs, rdma, &dev)
	case isSoft:
		d.soft(soft, &dev)
	case f.node.Kind == yaml.MappingNode:
		d.errorf(f, "names no device: want soft: {address: ADDRESS} or rdma: NAME")
	}
	return dev
}

// hardware reads a device of the kernel: its name, or a mapping with name, port, address,
// gidType and trafficClass.
func (d *decoder) hardware(fs fields, f field, dev *Device) {
	if f.node.Kind == yaml.MappingNode {
		fs = d.mapping(f, "name", "port", "address", "gidType", "trafficClass")
		f = fs.where("name")
		d.text(fs, "name", &dev.RDMA)
		var port int
		d.integer(fs, "port", &port, 1, maxPort)
		dev.Port = uint8(port)
		if a, ok := fs.get("address"); ok {
			var text string
			d.text(fs, "address", &text)
			dev.GIDAddress, dev.Interface = d.gidAddress(a, text)
		}
		dev.GIDType = [...]rdma.GIDType{rdma.GIDTypeUnknown, rdma.GIDTypeRoCEv2, rdma.GIDTypeRoCEv1}[d.choice(fs, "gidType", "auto", "RoCEv2", "RoCEv1")]
		var class int
		d.integer(fs, "trafficClass", &class, 0, math.MaxUint8)
		dev.TrafficClass = uint8(class)
	} else {
		d.text(fs, "rdma", &dev.RDMA)
	}
	if !validName(dev.RDMA, "") {
		d.errorf(f, "%q, want the name of an RDMA device such as mlx5_0 (smcrctl devices shows them)", dev.RDMA)
	}
}

// gidAddress reads the address of a GID. As one file is for all nodes, the address may
// also be "node" or the name of an interface, which some nodes may not have, or not yet
// with an address.
func (d *decoder) gidAddress(f field, text string) (a netip.Addr, ifname string) {
	switch addrs := d.machine.Interfaces[text]; {
	case text == "node" && (d.machine.Address.IsValid() || d.machine.Any):
		return d.machine.Address, ""
	case text == "node":
		d.errorf(f, "node: the node's address is not known: run with --kubernetes and NODE_IP in the environment, or give the address")
		return netip.Addr{}, ""
	case len(addrs) > 0:
		return addrs[0], text
	}
	a, err := netip.ParseAddr(text)
	if err != nil && d.machine.Cluster && validName(text, "") && len(text) <= maxInterfaceName {
		return netip.Addr{}, text
	}
	if err != nil || a.IsUnspecified() || a.IsMulticast() || a.Is4In6() {
		d.errorf(f, "%q, want an address of the device's network interface, node, or the name of an interface that has one (smcrctl devices shows them)", text)
	}
	return a, ""
}

func (d *decoder) soft(f field, dev *Device) {
	fs := d.mapping(f, "address", "interface", "mtu")
	dev.SoftAddress = d.softAddress(fs)
	d.text(fs, "interface", &dev.Interface)
	d.integer(fs, "mtu", &dev.SoftMTU, minMTU, maxMTU)
	if m := dev.SoftMTU; m&(m-1) != 0 {
		d.errorf(fs.where("mtu"), "%d, want an InfiniBand path MTU: 256, 512, 1024, 2048 or 4096", m)
	}
}

// softAddress finds the address of a software device: the given one, that of an
// interface, or that of the node.
func (d *decoder) softAddress(fs fields) netip.Addr {
	var addr, ifname string
	d.text(fs, "address", &addr)
	d.text(fs, "interface", &ifname)
	if i, ok := fs.get("interface"); ok {
		addrs := d.machine.Interfaces[ifname]
		switch {
		case fs.has("address"):
			d.errorf(i, "contradicts address: choose one of the two")
		case len(addrs) == 0 && d.machine.Cluster:
			// The file is for all nodes, and some may not have the interface.
			if !validName(ifname, "") || len(ifname) > maxInterfaceName {
				d.errorf(i, "%q is no name of a network interface", ifname)
			}
		case len(addrs) == 0:
			d.errorf(i, "%q is no network interface of this machine with an address (ip address shows them)", ifname)
		default:
			return addrs[0]
		}
		return netip.Addr{}
	}
	if addr == "node" {
		if !d.machine.Address.IsValid() && !d.machine.Any {
			d.errorf(fs.where("address"), "node: the node's address is not known: run with --kubernetes and NODE_IP in the environment, or give the address")
		}
		return d.machine.Address
	}
	a, err := netip.ParseAddr(addr)
	if err != nil || a.IsUnspecified() || a.IsMulticast() || a.Is4In6() {
		d.errorf(fs.where("address"), "%q, want a local unicast address that the other nodes reach, or node", addr)
	}
	return a
}

func (d *decoder) policies(f field, n *Node) {
	items := d.list(f)
	if len(items) > maxPolicies {
		d.errorf(f, "has %d policies, at most %d are allowed", len(items), maxPolicies)
		return
	}
	for _, item := range items {
		before := len(d.errs)
		p := d.policy(item)
		if p.Datapath != DatapathAgent && n.Versions == VersionsV1 {
			d.errorf(item, "policy %q has datapath %v, which needs version 2, and node.versions is v1", p.Name, p.Datapath)
		}
		if len(d.errs) > before {
			continue // comparing a policy with errors would only cause further errors
		}
		for i := range n.Policies {
			o := &n.Policies[i]
			if o.Name == p.Name {
				d.errorf(item, "the name %q is taken by an earlier policy", p.Name)
			} else if both := overlap(o, &p); both != "" {
				d.errorf(item, "policy %q overlaps with policy %q (%s): exclude it from one of them, so that every connection has one policy", p.Name, o.Name, both)
			} else if o.Datapath != p.Datapath && o.Pods.intersects(&p.Pods) {
				d.errorf(item, "policy %q has datapath %v, and policy %q, which selects pods that this one selects, %v: a pod has one datapath", p.Name, p.Datapath, o.Name, o.Datapath)
			}
		}
		n.Policies = append(n.Policies, p)
	}
}

func (d *decoder) policy(f field) Policy {
	fs := d.mapping(f, "name", "mode", "datapath", "pods", "peers", "ports")
	var p Policy
	d.text(fs, "name", &p.Name)
	if !validName(p.Name, "") {
		d.errorf(fs.where("name"), "%q, want a name of letters, digits, '-', '_' and '.'", p.Name)
	}
	p.Mode = Mode(d.choice(fs, "mode", "Prefer", "Required"))
	p.Datapath = Datapath(d.choice(fs, "datapath", "Agent", "Kernel", "KernelIfAvailable"))
	if p.Datapath != DatapathAgent && p.Mode == ModeRequired {
		d.errorf(fs.where("datapath"), "%v, and mode is Required: nobody can refuse a connection that the kernel makes plain TCP; use datapath Agent, or mode Prefer", p.Datapath)
	}
	if pf, ok := fs.get("pods"); ok {
		ps := d.mapping(pf, "namespaces", "names", "interfaces")
		p.Pods = PodSelector{
			Namespaces: d.patterns(ps, "namespaces"),
			Names:      d.patterns(ps, "names"),
			Interfaces: d.patterns(ps, "interfaces"),
		}
	}
	if pf, ok := fs.get("peers"); ok {
		ps := d.mapping(pf, "cidrs", "except")
		p.Peers = d.prefixes(ps, "cidrs")
		p.Except = d.prefixes(ps, "except")
		d.exclusions(ps, p)
	}
	p.Ports = d.ports(fs, "ports")
	return p
}

// exclusions checks that each exclusion takes addresses out of the peers, and that each
// peer network has addresses left.
func (d *decoder) exclusions(ps fields, p Policy) {
	peers := peersOrAll(p.Peers)
	for _, e := range p.Except {
		inside := func(q netip.Prefix) bool { return q.Overlaps(e) && q.Bits() <= e.Bits() }
		if !slices.ContainsFunc(peers, inside) {
			d.errorf(ps.where("except"), "%v is not inside any of the peers' cidrs: remove it, or add the network that contains it to cidrs", e)
		}
	}
	for _, q := range p.Peers {
		if _, ok := remainder(q, p.Except); !ok {
			d.errorf(ps.where("except"), "nothing is left of %v", q)
		}
	}
}

// Immutable returns the names of the settings in which next differs and that need a
// restart. A reload takes over the others: policies, pods in the node's network, the kernel's datapath, time limits and the log level.
func (n *Node) Immutable(next *Node) []string {
	var out []string
	diff := func(name string, differs bool) {
		if differs {
			out = append(out, "node."+name)
		}
	}
	diff("name", n.Name != next.Name)
	diff("devices", !slices.Equal(n.Devices, next.Devices))
	diff("budgets", n.NodeBudget != next.NodeBudget || n.PodBudget != next.PodBudget || n.PodMax != next.PodMax)
	diff("rmbe", n.RMBEBytes != next.RMBEBytes)
	diff("sendBuffer", n.SendBufferBytes != next.SendBufferBytes)
	diff("versions", n.Versions != next.Versions)
	diff("eids", !slices.Equal(n.EIDs, next.EIDs))
	diff("dialects", n.Dialects != next.Dialects)
	diff("anyPrefix", n.AnyPrefix != next.AnyPrefix)
	diff("dataDir", n.DataDir != next.DataDir)
	diff("apiSocket", n.APISocket != next.APISocket)
	diff("metricsAddress", n.MetricsAddress != next.MetricsAddress)
	diff("metricsAuth", n.MetricsAuth != next.MetricsAuth)
	diff("metricsTLS", n.MetricsTLS != next.MetricsTLS)
	diff("podsAsNode", n.PodsAsNode != next.PodsAsNode)
	diff("holdSYNs", n.HoldSYNs != next.HoldSYNs)
	diff("takeover", n.Takeover != next.Takeover)
	diff("cni", n.CNI != next.CNI)
	diff("dra", n.DRA != next.DRA)
	diff("devicePlugin", !n.DevicePlugin.Equal(&next.DevicePlugin))
	return out
}
