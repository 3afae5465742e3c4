// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// classNetwork is the beginning of the PCI class of a network controller.
const classNetwork = "0x02"

// noRail is the rail of a device that has no PF.
const noRail = -1

// pciAddress is domain:bus:device.function. Some domains have more than four digits.
var pciAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// sysfs reads a tree like /sys. A file that is not there reads as empty, because devices
// appear and disappear while the tree is read.
type sysfs string

func (s sysfs) path(elem ...string) string {
	return filepath.Join(append([]string{string(s)}, elem...)...)
}

// text is the content of an attribute.
func (s sysfs) text(elem ...string) string {
	f, err := os.Open(s.path(elem...))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }() // was only read
	b, err := io.ReadAll(io.LimitReader(f, maxSysfsBytes))
	if err != nil {
		return "" // for example, operstate of an interface that is being removed
	}
	return strings.TrimSpace(string(b))
}

// number is the content of an attribute, or def.
func (s sysfs) number(def int, elem ...string) int {
	if n, err := strconv.Atoi(s.text(elem...)); err == nil {
		return n
	}
	return def
}

// link is the last element of the target of a symbolic link.
func (s sysfs) link(elem ...string) string {
	to, err := os.Readlink(s.path(elem...))
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}

// list are the entries of a directory, sorted.
func (s sysfs) list(elem ...string) []string {
	entries, err := os.ReadDir(s.path(elem...))
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (s sysfs) exists(elem ...string) bool {
	_, err := os.Stat(s.path(elem...))
	return err == nil
}

// Places in the tree.
const (
	busPCI     = "bus/pci/devices"
	classNet   = "class/net"
	classIB    = "class/infiniband"
	fileVFs    = "sriov_numvfs"
	fileMaxVFs = "sriov_totalvfs"
)

// function is the PCI function of a network interface, "" if it has none. A
// virtio interface's device is a child of its PCI function.
func (s sysfs) function(netdev string) string {
	real, err := filepath.EvalSymlinks(s.path(classNet, netdev, "device"))
	if err != nil {
		return ""
	}
	for range 2 {
		if base := filepath.Base(real); pciAddress.MatchString(base) {
			return base
		}
		real = filepath.Dir(real)
	}
	return ""
}

// pcieRoot is the root complex of a function, as in "pci0000:00".
func (s sysfs) pcieRoot(pci string) string {
	real, err := filepath.EvalSymlinks(s.path(busPCI, pci))
	if err != nil {
		return ""
	}
	for elem := range strings.SplitSeq(real, string(filepath.Separator)) {
		if strings.HasPrefix(elem, "pci") && strings.Contains(elem, ":") {
			return elem
		}
	}
	return ""
}

// softRDMA returns the software RDMA devices by their network interface. They have no
// link to a PCI device. An rxe device has a file with the name of the interface; a siw
// device has the name in its GID table. Devices that were moved into a pod are left out.
func (s sysfs) softRDMA(inPods map[string]bool) map[string][]string {
	out := map[string][]string{}
	for _, name := range s.list(classIB) {
		if s.exists(classIB, name, "device") {
			continue
		}
		netdev := s.text(classIB, name, "parent")
		for row := 0; netdev == "" && row < maxGIDRows; row++ {
			netdev = s.text(classIB, name, "ports/1/gid_attrs/ndevs", strconv.Itoa(row))
		}
		// The device may be in another namespace, where netdev names another interface.
		if netdev != "" && s.exists(classNet, netdev) && !inPods[name] && len(out[netdev]) < maxRDMA {
			out[netdev] = append(out[netdev], name)
		}
	}
	return out
}

// inPods are the names of the RDMA devices that moved into pods.
func inPods(journals map[string]*journal) map[string]bool {
	out := map[string]bool{}
	for _, j := range journals {
		if j.Wiring.Mode != ModeMove || !j.Complete {
			continue
		}
		for _, r := range j.Wiring.RDMA {
			out[r.Name] = true
		}
	}
	return out
}

// softKind is the kind of a software device, as rdma link add has it: rxe or siw.
func (s sysfs) softKind(rdma string) string {
	if strings.HasSuffix(s.text(classIB, rdma, "node_type"), "RNIC") {
		return kindSIW
	}
	return kindRXE
}

// netState is StateUp or StateDown, by the carrier of an interface. The operstate of a
// software interface is "unknown", and counts as up.
func (s sysfs) netState(netdev string) State {
	switch s.text(classNet, netdev, "operstate") {
	case "up", "unknown":
		return StateUp
	}
	return StateDown
}

// isPF tells whether a function can have VFs.
func (s sysfs) isPF(pci string) bool { return s.number(0, busPCI, pci, fileMaxVFs) > 0 }

// isVF tells whether a function is one.
func (s sysfs) isVF(pci string) bool { return s.exists(busPCI, pci, "physfn") }

// vfIndex is the number of a VF of pf. It cannot be computed from the PCI address, because
// each device has its own offset and stride.
func (s sysfs) vfIndex(pf, vf string) int {
	for _, name := range s.list(busPCI, pf) {
		if n, ok := strings.CutPrefix(name, "virtfn"); ok && s.link(busPCI, pf, name) == vf {
			if i, err := strconv.Atoi(n); err == nil {
				return i
			}
		}
	}
	return -1
}

func (h Host) sys() sysfs { return sysfs(cmp.Or(h.Sys, "/sys")) }

// PFs lists the physical functions, in the order of their PCI addresses.
func (h Host) PFs() ([]PF, error) {
	s := h.sys()
	functions, err := s.functions()
	if err != nil {
		return nil, err
	}
	var pfs []PF
	for _, pci := range functions {
		if !s.isPF(pci) {
			continue
		}
		pf := PF{
			PCI: pci, Driver: s.link(busPCI, pci, "driver"), RDMA: s.list(busPCI, pci, "infiniband"),
			VFs: s.number(0, busPCI, pci, fileVFs), TotalVFs: s.number(0, busPCI, pci, fileMaxVFs),
			NUMANode: s.number(-1, busPCI, pci, "numa_node"), PCIeRoot: s.pcieRoot(pci),
			Rail: len(pfs), State: StateUnbound,
		}
		if pf.NetDev = s.ownNetDev(pci); pf.NetDev != "" {
			pf.State = s.netState(pf.NetDev)
		}
		pfs = append(pfs, pf)
	}
	for i, pf := range pfs {
		pfs[i].Rail = h.rail(pf.Rail, pf.PCI, pf.NetDev)
	}
	return pfs, nil
}

// rail is the rail that Rails has for one of the names, or def.
func (h Host) rail(def int, names ...string) int {
	for _, n := range names {
		if r, ok := h.Rails[n]; ok && n != "" {
			return r
		}
	}
	return def
}

// functions are the addresses of the network controllers, sorted.
func (s sysfs) functions() ([]string, error) {
	entries, err := os.ReadDir(s.path(busPCI))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a machine without PCI
	}
	if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var out []string
	for _, e := range entries {
		if strings.HasPrefix(s.text(busPCI, e.Name(), "class"), classNetwork) {
			out = append(out, e.Name())
		}
	}
	slices.Sort(out)
	return out, nil
}

// Devices lists the devices that pods can get or have, in the order of their IDs: VFs, PCI
// functions with an RDMA device and without VFs, and interfaces with a software RDMA
// device.
func (h Host) Devices() ([]Device, error) {
	s := h.sys()
	pfs, err := h.PFs()
	if err != nil {
		return nil, err
	}
	functions, err := s.functions()
	if err != nil {
		return nil, err
	}
	journals, err := h.journals()
	if err != nil {
		return nil, err
	}
	soft := s.softRDMA(inPods(journals))
	var out []Device
	add := func(d Device) {
		if j, ok := journals[d.ID]; ok {
			d = j.device(d)
			delete(journals, d.ID)
		}
		out = append(out, d)
	}
	for _, pci := range functions {
		if s.isVF(pci) || !s.isPF(pci) && s.exists(busPCI, pci, "infiniband") {
			add(h.function(pci, pfs, soft))
		}
	}
	for netdev := range soft {
		if pci, ok := s.softDevice(netdev); ok {
			add(h.interfaceDevice(netdev, pci, soft[netdev]))
		}
	}
	for _, j := range journals {
		if j.Wiring.Device.PCI == "" { // its interface is in the pod, not in the host
			out = append(out, j.device(j.Wiring.Device))
		}
	}
	slices.SortFunc(out, func(a, b Device) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// Glance returns a text that differs if an RDMA device or the state of a port changed, or if a pod got or
// gave back a device. It costs a small part of what Devices costs.
func (h Host) Glance() string {
	s := h.sys()
	var b strings.Builder
	if dir, err := os.Stat(h.dir()); err == nil { // each write of a journal puts a new file there
		fmt.Fprintln(&b, dir.ModTime().UnixNano())
	}
	for _, device := range s.list(classIB) {
		for _, port := range s.list(classIB, device, "ports") {
			fmt.Fprintln(&b, device, port, s.text(classIB, device, "ports", port, "state"))
		}
	}
	return b.String()
}

// softDevice tells whether an interface with a software RDMA device can be a device of its own (ok), and
// which PCI function it belongs to, "" if to none. The interface of a VF is no device of its own, as the
// VF is listed; nor is that of a PF with VFs, which stays in the host. An interface that is not in the
// host does not count: it has just moved into a pod, and may be that of a VF.
func (s sysfs) softDevice(netdev string) (pci string, ok bool) {
	if pci = s.function(netdev); pci == "" {
		return "", s.exists(classNet, netdev)
	}
	return pci, !s.isVF(pci) && s.number(0, busPCI, pci, fileVFs) == 0 && !s.exists(busPCI, pci, "infiniband")
}

// function describes a PCI function.
func (h Host) function(pci string, pfs []PF, soft map[string][]string) Device {
	s := h.sys()
	d := Device{
		ID: pci, PCI: pci, Driver: s.link(busPCI, pci, "driver"), VF: -1, Rail: noRail,
		RDMA:     s.list(busPCI, pci, "infiniband"),
		NUMANode: s.number(-1, busPCI, pci, "numa_node"), PCIeRoot: s.pcieRoot(pci), State: StateUnbound,
	}
	if pf := s.link(busPCI, pci, "physfn"); pf != "" {
		d.PFPCI, d.VF = pf, s.vfIndex(pf, pci)
		if i := slices.IndexFunc(pfs, func(p PF) bool { return p.PCI == pf }); i >= 0 {
			d.PF, d.Rail = pfs[i].NetDev, pfs[i].Rail
		}
	}
	d.Rail = h.rail(d.Rail, d.ID)
	if d.NetDev = s.ownNetDev(pci); d.NetDev != "" {
		d.MAC, d.State = s.text(classNet, d.NetDev, "address"), s.netState(d.NetDev)
		if of := soft[d.NetDev]; len(d.RDMA) == 0 && len(of) > 0 {
			d.RDMA, d.SoftRDMA = of, s.softKind(of[0])
		}
	}
	if strings.HasPrefix(d.Driver, "vfio") {
		d.State = StateVFIO
	}
	return d
}

// interfaceDevice describes an interface with software RDMA devices.
func (h Host) interfaceDevice(netdev, pci string, rdma []string) Device {
	s := h.sys()
	return Device{
		ID: netdev, NetDev: netdev, RDMA: rdma, SoftRDMA: s.softKind(rdma[0]), VF: -1,
		Driver:   s.link(classNet, netdev, "device/driver"),
		NUMANode: s.number(-1, classNet, netdev, "device/numa_node"), PCIeRoot: s.pcieRoot(cmp.Or(pci, "-")),
		Rail: h.rail(noRail, netdev), MAC: s.text(classNet, netdev, "address"), State: s.netState(netdev),
	}
}

// Device looks for one device. The error is ErrNotFound, or ErrIsPF. [Device.Usable] says
// whether a pod can have it.
func (h Host) Device(id string) (Device, error) {
	if err := checkID(id); err != nil {
		return Device{}, err
	}
	s := h.sys()
	if !pciAddress.MatchString(id) {
		return h.interfaceByID(id)
	}
	switch {
	case !s.exists(busPCI, id):
		return Device{}, fmt.Errorf("device %s: %w: no PCI function has this address", id, ErrNotFound)
	case s.isPF(id):
		return Device{}, fmt.Errorf("device %s: %w: name one of its VFs; echo their number into %s to make some",
			id, ErrIsPF, s.path(busPCI, id, fileVFs))
	case !strings.HasPrefix(s.text(busPCI, id, "class"), classNetwork):
		return Device{}, fmt.Errorf("device %s: %w: it is not a network controller", id, ErrNotFound)
	}
	pfs, err := h.PFs()
	if err != nil {
		return Device{}, err
	}
	journals, err := h.journals()
	if err != nil {
		return Device{}, err
	}
	return h.withOwner(h.function(id, pfs, s.softRDMA(inPods(journals))))
}

// interfaceByID looks for an interface with a software RDMA device.
func (h Host) interfaceByID(id string) (Device, error) {
	s := h.sys()
	journals, err := h.journals()
	if err != nil {
		return Device{}, err
	}
	rdma := s.softRDMA(inPods(journals))[id]
	pci, soft := s.softDevice(id)
	switch {
	case len(rdma) > 0 && soft:
		return h.withOwner(h.interfaceDevice(id, pci, rdma))
	case pci != "" && s.isVF(pci), pci != "" && s.exists(busPCI, pci, "infiniband") && !s.isPF(pci):
		return Device{}, fmt.Errorf("device %s: %w: it is the interface of %s, which is its ID", id, ErrNotFound, pci)
	case pci != "" && s.isPF(pci) && s.number(0, busPCI, pci, fileVFs) > 0:
		return Device{}, fmt.Errorf("device %s: %w with VFs: name one of them", id, ErrIsPF)
	}
	j, err := h.readJournal(id)
	switch {
	case err == nil:
		return j.device(j.Wiring.Device), nil
	case !errors.Is(err, fs.ErrNotExist):
		return Device{}, err
	case s.exists(classNet, id):
		return Device{}, fmt.Errorf("device %s: %w: the interface has no RDMA device: rdma link add rxe_%s type rxe netdev %s", id, ErrNotFound, id, id)
	}
	return Device{}, fmt.Errorf("device %s: %w: it is neither a PCI address nor an interface of the host", id, ErrNotFound)
}

// withOwner adds the owner of the device, if it has one.
func (h Host) withOwner(d Device) (Device, error) {
	j, err := h.readJournal(d.ID)
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err != nil {
		return Device{}, err
	}
	return j.device(d), nil
}
