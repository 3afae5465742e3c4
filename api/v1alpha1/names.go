// SPDX-License-Identifier: Apache-2.0

package v1alpha1

// Annotations and labels.
const (
	// AnnotationEnabled opts a pod in ("true") or out ("false"). Any other value means
	// out, and an event says so. On a namespace, the annotation holds for those of its
	// pods that do not have it themselves, and do not claim an RDMA device, which also
	// opts in. A pod in its node's network is opted in only by its own annotation, and
	// only if its datapath is Kernel or KernelIfAvailable.
	AnnotationEnabled = "smcr.io/enabled"
	// AnnotationStatus on a pod is what its agent did: one of the PodStatus
	// words, and behind a colon the reason, as "Fallback: PEERNOSMC".
	AnnotationStatus = "smcr.io/status"
	// AnnotationUninstall on an SMCRNode tells its agent to leave the node clean
	// and to set the condition Uninstalled. An agent that is new on the node, and finds
	// the annotation there, takes it off, and leaves only if it is set again.
	AnnotationUninstall = "smcr.io/uninstall"
	// LabelNode on SMCRLinks, SMCRNodes and agents' Leases is the node whose agent writes them: its
	// name, or its UID if the name is longer than a label's value may be.
	LabelNode = "smcr.io/node"
	// LabelLeave, "true" on a Node, keeps agents off it: the one that is there leaves the
	// node clean and ends. "kubectl smcr leave" sets it.
	LabelLeave = "smcr.io/leave"
	// LabelAgent on SMCRLinks is the pod of the agent that has the link group. An agent
	// that handed its node over still has the link groups of the connections that it
	// carries.
	LabelAgent = "smcr.io/agent"
	// LabelNamespace on SMCRLinks is the namespace of the pods whose connections they
	// carry.
	LabelNamespace = "smcr.io/namespace"
	// LabelPolicy on SMCRPeerSlices is the policy that they belong to.
	LabelPolicy = "smcr.io/policy"

	// TaintAgentNotReady keeps pods off a node until its agent is ready. It is
	// put there by whoever adds nodes, and removed by the controller.
	TaintAgentNotReady = "smcr.io/agent-not-ready"
)

// AgentLeasePrefix begins the name of the Lease that the agent of a node renews while it
// lives; the node's label follows, see [LabelNode]. The Lease is in the namespace of the
// agent's pod.
const AgentLeasePrefix = "kube-smcr-agent-"

// DRADriver is the name of the driver by which pods claim RDMA devices
// (resource.k8s.io).
const DRADriver = "roce.smcr.io"

// Reporting controllers of events.
const (
	// ReporterAgent is that of agents. Their events are about SMCRNodes and SMCRLinks.
	// Those for a pod of the agent's node are about the agent's own pod, and name the
	// pod as the related object.
	ReporterAgent = "smcr.io/kube-smcr-agent"
	// ReporterController is that of the controller: it passes agents' events for a pod
	// on to that pod.
	ReporterController = "smcr.io/kube-smcr-controller"
)

// Field managers of server-side apply.
const (
	ManagerAgent      = "smcr-agent"
	ManagerController = "smcr-controller"
)

// Words of the annotation smcr.io/status.
const (
	PodStatusEnabled  = "Enabled"  // new connections try SMC-R
	PodStatusPending  = "Pending"  // not attached yet
	PodStatusFallback = "Fallback" // everything is plain TCP
	PodStatusRefused  = "Refused"  // new connections that a policy requires to be on SMC-R are reset
)

// PodStatusKernel is the annotation smcr.io/status of a pod whose connections its kernel carries.
const PodStatusKernel = PodStatusEnabled + ": KERNEL"

// PodStatusKernelNoAgent replaces PodStatusKernel when the node's agent is gone without having left the
// node clean: the kernel carries on, by the policies that were in force last. The controller writes it,
// in the place of the agent.
const PodStatusKernelNoAgent = PodStatusKernel + ", no agent"

// PodStatusOlder is at the end of the annotation smcr.io/status of a pod whose new connections
// are refused while older ones are on SMC-R: "Refused: REQUIRED, older connections live".
const PodStatusOlder = ", older connections live"

// PodStatusNoAgent is the annotation smcr.io/status of the other opted-in pods on a node that has no
// agent. The controller writes it in the place of the agent, or an agent when it leaves.
const PodStatusNoAgent = PodStatusFallback + ": NO_AGENT"

// Conditions of an SMCRPolicy.
const (
	// ConditionAccepted says that the controller understood the policy.
	ConditionAccepted = "Accepted"
	// ConditionReady of a policy says that all opted-in pods that it selects are
	// accelerated; of a node, that its agent takes connections; of a link group,
	// that it carries connections.
	ConditionReady = "Ready"
	// ConditionLinksRedundant says that every link group has the redundancy that
	// the policy wants.
	ConditionLinksRedundant = "LinksRedundant"
	// ConditionDegraded says that something that worked does not: links down,
	// nodes without their agent, pods that fell back.
	ConditionDegraded = "Degraded"
	// ConditionConflicting says that another policy of the same priority selects the
	// same pods and wants something else; or that, of two policies of any priority, one
	// requires SMC-R for pods that the other one puts on the kernel's datapath.
	ConditionConflicting = "Conflicting"
)

// Conditions of an SMCRNode, besides Ready.
const (
	// ConditionAccelerating says that connections can be on SMC-R.
	ConditionAccelerating = "Accelerating"
	// ConditionDevicesHealthy says that the ports of all RDMA devices are up.
	ConditionDevicesHealthy = "DevicesHealthy"
	// ConditionCNIInstalled says that the plugin is in the node's CNI chain.
	ConditionCNIInstalled = "CNIInstalled"
	// ConditionMetricsServed says that the agent serves metrics on its address; it is not
	// there if the agent is to serve none.
	ConditionMetricsServed = "MetricsServed"
	// ConditionAgentAlive is written by the controller: the agent renews its Lease.
	ConditionAgentAlive = "AgentAlive"
	// ConditionUninstalled says that the agent left the node clean. With the reason
	// NodeLeft the product goes on to be installed elsewhere, and the SMCRNode stays.
	ConditionUninstalled = "Uninstalled"
)

// ReasonAgentGone is the reason of the conditions Ready, Accelerating, DevicesHealthy and
// MetricsServed of an SMCRNode while its agent is gone. The controller sets them to Unknown then;
// an agent that leaves its node sets them itself, to False where that is what it knows.
const ReasonAgentGone = "AgentGone"

// ReasonNodeLeft is the reason of the condition Uninstalled of a node that its agent left clean because
// agents are not to run there any more. The condition goes when an agent is back.
const ReasonNodeLeft = "NodeLeft"

// Condition of an SMCRLink, besides Ready.
const (
	// ConditionRedundant says that the link group can lose an RNIC.
	ConditionRedundant = "Redundant"
)

// ReasonEnding is the reason of the condition Ready of an SMCRLink whose link group ends in good order: it is Down, and
// nothing is lost.
const ReasonEnding = "Ending"
