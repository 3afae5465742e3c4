// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// deviceInfo describes the node's devices as they are now.
func (a *agent) deviceInfo() []agentapi.Device {
	out := []agentapi.Device{}
	for _, d := range a.devices.now(nil) {
		out = append(out, d.info())
	}
	return out
}

func (d *deviceNow) info() agentapi.Device {
	x := agentapi.Device{Name: d.name, Provider: "verbs", Port: rdma.PortDown.String(), Since: d.since}
	if d.cfg.Soft() {
		x.Provider, x.Interface = "soft", d.cfg.Interface
		if d.cfg.SoftAddress.IsValid() {
			x.Address = d.cfg.SoftAddress.String()
		}
	} else if d.cfg.GIDAddress.IsValid() {
		x.Address = d.cfg.GIDAddress.String()
	}
	if d.err != nil {
		x.Missing = d.err.Error()
	}
	if d.open == nil {
		return x
	}
	port, table := d.open.Port(), d.open.GIDs()
	x.Provider, x.MTU, x.Port = d.open.Attr().Provider, port.ActiveMTU.Bytes(), port.State.String()
	if !d.cfg.Soft() {
		x.Address = cmp.Or(deviceAddress(d.open), x.Address)
	}
	x.Interface = "" // the one that has the address
	for _, g := range table {
		x.Interface = cmp.Or(x.Interface, g.NetDev)
	}
	if c, ok := d.open.(interface{ GIDChoice() string }); ok {
		x.Choice = c.GIDChoice()
	}
	return x
}

// pciOf is the PCI address of a device of a set; "" if it has none, or is the
// node's.
func (ds *devices) pciOf(set *deviceSet, name string) string {
	if set == nil {
		return ""
	}
	for _, d := range ds.now(set) {
		if d.open != nil && d.open.Name() == name {
			return d.own.pci
		}
	}
	return ""
}

// hostDevices is what the host has for pods, as of a moment ago: the API server
// is told several times a second.
type hostDevices struct {
	mu    sync.Mutex // guards what is below
	found []vf.Device
	err   error
	at    time.Time
}

func (h *hostDevices) list(look func() ([]vf.Device, error), now time.Time) ([]vf.Device, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at.IsZero() || now.Sub(h.at) >= hostEvery {
		h.found, h.err = look()
		h.at = now
	}
	return h.found, h.err
}

func (a *agent) apiDevices(*http.Request) (agentapi.Devices, error) {
	out := agentapi.Devices{APIVersion: agentapi.Version, Devices: []agentapi.PodDevice{}}
	found, err := a.host.list(a.cfg.hostDevices, time.Now())
	if err != nil {
		out.Problem = err.Error()
	}
	all := map[string]*agentapi.PodDevice{}
	for _, d := range found {
		x := agentapi.PodDevice{
			ID: d.ID, PCI: d.PCI, PF: d.PF, VF: d.VF, Interface: d.NetDev, RDMA: d.RDMA, MAC: d.MAC, NUMANode: d.NUMANode, Rail: d.Rail,
			State: string(d.State), Mode: string(d.Mode),
		}
		if d.Owner != nil && d.Owner.Pod.Name != "" {
			x.Pods = []string{d.Owner.Pod.Namespace + "/" + d.Owner.Pod.Name}
		}
		all[d.ID] = &x
	}
	pods := a.manager.snapshot()
	for _, key := range slices.Sorted(maps.Keys(pods)) {
		if p := pods[key]; p.set != nil {
			for _, d := range a.devices.now(p.set) {
				addUse(all, podOf(p.atts[0]).String(), &d)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		out.Devices = append(out.Devices, *all[id])
	}
	return out, nil
}

// addUse adds to the list that a pod has a device.
func addUse(all map[string]*agentapi.PodDevice, pod string, d *deviceNow) {
	o := d.own
	x := all[o.id]
	if x == nil {
		x = &agentapi.PodDevice{ID: o.id, PCI: o.pci, PF: o.pf, VF: o.vf, Interface: o.netdev, RDMA: o.rdma, NUMANode: o.numa, Rail: o.rail}
		all[o.id] = x
	}
	if !slices.Contains(x.Pods, pod) && len(x.Pods) < maxShownPods {
		x.Pods = append(x.Pods, pod)
	}
	used := d.info()
	x.Used, x.Mode, x.State = &used, cmp.Or(x.Mode, o.mode), agentapi.DevicePod
	if used.Missing != "" {
		x.State = agentapi.DeviceMissing
	}
	if x.Interface = cmp.Or(x.Interface, used.Interface); len(x.RDMA) == 0 && d.open != nil {
		x.RDMA = []string{d.open.Name()}
	}
}
