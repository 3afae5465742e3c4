// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Info describes an RDMA device of the kernel.
type Info struct {
	Name     string
	Driver   string // as in "mlx5_core", "bnxt_re" or "rxe"; "" if nothing tells
	NodeType string // "ca": InfiniBand or RoCE; "rnic": iWARP
	NodeGUID string
	Firmware string
	PCI      string // address of its function, "" for a software device
	NUMANode int    // of the function, or of the network interface below it; -1: none
	Ports    []PortInfo
}

// PortInfo describes a port.
type PortInfo struct {
	Num       int
	State     string // as in "ACTIVE"
	PhysState string // as in "LinkUp"
	LinkLayer string // "Ethernet" or "InfiniBand"
	RateGbps  float64
	NetDev    string // the interface of the first GID
	NetDevMTU int    // in bytes, 0: unknown
	// MTU is the path MTU that fits NetDevMTU, 0: unknown.
	MTU  rdma.MTU
	GIDs []rdma.GIDEntry
	// Elsewhere are the Index of GIDs whose network interfaces are in other network
	// namespaces. Of these the kernel tells the names that they have there.
	Elsewhere []int
}

// ChooseGID is [ChooseGID] for the port: it knows which of its GIDs are of other
// network namespaces.
func (p *PortInfo) ChooseGID(want GIDWish) (rdma.GIDEntry, string, error) {
	table := slices.Clone(p.GIDs)
	for i := range table {
		if slices.Contains(p.Elsewhere, table[i].Index) {
			table[i].NetDev = ""
		}
	}
	return ChooseGID(table, want)
}

// Devices returns the RDMA devices of the kernel, by name. It reads sysfs: it
// needs neither cgo nor rights, and does not open them.
func Devices() ([]Info, error) {
	return hostSysfs().devices()
}

func hostSysfs() sysfs { return sysfs{root: os.DirFS("/sys"), net: lookUpNet} }

// sysfs is where devices are looked for.
type sysfs struct {
	root fs.FS
	net  func(name string) Interface
}

// text returns a file's only line, "" if it cannot be read.
func (s sysfs) text(parts ...string) string {
	b, err := fs.ReadFile(s.root, path.Join(parts...))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// value is text without the number in front of it, as in "4: ACTIVE".
func (s sysfs) value(parts ...string) string {
	t := s.text(parts...)
	if _, v, ok := strings.Cut(t, ": "); ok {
		return v
	}
	return t
}

// link returns the last element of what a symbolic link names, "" without one.
func (s sysfs) link(parts ...string) string {
	to, err := fs.ReadLink(s.root, path.Join(parts...))
	if err != nil {
		return ""
	}
	return path.Base(to)
}

const classInfiniband = "class/infiniband"

func (s sysfs) devices() ([]Info, error) {
	entries, err := fs.ReadDir(s.root, classInfiniband)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil // no RDMA in this kernel, or its modules are not loaded
	case err != nil:
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	var out []Info
	for _, e := range entries {
		out = append(out, s.device(e.Name()))
	}
	slices.SortFunc(out, func(a, b Info) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

func (s sysfs) device(name string) Info {
	dir := path.Join(classInfiniband, name)
	i := Info{
		Name:     name,
		NodeType: strings.ToLower(s.value(dir, "node_type")),
		NodeGUID: s.text(dir, "node_guid"),
		Firmware: s.text(dir, "fw_ver"),
		PCI:      s.link(dir, "device"),
		Driver:   s.driver(name),
		NUMANode: -1,
	}
	parent := s.parent(name)
	ports, err := fs.ReadDir(s.root, path.Join(dir, "ports"))
	if err != nil {
		ports = nil // it is just being removed
	}
	for _, p := range ports {
		if n, err := strconv.Atoi(p.Name()); err == nil && len(i.Ports) < maxPorts {
			i.Ports = append(i.Ports, s.port(dir, n, parent))
		}
	}
	slices.SortFunc(i.Ports, func(a, b PortInfo) int { return cmp.Compare(a.Num, b.Num) })
	node := s.text(dir, "device", "numa_node")
	if node == "" && len(i.Ports) > 0 && i.Ports[0].NetDev != "" {
		node = s.text("class/net", i.Ports[0].NetDev, "device", "numa_node")
	}
	if n, err := strconv.Atoi(node); err == nil {
		i.NUMANode = n
	}
	return i
}

// parent is the network interface of a soft RoCE device; no other has the file.
func (s sysfs) parent(name string) string { return s.text(classInfiniband, name, "parent") }

// driver is the name of a device's driver. Software devices have no link to
// one.
func (s sysfs) driver(name string) string {
	dir := path.Join(classInfiniband, name)
	switch d := s.link(dir, "device", "driver"); {
	case d != "":
		return d
	case s.parent(name) != "":
		return "rxe"
	case s.value(dir, "node_type") == "RNIC":
		return "siw"
	}
	return ""
}

const classVerbs = "class/infiniband_verbs"

// node is the name of a device's node, as in "uverbs0"; "" if it has none. The error says that it cannot be known now, for want of
// descriptors or memory.
func (s sysfs) node(device string) (string, error) {
	all, err := fs.ReadDir(s.root, classVerbs)
	if isShort(err) {
		return "", err
	}
	var unread error
	for _, e := range all {
		b, err := fs.ReadFile(s.root, path.Join(classVerbs, e.Name(), "ibdev"))
		switch {
		case err == nil && strings.TrimSpace(string(b)) == device:
			return e.Name(), nil
		case isShort(err):
			unread = err
		}
	}
	return "", unread
}

func (s sysfs) port(device string, num int, parent string) PortInfo {
	dir := path.Join(device, "ports", strconv.Itoa(num))
	p := PortInfo{
		Num:       num,
		State:     s.value(dir, "state"),
		PhysState: s.value(dir, "phys_state"),
		LinkLayer: s.text(dir, "link_layer"),
		NetDev:    parent,
	}
	p.GIDs, p.Elsewhere = s.gids(dir)
	rate, _, _ := strings.Cut(s.text(dir, "rate"), " ")
	if f, err := strconv.ParseFloat(rate, 64); err == nil {
		p.RateGbps = f
	}
	for _, g := range p.GIDs {
		p.NetDev = cmp.Or(p.NetDev, g.NetDev)
	}
	if n, err := strconv.Atoi(s.text("class/net", p.NetDev, "mtu")); err == nil && p.NetDev != "" {
		p.NetDevMTU, p.MTU = n, pathMTU(n)
	}
	return p
}

// gids reads a port's GID table, and which rows are of other network namespaces.
func (s sysfs) gids(port string) (out []rdma.GIDEntry, elsewhere []int) {
	nets := map[string]Interface{}
	for row, empty := 0, 0; row <= maxGIDIndex && empty < gidGap; row++ {
		n := strconv.Itoa(row)
		a, err := netip.ParseAddr(s.text(port, "gids", n))
		if err != nil || a.IsUnspecified() {
			empty++
			continue
		}
		empty = 0
		g := rdma.GIDEntry{Index: row, GID: rdma.GIDFromAddr(a), NetDev: s.text(port, "gid_attrs/ndevs", n)}
		switch s.text(port, "gid_attrs/types", n) {
		case "RoCE v2":
			g.Type = rdma.GIDTypeRoCEv2
		case "IB/RoCE v1", "RoCE v1":
			g.Type = rdma.GIDTypeRoCEv1
		}
		if !describeGID(&g, nets, s.net) {
			elsewhere = append(elsewhere, row)
		}
		out = append(out, g)
	}
	return out, elsewhere
}

// pathMTU returns the largest path MTU whose packets fit an interface MTU, with
// the longest headers that RoCE v2 can have, as the kernel counts them.
func pathMTU(bytes int) rdma.MTU {
	const headers = 40 + 8 + 12 + 4 + 28 + 4 // GRH or IP, UDP, BTH, XRCETH, AtomicETH, ICRC
	m := rdma.MTU4096
	for m > rdma.MTU256 && m.Bytes()+headers > bytes {
		m--
	}
	return m
}

// describeGID fills in what the network interface of a GID, which it names,
// tells, and reports whether the GID can be of that interface. Of each interface known
// keeps what lookUp said.
func describeGID(g *rdma.GIDEntry, known map[string]Interface, lookUp func(string) Interface) (here bool) {
	if g.NetDev == "" {
		return true
	}
	n, ok := known[g.NetDev]
	if !ok {
		n = lookUp(g.NetDev)
		known[g.NetDev] = n
	}
	n.describe(g)
	return n.Name != "" && n.has(*g)
}
