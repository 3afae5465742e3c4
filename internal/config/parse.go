// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// yamlLine finds the line in the messages of the YAML parser.
var yamlLine = regexp.MustCompile(`line (\d+): (.*)`)

// Parse reads a configuration file's bytes; file is its name for messages. The
// error is [Errors]: every mistake that was found.
func Parse(file string, b []byte) (*Node, error) {
	d := &decoder{file: file}
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
	if f, ok := fs.get("policies"); ok {
		d.policies(f, n)
	}
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
	return &Node{
		NodeBudget:       Budget{MemoryBytes: defaultNodeMemoryBytes, Conns: defaultNodeConns},
		PodBudget:        Budget{MemoryBytes: defaultPodMemoryBytes, Conns: defaultPodConns},
		RMBEBytes:        defaultBufferBytes,
		EIDs:             []clc.EID{defaultEID()},
		SendBufferBytes:  defaultBufferBytes,
		DataDir:          defaultDataDir,
		APISocket:        defaultAPISocket,
		MetricsAddress:   netip.MustParseAddrPort(defaultMetricsAddress),
		RedirectTTL:      defaultRedirectTTL,
		NegativeCacheTTL: defaultNegativeCacheTTL,
		DrainTimeout:     defaultDrainTimeout,
		AnswerPoll:       defaultAnswerPoll,
	}
}

func (d *decoder) node(f field, n *Node) {
	fs := d.mapping(f, "name", "devices", "budgets", "rmbe", "sendBuffer", "versions", "eids", "dialects", "anyPrefix", "dataDir",
		"apiSocket", "metricsAddress", "redirectTTL", "negativeCacheTTL", "drainTimeout", "answerPoll", "logLevel")
	d.text(fs, "name", &n.Name)
	if !validName(n.Name, "") {
		d.errorf(fs.where("name"), "%q, want the node's name: letters, digits, '-', '_' and '.'", n.Name)
	}
	if f, ok := fs.get("devices"); ok {
		n.Devices = d.devices(f)
	} else if !fs.has("device") { // the old name was complained about
		d.errorf(fs.where("devices"), "is missing: want a list of soft: {address: ADDRESS} or rdma: NAME")
	}
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
	for _, p := range []struct{ key, path string }{{"dataDir", n.DataDir}, {"apiSocket", n.APISocket}} {
		if !path.IsAbs(p.path) || path.Clean(p.path) != p.path {
			d.errorf(fs.where(p.key), "%q, want an absolute path without . and ..", p.path)
		}
	}
	if len(n.APISocket) > maxSocketPath {
		d.errorf(fs.where("apiSocket"), "is %d bytes long; the kernel allows %d", len(n.APISocket), maxSocketPath)
	}
	d.metricsAddress(fs, n)
	d.duration(fs, "redirectTTL", &n.RedirectTTL, minRedirectTTL, maxRedirectTTL)
	d.duration(fs, "negativeCacheTTL", &n.NegativeCacheTTL, 0, maxTTL)
	d.duration(fs, "drainTimeout", &n.DrainTimeout, 0, maxTTL)
	d.duration(fs, "answerPoll", &n.AnswerPoll, 0, maxAnswerPoll)
	n.LogLevel = LogLevel(d.choice(fs, "logLevel", "info", "debug", "warn", "error"))
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

// devices reads the list of RNICs, which must be able to work together: one
// provider, so that each can register the memory of the others, and one address
// family, because a link has the same at both ends.
func (d *decoder) devices(f field) []Device {
	items := d.list(f)
	switch {
	case f.node.Kind == yaml.SequenceNode && len(f.node.Content) == 0:
		d.errorf(f, "is empty: want soft: {address: ADDRESS} or rdma: NAME")
	case len(items) > maxDevices:
		d.errorf(f, "has %d devices, at most %d are used", len(items), maxDevices)
		return nil
	}
	var out []Device
	for _, item := range items {
		before := len(d.errs)
		dev := d.device(item)
		if len(d.errs) > before {
			continue // half a device would only lead to more complaints
		}
		i := slices.IndexFunc(out, func(o Device) bool { return o.SoftAddress == dev.SoftAddress && o.RDMA == dev.RDMA })
		switch {
		case i >= 0:
			d.errorf(item, "%v is given twice", dev)
		case len(out) > 0 && out[0].Soft() != dev.Soft():
			d.errorf(item, "%v is of another kind than %v: use soft or rdma for all", dev, out[0])
		case len(out) > 0 && out[0].SoftAddress.Is4() != dev.SoftAddress.Is4():
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
		d.text(fs, "rdma", &dev.RDMA)
		if !validName(dev.RDMA, "") {
			d.errorf(rdma, "%q, want the name of an RDMA device such as mlx5_0 (rdma link shows them)", dev.RDMA)
		}
	case isSoft:
		d.soft(soft, &dev)
	case f.node.Kind == yaml.MappingNode:
		d.errorf(f, "names no device: want soft: {address: ADDRESS} or rdma: NAME")
	}
	return dev
}

func (d *decoder) soft(f field, dev *Device) {
	fs := d.mapping(f, "address", "mtu")
	var addr string
	d.text(fs, "address", &addr)
	a, err := netip.ParseAddr(addr)
	if err != nil || a.IsUnspecified() || a.IsMulticast() || a.Is4In6() {
		d.errorf(fs.where("address"), "%q, want a local unicast address that the other nodes reach", addr)
	}
	dev.SoftAddress = a
	d.integer(fs, "mtu", &dev.SoftMTU, minMTU, maxMTU)
	if m := dev.SoftMTU; m&(m-1) != 0 {
		d.errorf(fs.where("mtu"), "%d, want an InfiniBand path MTU: 256, 512, 1024, 2048 or 4096", m)
	}
}

func (d *decoder) budgets(f field, n *Node) {
	fs := d.mapping(f, "node", "pod")
	one := func(key string, b *Budget) {
		bf, ok := fs.get(key)
		if !ok {
			return
		}
		bs := d.mapping(bf, "memory", "connections")
		d.size(bs, "memory", &b.MemoryBytes)
		d.integer(bs, "connections", &b.Conns, 0, 1<<20)
	}
	one("node", &n.NodeBudget)
	one("pod", &n.PodBudget)
	if n.PodBudget.MemoryBytes > n.NodeBudget.MemoryBytes {
		d.errorf(fs.where("pod"), "memory of a pod (%d bytes) is more than that of the node (%d)", n.PodBudget.MemoryBytes, n.NodeBudget.MemoryBytes)
	}
	if n.PodBudget.Conns > n.NodeBudget.Conns {
		d.errorf(fs.where("pod"), "connections of a pod (%d) are more than those of the node (%d)", n.PodBudget.Conns, n.NodeBudget.Conns)
	}
	if need := ConnsPerRegion * (n.RMBEBytes + n.SendBufferBytes); n.PodBudget.MemoryBytes < need {
		d.errorf(fs.where("pod"), "memory (%d bytes) is less than the rmbe and sendBuffer of %d connections (%d), which are registered at a time", n.PodBudget.MemoryBytes, ConnsPerRegion, need)
	}
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
		if len(d.errs) > before {
			continue // half a policy would only lead to more complaints
		}
		for i := range n.Policies {
			o := &n.Policies[i]
			if o.Name == p.Name {
				d.errorf(item, "the name %q is taken by an earlier policy", p.Name)
			} else if both := overlap(o, &p); both != "" {
				d.errorf(item, "policy %q overlaps with policy %q (%s): exclude it from one of them, so that every connection has one policy", p.Name, o.Name, both)
			}
		}
		n.Policies = append(n.Policies, p)
	}
}

func (d *decoder) policy(f field) Policy {
	fs := d.mapping(f, "name", "mode", "pods", "peers", "ports")
	var p Policy
	d.text(fs, "name", &p.Name)
	if !validName(p.Name, "") {
		d.errorf(fs.where("name"), "%q, want a name of letters, digits, '-', '_' and '.'", p.Name)
	}
	p.Mode = Mode(d.choice(fs, "mode", "Prefer", "Required"))
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

// exclusions checks that each exclusion takes something out of the peers, and
// that they leave something.
func (d *decoder) exclusions(ps fields, p Policy) {
	peers := peersOrAll(p.Peers)
	for _, e := range p.Except {
		inside := func(q netip.Prefix) bool { return q.Overlaps(e) && q.Bits() <= e.Bits() }
		if !slices.ContainsFunc(peers, inside) {
			d.errorf(ps.where("except"), "%v is not inside any of the peers' cidrs, so it excludes nothing", e)
		}
	}
	for _, q := range p.Peers {
		if _, ok := remainder(q, p.Except); !ok {
			d.errorf(ps.where("except"), "nothing is left of %v", q)
		}
	}
}

// Immutable returns the names of the node settings in which next differs and
// that only a restart can change. A reload takes over policies, time
// limits and the log level.
func (n *Node) Immutable(next *Node) []string {
	var out []string
	diff := func(name string, differs bool) {
		if differs {
			out = append(out, "node."+name)
		}
	}
	diff("name", n.Name != next.Name)
	diff("devices", !slices.Equal(n.Devices, next.Devices))
	diff("budgets", n.NodeBudget != next.NodeBudget || n.PodBudget != next.PodBudget)
	diff("rmbe", n.RMBEBytes != next.RMBEBytes)
	diff("sendBuffer", n.SendBufferBytes != next.SendBufferBytes)
	diff("versions", n.Versions != next.Versions)
	diff("eids", !slices.Equal(n.EIDs, next.EIDs))
	diff("dialects", n.Dialects != next.Dialects)
	diff("anyPrefix", n.AnyPrefix != next.AnyPrefix)
	diff("dataDir", n.DataDir != next.DataDir)
	diff("apiSocket", n.APISocket != next.APISocket)
	diff("metricsAddress", n.MetricsAddress != next.MetricsAddress)
	return out
}
