// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Names of the resources.
const (
	ResourceShared = "smcr.io/roce"
	ResourceVF     = "smcr.io/roce_vf"
)

// Device is an RDMA device of the node.
type Device struct {
	// ID is the PCI address of a VF, the name of the network interface of another RDMA
	// device of the kernel, or the name of a software device.
	ID string
	// VF says that the device is a VF, which only one pod at a time can have.
	VF bool
	// Why is why the device cannot be given to pods now; "" if it can.
	Why string
	// NUMANode is the device's NUMA node, -1 without one. Rail is the number of its rail.
	NUMANode, Rail int
	// PF is the PCI address of the VF's physical function, and RDMA the name of the RDMA
	// device; "" if there is none.
	PF, RDMA string
}

// slotID is kubelet's ID for a slot of a shared device.
func slotID(device string, slot int) string { return device + "/" + strconv.Itoa(slot) }

// DeviceID is the device of one of kubelet's IDs: the ID without its slot.
func DeviceID(id string) string {
	device, _, _ := strings.Cut(id, "/")
	return device
}

// offer are the devices of one resource that kubelet is told of. It translates kubelet's
// IDs into devices. Nobody changes it.
type offer struct {
	devices []Device // in the order of rails and IDs
	slots   int      // of each device; 0: the devices are not shared
}

// newOffer picks the devices of a resource.
func newOffer(all []Device, vf bool, slots int) offer {
	o := offer{slots: slots}
	if vf {
		o.slots = 0
	}
	for i := range all {
		if all[i].VF == vf && len(o.devices) < maxDevices {
			o.devices = append(o.devices, all[i])
		}
	}
	slices.SortStableFunc(o.devices, byRail)
	o.devices = slices.CompactFunc(o.devices, func(a, b Device) bool { return a.ID == b.ID })
	return o
}

func byRail(a, b Device) int { return cmp.Or(cmp.Compare(a.Rail, b.Rail), cmp.Compare(a.ID, b.ID)) }

func (o offer) equal(p offer) bool { return o.slots == p.slots && slices.Equal(o.devices, p.devices) }

// list is the offer in kubelet's terms.
func (o offer) list() *pluginapi.ListAndWatchResponse {
	out := &pluginapi.ListAndWatchResponse{}
	for i := range o.devices {
		d := &o.devices[i]
		health := pluginapi.Healthy
		if d.Why != "" {
			health = pluginapi.Unhealthy
		}
		var topology *pluginapi.TopologyInfo
		if d.NUMANode >= 0 {
			topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(d.NUMANode)}}}
		}
		add := func(id string) {
			out.Devices = append(out.Devices, &pluginapi.Device{ID: id, Health: health, Topology: topology})
		}
		if o.slots == 0 {
			add(d.ID)
		}
		for s := range o.slots {
			add(slotID(d.ID, s))
		}
	}
	return out
}

// find returns the device of one of kubelet's IDs.
func (o offer) find(id string) (Device, error) {
	device, slot, isSlot := strings.Cut(id, "/")
	i := slices.IndexFunc(o.devices, func(d Device) bool { return d.ID == device })
	n, err := strconv.Atoi(slot)
	switch {
	case len(id) > maxIDLen:
		return Device{}, fmt.Errorf("the name of the device has %d bytes", len(id))
	case i < 0:
		return Device{}, fmt.Errorf("device %q is not on this node any more", device)
	case isSlot != (o.slots > 0) || isSlot && (err != nil || n < 0 || n >= o.slots):
		return Device{}, fmt.Errorf("device %q has no slot %q", device, slot)
	}
	return o.devices[i], nil
}
