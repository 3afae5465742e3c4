// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"cmp"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

// Inventory is what smcrctl devices shows: the RDMA devices of a node, and who uses them.
type Inventory struct {
	APIVersion string `json:"apiVersion"`
	// Verbs says whether the agent's program has hardware verbs.
	Verbs Verbs `json:"verbs"`
	// Devices are the RDMA devices of the kernel.
	Devices []RDMADevice `json:"devices"`
	// Agent are the devices that the agent is configured to use, software devices too;
	// nil if the agent does not run.
	Agent []agentapi.Device `json:"agent,omitempty"`
	// ForPods are the devices that pods can have; nil if the agent does not run.
	ForPods []agentapi.PodDevice `json:"forPods,omitempty"`
	// Problem is why devices may be missing from ForPods, or why the agent did not answer.
	Problem string `json:"problem,omitempty"`
}

// Verbs says whether a program has hardware verbs.
type Verbs struct {
	Built  bool   `json:"built"`
	Detail string `json:"detail"`
	// Unknown is set if the agent's program cannot be found.
	Unknown bool `json:"unknown,omitempty"`
}

// RDMADevice is an RDMA device of the kernel.
type RDMADevice struct {
	Name     string     `json:"name"`
	Driver   string     `json:"driver,omitempty"`
	NodeType string     `json:"nodeType,omitempty"` // ca, or rnic: iWARP
	Firmware string     `json:"firmware,omitempty"`
	PCI      string     `json:"pci,omitempty"`
	NUMANode int        `json:"numaNode"` // -1: none
	Ports    []RDMAPort `json:"ports"`
}

// RDMAPort is a port of an RDMA device.
type RDMAPort struct {
	Number    int     `json:"number"`
	State     string  `json:"state"` // as the kernel says it
	PhysState string  `json:"physicalState,omitempty"`
	LinkLayer string  `json:"linkLayer,omitempty"`
	Interface string  `json:"interface,omitempty"`
	RateGbps  float64 `json:"rateGbps,omitempty"`
	MTU       int     `json:"mtu,omitempty"` // largest path MTU that fits the interface, in bytes
	GIDs      []GID   `json:"gids"`
	// Choice is the GID that the agent uses if the configuration names none, and Why the
	// reason. If there is no such GID, Why says what is missing.
	Choice *GID   `json:"choice,omitempty"`
	Why    string `json:"why"`
}

// GID is a row of a port's GID table.
type GID struct {
	Index     int    `json:"index"`
	Address   string `json:"address"`
	Type      string `json:"type"`
	Interface string `json:"interface,omitempty"`
}

// TakeInventory lists the kernel's RDMA devices. It opens none.
func TakeInventory(m Machine) (Inventory, error) {
	inv := Inventory{APIVersion: agentapi.Version, Verbs: m.verbs(), Devices: []RDMADevice{}}
	infos, err := m.devices()
	for i := range infos {
		inv.Devices = append(inv.Devices, describe(&infos[i]))
	}
	return inv, err
}

func describe(i *verbs.Info) RDMADevice {
	d := RDMADevice{
		Name: i.Name, Driver: i.Driver, NodeType: i.NodeType, Firmware: i.Firmware, PCI: i.PCI, NUMANode: i.NUMANode, Ports: []RDMAPort{},
	}
	for _, p := range i.Ports {
		port := RDMAPort{
			Number: p.Num, State: p.State, PhysState: p.PhysState, LinkLayer: p.LinkLayer, Interface: p.NetDev,
			RateGbps: p.RateGbps, MTU: p.MTU.Bytes(), GIDs: []GID{},
		}
		for _, g := range p.GIDs {
			port.GIDs = append(port.GIDs, gidOf(g))
		}
		switch g, why, err := p.ChooseGID(verbs.GIDWish{}); {
		case i.NodeType == "rnic":
			port.Why = "it is an iWARP device, and SMC-R is for RoCE"
		case p.LinkLayer == "InfiniBand":
			port.Why = "it is an InfiniBand port, and SMC-R is for RoCE"
		case err != nil:
			port.Why = err.Error()
		default:
			c := gidOf(g)
			port.Choice, port.Why = &c, why
		}
		d.Ports = append(d.Ports, port)
	}
	return d
}

func gidOf(g rdma.GIDEntry) GID {
	return GID{Index: g.Index, Address: g.GID.Addr().String(), Type: g.Type.String(), Interface: g.NetDev}
}

// sentence describes a port in one line.
func (p *RDMAPort) sentence(d *RDMADevice) string {
	about := []string{fmt.Sprintf("%s port %d: %s", d.Name, p.Number, cmp.Or(p.State, "state not readable"))}
	add := func(format, value string) {
		if value != "" {
			about = append(about, fmt.Sprintf(format, value))
		}
	}
	add("%s", d.Driver)
	add("firmware %s", d.Firmware)
	if d.NUMANode >= 0 {
		about = append(about, fmt.Sprintf("NUMA node %d", d.NUMANode))
	}
	add("on %s", p.Interface)
	return strings.Join(about, ", ") + "; " + p.Why
}

// rdma lists the kernel's RDMA devices. It is no failure if there are none: a software
// device needs none.
func (m Machine) rdma() Check {
	c := Check{Name: nameRDMA, Result: OK}
	inv, err := TakeInventory(m)
	switch {
	case err != nil && !m.hardwareUsed():
		c.Detail = "not needed, and not readable: " + err.Error()
		return c
	case err != nil:
		c.Result, c.Detail = Warn, err.Error()
		return c
	case len(inv.Devices) == 0 && m.use != nil && m.use.Hardware:
		c.Result, c.Detail = Warn, "none, and one is configured"
		c.Advice = "install the RNIC's driver and check rdma link, or use the software device (soft in the setting devices)"
		return c
	case len(inv.Devices) == 0:
		c.Detail = "none: the software device (soft in the setting devices) needs none"
		return c
	}
	var texts []string
	active := false
	for _, d := range inv.Devices {
		for _, p := range d.Ports {
			active = active || p.State == "ACTIVE" && p.Choice != nil
			texts = append(texts, p.sentence(&d))
		}
	}
	c.Detail = strings.Join(texts, "\n")
	if !active && m.hardwareUsed() {
		c.Result, c.Advice = Warn, "no RoCE port is active with an address: bring its network interface up and give it one"
	}
	return c
}

// hardware says whether the agent can use the RDMA devices of the kernel, if there are any:
// whether its program has verbs, the device files can be opened, and enough memory may be
// locked.
func (m Machine) hardware() Check {
	c := Check{Name: nameVerbs, Result: OK}
	infos, err := m.devices()
	v := m.verbs()
	if err != nil || len(infos) == 0 {
		c.Detail = "not needed: there is no RDMA device"
		return c
	}
	if !m.hardwareUsed() {
		c.Detail = "not needed: no RDMA device of the kernel is configured"
		return c
	}
	c.Detail = v.Detail
	if !v.Built && !v.Unknown {
		c.Result, c.Advice = Warn, verbs.ErrNotBuilt.Error()
		return c
	}
	if !m.inAgent {
		return c // this process may have other limits than the agent's container
	}
	if err := m.uverbs(); err != nil {
		c.Result, c.Detail = Warn, err.Error()
		c.Advice = "give the agent's container /dev/infiniband: hardware.enabled in the chart's values, which say how"
		return c
	}
	if limit, ok := m.memlock(); !ok {
		c.Result, c.Detail = Warn, fmt.Sprintf("at most %d bytes may be locked into memory, as registered memory is", limit)
		c.Advice = "give the agent's container the capability IPC_LOCK (hardware.enabled in the chart's values does), or raise LimitMEMLOCK of the container runtime"
	}
	return c
}

// verbsHere says whether the agent's program has verbs: this program, or the one in the
// same directory.
func verbsHere(inAgent bool) Verbs {
	built := verbs.Built
	if !inAgent {
		self, err := os.Executable()
		if err != nil {
			return Verbs{Unknown: true, Detail: "the agent's program is not found: " + err.Error()}
		}
		agent := filepath.Join(filepath.Dir(self), "node-agent")
		info, err := buildinfo.ReadFile(agent)
		if err != nil {
			return Verbs{Unknown: true, Detail: fmt.Sprintf("%s is not there, so it is not known whether the agent has hardware verbs: node-agent --version tells", agent)}
		}
		built = false
		for _, s := range info.Settings {
			built = built || s.Key == "CGO_ENABLED" && s.Value == "1"
		}
	}
	return VerbsOf(agentapi.Status{HardwareVerbs: built})
}

// VerbsOf is what a running agent reports about its program.
func VerbsOf(s agentapi.Status) Verbs {
	if s.HardwareVerbs {
		return Verbs{Built: true, Detail: "the agent has hardware verbs"}
	}
	return Verbs{Detail: "hardware verbs are not in this build of the agent"}
}

// tryUverbs opens a device file as libibverbs does.
func tryUverbs() error {
	files, err := filepath.Glob("/dev/infiniband/uverbs*")
	if err != nil || len(files) == 0 {
		return errors.New("there are no files /dev/infiniband/uverbs*")
	}
	f, err := os.OpenFile(files[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}
