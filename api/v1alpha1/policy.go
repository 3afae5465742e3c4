// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SMCRPolicy says which TCP connections of the opted-in pods of its namespace
// use SMC-R, and how. It holds for both directions: connections that a selected
// pod makes, and connections that are made to it. It never touches a pod that
// is not opted in by the annotation smcr.io/enabled.
//
// Several policies may select one pod. They are ranked by priority (higher
// first), then age (older first), then name. A connection is decided by the
// first policy of the rank whose peers and ports contain it; the settings of the
// whole pod (datapath, buffers, budget, linkRedundancy, transports, isolation,
// versions) come from the first policy of the rank. Only datapath Kernel yields: a
// pod that a policy with mode Required selects is on datapath Agent.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=smcrp,categories=smcr
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.spec.mode`
// +kubebuilder:printcolumn:name="Pods",type=integer,JSONPath=`.status.pods.optedIn`,description="Opted-in pods that the policy selects"
// +kubebuilder:printcolumn:name="Accelerated",type=integer,JSONPath=`.status.pods.accelerated`
// +kubebuilder:printcolumn:name="Fallback",type=integer,JSONPath=`.status.pods.fallback`
// +kubebuilder:printcolumn:name="Refused",type=integer,JSONPath=`.status.pods.refused`,priority=1,description="Opted-in pods whose connections are reset, because SMC-R is required"
// +kubebuilder:printcolumn:name="Links",type=integer,JSONPath=`.status.linkGroups.total`,description="Link groups of the pods"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Redundant",type=string,JSONPath=`.status.conditions[?(@.type=="LinksRedundant")].status`
// +kubebuilder:printcolumn:name="Priority",type=integer,JSONPath=`.spec.priority`,priority=1
// +kubebuilder:printcolumn:name="Datapath",type=string,JSONPath=`.spec.datapath`,priority=1
// +kubebuilder:printcolumn:name="Kernel",type=integer,JSONPath=`.status.pods.kernel`,priority=1,description="Accelerated pods on datapath Kernel"
// +kubebuilder:printcolumn:name="Matched",type=integer,JSONPath=`.status.pods.matched`,priority=1,description="Pods that the policy selects, opted in or not"
// +kubebuilder:printcolumn:name="Peers",type=integer,JSONPath=`.status.peerAddresses`,priority=1,description="Addresses that the peer selectors stand for"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="metadata.name is longer than 63 characters, which is too long for the label smcr.io/policy: shorten it"
type SMCRPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is what the policy wants.
	// +optional
	Spec SMCRPolicySpec `json:"spec,omitzero"`
	// status is what became of the policy. The controller writes it.
	// +optional
	Status SMCRPolicyStatus `json:"status,omitzero"`
}

// SMCRPolicyList is a list of policies.
//
// +kubebuilder:object:root=true
type SMCRPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SMCRPolicy `json:"items"`
}

// SMCRPolicySpec is what a policy wants.
//
// +kubebuilder:validation:XValidation:rule="!has(self.budget) || !has(self.budget.memory) || !has(self.buffers) || !has(self.buffers.rmbe) || !has(self.buffers.send) || !string(self.budget.memory).matches('^[+-]?([0-9]{1,19}([.][0-9]{0,9})?|[.][0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$') || quantity(string(self.budget.memory)).asApproximateFloat() >= 8.0 * (quantity(self.buffers.rmbe).asApproximateFloat() + quantity(self.buffers.send).asApproximateFloat())",fieldPath=".budget.memory",message="budget.memory is less than 8 times buffers.rmbe and buffers.send together, so there is no room for any connection (memory is registered for 8 at a time): raise it, or lower the buffers"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || self.mode != 'Required'",fieldPath=".mode",message="mode Required needs datapath Agent: nobody can refuse a connection that the kernel makes plain TCP"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || self.isolation == 'Node'",fieldPath=".isolation",message="the kernel's link groups are those of the node: set isolation to Node if pods may share them, or use datapath Agent"
// +kubebuilder:validation:XValidation:rule="self.datapath != 'Agent' || self.isolation != 'Node'",fieldPath=".isolation",message="isolation Node is for datapath Kernel and KernelIfAvailable: on datapath Agent pods share less, use Pod or Namespace"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || !has(self.budget)",fieldPath=".budget",message="a budget needs datapath Agent: nothing bounds what a pod makes the kernel's SMC-R take"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || !has(self.versions) || self.versions.size() == 2",fieldPath=".versions",message="the kernel uses version 2 of SMC-R where the peer has it, and else version 1: leave versions out, or use datapath Agent"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || !has(self.transports) || 'Hardware' in self.transports",fieldPath=".transports",message="SoftwareRoCE is the agent's: add Hardware, or use datapath Agent"
// +kubebuilder:validation:XValidation:rule="self.datapath == 'Agent' || self.linkRedundancy != 'Single'",fieldPath=".linkRedundancy",message="the kernel's link groups have two links where they can: linkRedundancy Single needs datapath Agent"
type SMCRPolicySpec struct {
	// podSelector selects pods of the policy's namespace by their labels. Empty
	// or left out: all pods of the namespace. Of the selected pods only those that
	// are opted in are touched, and of those in their node's network only those that
	// datapath Kernel or KernelIfAvailable carries.
	// +optional
	PodSelector LabelSelector `json:"podSelector,omitzero"`

	// priority ranks policies that select the same pod: higher first. Among
	// equals the older one comes first, then the name decides. From -1000 to
	// 1000; default 0.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=-1000
	// +kubebuilder:validation:Maximum=1000
	Priority int32 `json:"priority,omitempty"`

	// mode says what happens to a selected connection that cannot use SMC-R:
	// with Prefer (default) it is plain TCP, with Required it is reset. The
	// reason is in the events of the pod either way.
	// +optional
	// +kubebuilder:default=Prefer
	Mode PolicyMode `json:"mode,omitempty"`

	// datapath says what carries the connections of the pods. Agent (default): the
	// agent of the node. Kernel: the SMC-R of the node's kernel, without a hop; a pod
	// that cannot have it is on plain TCP, and its smcr.io/status says so.
	// KernelIfAvailable: the kernel's where node and pod can have it, else the agent;
	// it is decided when the pod is attached. Pods in their node's network can have
	// these two only, and by their own annotation smcr.io/enabled. Both need isolation Node, and exclude
	// mode Required, budget, and linkRedundancy, transports and versions that the kernel
	// cannot keep.
	// +optional
	// +kubebuilder:default=Agent
	Datapath Datapath `json:"datapath,omitempty"`

	// peers are the other sides of the connections. Left out: the addresses of the
	// agents' setting defaultPeers, by default all private addresses.
	// +optional
	Peers *PolicyPeers `json:"peers,omitempty"`

	// ports are the TCP ports that the server of a connection listens on, whether
	// the selected pod is the server or the client. With port 6379, for example, a
	// pod's connections to any redis are selected, and those to a redis in the pod.
	// Left out: all ports. At most 64.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	Ports []PolicyPort `json:"ports,omitempty"`

	// buffers are the buffers of one connection.
	// +optional
	Buffers *PolicyBuffers `json:"buffers,omitempty"`

	// budget bounds what one pod may use. A connection for which the budget has no
	// room is plain TCP, or is reset if the mode is Required.
	// +optional
	Budget *PolicyBudget `json:"budget,omitempty"`

	// linkRedundancy is how many RNICs the pods' link groups use. Symmetric
	// (default): two where both nodes have two, so that connections outlive the
	// loss of one; the condition LinksRedundant tells whether all link groups have
	// two. Single: one.
	// +optional
	// +kubebuilder:default=Symmetric
	LinkRedundancy LinkRedundancy `json:"linkRedundancy,omitempty"`

	// transports are the kinds of RDMA devices that may carry the connections.
	// Left out: any. The connections of a pod whose node has no device of these
	// kinds are plain TCP, or are reset if the mode is Required.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	Transports []Transport `json:"transports,omitempty"`

	// isolation says who shares an SMC-R stack, with its memory budget and its
	// completion queues. Pod (default): nobody. Namespace: the pods of the policy's
	// namespace on one node. In either case a link group, which has a protection
	// domain of its own, is between two addresses of pods: the memory of one cannot be
	// reached with the keys of another one. Node, which datapath Kernel and
	// KernelIfAvailable need: all pods of the node, and the node itself, may share the
	// kernel's link groups, and who has the keys of one reaches the buffers of all pods on
	// it; on datapath Agent it is then as with Pod.
	// +optional
	// +kubebuilder:default=Pod
	Isolation Isolation `json:"isolation,omitempty"`

	// versions are the versions of SMC-R that may be used. Left out: both, and
	// version 2 is used where the peer has it. Version 1 alone needs peers in the
	// same IP subnet.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=2
	Versions []Version `json:"versions,omitempty"`
}

// PolicyMode says what happens without SMC-R.
// +kubebuilder:validation:Enum=Prefer;Required
type PolicyMode string

// Policy modes.
const (
	ModePrefer   PolicyMode = "Prefer"
	ModeRequired PolicyMode = "Required"
)

// Datapath says what carries the connections of a pod.
// +kubebuilder:validation:Enum=Agent;Kernel;KernelIfAvailable
type Datapath string

// Datapaths.
const (
	DatapathAgent             Datapath = "Agent"
	DatapathKernel            Datapath = "Kernel"
	DatapathKernelIfAvailable Datapath = "KernelIfAvailable"
)

// LinkRedundancy is how many RNICs a link group uses.
// +kubebuilder:validation:Enum=Single;Symmetric
type LinkRedundancy string

// Link redundancies that a policy can want.
const (
	LinksSingle    LinkRedundancy = "Single"
	LinksSymmetric LinkRedundancy = "Symmetric"
)

// Transport is a kind of RDMA device.
// +kubebuilder:validation:Enum=Hardware;SoftwareRoCE
type Transport string

// Transports.
const (
	// TransportHardware is an RDMA device of the kernel.
	TransportHardware Transport = "Hardware"
	// TransportSoftwareRoCE is the agent's own RoCEv2 over UDP.
	TransportSoftwareRoCE Transport = "SoftwareRoCE"
)

// Isolation says who shares an SMC-R stack.
// +kubebuilder:validation:Enum=Pod;Namespace;Node
type Isolation string

// Isolations.
const (
	IsolationPod       Isolation = "Pod"
	IsolationNamespace Isolation = "Namespace"
	IsolationNode      Isolation = "Node"
)

// Version is a version of SMC-R.
// +kubebuilder:validation:Enum=V1;V2
type Version string

// Versions of SMC-R.
const (
	VersionV1 Version = "V1"
	VersionV2 Version = "V2"
)

// PolicyPeers are the other sides of connections: the union of cidrs and
// selectors, without except.
//
// +kubebuilder:validation:XValidation:rule="has(self.cidrs) || has(self.selectors) || has(self.except)",message="peers is empty: leave it out for the default peers, or give cidrs, selectors or except"
// +kubebuilder:validation:XValidation:rule="!has(self.except) || !has(self.cidrs) || has(self.selectors) || self.except.all(e, !isCIDR(e) || self.cidrs.exists(c, isCIDR(c) && cidr(c).containsCIDR(e)))",message="except must lie inside cidrs: remove the entry that does not, or add the network that contains it to cidrs"
type PolicyPeers struct {
	// cidrs are the networks of peers, such as 10.0.0.0/8 or 2001:db8::/64. Left
	// out, without selectors: the agents' setting defaultPeers. At most 64.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	CIDRs []CIDR `json:"cidrs,omitempty"`

	// except are networks that are no peers though they are in cidrs or contain a
	// selected pod. With cidrs 10.0.0.0/8 and except 10.1.0.0/16, for example,
	// 10.1.2.3 is no peer, and 10.2.3.4 is one. They are excepted from this policy only:
	// another one that selects the pod may still have them as peers. At most 64.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Except []CIDR `json:"except,omitempty"`

	// selectors select pods of the cluster. The addresses of these pods are peers,
	// and so are the cluster addresses of Services all of whose pods are selected.
	// Pods in their node's network are not among them: their address is the node's,
	// so name it in cidrs. At most 16.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=16
	Selectors []PeerSelector `json:"selectors,omitempty"`
}

// CIDR is an IP network.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self)",message="not a CIDR: want a network such as 10.0.0.0/8 or 2001:db8::/64; a single address is 10.1.2.3/32"
// +kubebuilder:validation:XValidation:rule="!isCIDR(self) || cidr(self).masked() == cidr(self)",message="the address has bits set behind the prefix length: write the network address, such as 10.0.0.0/8 and not 10.1.2.3/8"
type CIDR string

// PeerSelector selects pods by namespace and label. Both must match.
//
// +kubebuilder:validation:XValidation:rule="has(self.namespaceSelector) || has(self.podSelector)",message="the selector is empty: give namespaceSelector, podSelector or both"
type PeerSelector struct {
	// namespaceSelector selects namespaces by their labels; {} selects all. Left
	// out: the policy's own namespace. A namespace has its name as the label
	// kubernetes.io/metadata.name, so that matchLabels with
	// kubernetes.io/metadata.name: shop selects the namespace shop.
	// +optional
	NamespaceSelector *LabelSelector `json:"namespaceSelector,omitempty"`
	// podSelector selects pods of these namespaces by their labels. Left out or {}:
	// all.
	// +optional
	PodSelector *LabelSelector `json:"podSelector,omitempty"`
}

// PolicyPort is a TCP port, or a range of ports with both its ends.
//
// +kubebuilder:validation:XValidation:rule="!has(self.endPort) || self.endPort >= self.port",message="endPort is less than port: the range runs backwards; swap them"
type PolicyPort struct {
	// port is the port, or the first one of the range: 1 to 65535.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
	// endPort is the last port of the range, at least port: with port 8000 and
	// endPort 8099 the range has 100 ports. Left out: port alone.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	EndPort *int32 `json:"endPort,omitempty"`
}

// BufferSize is the size of a buffer in bytes, a power of two.
//
// +kubebuilder:validation:MaxLength=5
// +kubebuilder:validation:Enum="16Ki";"32Ki";"64Ki";"128Ki";"256Ki";"512Ki"
type BufferSize string

// PolicyBuffers are the buffers of one connection of a pod. Larger buffers carry
// more data at a time to far peers, smaller ones leave memory for more connections.
// With datapath Agent a pod's first 8 connections with a peer have buffers of these
// sizes, the next 8 half as large ones, and further ones a quarter; none is smaller for
// that than 128Ki.
type PolicyBuffers struct {
	// rmbe is the size of the receive buffer in bytes: an element of an RMB, which
	// the peer writes into. Left out: the agents' setting, by default 512Ki.
	// +optional
	RMBE BufferSize `json:"rmbe,omitempty"`
	// send is the size of the send buffer in bytes. Left out: the agents' setting,
	// by default 512Ki.
	// +optional
	Send BufferSize `json:"send,omitempty"`
}

// Rules about memory look at its form before they read it as a quantity: the API server
// calculates with 1e99999999 for longer than any request may take, and with 1e9999999 for
// seconds.

// PolicyBudget bounds one pod. It cannot exceed the agents' setting
// budgets.podMax, by default four times budgets.pod: a larger budget counts as
// budgets.podMax, and the event SMCRBudgetLimited on the pod says so.
//
// +kubebuilder:validation:XValidation:rule="has(self.memory) || has(self.connections)",message="budget is empty: leave it out for the agents' setting, or give memory or connections"
type PolicyBudget struct {
	// memory is how much memory may be registered for RMBs and send buffers, in
	// bytes: at least 1Mi, and if buffers has rmbe and send, at least 8 times both
	// together, as memory is registered for 8 connections at a time. With 512Ki each,
	// for example, that is 8Mi. Left out: the agents' setting, 256Mi
	// by the chart (budgets.pod).
	// +optional
	// +kubebuilder:validation:XValidation:rule="string(self).matches('^[+-]?([0-9]{1,19}([.][0-9]{0,9})?|[.][0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$')",message="not an amount of memory: want bytes, such as 64Mi, 1.5Gi or 1e9, without spaces"
	// +kubebuilder:validation:XValidation:rule="!string(self).matches('^[+-]?([0-9]{1,19}([.][0-9]{0,9})?|[.][0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$') || quantity(string(self)).compareTo(quantity('1Mi')) >= 0",message="memory is less than 1Mi, which is no room for a connection: give at least 8 times buffers.rmbe and buffers.send together"
	Memory *resource.Quantity `json:"memory,omitempty"`
	// connections is how many connections of the pod may be on SMC-R at a time.
	// Left out: the agents' setting, by default 4096.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65536
	Connections *int32 `json:"connections,omitempty"`
}

// SMCRPolicyStatus is what became of a policy.
type SMCRPolicyStatus struct {
	// observedGeneration is the metadata.generation that the policy had when the
	// controller wrote this status. If metadata.generation is higher, the status is
	// about an older spec.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// pods counts the pods that the policy selects.
	// +optional
	Pods PolicyPods `json:"pods,omitzero"`
	// fallbackReasons counts the pods on plain TCP, and those whose connections are
	// reset, by reason code, the most frequent codes first. At most 16.
	// +optional
	// +listType=map
	// +listMapKey=reason
	FallbackReasons []ReasonCount `json:"fallbackReasons,omitempty"`
	// linkGroups counts the link groups of the selected pods.
	// +optional
	LinkGroups LinkGroupCounts `json:"linkGroups,omitzero"`
	// peerAddresses is the number of addresses that peers.selectors select.
	// +optional
	PeerAddresses int32 `json:"peerAddresses"`
	// peersGeneration is the metadata.generation whose peers.selectors are resolved to
	// addresses. While it is another one than metadata.generation, agents keep the
	// form of the policy that was in force before. Of a new policy they keep none on
	// nodes where a pod that it selects ran before, and all but the selected peers on
	// others.
	// +optional
	PeersGeneration *int64 `json:"peersGeneration,omitempty"`
	// conditions are Accepted, Ready, LinksRedundant, Degraded and Conflicting.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PolicyPods counts pods.
type PolicyPods struct {
	// matched is the number of running pods that podSelector selects, of those in
	// their node's network the opted-in ones.
	// +optional
	Matched int32 `json:"matched"`
	// optedIn is how many of the matched pods are opted in.
	// +optional
	OptedIn int32 `json:"optedIn"`
	// accelerated is how many of the opted-in pods may use SMC-R now.
	// +optional
	Accelerated int32 `json:"accelerated"`
	// kernel is how many of the accelerated pods are on datapath Kernel; the others are on datapath
	// Agent.
	// +optional
	Kernel int32 `json:"kernel"`
	// fallback is how many of the opted-in pods are on plain TCP.
	// +optional
	Fallback int32 `json:"fallback"`
	// refused is how many of the opted-in pods have their connections reset, because a policy requires
	// SMC-R and none of them can be on it.
	// +optional
	Refused int32 `json:"refused"`
	// pending is how many of the opted-in pods are not attached yet.
	// +optional
	Pending int32 `json:"pending"`
}

// ReasonCount is a reason code and how many pods have it.
type ReasonCount struct {
	// reason is the code, as PEERNOSMC; docs/operations.md says what each one means
	// and what to do.
	// +required
	Reason string `json:"reason"`
	// pods is how many pods are on plain TCP for this reason.
	// +required
	Pods int32 `json:"pods"`
}

// LinkGroupCounts counts link groups by state and redundancy.
type LinkGroupCounts struct {
	// total is the number of link groups in any state.
	// +optional
	Total int32 `json:"total"`
	// active is how many link groups carry connections or can.
	// +optional
	Active int32 `json:"active"`
	// establishing is how many link groups are being set up.
	// +optional
	Establishing int32 `json:"establishing"`
	// down is how many link groups lost all links.
	// +optional
	Down int32 `json:"down"`
	// symmetric is how many link groups can lose any one RNIC.
	// +optional
	Symmetric int32 `json:"symmetric"`
	// asymmetric is how many link groups can lose an RNIC of one side only.
	// +optional
	Asymmetric int32 `json:"asymmetric"`
	// single is how many link groups cannot lose an RNIC.
	// +optional
	Single int32 `json:"single"`
}
