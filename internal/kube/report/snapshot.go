// SPDX-License-Identifier: Apache-2.0

package report

import (
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// Snapshot is all that is told to Kubernetes, at one moment. The reporter keeps
// no reference to it, and changes nothing in it.
type Snapshot struct {
	// Status without a start is that of an agent which is not up yet: nothing is
	// said of the node.
	Status      agentapi.Status
	Links       []agentapi.LinkGroup
	Attachments []agentapi.Attachment
	// PodDevices are the devices that pods can have for themselves.
	PodDevices []agentapi.PodDevice
	// Verdicts are of all pods of the node, opted in or not.
	Verdicts []config.Verdict
	// Decisions are the last decisions about connections. They may be the news
	// since the last snapshot, or all that are remembered: what was seen before
	// does no harm.
	Decisions []agentapi.Decision
	// Annotations are the annotations smcr.io/status as the API server has
	// them, by UID of the pod; pods without one are left out.
	Annotations map[string]string
	// Nodes are the nodes of the cluster by the addresses of their devices.
	Nodes map[netip.Addr]string
	CNI   CNI
	// SettledOnce is set once the pods and policies of the cluster were read and
	// the agent has done what they want. Until then nothing is said of pods and
	// links, and nothing is deleted.
	SettledOnce bool
	// Uninstalled is set once the agent has left the node clean.
	Uninstalled bool
}

// CNI is how the plugin's installation stands. State is one of cniinstall's, or
// empty if somebody else installs the plugin.
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
