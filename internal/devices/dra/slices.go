// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// DriverName is the driver's name in the API, and the domain of its attributes.
const DriverName = v1alpha1.DRADriver

// Attributes of the driver's domain.
const (
	attrID        = "id"
	attrKind      = "kind"
	attrRDMA      = "rdma"
	attrLinkState = "linkState"
	attrRail      = "rail"
	attrNUMANode  = "numaNode"
	attrPF        = "pf"
	attrVF        = "vf"
	attrDriver    = "driver"
	attrNetDev    = "netdev"
)

// capacityPods is the consumable capacity of a shared device: each claim takes
// one.
const capacityPods = "pods"

// published are the devices of a node as devices of the API.
type published struct {
	devices []resourceapi.Device
	// ids has the device for each name that was published.
	ids map[string]inventory.Device
}

// translate makes the API's devices of those of an inventory. With slots, a shared device becomes
// MaxSharers devices, else one with a consumable capacity.
func translate(list []inventory.Device, slots bool) published {
	p := published{ids: map[string]inventory.Device{}}
	left := maxSlots
	for _, d := range list {
		if d.State == vf.StateVFIO || d.State == vf.StateUnbound {
			continue // a pod could not use the device
		}
		name := deviceName(d.ID)
		for n := 0; p.has(name); n++ {
			name = deviceName(fmt.Sprintf("%s#%d", d.ID, n))
		}
		attrs := attributes(d)
		switch {
		case !d.Shared():
			p.add(name, d, resourceapi.Device{Attributes: attrs})
		case !slots:
			one := resource.MustParse("1")
			p.add(name, d, resourceapi.Device{
				Attributes: attrs, AllowMultipleAllocations: new(true),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{capacityPods: {
					Value:         *resource.NewQuantity(MaxSharers, resource.DecimalSI),
					RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &one, ValidValues: []resource.Quantity{one}},
				}},
			})
		default:
			for n := range min(MaxSharers, left) {
				p.add(fmt.Sprintf("%s%s%02d", name, slotInfix, n), d, resourceapi.Device{Attributes: attrs})
			}
			left -= min(MaxSharers, left)
		}
	}
	return p
}

// slotInfix is in the names of slots: soft0-slot-07.
const slotInfix = "-slot-"

func isSlot(d resourceapi.Device) bool { return strings.Contains(d.Name, slotInfix) }

func (p published) has(name string) bool {
	_, ok := p.ids[name]
	return ok
}

func (p *published) add(name string, d inventory.Device, x resourceapi.Device) {
	x.Name = name
	p.devices = append(p.devices, x)
	p.ids[name] = d
}

// resources are the devices as a pool of the node.
func (p published) resources(node string) resourceslice.DriverResources {
	pool := resourceslice.Pool{}
	for chunk := range slices.Chunk(p.devices, sliceDevices) {
		pool.Slices = append(pool.Slices, resourceslice.Slice{Devices: chunk})
	}
	if len(pool.Slices) == 0 {
		pool.Slices = []resourceslice.Slice{{}} // an empty slice says that the node has no devices
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}
}

// attributes are the attributes of a device. Those that Kubernetes defines have its names,
// so that a claim can ask for a device at the same PCIe root as a device of another driver.
func attributes(d inventory.Device) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	out := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}
	text := func(name resourceapi.QualifiedName, value string) {
		if value != "" && len(value) <= maxValueBytes {
			out[name] = resourceapi.DeviceAttribute{StringValue: &value}
		}
	}
	number := func(name resourceapi.QualifiedName, value int) {
		if value >= 0 {
			n := int64(value)
			out[name] = resourceapi.DeviceAttribute{IntValue: &n}
		}
	}
	state := "down"
	if d.Up {
		state = "up"
	}
	text(attrID, d.ID)
	text(attrKind, string(d.Kind))
	text(attrLinkState, state)
	text(attrPF, d.PF)
	text(attrDriver, d.Driver)
	text(attrNetDev, d.NetDev)
	number(attrRail, d.Rail)
	number(attrNUMANode, d.NUMANode)
	number(attrVF, d.VF)
	// The RDMA device of a VF that is in a pod may be in the pod too, where it is not seen.
	rdma := d.Kind == inventory.KindSoftware || len(d.RDMA) > 0 || d.State == vf.StatePod
	out[attrRDMA] = resourceapi.DeviceAttribute{BoolValue: &rdma}
	text(deviceattribute.StandardDeviceAttributePCIBusID, d.PCI)
	text(deviceattribute.StandardDeviceAttributePCIeRoot, d.PCIeRoot)
	return out
}

// deviceName makes a DNS label from an ID. In a PCI address hyphens replace colons and the
// dot. Any other ID that has to be changed or shortened gets a digest of the whole ID at
// the end.
func deviceName(id string) string {
	const most = 40 // of the 63 of a label: room for digest and slot
	if pciAddress(id) {
		return strings.NewReplacer(":", "-", ".", "-").Replace(id)
	}
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, id)
	name = strings.Trim(name[:min(len(name), most)], "-")
	if name == id && name != "" {
		return name
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(id)) // never fails
	return strings.TrimPrefix(fmt.Sprintf("%s-%08x", name, h.Sum32()), "-")
}

// pciAddress says whether an ID is DOMAIN:BUS:DEVICE.FUNCTION.
func pciAddress(id string) bool {
	var domain, bus, device, function uint32
	n, err := fmt.Sscanf(id, "%x:%x:%x.%x", &domain, &bus, &device, &function)
	return err == nil && n == 4 && id == fmt.Sprintf("%04x:%02x:%02x.%x", domain, bus, device, function)
}
