// SPDX-License-Identifier: Apache-2.0

package report

import (
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// Snapshot is all that the reporter tells Kubernetes, at one moment. The reporter keeps
// no reference to it, and changes nothing in it.
type Snapshot struct {
	// Status has a zero Started while the agent is not up yet. Then the SMCRNode is not
	// written.
	Status agentapi.Status
	Links  []agentapi.LinkGroup
	// LinksProblem is why Links lacks the kernel's link groups; "" if it lacks none.
	LinksProblem string
	Attachments  []agentapi.Attachment
	// PodDevices are the devices that pods can have for themselves.
	PodDevices []agentapi.PodDevice
	// Verdicts are of all pods of the node, opted in or not.
	Verdicts []config.Verdict
	// Decisions are the last decisions about connections. The reporter ignores those
	// that an earlier snapshot had.
	Decisions []agentapi.Decision
	// Annotations are the annotations smcr.io/status as the API server has
	// them, by UID of the pod; pods without one are left out.
	Annotations map[string]string
	// Versions are the resource versions of the pods that Annotations were read from, by UID.
	Versions map[string]string
	// Nodes has the name of the node that has a device with an address.
	Nodes map[netip.Addr]string
	CNI   CNI
	// Reconciled is set once the pods and policies of the cluster were read and the
	// agent has done what they want. Until then no pod status and no SMCRLink is written
	// or deleted.
	Reconciled bool
	// Early is set while the agent still needs what the SMCRNode says of an earlier agent: until
	// then the SMCRNode is not written, unless the node is left.
	Early bool
	// Uninstalled is set once the agent has left the node clean.
	Uninstalled bool
	// Left, with Uninstalled, is why the agent left while the product goes on to be
	// installed: then the SMCRNode stays, and it and the pods say that there is no agent.
	Left string
}

// CNI is the state of the plugin's installation. State is one of those of
// internal/cni/install, or "" if somebody else installs the plugin.
type CNI struct {
	State  string
	Detail string
}

// States of the plugin's installation that mean something here; the others are
// shown as they are.
const (
	cniStandby   = "Standby"
	cniInstalled = "Installed"
	cniContested = "Contested"
)
