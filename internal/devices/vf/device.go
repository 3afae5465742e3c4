// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/records"
)

// DefaultDataDir is the directory of the journals. It is on a tmpfs, and so empty after a
// reboot, when the devices are in their original state too.
const DefaultDataDir = "/run/kube-smcr"

// Host is the machine whose devices these are. The zero value is the one that
// the process runs on.
type Host struct {
	// Sys is where sysfs is; "" is /sys.
	Sys string
	// DataDir has the journals; "" is [DefaultDataDir].
	DataDir string
	// NetNS is the path of the host's network namespace, where devices are that no pod
	// has; "" is that of the process.
	NetNS string
	// Rails sets rails by hand. A key is the PCI address or the interface of a PF, or the
	// ID of a device; a device without a key gets its rail from its PF.
	Rails map[string]int

	hooks hooks // of tests
}

// State says where a device is and what it can do.
type State string

// States of a device.
const (
	StateUp      State = "up"      // in the host, its interface has a carrier
	StateDown    State = "down"    // in the host, its interface has no carrier
	StatePod     State = "pod"     // a pod has it: see its Owner
	StateVFIO    State = "vfio"    // bound to vfio: a virtual machine has it
	StateUnbound State = "unbound" // no driver of a network interface is bound to it
)

// Owner is the attachment that has a device. One attachment may have several devices,
// whose interfaces have different names in the pod.
type Owner struct {
	ContainerID string      `json:"containerID"`
	IfName      string      `json:"ifName"`
	Network     string      `json:"network,omitempty"` // name of the CNI network
	Pod         records.Pod `json:"pod"`
	// NetNS is the path of the pod's network namespace and NetNSID its inode.
	NetNS   string `json:"netns"`
	NetNSID uint64 `json:"netnsID"`
}

// Is tells whether o is the given attachment.
func (o Owner) Is(containerID, ifName string) bool {
	return o.ContainerID == containerID && o.IfName == ifName
}

// ReplacedBy tells whether o is an attachment of an earlier sandbox of next's pod. Kubelet makes a new
// sandbox only after it has given up the former one. For that the runtime may never call DEL: for
// example, if the runtime died before it stored that the sandbox exists.
func (o Owner) ReplacedBy(next Owner) bool {
	return o.Pod.UID != "" && o.Pod.UID == next.Pod.UID && o.ContainerID != next.ContainerID
}

// String names the owner for messages.
func (o Owner) String() string {
	s := fmt.Sprintf("interface %s of container %s", o.IfName, o.ContainerID)
	if o.Pod.Name != "" {
		s += fmt.Sprintf(" (pod %s/%s", o.Pod.Namespace, o.Pod.Name)
		if o.Pod.UID != "" { // a later pod may have the same name
			s += ", UID " + o.Pod.UID
		}
		s += ")"
	}
	return s
}

// Device is what a pod can get.
type Device struct {
	// ID is the PCI address, or the host's name of the network interface if
	// the RDMA device is not PCI.
	ID     string `json:"id"`
	PCI    string `json:"pci,omitempty"`
	Driver string `json:"driver,omitempty"`
	// NetDev is the name of the network interface: in the host, or in the pod if the
	// interface moved.
	NetDev string `json:"netdev,omitempty"`
	// PF is the interface of the physical function, PFPCI its PCI address, and
	// VF the number of the device among its VFs, -1 for what is not a VF.
	PF    string `json:"pf,omitempty"`
	PFPCI string `json:"pfPCI,omitempty"`
	VF    int    `json:"vf"`
	// RDMA are the names of its RDMA devices.
	RDMA []string `json:"rdma,omitempty"`
	// SoftRDMA is the kind of an RDMA device that is made of software, "rxe" or
	// "siw".
	SoftRDMA string `json:"softRDMA,omitempty"`
	NUMANode int    `json:"numaNode"` // -1: none
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// Rail is the number of the PF among those of the node, in the order of their PCI
	// addresses; -1: none. Devices of the same rail reach each other best.
	Rail  int    `json:"rail"`
	MAC   string `json:"mac,omitempty"`
	State State  `json:"state"`
	// Owner is the attachment that has the device if State is StatePod. With ModeIPVlan
	// the interface is in the host all the same.
	Owner *Owner `json:"owner,omitempty"`
	Mode  Mode   `json:"mode,omitempty"`
	// PodIfName is the name of the interface that the pod has of the device. It is not
	// Owner's IfName if the attachment made further interfaces besides its own.
	PodIfName string `json:"podIfName,omitempty"`
}

// PF is a physical function that can have VFs.
type PF struct {
	PCI      string   `json:"pci"`
	NetDev   string   `json:"netdev,omitempty"`
	Driver   string   `json:"driver,omitempty"`
	RDMA     []string `json:"rdma,omitempty"`
	VFs      int      `json:"vfs"`
	TotalVFs int      `json:"totalVFs"`
	NUMANode int      `json:"numaNode"`
	PCIeRoot string   `json:"pcieRoot,omitempty"`
	Rail     int      `json:"rail"`
	State    State    `json:"state"`
}

// Decisions about a device; each comes wrapped in what was being done.
var (
	// ErrNotFound means that the node has no such device.
	ErrNotFound = errors.New("no such device on this node")
	// ErrIsPF means that the device is a physical function, which stays in the host for
	// its VFs.
	ErrIsPF = errors.New("device is a physical function")
	// ErrVFIO means that the device is bound to vfio.
	ErrVFIO = errors.New("device is bound to vfio")
	// ErrUnbound means that the device has no network interface.
	ErrUnbound = errors.New("device has no network interface")
	// ErrPFDown means that the physical function is down, and with it its VFs.
	ErrPFDown = errors.New("physical function is down")
	// ErrNameTaken means that the pod has an interface of that name.
	ErrNameTaken = errors.New("interface name is in use in the pod")
	// ErrSetting means that the device, its driver or its PF does not accept a setting.
	ErrSetting = errors.New("device does not take a setting")
	// ErrInUse means that the host itself needs the interface.
	ErrInUse = errors.New("interface is in use by the host")
	// ErrNotReturned means that the kernel has not given the interface back yet:
	// a process keeps the pod's network namespace alive.
	ErrNotReturned = errors.New("interface has not come back from the pod")
)

// BusyError says which attachment has a device.
type BusyError struct {
	Device string
	Owner  Owner
	// IfName is the name of the device's interface in the pod; "": it is Owner's.
	IfName string
}

// Error implements error.
func (e *BusyError) Error() string {
	o := e.Owner
	o.IfName = cmp.Or(e.IfName, o.IfName)
	return fmt.Sprintf("device %s belongs to %s", e.Device, o)
}

// Usable says why a device cannot be given to a pod now: ErrVFIO, ErrUnbound, a
// *BusyError, or nil.
func (d Device) Usable() error {
	switch d.State {
	case StateVFIO:
		return fmt.Errorf("device %s: %w: bind it to the driver of its network interface", d.ID, ErrVFIO)
	case StateUnbound:
		return fmt.Errorf("device %s: %w: bind it to its driver", d.ID, ErrUnbound)
	case StatePod:
		if d.Owner != nil {
			return &BusyError{Device: d.ID, Owner: *d.Owner, IfName: d.PodIfName}
		}
	case StateUp, StateDown:
	}
	return nil
}
