// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SMCRLink is one link group as one of its two sides sees it. The agent of that
// side's node writes it when its state changes; people only read it. It ends
// with the link group, with the node, or when the node's agent is gone.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=smcrl,categories=smcr
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.node`
// +kubebuilder:printcolumn:name="Peer",type=string,JSONPath=`.status.peer`,description="The peer's node, if all links end at its devices, else an address"
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.status.pod`
// +kubebuilder:printcolumn:name="Peer-Pod",type=string,JSONPath=`.status.peerPod`,description="The pod at the other side, if it is one of the cluster"
// +kubebuilder:printcolumn:name="Datapath",type=string,JSONPath=`.status.datapath`,description="Agent, or Kernel: one of the node's kernel, for all of its pods"
// +kubebuilder:printcolumn:name="Role",type=string,JSONPath=`.status.role`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Redundancy",type=string,JSONPath=`.status.redundancy`
// +kubebuilder:printcolumn:name="Conns",type=integer,JSONPath=`.status.connections`
// +kubebuilder:printcolumn:name="Counted",type=date,JSONPath=`.status.countedAt`,description="How long ago the connections were counted"
// +kubebuilder:printcolumn:name="Device",type=string,JSONPath=`.status.devices`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.status.openedAt`
// +kubebuilder:printcolumn:name="Peer-Claims",type=string,JSONPath=`.status.peerClaimedName`,priority=1,description="What the peer calls itself; nobody checked it"
// +kubebuilder:printcolumn:name="RMB-Bytes",type=integer,JSONPath=`.status.rmbBytes`,priority=1
// +kubebuilder:printcolumn:name="PCI",type=string,JSONPath=`.status.pciAddresses`,priority=1,description="The VFs that the pod has for itself"
// +kubebuilder:printcolumn:name="GIDs",type=string,JSONPath=`.status.gids`,priority=1
// +kubebuilder:printcolumn:name="QPNs",type=string,JSONPath=`.status.qpns`,priority=1
// +kubebuilder:printcolumn:name="MTU",type=integer,JSONPath=`.status.mtuBytes`,priority=1
// +kubebuilder:printcolumn:name="Version",type=integer,JSONPath=`.status.version`,priority=1
// +kubebuilder:printcolumn:name="Last-Error",type=string,JSONPath=`.status.lastError`,priority=1
type SMCRLink struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// status is the link group.
	// +optional
	Status SMCRLinkStatus `json:"status,omitzero"`
}

// SMCRLinkList is a list of link groups.
//
// +kubebuilder:object:root=true
type SMCRLinkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SMCRLink `json:"items"`
}

// LinkState is the state of a link group, or of one link.
// +kubebuilder:validation:Enum=Establishing;Active;Down
type LinkState string

// Link states.
const (
	LinkEstablishing LinkState = "Establishing" // first contact or ADD LINK goes on
	LinkActive       LinkState = "Active"       // carries connections, or can
	LinkDown         LinkState = "Down"         // lost
)

// Redundancy is which RNICs a link group can lose.
// +kubebuilder:validation:Enum=None;Single;Symmetric;Asymmetric
type Redundancy string

// Redundancies.
const (
	RedundancyNone       Redundancy = "None"       // no link
	RedundancySingle     Redundancy = "Single"     // cannot lose an RNIC
	RedundancySymmetric  Redundancy = "Symmetric"  // can lose any one RNIC
	RedundancyAsymmetric Redundancy = "Asymmetric" // can lose an RNIC of one side only
)

// SMCRLinkStatus describes a link group.
type SMCRLinkStatus struct {
	// node is the node of this side.
	// +required
	Node string `json:"node"`
	// peer is the other side: the name of a node if all links end at addresses of
	// that node's SMCRNode; else the address at which the first link ends. It is
	// never what the peer says of itself.
	// +optional
	Peer string `json:"peer,omitempty"`
	// peerPod is NAMESPACE/NAME of the pod at the other side, or NAMESPACE/* as in
	// pod, if that is a pod of the cluster. The controller writes it, when it has
	// found the SMCRLink of the other side, which has the same GIDs and queue pair
	// numbers the other way round.
	// +optional
	PeerPod string `json:"peerPod,omitempty"`
	// peerClaimedName is what the peer calls itself (SMC-R version 2): a host name
	// that nobody checked. Any peer can call itself by the name of any node.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9._?-]*$`
	PeerClaimedName string `json:"peerClaimedName,omitempty"`
	// namespace is the namespace of the pod or pods whose connections the link
	// group carries.
	// +optional
	Namespace string `json:"namespace,omitempty"`
	// pod is the pod whose connections the link group carries, as shop/redis-0, or
	// shop/* if the pods of the namespace shop share the link group.
	// +optional
	Pod string `json:"pod,omitempty"`
	// datapath is what runs the link group: Agent, or Kernel, the SMC-R of the node's
	// kernel. Its link groups are the node's, for all pods that are on it and for other
	// programs, so they have no pod; when they were made and their queue pairs are not
	// known.
	// +optional
	// +kubebuilder:validation:Enum=Agent;Kernel
	Datapath string `json:"datapath,omitempty"`
	// policy is the SMCRPolicy from which the settings of the pod come. Empty: no
	// policy selects the pod, and the agents' settings hold.
	// +optional
	Policy string `json:"policy,omitempty"`
	// role is the role of this side in the link group: Client made the TCP
	// connection with which the link group began, Server took it.
	// +optional
	// +kubebuilder:validation:Enum=Client;Server
	Role string `json:"role,omitempty"`
	// state is the state of the link group.
	// +optional
	State LinkState `json:"state,omitempty"`
	// redundancy is which RNICs the link group can lose: Symmetric any one of both
	// sides, Asymmetric one of one side only, Single none. None: no link is left.
	// +optional
	Redundancy Redundancy `json:"redundancy,omitempty"`
	// connections is how many connections the link group carried at countedAt. That
	// is written on changes of the state, and now and then.
	// +optional
	Connections int32 `json:"connections"`
	// rmbBytes is the size of the RMBs, the receive memory, of this side in bytes.
	// +optional
	RMBBytes int64 `json:"rmbBytes"`
	// countedAt is when connections and rmbBytes were so.
	// +optional
	CountedAt metav1.Time `json:"countedAt,omitzero"`
	// devices are the RDMA devices of this side, as mlx5_0,mlx5_1.
	// +optional
	Devices string `json:"devices,omitempty"`
	// pciAddresses are the PCI addresses of the VFs, or other functions, that the
	// pod has for itself and that carry the links, as 0000:3b:10.2,0000:3b:10.3.
	// +optional
	PCIAddresses string `json:"pciAddresses,omitempty"`
	// version is the version of SMC-R, 1 or 2.
	// +optional
	Version int32 `json:"version,omitempty"`
	// eid is the enterprise ID that both sides have in common (version 2).
	// +optional
	EID string `json:"eid,omitempty"`
	// gids are the addresses between which each link runs, as LOCAL-PEER:
	// 192.0.2.1-192.0.2.2,198.51.100.1-198.51.100.2.
	// +optional
	GIDs string `json:"gids,omitempty"`
	// qpns are the queue pair numbers of each link, as LOCAL-PEER: 291-877,292-880.
	// +optional
	QPNs string `json:"qpns,omitempty"`
	// mtuBytes is the smallest path MTU of the links: the most data in one RDMA
	// packet, 256 to 4096 bytes.
	// +optional
	MTUBytes int32 `json:"mtuBytes,omitempty"`
	// openedAt is when the link group was made, in whole seconds.
	// +optional
	OpenedAt metav1.Time `json:"openedAt,omitzero"`
	// lastError is the last thing that went wrong with the link group.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	LastError string `json:"lastError,omitempty"`
	// links are the links of the group, at most 8.
	// +optional
	// +listType=map
	// +listMapKey=id
	// +kubebuilder:validation:MaxItems=8
	Links []LinkStatus `json:"links,omitempty"`
	// conditions are Ready and Redundant.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// LinkStatus describes one link: a queue pair at each side.
type LinkStatus struct {
	// id is the link number within the group.
	// +required
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=255
	ID int32 `json:"id"`
	// state is the state of the link.
	// +required
	State LinkState `json:"state"`
	// device is the name of the RDMA device of this side.
	// +optional
	Device string `json:"device,omitempty"`
	// pci is the PCI address of the device if the pod has the device for itself, as
	// 0000:3b:10.2.
	// +optional
	PCI string `json:"pci,omitempty"`
	// localGID is the address of the RNIC port of this side, a GID: an IPv6
	// address, or an IPv4 address in its usual form.
	// +optional
	LocalGID string `json:"localGID,omitempty"`
	// peerGID is the address of the RNIC port of the other side, in the same form.
	// +optional
	PeerGID string `json:"peerGID,omitempty"`
	// localQPN is the queue pair number of this side.
	// +optional
	LocalQPN int64 `json:"localQPN,omitempty"`
	// peerQPN is the queue pair number of the other side.
	// +optional
	PeerQPN int64 `json:"peerQPN,omitempty"`
	// mtuBytes is the path MTU of the link: the most data in one RDMA packet, 256
	// to 4096 bytes.
	// +optional
	MTUBytes int32 `json:"mtuBytes,omitempty"`
}
