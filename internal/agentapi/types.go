// SPDX-License-Identifier: Apache-2.0

package agentapi

import (
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Version is the apiVersion of all documents of this package.
const Version = "smcr.io/agent/v1"

// Paths of the API.
const (
	PathStatus      = "/v1/status"
	PathLinks       = "/v1/links"
	PathConns       = "/v1/conns"
	PathExplain     = "/v1/explain"
	PathAttachments = "/v1/attachments"
	PathDevices     = "/v1/devices"
	PathSync        = "/v1/attachments/sync"
	PathHandover    = "/v1/handover"
	PathMetrics     = "/metrics"
)

// InstanceEnv is the environment variable that names the agent's instance: the
// pod's name, in every container of that pod.
const InstanceEnv = "POD_NAME"

// Problem is the body of an error answer.
type Problem struct {
	APIVersion string `json:"apiVersion"`
	Error      string `json:"error"`
}

// Status is the answer of /v1/status.
type Status struct {
	APIVersion string `json:"apiVersion"`
	Node       string `json:"node"`
	Version    string `json:"version"`
	// Instance tells agents of one node apart: in Kubernetes the pod's name.
	Instance string    `json:"instance,omitempty"`
	Started  time.Time `json:"started"`
	// Synced is true once the agent has looked at all attachment records.
	Synced bool `json:"synced"`
	// Takeover is true if another agent may take over from this one.
	Takeover bool `json:"takeover,omitempty"`
	// Accelerating is false while nothing can be on SMC-R; Problems says why.
	Accelerating bool     `json:"accelerating"`
	Problems     []string `json:"problems,omitempty"`
	// Unable is why no connection can be on SMC-R on this node, and UnableCode its reason
	// code; both are empty if connections can.
	Unable     string `json:"unable,omitempty"`
	UnableCode Code   `json:"unableCode,omitempty"`
	Draining   bool   `json:"draining,omitempty"`
	// HardwareVerbs says whether the agent's program can use RDMA devices of the
	// kernel.
	HardwareVerbs bool     `json:"hardwareVerbs"`
	Devices       []Device `json:"devices"`
	Policies      []string `json:"policies"`
	Pods          PodCount `json:"pods"`
	Conns         ConnSums `json:"conns"`
	LinkGroups    int      `json:"linkGroups"`
	Wire          Wire     `json:"wire"`
	// NodeBudget is the budget of all pods together.
	NodeBudget Budget `json:"nodeBudget"`
	// FewFiles says what part of the configured budget the node does not have, because
	// the agent may not open enough files; "" if it has all.
	FewFiles string `json:"fewFiles,omitempty"`
	// Metrics says whether metrics are to be served on an address of the node, and NoMetrics
	// why they are not; "" if they are.
	Metrics   bool   `json:"metrics,omitempty"`
	NoMetrics string `json:"noMetrics,omitempty"`
	// Cluster is what the agent has of its cluster; nil if it is in none.
	Cluster *Cluster `json:"cluster,omitempty"`
	// Reasons counts the connections since the start that were not on SMC-R,
	// by reason code.
	Reasons map[Code]uint64 `json:"reasons"`
}

// Cluster is what an agent has of its cluster.
type Cluster struct {
	// Joined is true once the agent had all that it does its work by from the API server, and
	// the API server had the agent's SMCRNode. It stays true whatever the API server does:
	// the agent goes on with what it has.
	Joined bool `json:"joined"`
	// Lacks is what is missing for that, and why; "" if Joined.
	Lacks string `json:"lacks,omitempty"`
	// Away is why the API server is not reached, "" if it is, and AwaySince since when.
	Away      string    `json:"away,omitempty"`
	AwaySince time.Time `json:"awaySince,omitzero"`
}

// WireState says who may send RoCE packets to the node's devices. It is about the
// devices whose packets the kernel sees, and can filter.
type WireState string

// States of the wire.
const (
	WireNone     WireState = ""         // there is no device whose packets the kernel sees
	WireFiltered WireState = "Filtered" // nodes of the cluster and configured peers may send
	WireOpen     WireState = "Open"     // everybody may send, as configured
	WirePending  WireState = "Pending"  // there is no filter yet, or that of the agent before this one
	WireFailed   WireState = "Failed"   // the filter could not be set as configured
)

// Wire is the filter of RoCE packets.
type Wire struct {
	State WireState `json:"state,omitempty"`
	// Detail says why packets are not filtered, or what the filter lacks.
	Detail string `json:"detail,omitempty"`
	// Allowed is the number of addresses and networks that may send.
	Allowed int `json:"allowed,omitempty"`
	// Dropped counts packets since the agent's start, by reason.
	Dropped map[string]uint64 `json:"dropped,omitempty"`
}

// Sum is the number of dropped packets.
func (w *Wire) Sum() uint64 {
	var n uint64
	for _, k := range w.Dropped {
		n += k
	}
	return n
}

// Readiness says whether an agent serves its node.
type Readiness struct {
	APIVersion string `json:"apiVersion"`
	Ready      bool   `json:"ready"`
	Detail     string `json:"detail"`
}

// ReadinessOf is the readiness of the agent whose status this is. If instance is not "",
// any other agent is not ready.
func ReadinessOf(s Status, instance string) Readiness {
	r := Readiness{APIVersion: Version}
	switch {
	case instance != "" && s.Instance != instance:
		r.Detail = fmt.Sprintf("not ready: agent %q manages this node, and not %q", s.Instance, instance)
	case s.Draining:
		r.Detail = "not ready: the agent is stopping"
	case !s.Synced:
		r.Detail = "not ready: the agent has not looked at all pods yet"
	case s.Cluster != nil && !s.Cluster.Joined:
		r.Detail = "not ready: " + s.Cluster.Lacks
	default:
		r.Ready, r.Detail = true, fmt.Sprintf("ready: %d of %d pods are served", s.Pods.Ready, s.Pods.Attached)
	}
	return r
}

// Device is an RDMA device that carries links.
type Device struct {
	Name     string `json:"name"`
	Provider string `json:"provider"` // soft or verbs
	// Missing is why a configured device is not there, "" if the device is there.
	Missing string `json:"missing,omitempty"`
	// Since is when the device was opened, or found missing.
	Since time.Time `json:"since"`
	// Choice says which GID a device of the kernel uses, and why.
	Choice string `json:"choice,omitempty"`
	// Address is the address of the device's links.
	Address string `json:"address,omitempty"`
	// Interface is the network interface that has the address; while none has it, the
	// interface that had it last.
	Interface string `json:"interface,omitempty"`
	// OtherAddresses are the other IPv4 addresses of the interface of an RDMA device of the
	// kernel, whose SMC-R sends from any of them.
	OtherAddresses []string `json:"otherAddresses,omitempty"`
	MTU            int      `json:"mtu"`  // path MTU in bytes
	Port           string   `json:"port"` // ACTIVE or DOWN
}

// Devices is the answer of /v1/devices.
type Devices struct {
	APIVersion string `json:"apiVersion"`
	// Devices are the devices that pods can have, and those that they have.
	Devices []PodDevice `json:"devices"`
	// Problem is why devices may be missing from the list.
	Problem string `json:"problem,omitempty"`
}

// PodDevice is an RDMA device that a pod can have for itself, or share with the
// other pods that asked for it.
type PodDevice struct {
	// ID is the PCI address of a VF or another function, the name of the network
	// interface of an RDMA device that is not PCI, or the name of a software device.
	ID  string `json:"id"`
	PCI string `json:"pci,omitempty"`
	// PF is the network interface of the physical function, and VF the number of
	// the VF there; -1: it is no VF.
	PF string `json:"pf,omitempty"`
	VF int    `json:"vf"`
	// Interface is the device's network interface: on the host, or in the pod.
	Interface string   `json:"interface,omitempty"`
	RDMA      []string `json:"rdma,omitempty"`
	MAC       string   `json:"mac,omitempty"`
	// NUMANode is the memory that the device is near to, and Rail the number of its
	// rail, a part of the fabric; -1: unknown.
	NUMANode int `json:"numaNode"`
	Rail     int `json:"rail"`
	// State is one of DeviceUp and so on.
	State string `json:"state"`
	// Pods are the pods that have the device, NAMESPACE/NAME. Mode says how it is wired:
	// move, ipvlan, or chained if another plugin wired it.
	Pods []string `json:"pods,omitempty"`
	Mode string   `json:"mode,omitempty"`
	// Used is the device as the agent uses it; nil if it does not, because no policy
	// selects the pod.
	Used *Device `json:"used,omitempty"`
}

// States of a device that pods can have.
const (
	DeviceUp      = "up"      // free, and its interface has a carrier
	DeviceDown    = "down"    // free, and its interface has no carrier
	DevicePod     = "pod"     // a pod has it
	DeviceVFIO    = "vfio"    // a virtual machine has it
	DeviceUnbound = "unbound" // no driver of a network interface is bound to it
	DeviceMissing = "missing" // a pod has it, but it cannot be used
)

// PodCount counts attached pods.
type PodCount struct {
	Attached int `json:"attached"`
	Ready    int `json:"ready"`
	Failed   int `json:"failed"`
	// Paused are the ready pods whose new connections go directly, because a budget is
	// nearly used up.
	Paused int `json:"paused,omitempty"`
}

// ConnSums counts the live connections, and the connections and their bytes since the
// agent's start. BytesSMCR and BytesTCP are the bytes of both directions that the agent
// carried.
type ConnSums struct {
	Live      int    `json:"live"`
	LiveSMCR  int    `json:"liveSMCR"`
	TotalSMCR uint64 `json:"totalSMCR"`
	TotalTCP  uint64 `json:"totalTCP"`
	Reset     uint64 `json:"reset"`
	BytesSMCR uint64 `json:"bytesSMCR"`
	BytesTCP  uint64 `json:"bytesTCP"`
	// Kernel are the connections of pods whose kernel carries them, which are not in the other sums; nil: there are no
	// such pods, and there were none.
	Kernel *KernelSums `json:"kernel,omitempty"`
}

// KernelSums counts the pods whose kernel carries their connections, their live connections, and those that they made
// while the agent had them.
type KernelSums struct {
	Pods      int    `json:"pods"`
	Live      int    `json:"live"`
	LiveSMCR  int    `json:"liveSMCR"`
	TotalSMCR uint64 `json:"totalSMCR"`
	TotalTCP  uint64 `json:"totalTCP"`
}

// Budget is a budget and how much of it is used.
type Budget struct {
	MemoryBytes     int `json:"memoryBytes"`
	MemoryUsedBytes int `json:"memoryUsedBytes"`
	// MemoryKeptBytes is the part of the node's memory that is kept for this pod. Pods
	// that share a stack have it together.
	MemoryKeptBytes int `json:"memoryKeptBytes,omitempty"`
	Conns           int `json:"conns"`
	ConnsUsed       int `json:"connsUsed"`
	// RoomConns is how many connections on SMC-R the budget has room for in all, with
	// buffers of the configured size, and RoomPeers with how many peers there can be one.
	// Only the node's budget has them.
	RoomConns int `json:"roomConns,omitempty"`
	RoomPeers int `json:"roomPeers,omitempty"`
	// Relays are connections that the agent carries as plain TCP.
	Relays     int `json:"relays"`
	RelaysUsed int `json:"relaysUsed"`
	// Pending are connections being set up: the dial or the rendezvous is under way.
	Pending     int `json:"pending"`
	PendingUsed int `json:"pendingUsed"`
	// SocketBytes bounds the kernel's buffers of the sockets of carried connections;
	// SocketUsedBytes is their size if all of them are full.
	SocketBytes     int `json:"socketBytes"`
	SocketUsedBytes int `json:"socketUsedBytes"`
}

// Links is the answer of /v1/links.
type Links struct {
	APIVersion string      `json:"apiVersion"`
	LinkGroups []LinkGroup `json:"linkGroups"`
	// Problem is why link groups may be missing from the list.
	Problem string `json:"problem,omitempty"`
}

// LinkGroup is one SMC-R link group.
type LinkGroup struct {
	ID uint32 `json:"id"`
	// Pod is "" for one of the node's kernel, which all its pods have together.
	Pod string `json:"pod"`
	// Datapath is Kernel for one of the node's kernel, or "": it is the agent's. Of the kernel's it is not known when
	// they were opened, nor the links' queue pairs, MTUs and bytes.
	Datapath string `json:"datapath,omitempty"`
	Role     string `json:"role"` // client or server
	PeerID   string `json:"peerID"`
	State    string `json:"state"`
	Dialect  string `json:"dialect"`
	Version  uint8  `json:"version"`
	// Of version 2: the common enterprise ID, the release, and the name that the peer
	// gives itself, which nobody checked.
	EID             string `json:"eid,omitempty"`
	Release         uint8  `json:"release,omitempty"`
	PeerClaimedName string `json:"peerClaimedName,omitempty"`
	// NoV2 is why a group is of version 1 although both sides support version 2; only
	// the server knows.
	NoV2 Code `json:"noV2,omitempty"`
	// Redundancy tells which RNIC the group can lose: SINGLE (none), SYMMETRIC (any
	// one), ASYMMETRIC LOCAL or ASYMMETRIC PEER (one of the side that has two).
	Redundancy string    `json:"redundancy"`
	Conns      int       `json:"conns"`
	RMBBytes   int       `json:"rmbBytes"`
	Opened     time.Time `json:"opened"`
	Links      []Link    `json:"links"`
	Error      string    `json:"error,omitempty"`
}

// Link is one link of a group.
type Link struct {
	ID     uint8  `json:"id"`
	State  string `json:"state"`
	Device string `json:"device"`
	// PCI is the address of a device that the pod has for itself.
	PCI       string `json:"pci,omitempty"`
	LocalGID  string `json:"localGID"`
	PeerGID   string `json:"peerGID"`
	LocalQPN  uint32 `json:"localQPN"`
	PeerQPN   uint32 `json:"peerQPN"`
	MTU       int    `json:"mtu"`
	UserID    uint32 `json:"userID"`
	Conns     int    `json:"conns"`
	BytesSent uint64 `json:"bytesSent"`
	BytesRecv uint64 `json:"bytesRecv"`
}

// Conns is the answer of /v1/conns.
type Conns struct {
	APIVersion string `json:"apiVersion"`
	Conns      []Conn `json:"conns"`
	// Problem is why connections may be missing from the list.
	Problem string `json:"problem,omitempty"`
}

// Keep drops the connections that are not of the pod NAMESPACE/NAME.
func (c *Conns) Keep(pod string) {
	c.Conns = slices.DeleteFunc(c.Conns, func(x Conn) bool { return x.Pod != pod })
}

// Direction of a connection, as the pod sees it.
type Direction string

// Directions.
const (
	Outbound Direction = "outbound" // the pod's application is the client
	Inbound  Direction = "inbound"  // the pod's application is the server
)

// Conn is a connection that the agent carries, or the kernel of a pod with datapath Kernel. The agent
// does not know connections that are not diverted, and those of sockets that are not SMC's.
type Conn struct {
	ID  uint64 `json:"id"`
	Pod string `json:"pod"`
	// Datapath is Kernel if the pod's kernel carries it, or "": the agent does. Of the kernel's it is not known
	// when they were opened, how long that took and how many bytes they carried. Where several have the same ports,
	// their addresses are not known, nor the link group where several have the same link.
	Datapath  string         `json:"datapath,omitempty"`
	Direction Direction      `json:"direction"`
	Source    netip.AddrPort `json:"source"`
	Dest      netip.AddrPort `json:"destination"`
	Mode      string         `json:"mode"` // SMC-R, TCP, or connecting
	Reason    Code           `json:"reason,omitempty"`
	// Detail is what a pod's kernel said of the reason.
	Detail    string    `json:"detail,omitempty"`
	Policy    string    `json:"policy,omitempty"`
	Opened    time.Time `json:"opened"`
	SetupUS   int64     `json:"setupMicroseconds"`
	BytesSent uint64    `json:"bytesSent"` // by the pod; of plain TCP known only at the end
	BytesRecv uint64    `json:"bytesReceived"`
	// With SMC-R:
	LinkGroup    uint32 `json:"linkGroup,omitempty"`
	Link         uint8  `json:"link,omitempty"`
	FirstContact bool   `json:"firstContact,omitempty"`
	Version      uint8  `json:"version,omitempty"`
	Token        uint32 `json:"alertToken,omitempty"`
	State        string `json:"state,omitempty"`
	SendBuffer   int    `json:"sendBufferBytes,omitempty"`
	RMBE         int    `json:"rmbeBytes,omitempty"`
	PeerRMBE     int    `json:"peerRMBEBytes,omitempty"`
	RDMAWrites   uint64 `json:"rdmaWrites,omitempty"`
	CDCSent      uint64 `json:"cdcSent,omitempty"`
	CDCRecv      uint64 `json:"cdcReceived,omitempty"`
}

// Explanation is the answer of /v1/explain: why connections from a pod to a
// destination are, or are not, on SMC-R.
type Explanation struct {
	APIVersion string `json:"apiVersion"`
	// Verdict is one sentence, and Code its reason code.
	Verdict string `json:"verdict"`
	Code    Code   `json:"code"`
	Advice  string `json:"advice,omitempty"`
	// Pod is empty when no attached pod has the source.
	Pod    string `json:"pod,omitempty"`
	Policy string `json:"policy,omitempty"`
	// Required says that a connection without SMC-R is reset.
	Required bool `json:"required,omitempty"`
	// Unresolved are policies of the pod that are not in force as they are now, because the controller has not
	// resolved their peers yet.
	Unresolved []string `json:"unresolved,omitempty"`
	// NotKernel is why the agent carries the pod though its policy wants the kernel's SMC-R, "" if it does not.
	NotKernel string `json:"notKernel,omitempty"`
	// Budget is the budget that the reason is about, if it is one of a pod of this node.
	Budget *FullBudget `json:"budget,omitempty"`
	// Bypassed is the destination's entry of the negative cache, if it has one.
	Bypassed *Bypass `json:"bypassed,omitempty"`
	// Recent are the last decisions, the latest first.
	Recent []Decision `json:"recent"`
	Live   []Conn     `json:"live"`
	// Problem is why connections may be missing.
	Problem string `json:"problem,omitempty"`
}

// FullBudget is a budget that keeps connections off SMC-R, as it is now.
type FullBudget struct {
	// Budget is its name in configurations: memory, connections, relays, pending or
	// sockets.
	Budget string `json:"budget"`
	// Of is whose it is: "pod NAMESPACE/NAME", "node NAME" and so on.
	Of    string `json:"of"`
	Used  int    `json:"used"`
	Limit int    `json:"limit"`
	// KeptForOthers is the part of the node's budget that is kept for other pods.
	KeptForOthers int `json:"keptForOthers,omitempty"`
	// Bytes says that it counts bytes.
	Bytes bool `json:"bytes,omitempty"`
	// Field is what raises it.
	Field string `json:"field"`
}

// String says how full the budget is.
func (b FullBudget) String() string {
	show := func(n int) string {
		if !b.Bytes {
			return fmt.Sprint(n)
		}
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	s := fmt.Sprintf("%s of %s: %s of %s used now", b.Budget, b.Of, show(b.Used), show(b.Limit))
	if b.KeptForOthers > 0 {
		s += fmt.Sprintf(", and %s kept for other pods", show(b.KeptForOthers))
	}
	return s
}

// Bypass is an entry of the negative cache.
type Bypass struct {
	Pod    string         `json:"pod"`
	Dest   netip.AddrPort `json:"destination"`
	Reason Code           `json:"reason"`
	Until  time.Time      `json:"until"`
}

// Decision is what was decided about the last connections of one pod with one peer.
type Decision struct {
	Pod          string         `json:"pod"`
	Direction    Direction      `json:"direction"`
	Source       netip.Addr     `json:"source"`
	Dest         netip.AddrPort `json:"destination"`
	Mode         string         `json:"mode"` // SMC-R, TCP, reset, ended or connecting
	Reason       Code           `json:"reason,omitempty"`
	PeerDeclined bool           `json:"peerDeclined,omitempty"` // the reason is that of the peer's Decline
	Detail       string         `json:"detail,omitempty"`
	Policy       string         `json:"policy,omitempty"`
	Count        uint64         `json:"count"` // how often in a row
	Last         time.Time      `json:"last"`
}

// Attachments is the answer of /v1/attachments.
type Attachments struct {
	APIVersion  string       `json:"apiVersion"`
	Attachments []Attachment `json:"attachments"`
	Bypasses    []Bypass     `json:"bypasses"`
	// Malformed are the records that could not be read, with the reason.
	Malformed []string `json:"malformed,omitempty"`
}

// Attachment is a pod's network attachment and what the agent did for it.
type Attachment struct {
	ContainerID string         `json:"containerID"`
	Interface   string         `json:"interface"`
	Pod         string         `json:"pod"`
	NetNS       string         `json:"netns"`
	Addresses   []netip.Prefix `json:"addresses"`
	State       string         `json:"state"` // ready, idle, failed
	Detail      string         `json:"detail,omitempty"`
	// Datapath is Kernel if the pod's kernel carries its connections, or "": the agent does.
	Datapath string `json:"datapath,omitempty"`
	// NotKernel is why the agent carries a pod whose policy wants its kernel's SMC-R, "" if it does not.
	NotKernel string `json:"notKernel,omitempty"`
	// Reason is why no connection of a ready pod can be on SMC-R, or of an idle one that policies
	// select: what the node or the pod's own devices lack, or what the policies do not allow; "" if
	// they can, or the pod's state and Detail say it.
	Reason   Code     `json:"reason,omitempty"`
	Policies []string `json:"policies"`
	// Devices are the IDs of the RDMA devices that the pod's connections use
	// instead of the node's: with datapath Kernel each connection that of the
	// interface which it is by.
	Devices []string `json:"devices,omitempty"`
	Budget  Budget   `json:"budget"`
	// Paused is why the pod's new connections are not diverted for now, "" if they are.
	Paused Code `json:"paused,omitempty"`
	// GreedySources are clients whose new connections to the pod are not diverted
	// for now (BUDGET_SOURCE).
	GreedySources []netip.Addr `json:"greedySources,omitempty"`
}

// States of an attachment.
const (
	StateReady  = "ready"  // connections are diverted
	StateIdle   = "idle"   // no policy selects the pod, or nothing can be accelerated
	StateFailed = "failed" // the set-up failed, see Detail; it is tried again
)

// Modes of a connection beyond those of pkg/smcr.
const (
	ModeConnecting = "connecting"
	ModeReset      = "reset"
	ModeEnded      = "ended" // by an end of stream, as the kernel's SMC-R has no reset of others
)
