// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SMCRNode is what a node can do for SMC-R, and how it is. It has the name of
// the node. Its agent writes it; people only read it.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=smcrn,categories=smcr
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Accelerating",type=string,JSONPath=`.status.conditions[?(@.type=="Accelerating")].status`
// +kubebuilder:printcolumn:name="Transport",type=string,JSONPath=`.status.transport`
// +kubebuilder:printcolumn:name="Devices",type=string,JSONPath=`.status.deviceSummary`,description="Devices with their port up, of all"
// +kubebuilder:printcolumn:name="Pod-Devices",type=string,JSONPath=`.status.podDeviceSummary`,priority=1,description="Devices that pods have for themselves, of all they can have"
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods.ready`,description="Pods whose connections may use SMC-R"
// +kubebuilder:printcolumn:name="Links",type=integer,JSONPath=`.status.linkGroups`
// +kubebuilder:printcolumn:name="Counted",type=date,JSONPath=`.status.countedAt`,description="How long ago pods and links were counted"
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.agentVersion`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Accelerating")].reason`,priority=1
// +kubebuilder:printcolumn:name="CNI",type=string,JSONPath=`.status.conditions[?(@.type=="CNIInstalled")].reason`,priority=1
// +kubebuilder:printcolumn:name="Wire",type=string,JSONPath=`.status.wire.state`,priority=1,description="Who may send RoCE packets to the devices, as far as the kernel sees them"
// +kubebuilder:printcolumn:name="Kernel",type=string,JSONPath=`.status.kernel`,priority=1
// +kubebuilder:printcolumn:name="Kernel-Path",type=string,JSONPath=`.status.capabilities[?(@.name=="kernelPath")].state`,priority=1,description="Whether pods can have datapath Kernel"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SMCRNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// status is the node.
	// +optional
	Status SMCRNodeStatus `json:"status,omitzero"`
}

// SMCRNodeList is a list of nodes.
//
// +kubebuilder:object:root=true
type SMCRNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SMCRNode `json:"items"`
}

// SMCRNodeStatus describes a node.
type SMCRNodeStatus struct {
	// agentVersion is the version of the agent that manages the node, as v0.3.0.
	// +optional
	AgentVersion string `json:"agentVersion,omitempty"`
	// agentPod is the agent's pod, as kube-smcr/kube-smcr-agent-x7k2p.
	// +optional
	AgentPod string `json:"agentPod,omitempty"`
	// agentStartedAt is when the agent started, in whole seconds.
	// +optional
	AgentStartedAt metav1.Time `json:"agentStartedAt,omitzero"`
	// kernel is the release of the node's kernel, as 6.12.9-amd64.
	// +optional
	Kernel string `json:"kernel,omitempty"`
	// transport is the kind of the node's RDMA devices.
	// +optional
	Transport Transport `json:"transport,omitempty"`
	// deviceSummary is how many of the devices have their port up: 1/2 is one of
	// two.
	// +optional
	DeviceSummary string `json:"deviceSummary,omitempty"`
	// devices are the RDMA devices that carry the links of pods without devices of
	// their own.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Devices []NodeDevice `json:"devices,omitempty"`
	// podDeviceSummary is how many of the devices that pods can have for themselves
	// are with pods: 3/8 is three of eight.
	// +optional
	PodDeviceSummary string `json:"podDeviceSummary,omitempty"`
	// podDevices are the devices that pods can have for themselves: VFs, and other
	// RDMA devices. At most 256; smcrctl devices in the agent's pod lists all.
	// +optional
	// +listType=map
	// +listMapKey=id
	// +kubebuilder:validation:MaxItems=256
	PodDevices []NodePodDevice `json:"podDevices,omitempty"`
	// capabilities are what the agent found that the node can and cannot do; the
	// same as from smcrctl preflight.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Capabilities []NodeCapability `json:"capabilities,omitempty"`
	// wire says who may send RoCE packets to the devices.
	// +optional
	Wire NodeWire `json:"wire,omitzero"`
	// budget is the budget of all pods of the node together, and what they use of
	// it.
	// +optional
	Budget NodeBudget `json:"budget,omitzero"`
	// pods counts the attached pods.
	// +optional
	Pods NodePods `json:"pods"`
	// linkGroups is the number of link groups of the node's pods.
	// +optional
	LinkGroups int32 `json:"linkGroups"`
	// countedAt is when the counters were so: pods, linkGroups, what is used of
	// budget, and wire.droppedPackets. They are written with changes of the state,
	// and now and then.
	// +optional
	CountedAt metav1.Time `json:"countedAt,omitzero"`
	// conditions are Ready, Accelerating, DevicesHealthy, CNIInstalled,
	// MetricsServed, AgentAlive and Uninstalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// NodeDevice is an RDMA device.
type NodeDevice struct {
	// name is the name of the device: that of the kernel's RDMA device, as mlx5_0,
	// or soft0, soft1 and so on of software devices.
	// +required
	Name string `json:"name"`
	// transport is the kind of the device.
	// +optional
	Transport Transport `json:"transport,omitempty"`
	// address is the IP address of the device. The other nodes take RoCE packets
	// from this address.
	// +optional
	Address string `json:"address,omitempty"`
	// otherAddresses are the other IPv4 addresses of the interface of an RDMA device
	// of the kernel, at most 16. The SMC-R of the node's own kernel, for programs
	// outside of pods, sends from any of them, and the other nodes take RoCE packets
	// from these, too.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=15
	OtherAddresses []string `json:"otherAddresses,omitempty"`
	// interface is the network interface of the device, as eth1.
	// +optional
	Interface string `json:"interface,omitempty"`
	// port is the state of the device's port; Missing means that the whole device
	// is not there.
	// +optional
	// +kubebuilder:validation:Enum=Active;Down;Missing
	Port string `json:"port,omitempty"`
	// mtuBytes is the path MTU of the device: the most data in one RDMA packet, 256
	// to 4096 bytes.
	// +optional
	MTUBytes int32 `json:"mtuBytes,omitempty"`
	// detail says why the device is missing, or which GID the agent uses of it and
	// why.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
}

// PodDeviceState says where a device that pods can have is.
// +kubebuilder:validation:Enum=Up;Down;Pod;Missing;VFIO;Unbound
type PodDeviceState string

// States of a device that pods can have.
const (
	PodDeviceUp      PodDeviceState = "Up"      // free, with a carrier
	PodDeviceDown    PodDeviceState = "Down"    // free, without one
	PodDeviceInPod   PodDeviceState = "Pod"     // a pod has it
	PodDeviceMissing PodDeviceState = "Missing" // a pod has it, and it cannot be used
	PodDeviceVFIO    PodDeviceState = "VFIO"    // a virtual machine has it
	PodDeviceUnbound PodDeviceState = "Unbound" // no driver has it
)

// NodePodDevice is a device that a pod can have for itself, or share with the
// other pods that asked for it.
type NodePodDevice struct {
	// id is the PCI address of a VF or another function, as 0000:3b:10.2; for a
	// device that is not PCI the name of its network interface, as eth1; for a
	// software device its name, as soft0.
	// +required
	ID string `json:"id"`
	// state is Pod if a pod has the device, and Missing if the pod cannot use it
	// though; Up or Down, by its carrier, if it is free; VFIO if a virtual machine
	// has it; Unbound if no driver has.
	// +optional
	State PodDeviceState `json:"state,omitempty"`
	// pod is the pod that has the device, as shop/redis-0, or how many pods share
	// it, as 3 pods.
	// +optional
	Pod string `json:"pod,omitempty"`
	// pf is the network interface of the VF's physical function, as ens1f0.
	// +optional
	PF string `json:"pf,omitempty"`
	// vf is the number of the VF at its physical function, from 0.
	// +optional
	VF *int32 `json:"vf,omitempty"`
	// numaNode is the number of the NUMA node that the device is near to, from 0.
	// +optional
	NUMANode *int32 `json:"numaNode,omitempty"`
	// rail is the number of the device's part of the fabric, from 0: devices of one
	// rail, on whichever nodes, reach each other best.
	// +optional
	Rail *int32 `json:"rail,omitempty"`
	// interface is the network interface of the device: on the host, as ens1f0v2,
	// or in the pod, as net1.
	// +optional
	Interface string `json:"interface,omitempty"`
	// rdma are the names of the RDMA devices of this device, as mlx5_2,mlx5_3.
	// +optional
	RDMA string `json:"rdma,omitempty"`
	// address is the IP address that the pod's links have at the device.
	// +optional
	Address string `json:"address,omitempty"`
	// detail says why the device cannot be used, or which GID the agent uses of it
	// and why.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
}

// NodeCapability is one thing that the node can or cannot do.
type NodeCapability struct {
	// name is what was looked at, as nftables or RDMA devices.
	// +required
	Name string `json:"name"`
	// state tells whether the capability is there. Degraded: it is not, and the
	// agent runs with less. Missing: it is not, and the agent cannot do its work.
	// Unavailable: it is not, and only pods whose policy asks for it go without.
	// detail says what that means.
	// +required
	// +kubebuilder:validation:Enum=Available;Degraded;Missing;Unavailable
	State string `json:"state"`
	// reason is a word for the first thing that is missing, of a capability that has
	// such words: kernelPath, as NoSMC.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// detail says what was found, what that means and what to do.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
}

// WireState says who may send RoCE packets to the devices of a node.
// +kubebuilder:validation:Enum=Filtered;Open;Pending;Failed
type WireState string

// States of a node's wire.
const (
	WireFiltered WireState = "Filtered" // devices of the cluster's nodes and configured peers
	WireOpen     WireState = "Open"     // everybody, as configured
	WirePending  WireState = "Pending"  // the other nodes are not known yet
	WireFailed   WireState = "Failed"   // not as wanted
)

// NodeWire is the filter of RoCE packets. It holds for devices whose packets the
// kernel sees: software ones, and those of drivers like rxe.
type NodeWire struct {
	// state says who may send RoCE packets to the node's devices: Filtered the
	// devices of the cluster's nodes and the configured peers, Open everybody.
	// Pending: the other nodes are not known yet. Failed: the filter is not as
	// wanted, see detail. Left out: the node has no device whose packets the kernel
	// sees.
	// +optional
	State WireState `json:"state,omitempty"`
	// detail says why the state is what it is, or what the filter lacks.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
	// droppedPackets counts the RoCE packets that the filter dropped since the agent
	// started. kubectl smcr status counts them by reason.
	// +optional
	DroppedPackets int64 `json:"droppedPackets"`
}

// NodeBudget is the budget of a node's pods, and what was used of it when the
// object was written.
type NodeBudget struct {
	// memoryBytes is how much memory may be registered for RDMA, in bytes.
	// +optional
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// memoryUsedBytes is how much memory is registered for RDMA, in bytes.
	// +optional
	MemoryUsedBytes int64 `json:"memoryUsedBytes"`
	// connections is how many connections may be on SMC-R at a time.
	// +optional
	Connections int32 `json:"connections,omitempty"`
	// connectionsUsed is how many connections are on SMC-R.
	// +optional
	ConnectionsUsed int32 `json:"connectionsUsed"`
	// roomConnections is how many connections on SMC-R the budgets have room for in
	// all, with the buffers as configured: of memory, sockets and connections the one
	// that ends first decides.
	// +optional
	RoomConnections int32 `json:"roomConnections,omitempty"`
	// roomPeers is with how many peers, pods or other addresses, the node's pods can
	// have one connection on SMC-R each: the first one with a peer takes more memory.
	// +optional
	RoomPeers int32 `json:"roomPeers,omitempty"`
}

// NodePods counts pods.
type NodePods struct {
	// attached is how many pods of the node are attached to the agent.
	// +optional
	Attached int32 `json:"attached"`
	// ready is how many of the attached pods may use SMC-R.
	// +optional
	Ready int32 `json:"ready"`
	// failed is how many of the attached pods could not be set up.
	// +optional
	Failed int32 `json:"failed"`
}
