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
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.agentVersion`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Accelerating")].reason`,priority=1
// +kubebuilder:printcolumn:name="CNI",type=string,JSONPath=`.status.conditions[?(@.type=="CNIInstalled")].reason`,priority=1
// +kubebuilder:printcolumn:name="Wire",type=string,JSONPath=`.status.wire.state`,priority=1,description="Who may send RoCE packets to the devices, as far as the kernel sees them"
// +kubebuilder:printcolumn:name="Kernel",type=string,JSONPath=`.status.kernel`,priority=1
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
	// agentVersion is the version of the agent.
	// +optional
	AgentVersion string `json:"agentVersion,omitempty"`
	// agentPod is NAMESPACE/NAME of the agent's pod.
	// +optional
	AgentPod string `json:"agentPod,omitempty"`
	// agentStartedAt is when the agent started.
	// +optional
	AgentStartedAt metav1.Time `json:"agentStartedAt,omitzero"`
	// kernel is the release of the node's kernel.
	// +optional
	Kernel string `json:"kernel,omitempty"`
	// transport is the kind of the node's RDMA devices.
	// +optional
	Transport Transport `json:"transport,omitempty"`
	// deviceSummary is how many devices have their port up, of how many: 1/2.
	// +optional
	DeviceSummary string `json:"deviceSummary,omitempty"`
	// devices are the RDMA devices that carry links.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	Devices []NodeDevice `json:"devices,omitempty"`
	// podDeviceSummary is how many of the devices that pods can have for
	// themselves they have: 3/8.
	// +optional
	PodDeviceSummary string `json:"podDeviceSummary,omitempty"`
	// podDevices are the devices that pods can have for themselves: VFs, and other
	// RDMA devices. smcrctl devices on the node lists all if there are more.
	// +optional
	// +listType=map
	// +listMapKey=id
	// +kubebuilder:validation:MaxItems=256
	PodDevices []NodePodDevice `json:"podDevices,omitempty"`
	// capabilities are what preflight found out about the node.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Capabilities []NodeCapability `json:"capabilities,omitempty"`
	// wire says who may send RoCE packets to the devices.
	// +optional
	Wire NodeWire `json:"wire,omitzero"`
	// budget is of all pods of the node together.
	// +optional
	Budget NodeBudget `json:"budget,omitzero"`
	// pods counts the attached pods.
	// +optional
	Pods NodePods `json:"pods"`
	// linkGroups is the number of link groups.
	// +optional
	LinkGroups int32 `json:"linkGroups"`
	// conditions are Ready, Accelerating, DevicesHealthy, CNIInstalled, AgentAlive
	// and Uninstalled.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// NodeDevice is an RDMA device.
type NodeDevice struct {
	// name is the device's name.
	// +required
	Name string `json:"name"`
	// transport is its kind.
	// +optional
	Transport Transport `json:"transport,omitempty"`
	// address is its IP address. The other nodes take RoCE packets of it.
	// +optional
	Address string `json:"address,omitempty"`
	// interface is its network interface.
	// +optional
	Interface string `json:"interface,omitempty"`
	// port is the state of its port; Missing means that the whole device is not
	// there.
	// +optional
	// +kubebuilder:validation:Enum=Active;Down;Missing
	Port string `json:"port,omitempty"`
	// mtuBytes is its path MTU.
	// +optional
	MTUBytes int32 `json:"mtuBytes,omitempty"`
	// detail says why it is missing, or which GID it uses and why.
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
	// id is the PCI address of a VF or another function, the name of the network
	// interface of what is not PCI, or the name of a software device.
	// +required
	ID string `json:"id"`
	// state tells whether a pod has it, and its port if none has.
	// +optional
	State PodDeviceState `json:"state,omitempty"`
	// pod is NAMESPACE/NAME of the pod that has it, or how many pods do.
	// +optional
	Pod string `json:"pod,omitempty"`
	// pf is the network interface of the physical function.
	// +optional
	PF string `json:"pf,omitempty"`
	// vf is the number of the VF at its physical function.
	// +optional
	VF *int32 `json:"vf,omitempty"`
	// numaNode is the memory that the device is near to.
	// +optional
	NUMANode *int32 `json:"numaNode,omitempty"`
	// rail is the number of its part of the fabric: devices of one rail reach
	// each other best.
	// +optional
	Rail *int32 `json:"rail,omitempty"`
	// interface is its network interface, on the host or in the pod.
	// +optional
	Interface string `json:"interface,omitempty"`
	// rdma are the names of its RDMA devices, with commas between.
	// +optional
	RDMA string `json:"rdma,omitempty"`
	// address is the one that the pod's links have at it.
	// +optional
	Address string `json:"address,omitempty"`
	// detail says why it cannot be used, or which GID it uses and why.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
}

// NodeCapability is one thing that the node can or cannot do.
type NodeCapability struct {
	// name is what was looked at.
	// +required
	Name string `json:"name"`
	// state tells whether it is there. Missing things that are only nice to have
	// are Degraded.
	// +required
	// +kubebuilder:validation:Enum=Available;Degraded;Missing
	State string `json:"state"`
	// detail says what was found, what it means and what to do.
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
	// state says who may send; left out: the node has no device on the host.
	// +optional
	State WireState `json:"state,omitempty"`
	// detail says why it is so, or what the filter lacks.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Detail string `json:"detail,omitempty"`
	// droppedPackets counts packets of others since the agent started. smcrctl
	// status on the node counts them by reason.
	// +optional
	DroppedPackets int64 `json:"droppedPackets,omitempty"`
}

// NodeBudget is a budget and what is used of it, when this was written.
type NodeBudget struct {
	// memoryBytes is registered memory.
	// +optional
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// memoryUsedBytes is what is used of it.
	// +optional
	MemoryUsedBytes int64 `json:"memoryUsedBytes"`
	// connections is how many connections may be on SMC-R.
	// +optional
	Connections int32 `json:"connections,omitempty"`
	// connectionsUsed is how many are.
	// +optional
	ConnectionsUsed int32 `json:"connectionsUsed"`
}

// NodePods counts pods.
type NodePods struct {
	// attached is how many pods of the node the plugin recorded.
	// +optional
	Attached int32 `json:"attached"`
	// ready is how many of them may use SMC-R.
	// +optional
	Ready int32 `json:"ready"`
	// failed is how many could not be set up.
	// +optional
	Failed int32 `json:"failed"`
}
