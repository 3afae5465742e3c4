// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// deviceInfo describes the node's devices as they are now.
func (a *agent) deviceInfo() []agentapi.Device {
	out := []agentapi.Device{}
	for _, d := range a.rnics.Node().States() {
		x := d.Info()
		if d.Open != nil && !d.Config.Soft() {
			x.OtherAddresses = a.otherAddresses(&x)
		}
		out = append(out, x)
	}
	return out
}

// otherAddresses are the other IPv4 addresses of a device's interface in the host's network. They
// are asked of the interface: the device's own table has the addresses of macvlans of pods, too,
// whose interfaces may have the same name.
func (a *agent) otherAddresses(d *agentapi.Device) (others []string) {
	if d.Interface == "" {
		return nil
	}
	all, err := a.cfg.host.addresses(d.Interface)
	if err != nil {
		return nil // the interface is gone, which the port says
	}
	slices.SortFunc(all, netip.Addr.Compare)
	for _, addr := range slices.Compact(all) {
		if s := addr.String(); s != d.Address && addr.IsGlobalUnicast() {
			others = append(others, s)
		}
	}
	return others
}

// hostDevices caches what the host has for pods, for hostEvery or longer: the API server is told several
// times a second. Looks take 1/hostShare of the time at most, but there is one every hostMost.
type hostDevices struct {
	mu    sync.Mutex // guards what is below
	found []vf.Device
	err   error
	next  time.Time // when the next look is due
}

func (h *hostDevices) list(look func() ([]vf.Device, error), now time.Time) ([]vf.Device, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !now.Before(h.next) {
		start := time.Now()
		h.found, h.err = look()
		h.next = now.Add(min(max(hostEvery, hostShare*time.Since(start)), hostMost))
	}
	return h.found, h.err
}

// Devices are the devices that pods can have for themselves.
func (v View) Devices() agentapi.Devices {
	a := v.a
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
		if p := pods[key]; p.set.Own() {
			for _, d := range p.set.States() {
				addUse(all, podOf(p.atts[0]).String(), &d)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(all)) {
		out.Devices = append(out.Devices, *all[id])
	}
	return out
}

// addUse enters in the list that a pod uses a device.
func addUse(all map[string]*agentapi.PodDevice, pod string, d *rnics.State) {
	o := d.Own
	x := all[o.ID]
	if x == nil {
		x = &agentapi.PodDevice{ID: o.ID, PCI: o.PCI, PF: o.PF, VF: o.VF, Interface: o.NetDev, RDMA: o.RDMA, NUMANode: o.NUMA, Rail: o.Rail}
		all[o.ID] = x
	}
	if !slices.Contains(x.Pods, pod) && len(x.Pods) < maxShownPods {
		x.Pods = append(x.Pods, pod)
	}
	used := d.Info()
	x.Used, x.Mode, x.State = &used, cmp.Or(x.Mode, o.Mode), agentapi.DevicePod
	if used.Missing != "" {
		x.State = agentapi.DeviceMissing
	}
	if x.Interface = cmp.Or(x.Interface, used.Interface); len(x.RDMA) == 0 && d.Open != nil {
		x.RDMA = []string{d.Open.Name()}
	}
}
