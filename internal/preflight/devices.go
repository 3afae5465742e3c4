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

// Inventory is what a node has for hardware verbs.
type Inventory struct {
	APIVersion string `json:"apiVersion"`
	// Verbs says whether the agent's program has hardware verbs.
	Verbs Verbs `json:"verbs"`
	// Devices are the RDMA devices of the kernel.
	Devices []RDMADevice `json:"devices"`
	// Agent are the devices that the agent was told to use, software ones too;
	// nil if it does not run.
	Agent []agentapi.Device `json:"agent,omitempty"`
	// ForPods are those that pods can have for themselves; nil if the agent does
	// not run.
	ForPods []agentapi.PodDevice `json:"forPods,omitempty"`
}

// Verbs says whether a program has hardware verbs.
type Verbs struct {
	Built  bool   `json:"built"`
	Detail string `json:"detail"`
	// Unknown is set if the agent's program is not there to be looked at.
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

// RDMAPort is one of its ports.
type RDMAPort struct {
	Number    int     `json:"number"`
	State     string  `json:"state"` // as the kernel says it
	PhysState string  `json:"physicalState,omitempty"`
	LinkLayer string  `json:"linkLayer,omitempty"`
	Interface string  `json:"interface,omitempty"`
	RateGbps  float64 `json:"rateGbps,omitempty"`
	MTU       int     `json:"mtu,omitempty"` // largest path MTU that fits the interface, in bytes
	GIDs      []GID   `json:"gids"`
	// Choice is the GID that the agent takes if it is not told, and Why. Without
	// one, Why says what is missing.
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

// TakeInventory looks at the kernel's RDMA devices, without opening one.
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
		switch g, why, err := verbs.ChooseGID(p.GIDs, verbs.GIDWish{}); {
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

// sentence is a port in one line.
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

// rdma lists the kernel's RDMA devices. None is no failure: the software
// device needs none.
func (m Machine) rdma() Check {
	c := Check{Name: nameRDMA, Result: OK}
	inv, err := TakeInventory(m)
	switch {
	case err != nil:
		c.Result, c.Detail = Warn, err.Error()
		return c
	case len(inv.Devices) == 0:
		c.Result, c.Detail = Warn, "none"
		c.Advice = "use the software device (soft in node.devices), or install the RNIC's driver and check rdma link"
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
	if !active {
		c.Result, c.Advice = Warn, "no RoCE port is active with an address: bring its network interface up and give it one"
	}
	return c
}

// hardware says whether the agent could use the devices of the kernel, if there
// are any: its program, the device files, and memory that may be locked.
func (m Machine) hardware() Check {
	c := Check{Name: nameVerbs, Result: OK}
	infos, err := m.devices()
	v := m.verbs()
	if err != nil || len(infos) == 0 {
		c.Detail = "not needed: there is no RDMA device"
		return c
	}
	c.Detail = v.Detail
	if !v.Built && !v.Unknown {
		c.Result, c.Advice = Warn, verbs.ErrNotBuilt.Error()
		return c
	}
	if !m.inAgent {
		return c // what its container may do is not what this process may
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

// verbsHere is about the agent's program: this one, or the one beside it.
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

// VerbsOf is what a running agent says about its program.
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
