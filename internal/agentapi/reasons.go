// SPDX-License-Identifier: Apache-2.0

package agentapi

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Code says why a connection is not on SMC-R. It is the name of a diagnosis
// code of CLC (clc.Reason), or one of the agent's own below.
type Code string

// The agent's own codes.
const (
	CodeOK            Code = ""               // the connection is on SMC-R
	CodeNoPolicy      Code = "NO_POLICY"      // no policy selects the connection
	CodeOptedOut      Code = "OPTED_OUT"      // the pod is not opted in
	CodeTransport     Code = "TRANSPORT"      // the policy allows no device of this node
	CodePodDevice     Code = "POD_DEVICE"     // no RDMA device of the pod can be used
	CodeMesh          Code = "MESH"           // another program redirects the pod's connections, or confuses them
	CodeOldSockets    Code = "OLD_SOCKETS"    // programs have sockets of the kernel's SMC-R from before
	CodeSameNode      Code = "SAME_NODE"      // both pods are on this node
	CodeNotAttached   Code = "NOT_ATTACHED"   // the pod has no attachment
	CodePodFailed     Code = "POD_FAILED"     // the set-up in the pod failed
	CodeNoOption      Code = "NO_OPTION"      // the node lacks the TCP option, or diversion
	CodeBudgetConns   Code = "BUDGET_CONNS"   // no connections left in the budget
	CodeBudgetMemory  Code = "BUDGET_MEMORY"  // no memory for buffers left in the budget
	CodeQueuePairs    Code = "QUEUE_PAIRS"    // the device has no queue pairs left for the pod
	CodeBudgetRelays  Code = "BUDGET_RELAYS"  // nearly no relays left in the budget
	CodeBudgetPending Code = "BUDGET_PENDING" // nearly no pending connections left in the budget
	CodeBudgetSockets Code = "BUDGET_SOCKETS" // nearly no memory for sockets left in the budget
	CodeBudgetSource  Code = "BUDGET_SOURCE"  // one client has its share of relays or pending connections
	CodeConnect       Code = "CONNECT"        // the destination did not answer
	CodeApplication   Code = "APPLICATION"    // the pod's application did not answer
	CodeBacklog       Code = "BACKLOG"        // the pod's application did not accept the connection in time for SMC-R
	CodeRendezvous    Code = "RENDEZVOUS"     // the connection broke during the rendezvous
	CodeLate          Code = "LATE"           // the rendezvous took longer than a SYN is held
	CodeUndiverted    Code = "UNDIVERTED"     // the connection cannot be brought to the agent
	CodeRequired      Code = "REQUIRED"       // reset because a policy requires SMC-R
	CodePolicyChange  Code = "POLICY_CHANGE"  // ended by a changed policy
	CodeDraining      Code = "DRAINING"       // the agent stops, or the pod is gone
	CodeGroupLost     Code = "LINK_GROUP"     // reset because its link group ended
	CodeUnseen        Code = "UNSEEN"         // there was no such connection yet
	CodeNoAgent       Code = "NO_AGENT"       // no agent runs on the pod's node
	CodeUnknownReason Code = "UNKNOWN_REASON" // the peer's diagnosis has no name
)

// CodeOf is the code of a CLC diagnosis. All that have no name have one code: a peer may send any of 2^32, and a code
// becomes a label of metrics.
func CodeOf(r clc.Reason) Code {
	switch {
	case r == clc.ReasonNone:
		return CodeOK
	case !r.Known():
		return CodeUnknownReason
	}
	return Code(r.String())
}

// Text says what the code means, for people.
func (c Code) Text() string {
	text, _ := c.describe()
	return text
}

// Advice says what to do about the reason, "" if nothing.
func (c Code) Advice() string {
	_, advice := c.describe()
	return advice
}

// Codes returns every code that has a text of its own, sorted.
func Codes() []Code {
	out := []Code{
		CodeNoPolicy, CodeOptedOut, CodeTransport, CodePodDevice, CodeMesh, CodeOldSockets, CodeSameNode, CodeNotAttached, CodePodFailed, CodeNoOption, CodeBudgetConns, CodeBudgetMemory,
		CodeQueuePairs, CodeBudgetRelays, CodeBudgetPending, CodeBudgetSockets, CodeBudgetSource, CodeConnect,
		CodeApplication, CodeBacklog, CodeRendezvous, CodeLate, CodeUndiverted, CodeRequired, CodePolicyChange, CodeDraining, CodeGroupLost, CodeUnseen, CodeNoAgent, CodeUnknownReason,
	}
	for _, r := range clcReasons() {
		out = append(out, CodeOf(r))
	}
	slices.Sort(out)
	return out
}

func (c Code) describe() (text, advice string) {
	switch c {
	case CodeOK:
		return "on SMC-R", ""
	case CodeNoPolicy:
		return "no policy selects this connection", "add or widen a policy: an SMCRPolicy in the pod's namespace; without a cluster, a policy in the agent's configuration file, and send the agent SIGHUP"
	case CodeOptedOut:
		return "the pod is not opted in", "annotate the pod or its namespace with smcr.io/enabled: \"true\"; kubectl smcr explain says which annotation decided"
	case CodeTransport:
		return "the policy allows no RDMA device of the kind that this node has", "add the node's kind to spec.transports of the SMCRPolicy (kubectl get smcrnodes shows it), or let the pod run on another node"
	case CodePodDevice:
		return "the pod was given an RDMA device for itself, and the device cannot be used", "see the attachment's detail (smcrctl attachments), and the device (smcrctl devices); the agent tries again by itself, and does not use the node's devices for this pod instead"
	case CodeMesh:
		return "another program redirects connections in the pod, as the sidecar of a service mesh does, or rules there match the owner of packets, change their marks or exclude them from connection tracking", "use one of the two for the pod: annotate the pod with smcr.io/enabled: \"false\", or exclude it from the mesh, or do without these rules; the attachment's detail (smcrctl attachments) names the other program's rules"
	case CodeOldSockets:
		return "programs of the pod have sockets of the kernel's SMC-R from before it left that datapath, so everything is plain TCP", "restart these programs, those that listen above all, or the pod: the agent carries it when the last such socket is gone"
	case CodeSameNode:
		return "both pods are on this node, where plain TCP does not leave the machine", "nothing is wrong; with mode Required the policy's connections on one node are on SMC-R, too"
	case CodeNotAttached:
		return "no attached pod has this source", "a pod that is older than the installation is attached some 10 s after it opted in, or delete it, so that its successor is attached; else check that the pod's network has the smcr-cni plugin in its chain; smcrctl status counts attached pods"
	case CodePodFailed:
		return "the agent could not set up the pod's network", "see the attachment's detail (smcrctl attachments), and smcrctl preflight; the agent tries again by itself"
	case CodeNoOption:
		return "this node lacks what SMC-R needs (writing its TCP option, or diverting connections), so everything is plain TCP", "run smcrctl preflight as root: it says which kernel feature or privilege is missing"
	case CodeBudgetConns:
		return "the connection budget of the pod or the node is used up", "raise the agents' setting budgets, or budget of the SMCRPolicy, or narrow the policies"
	case CodeBudgetMemory:
		return "the memory budget of the pod or the node is used up", "raise the agents' setting budgets, or budget of the SMCRPolicy, or use smaller rmbe and sendBuffer (buffers in the SMCRPolicy)"
	case CodeQueuePairs:
		return "the queue pairs of the node's RDMA device are used up, or what is left of them is kept for other pods", "each link group takes one for each of its links (kubectl get smcrlinks): let fewer peers connect to the pod, give the pod an RDMA device of its own, or set linkRedundancy: Single in the SMCRPolicy"
	case CodeBudgetRelays:
		return "the agent carries nearly as many connections as plain TCP as the budget of the pod or the node allows, so new ones go directly", "narrow the policies to peers that have SMC-R, or raise relays of the agents' setting budgets; new connections are diverted again when old ones end"
	case CodeBudgetPending:
		return "so many connections are being set up, with destinations or peers that do not answer, that new ones go directly", "find out who opens connections and sends nothing, or raise pending of the agents' setting budgets; new connections are diverted again when these are set up or given up"
	case CodeBudgetSockets:
		return "the kernel may need nearly as much memory for the sockets of the pod's connections as the budget of the pod or the node allows, so new ones go directly", "narrow the policies to peers that have SMC-R, or raise sockets of the agents' setting budgets; new connections are diverted again when old ones end"
	case CodeBudgetSource:
		return "the client has so many connections to the pod that are plain TCP or being set up that its new ones go directly", "find out why the client's connections are not on SMC-R, or raise relays and pending of the agents' setting budgets; its new connections are diverted again when old ones end"
	case CodeConnect, CodeApplication, CodeBacklog, CodeRendezvous, CodeLate, CodeUndiverted:
		return c.describeSetUp()
	case CodeRequired, CodePolicyChange, CodeDraining, CodeGroupLost:
		return c.describeEnd()
	case CodeUnseen:
		return "the policy selects this connection, but there was none yet", "make a connection and ask again"
	case CodeNoAgent:
		return "no agent runs on the pod's node, so everything is plain TCP", "the condition AgentAlive of the SMCRNode says what is known of the agent: kubectl describe smcrnode NODE"
	case CodeUnknownReason:
		return "the peer declined without a reason, or for one that has no name here", "look at the log of the side that declined; the detail has the digits of the reason"
	}
	for _, r := range clcReasons() {
		if CodeOf(r) == c {
			return r.Text(), adviceFor(r)
		}
	}
	return fmt.Sprintf("unknown reason %s", string(c)), ""
}

// describeSetUp describes what happened to a connection while it was set up.
func (c Code) describeSetUp() (text, advice string) {
	switch c {
	case CodeConnect:
		return "the destination did not accept the TCP connection", "SMC-R is not the cause: check the service, and the network on the way to it"
	case CodeApplication:
		return "the application in the pod did not accept the connection", "SMC-R is not the cause: check that the application listens on this address and port"
	case CodeBacklog:
		return "the backlog of the application in the pod was full for so long that the client could not be kept waiting for SMC-R", "SMC-R is not the cause: let the application accept connections faster, or give it a longer backlog (the argument of its listen(), and net.core.somaxconn in the pod)"
	case CodeRendezvous:
		return "the connection broke during the SMC-R rendezvous", "if it happens again, look at the agents' logs on both sides; a peer that echoes unknown TCP options belongs into the policy's except list"
	case CodeLate:
		return "the SMC-R rendezvous took so long that connect() was not kept waiting for it", "now and then, on a busy node, nothing; if it happens often, see whether the agents of both nodes have processor time enough (their limits, the nodes' load), and look at the health of the links"
	}
	return "the connection cannot be brought to the agent: its socket is bound to a network interface, or something in the pod drops what goes to loopback, or lets the program connect and not the agent", "the detail says which: with a socket that is bound to an interface (SO_BINDTODEVICE, as of curl --interface eth0) it is plain TCP; a SYN that never came was dropped by something in the pod: look for rules there that drop what goes to loopback"
}

// describeEnd describes why a connection was refused or ended.
func (c Code) describeEnd() (text, advice string) {
	switch c {
	case CodeRequired:
		return "the policy requires SMC-R and SMC-R was not possible, so the connection was reset", "see the decision's detail for the reason; with mode Prefer the connection would be plain TCP"
	case CodePolicyChange:
		return "a changed policy no longer allows the connection, so it was ended", ""
	case CodeDraining:
		return "the agent is stopping, or the pod was deleted", "an agent that stops: connections go directly to their destination until an agent runs again"
	}
	return "the connection was on SMC-R, and was reset because its link group ended: no link to the peer's node was left, or the peer ended the group", "see the health of links and devices on both nodes (kubectl get smcrlinks, smcrctl devices), and whether the peer's node or agent is gone; new connections go their way without it"
}

// adviceFor is the advice for the diagnosis codes that this implementation, or a Linux
// peer, can send.
func adviceFor(r clc.Reason) string {
	switch r {
	case clc.ReasonPeerNoSMC:
		return "run the agent on the peer's node and attach the peer's pod, or load the smc module there; a middlebox may also drop the TCP option"
	case clc.ReasonMem:
		return "raise the budgets of the side that declined"
	case clc.ReasonDiffPrefix:
		return "use version 2 on both sides (the agents' setting versions: both, which is the default), or put both pods' interfaces into one IP subnet"
	case clc.ReasonTimeoutCL, clc.ReasonTimeoutAL:
		return "check that UDP port 4791 passes between the nodes' RDMA addresses, and in smcrctl status of both nodes that no agent drops it"
	case clc.ReasonNoRoute:
		return "give the node whose side declined a route from its RDMA addresses to the peer's (ip route get PEER from OWN), of the same address family"
	case clc.ReasonNoIndirect:
		return "correct the routes between the nodes' RDMA addresses: one side sends through a router, the other does not (ip route get PEER from OWN)"
	case clc.ReasonNoUEID:
		return "give both sides an enterprise ID in common: the agents' setting eids, smcr ueid add on a Linux peer"
	case clc.ReasonReleaseErr:
		return "the peer answered with another release of version 2 than the one agreed on: update the peer, or let the agents' setting versions be v1"
	case clc.ReasonMaxConnErr:
		return "the peer's limit of connections per link group is below 16, or the peer does not keep to the agreed limit: raise the peer's limit (on Linux net.smc.smcr_max_conns_per_lgr), or let the agents' setting versions be v1"
	case clc.ReasonMaxLinkErr:
		return "the peer's limit of links per link group is 0, or the peer does not keep to the agreed limit: raise the peer's limit (on Linux net.smc.smcr_max_links_per_lgr), or let the agents' setting versions be v1"
	case clc.ReasonNoDev, clc.ReasonNoDevR:
		return "check the RDMA device of the side that declined: smcrctl preflight"
	case clc.ReasonRMBEEC:
		return "let the agents' setting dialects be both"
	case clc.ReasonConfigErr:
		return "the peer's configuration does not allow SMC-R for this connection: run smcrctl explain on the peer's node"
	case clc.ReasonVersMismat:
		return "choose the agents' setting versions so that both sides have a version of SMC-R in common"
	case clc.ReasonModeUnsupp:
		return "the peer offers only another kind of SMC, or a version that the agents' setting versions does not allow"
	case clc.ReasonNoV2Ext:
		return "the peer's message lacks what version 2 requires: update the peer, or let the agents' setting versions be v1"
	case clc.ReasonPeerDecl, clc.ReasonInternal, clc.ReasonErrRToken, clc.ReasonErrReadyLnk, clc.ReasonErrRegBuf:
		return "look at the log of the side that declined"
	case clc.ReasonIPSec:
		return "none: connections that IPsec protects stay as they are"
	}
	return ""
}

func clcReasons() []clc.Reason {
	return []clc.Reason{
		clc.ReasonMem, clc.ReasonTimeoutCL, clc.ReasonTimeoutAL, clc.ReasonConfigErr, clc.ReasonPeerNoSMC, clc.ReasonIPSec,
		clc.ReasonNoDev, clc.ReasonNoDevD, clc.ReasonNoDevR, clc.ReasonNoISMv2, clc.ReasonNoV2Ext, clc.ReasonNoV2DExt,
		clc.ReasonNoSEID, clc.ReasonNoDevD2, clc.ReasonNoUEID, clc.ReasonReleaseErr, clc.ReasonMaxConnErr, clc.ReasonMaxLinkErr,
		clc.ReasonVendorErr, clc.ReasonModeUnsupp, clc.ReasonRMBEEC, clc.ReasonOptUnsupp, clc.ReasonDiffPrefix, clc.ReasonGetVLANErr,
		clc.ReasonISMVLANErr, clc.ReasonNoActLink, clc.ReasonNoSrvLink, clc.ReasonVersMismat, clc.ReasonMaxDMB, clc.ReasonNoRoute,
		clc.ReasonNoIndirect, clc.ReasonSyncErr, clc.ReasonPeerDecl, clc.ReasonInternal, clc.ReasonErrRToken, clc.ReasonErrReadyLnk,
		clc.ReasonErrRegBuf, clc.ReasonCreditsErr,
	}
}
