// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Diversion says how pods' connections come to the agent.
type Diversion struct {
	// RedirectTTL is how long diversions stay in force after the agent last renewed them.
	RedirectTTL time.Duration
	// NegativeCacheTTL is how long a destination without SMC-R is not diverted.
	NegativeCacheTTL time.Duration
	// HoldSYNs makes a connection of a pod wait until it is known where it can go: to the agent, or
	// directly to its destination.
	HoldSYNs bool
}

// Node is the whole configuration of an agent. Nobody changes it after [Parse].
type Node struct {
	// Name is the node's name in records and answers.
	Name string
	// Devices carry the links of the pods that have no device for themselves: at most 8
	// devices, all of one kind.
	Devices []Device
	// NodeBudget bounds all pods together, PodBudget each of them. PodMax is the
	// most memory and connections that a policy may give to a pod; it bounds
	// nothing else.
	NodeBudget, PodBudget, PodMax Budget
	// RMBEBytes and SendBufferBytes are the buffers of one connection.
	RMBEBytes, SendBufferBytes int
	// Versions are the versions of SMC-R that may be used. EIDs are the
	// enterprise IDs of version 2, the preferred one first.
	Versions Versions
	EIDs     []clc.EID
	Dialects Dialects
	// AnyPrefix accepts clients of other IP subnets with version 1, where the RoCE
	// fabric is routed.
	AnyPrefix bool
	// PodsAsNode makes the agent read the pods of the node with the rights of the node,
	// so that the agent needs no right on all pods. Kubernetes allows that from 1.36 on.
	PodsAsNode bool
	// DataDir is the directory of the attachment records and the agent's other files.
	DataDir string
	// APISocket is the path of the Unix socket of the JSON API.
	APISocket string
	// MetricsAddress is where Prometheus metrics are served; invalid: on the API socket
	// only.
	MetricsAddress netip.AddrPort
	// MetricsAuth serves metrics only over TLS, and only to clients that the cluster
	// allows to get /metrics. MetricsTLS is the directory of the certificate; "": the
	// agent makes one.
	MetricsAuth bool
	MetricsTLS  string
	Diversion
	// DrainTimeout is how long a stopping agent waits for carried
	// connections before it resets them.
	DrainTimeout time.Duration
	// AnswerPoll is how long the agent polls for a program's answer before it sleeps;
	// 0: not at all.
	AnswerPoll time.Duration
	LogLevel   LogLevel
	// Takeover makes a starting agent take the node over from one that runs, and
	// lets a later one take it over from this one.
	Takeover bool
	// CNI says whether the agent installs the CNI plugin.
	CNI CNI
	// DevicePlugin says which devices kubelet can give to pods, and whether kubelet is
	// asked which ones pods have.
	DevicePlugin DevicePlugin
	// DRA says whether pods can claim devices.
	DRA DRA
	// DefaultPeers are the peers of the policies of the cluster that name no peers.
	DefaultPeers Peers
	// Wire says who may send RoCE packets to the node's devices.
	Wire Wire
	// Policies select connections of all pods, where there is no cluster.
	Policies []Policy
	// Pods are the opted-in pods of the node in a cluster; nil means that there
	// is no cluster and Policies decide. See [FromObjects].
	Pods map[PodName]PodConfig
	KernelPath
}

// KernelPath says which pods their kernel can carry.
type KernelPath struct {
	// HostPods are pods in the node's own network that are opted in, by namespace and name: their kernel can
	// carry their connections. No other pod in that network is touched. See [FromObjects].
	HostPods []HostPod
	// KernelVeth is for pods whose only interface is a veth, too. Their addresses are then among those of the node.
	KernelVeth bool
}

// HostPod is a pod in the network of its node. It has no attachment, and is known by its cgroup.
type HostPod struct {
	Namespace, Name string
	UID             string // "" outside of a cluster
	// Cgroup is the path of the pod's cgroup, of version 2, from the root of that hierarchy, such as
	// /redis.slice; "": the one that kubelet made for a pod with CgroupUID.
	Cgroup string
	// CgroupUID is UID, but for static pods: kubelet names their cgroups by the annotation
	// kubernetes.io/config.hash.
	CgroupUID string
}

// InCluster says whether the policies are objects of a cluster, and not in the file.
func (n *Node) InCluster() bool { return n.Pods != nil }

// PodName names a pod.
type PodName struct {
	Namespace, Name string
}

// PodConfig is what the objects of a cluster want for one opted-in pod.
type PodConfig struct {
	// UID tells the pod from an earlier one of the same name. It is that of [Verdict.NodeUID].
	UID string
	// Policies in the order of their rank: the first that selects a connection
	// decides it.
	Policies []Policy
	// Unresolved names policies that select the pod and are not in force as they are now: see [Resolved].
	Unresolved []string
	Settings   Settings
}

// Settings are the settings of one pod.
type Settings struct {
	RMBEBytes, SendBufferBytes int
	Budget                     Budget
	Versions                   Versions
	// SingleLink keeps link groups on one RNIC.
	SingleLink bool
	// Shared makes the pod share its link groups with the other pods of its namespace
	// that have Shared set.
	Shared bool
	// Mismatch is why the pod cannot use SMC-R on this node at all. A pod that has RDMA
	// devices of the kernel for itself has MismatchOwn instead: the kind of the node's
	// devices does not matter to it.
	Mismatch, MismatchOwn Mismatch
}

// Mismatch is what the policies of a pod and a node do not have in common, so that the
// pod cannot use SMC-R there.
type Mismatch uint8

// Mismatches.
const (
	MismatchNone      Mismatch = iota
	MismatchTransport          // the node has no RDMA device of an allowed kind
	MismatchVersion            // the node's agent may not use an allowed version
)

func (m Mismatch) String() string {
	switch m {
	case MismatchTransport:
		return "the policy allows no RDMA device of the kind that this node has"
	case MismatchVersion:
		return "the policy allows no version of SMC-R that this node may use"
	case MismatchNone:
	}
	return "none"
}

// Code is the reason code of a mismatch, which agentapi.Code lists and explains; "" for
// MismatchNone.
func (m Mismatch) Code() string {
	switch m {
	case MismatchTransport:
		return "TRANSPORT"
	case MismatchVersion:
		return clc.ReasonVersMismat.String()
	case MismatchNone:
	}
	return ""
}

// Peers are the addresses in one of the CIDRs and in none of Except.
type Peers struct {
	CIDRs, Except []netip.Prefix
}

// Wire says who may send RoCE packets to the node's devices. It concerns the devices
// whose packets the kernel sees.
type Wire struct {
	// Filter is false if everybody may send.
	Filter bool
	// Peers are networks outside of the cluster that may send. Interfaces are the
	// network interfaces by which packets of peers and of other nodes may come, besides
	// the devices' own interfaces.
	Peers      []netip.Prefix
	Interfaces []string
	// Nodes are the addresses of the devices of the cluster's other nodes, sorted.
	// NodesKnown is false until they have been read.
	Nodes      []netip.Addr
	NodesKnown bool
}

// CNI says how the agent installs the CNI plugin.
type CNI struct {
	Install bool
	// BinDir and ConfDir are the container runtime's directories, as the agent
	// sees them.
	BinDir, ConfDir string
	// Required and ReportStatus are fields of the plugin's configuration.
	Required, ReportStatus bool
}

// DRA says whether the agent is a driver for dynamic resource allocation.
type DRA struct {
	Enabled bool
	// KubeletDir is kubelet's directory. It must have the same path for the agent as for
	// kubelet, because the agent tells kubelet the paths of sockets in it.
	KubeletDir string
	// IPAM is the configuration of the IPAM plugin that gives claimed VFs their addresses on
	// this node, as JSON; "": they have none.
	IPAM string
}

// DevicePlugin says how the agent offers RDMA devices to kubelet, which gives them to
// pods.
type DevicePlugin struct {
	// Enabled offers RDMA devices that are not PCI devices, and software devices, to
	// kubelet; VFs offers VFs as well.
	Enabled, VFs bool
	// Slots is how many pods may have one device that is no VF at a time.
	Slots int
	// Dir is kubelet's directory of device plugins, PodResources the socket of
	// its pod resources API, and InfoDir where Multus looks for device
	// information, all as the agent sees them.
	Dir, PodResources, InfoDir string
	// OtherResources are resources of other device plugins that give VFs to pods:
	// vendor.com/name, or vendor.com/*.
	OtherResources []string
}

// Asks says whether kubelet is asked which devices pods have.
func (p *DevicePlugin) Asks() bool { return p.Enabled || len(p.OtherResources) > 0 }

// Equal says whether both are the same.
func (p *DevicePlugin) Equal(o *DevicePlugin) bool {
	return p.Enabled == o.Enabled && p.VFs == o.VFs && p.Slots == o.Slots && p.Dir == o.Dir &&
		p.PodResources == o.PodResources && p.InfoDir == o.InfoDir && slices.Equal(p.OtherResources, o.OtherResources)
}

// Device is an RNIC that carries links. It is a software device if RDMA is "", else a
// device of the kernel.
type Device struct {
	// SoftAddress is the local address of a software RoCEv2 device. It is invalid if
	// Interface has no address.
	SoftAddress netip.Addr
	// Interface is the network interface that SoftAddress or GIDAddress is the address of, if
	// the file names one. Which addresses it has is looked up whenever the device is opened.
	Interface string
	// SoftMTU is the path MTU of a software device in bytes, at most; 0 means the largest
	// that fits the interface.
	SoftMTU int
	// RDMA is the name of an RDMA device of the kernel, and Port the number of
	// its port; 0: the only one, or the first active one.
	RDMA string
	Port uint8
	// GIDAddress is the address whose GID is used, and GIDType the GID's type.
	// The zero values: the provider chooses, and says why, unless Interface is given, which
	// has no address then.
	GIDAddress netip.Addr
	GIDType    rdma.GIDType
	// TrafficClass is the byte with DSCP and ECN in the IP header of the device's packets.
	TrafficClass uint8
}

// Soft says whether the device is a software device.
func (d Device) Soft() bool { return d.RDMA == "" }

func (d Device) String() string {
	switch {
	case !d.Soft():
		return d.RDMA
	case !d.SoftAddress.IsValid():
		return d.Interface
	}
	return d.SoftAddress.String()
}

// DeviceName is the name of the device at an index of Node.Devices.
func DeviceName(i int, d Device) string {
	if d.Soft() {
		return fmt.Sprintf("soft%d", i)
	}
	return d.RDMA
}

// Budget bounds resources. Without memory or connections left, a new connection is plain
// TCP. Without one of the others left, new connections are not diverted.
type Budget struct {
	MemoryBytes int // registered for RDMA
	Conns       int // on SMC-R
	Relays      int // carried as plain TCP
	Pending     int // being set up: the dial or the rendezvous is under way
	SocketBytes int // in the kernel's buffers of the sockets of carried connections
}

// Versions says which versions of SMC-R may be used.
type Versions uint8

// Version choices.
const (
	VersionsBoth Versions = iota // version 2 where the peer can, else version 1
	VersionsV1
	VersionsV2
)

func (v Versions) String() string {
	switch v {
	case VersionsV1:
		return "v1"
	case VersionsV2:
		return "v2"
	case VersionsBoth:
	}
	return "both"
}

// Dialects says which dialects of the wire protocol may be used.
type Dialects uint8

// Dialect choices.
const (
	DialectsBoth  Dialects = iota // ask for Linux's, accept either
	DialectsLinux                 // Linux's only
)

func (d Dialects) String() string {
	if d == DialectsLinux {
		return "linux"
	}
	return "both"
}

// LogLevel is the least severe level that is logged.
type LogLevel uint8

// Log levels.
const (
	LogInfo LogLevel = iota
	LogDebug
	LogWarn
	LogError
)

func (l LogLevel) String() string {
	switch l {
	case LogDebug:
		return "debug"
	case LogWarn:
		return "warn"
	case LogError:
		return "error"
	case LogInfo:
	}
	return "info"
}

// Mode says what happens to a selected connection that cannot use SMC-R.
type Mode uint8

// Modes.
const (
	ModePrefer   Mode = iota // it is plain TCP
	ModeRequired             // it is reset
)

func (m Mode) String() string {
	if m == ModeRequired {
		return "Required"
	}
	return "Prefer"
}

// Datapath says what carries the connections of a pod.
type Datapath uint8

// Datapaths.
const (
	DatapathAgent             Datapath = iota // the agent, on its own SMC-R
	DatapathKernel                            // the pod's kernel, on that of Linux
	DatapathKernelIfAvailable                 // the latter where node and pod can have it, else the former
)

func (p Datapath) String() string {
	switch p {
	case DatapathKernel:
		return "Kernel"
	case DatapathKernelIfAvailable:
		return "KernelIfAvailable"
	case DatapathAgent:
	}
	return "Agent"
}

// Policy selects connections, of both directions, that are to use SMC-R.
type Policy struct {
	Name string
	Mode Mode
	// Datapath is that of the pod, if the policy is the first that selects it: see [Node.DatapathFor]. In a
	// file it is the same in all policies that select a pod.
	Datapath Datapath
	Pods     PodSelector
	// Peers are the addresses of the other side. If there are none, and no Addresses
	// either, the policy selects all addresses, unless NoPeers is set.
	Peers []netip.Prefix
	// Addresses are further addresses of the other side, sorted.
	Addresses []netip.Addr
	// NoPeers says that the policy selects no address: its peer selectors find no pod.
	NoPeers bool
	// Version names what a policy with peer selectors says, which is another one when its spec changes, or when Addresses
	// are first those of the changed spec. It stays when pods come and go. It is "" without peer selectors.
	Version string
	// Except are addresses that the policy does not select.
	Except []netip.Prefix
	// Ports are the ports of the service, whichever side it is on; empty means
	// all.
	Ports []PortRange
}

// PodSelector selects pods; an empty list selects all. Entries are names in
// which * stands for any run of characters.
type PodSelector struct {
	Namespaces []string
	Names      []string
	Interfaces []string
}

// PortRange is an inclusive range of TCP ports.
type PortRange struct {
	First, Last uint16
}

// Contains says whether p lies in the range.
func (r PortRange) Contains(p uint16) bool { return r.First <= p && p <= r.Last }

// Pod identifies the pod's side of a connection.
type Pod struct {
	Namespace string
	Name      string
	Interface string // of the attachment, in the pod
	UID       string // "" if it is not known
}

func (p Pod) String() string { return p.Namespace + "/" + p.Name }
