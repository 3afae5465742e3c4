// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Reasons of the conditions of an SMCRNode. The condition CNIInstalled also has the
// states of the installation as reasons.
const (
	reasonAgentReady     = "AgentReady"
	reasonStarting       = "Starting"
	reasonDraining       = "Draining"
	reasonUninstalled    = "Uninstalled"
	reasonCNINotReady    = "CNINotInstalled"
	reasonNotManaged     = "NotManaged"
	reasonAccelerating   = "PodsReady"
	reasonNoPods         = "NoPods"
	reasonNodeUnfit      = "NodeUnfit"
	reasonNoDevices      = "NoDevices"
	reasonPortsActive    = "AllPortsActive"
	reasonPortDown       = "PortDown"
	reasonDeviceMissing  = "DeviceMissing"
	reasonNoActiveDevice = "NoActiveDevice"
	reasonServing        = "Serving"
	reasonNoPort         = "PortNotAvailable"
)

// portActive is the agent's word for the port of a device that works.
const portActive = "ACTIVE"

// identity is what does not change while the agent runs, except a capability that is checked again.
type identity struct {
	node         string
	linksOnly    bool   // another agent manages the node
	agentPod     string // NAMESPACE/NAME
	agentVersion string
	kernel       string
	capabilities []v1alpha1.NodeCapability
}

// become notes a capability that was checked again.
func (id *identity) become(c v1alpha1.NodeCapability) {
	is := func(old v1alpha1.NodeCapability) bool { return old.Name == c.Name }
	if i := slices.IndexFunc(id.capabilities, is); i >= 0 {
		id.capabilities = slices.Clone(id.capabilities) // a status that waits to be written has the old ones
		id.capabilities[i] = c
	}
}

// agentLabel names the agent on its SMCRLinks.
func (id *identity) agentLabel() string {
	_, name, _ := strings.Cut(id.agentPod, "/")
	return podLabel(name)
}

// nodeStatus is the status of the SMCRNode; its conditions have no times yet.
// clean says that all other objects of an uninstalled node have been written.
func nodeStatus(id *identity, s *Snapshot, clean bool) v1alpha1.SMCRNodeStatus {
	if s.Left != "" {
		return leftStatus(id, s)
	}
	out := v1alpha1.SMCRNodeStatus{
		AgentVersion:   id.agentVersion,
		AgentPod:       id.agentPod,
		AgentStartedAt: metav1.Time{Time: s.Status.Started.Truncate(secondOfAPI)},
		Kernel:         id.kernel,
		Capabilities:   id.capabilities[:min(len(id.capabilities), maxCapabilities)],
		Budget: v1alpha1.NodeBudget{
			MemoryBytes: int64(s.Status.NodeBudget.MemoryBytes), MemoryUsedBytes: int64(s.Status.NodeBudget.MemoryUsedBytes),
			Connections: clamp(s.Status.NodeBudget.Conns), ConnectionsUsed: clamp(s.Status.NodeBudget.ConnsUsed),
			RoomConnections: clamp(s.Status.NodeBudget.RoomConns), RoomPeers: clamp(s.Status.NodeBudget.RoomPeers),
		},
		Pods: v1alpha1.NodePods{
			Attached: clamp(s.Status.Pods.Attached), Ready: clamp(s.Status.Pods.Ready), Failed: clamp(s.Status.Pods.Failed),
		},
		LinkGroups: clamp(s.Status.LinkGroups),
		Wire: v1alpha1.NodeWire{
			State: v1alpha1.WireState(s.Status.Wire.State), Detail: clip(s.Status.Wire.Detail, maxDetail),
			DroppedPackets: int64(min(s.Status.Wire.Sum(), math.MaxInt64)),
		},
	}
	up := 0
	for _, d := range s.Status.Devices {
		nd := v1alpha1.NodeDevice{
			Name: d.Name, Transport: transportOf(d), Address: d.Address, Interface: d.Interface, Port: devicePort(d), MTUBytes: clamp(d.MTU),
			OtherAddresses: d.OtherAddresses[:min(len(d.OtherAddresses), maxAddresses)], Detail: clip(cmp.Or(d.Missing, d.Choice), maxDetail),
		}
		if nd.Port == nodePortActive {
			up++
		}
		if out.Transport != v1alpha1.TransportHardware {
			out.Transport = nd.Transport
		}
		if len(out.Devices) < maxDevices {
			out.Devices = append(out.Devices, nd)
		}
	}
	out.PodDevices, out.PodDeviceSummary = podDevices(s.PodDevices)
	out.DeviceSummary = fmt.Sprintf("%d/%d", up, len(s.Status.Devices))
	out.Conditions = []metav1.Condition{nodeReady(s), nodeAccelerating(s, up), nodeDevices(s), nodeCNI(s)}
	if s.Status.Metrics && !s.Uninstalled {
		out.Conditions = append(out.Conditions, nodeMetrics(s))
	}
	if s.Uninstalled && clean {
		out.Conditions = append(out.Conditions, condition(v1alpha1.ConditionUninstalled, metav1.ConditionTrue, reasonUninstalled,
			"the agent removed its rules, files and the CNI plugin from the node"))
	}
	return out
}

// leftStatus is the status of a node that the agent left clean, while the product stays installed
// on others. It names no devices, as the other nodes accept packets of the devices that are named.
func leftStatus(id *identity, s *Snapshot) v1alpha1.SMCRNodeStatus {
	clean := "the agent left the node clean: " + s.Left
	return v1alpha1.SMCRNodeStatus{
		AgentVersion: id.agentVersion, AgentPod: id.agentPod, Kernel: id.kernel,
		Capabilities: id.capabilities[:min(len(id.capabilities), maxCapabilities)],
		Conditions: []metav1.Condition{
			condition(v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonAgentGone, clean+"; connections go directly to their destination"),
			condition(v1alpha1.ConditionAccelerating, metav1.ConditionFalse, v1alpha1.ReasonAgentGone, clean+"; everything is plain TCP"),
			condition(v1alpha1.ConditionDevicesHealthy, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone, clean),
			condition(v1alpha1.ConditionCNIInstalled, metav1.ConditionFalse, v1alpha1.ReasonNodeLeft, clean),
			condition(v1alpha1.ConditionUninstalled, metav1.ConditionTrue, v1alpha1.ReasonNodeLeft, clean),
		},
	}
}

// podDevices are the devices that pods can have for themselves, and how many of them pods have. If
// there is no room for all, free ones are left out first: the other nodes accept packets only of
// addresses that the SMCRNode names.
func podDevices(all []agentapi.PodDevice) (out []v1alpha1.NodePodDevice, summary string) {
	if len(all) == 0 {
		return nil, ""
	}
	taken := 0
	for _, d := range all {
		if len(d.Pods) > 0 {
			taken++
		}
	}
	named := all
	if len(all) > maxPodDevices {
		named = slices.SortedStableFunc(slices.Values(all), func(a, b agentapi.PodDevice) int { return cmp.Compare(keepRank(a), keepRank(b)) })[:maxPodDevices]
	}
	for _, d := range named {
		nd := v1alpha1.NodePodDevice{
			ID: d.ID, PF: d.PF, Interface: d.Interface, RDMA: strings.Join(d.RDMA, ","), State: podDeviceState(d.State), Pod: strings.Join(d.Pods, ","),
		}
		if len(d.Pods) > 1 {
			nd.Pod = fmt.Sprintf("%d pods", len(d.Pods))
		}
		number := func(n int) *int32 {
			if n < 0 {
				return nil
			}
			v := clamp(n)
			return &v
		}
		nd.VF, nd.NUMANode, nd.Rail = number(d.VF), number(d.NUMANode), number(d.Rail)
		if d.Used != nil {
			nd.Address, nd.Detail = d.Used.Address, clip(cmp.Or(d.Used.Missing, d.Used.Choice), maxDetail)
		}
		out = append(out, nd)
	}
	return out, fmt.Sprintf("%d/%d", taken, len(all))
}

// keepRank orders devices by how much an SMCRNode needs them: first those with an address, then
// those that pods have, then the others.
func keepRank(d agentapi.PodDevice) int {
	switch {
	case d.Used != nil && d.Used.Address != "":
		return 0
	case d.Used != nil || len(d.Pods) > 0:
		return 1
	}
	return 2
}

func podDeviceState(state string) v1alpha1.PodDeviceState {
	switch state {
	case agentapi.DeviceUp:
		return v1alpha1.PodDeviceUp
	case agentapi.DeviceDown:
		return v1alpha1.PodDeviceDown
	case agentapi.DevicePod:
		return v1alpha1.PodDeviceInPod
	case agentapi.DeviceMissing:
		return v1alpha1.PodDeviceMissing
	case agentapi.DeviceVFIO:
		return v1alpha1.PodDeviceVFIO
	}
	return v1alpha1.PodDeviceUnbound
}

// States of a device's port in an SMCRNode.
const (
	nodePortActive  = "Active"
	nodePortDown    = "Down"
	nodePortMissing = "Missing"
)

func devicePort(d agentapi.Device) string {
	switch {
	case d.Missing != "":
		return nodePortMissing
	case d.Port == portActive:
		return nodePortActive
	}
	return nodePortDown
}

func transportOf(d agentapi.Device) v1alpha1.Transport {
	if d.Provider == "soft" {
		return v1alpha1.TransportSoftwareRoCE
	}
	return v1alpha1.TransportHardware
}

func nodeReady(s *Snapshot) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionReady, status, reason, message)
	}
	switch c := s.CNI.State; {
	case s.Uninstalled:
		return is(metav1.ConditionFalse, reasonUninstalled, "kube-smcr is uninstalled from this node; connections go directly to their destination")
	case s.Status.Draining:
		return is(metav1.ConditionFalse, reasonDraining, "the agent is stopping; new connections go directly to their destination until another one runs")
	case !s.Reconciled:
		return is(metav1.ConditionFalse, reasonStarting, "the agent has not yet read the pods and policies of the node; connections go directly to their destination")
	case c != "" && c != cniInstalled && c != cniContested && c != cniStandby:
		return is(metav1.ConditionFalse, reasonCNINotReady, "pods that are created now are not attached, see the condition CNIInstalled; attached pods are served")
	}
	return is(metav1.ConditionTrue, reasonAgentReady, "the agent serves the attached pods")
}

func nodeAccelerating(s *Snapshot, up int) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionAccelerating, status, reason, message)
	}
	lack, why, advice := nodeLack(s, up)
	switch {
	case s.Uninstalled:
		return is(metav1.ConditionFalse, reasonUninstalled, "kube-smcr is uninstalled from this node")
	case s.Status.Draining:
		return is(metav1.ConditionFalse, reasonDraining, "the agent is stopping; new connections go directly to their destination until another one runs")
	case lack != "" && kernelCarries(s):
		return is(metav1.ConditionTrue, reasonAccelerating, fmt.Sprintf("only pods on the kernel's datapath can have connections on SMC-R: %s: %s", why, advice))
	case lack != "":
		return is(metav1.ConditionFalse, lack, fmt.Sprintf("%s; everything is plain TCP: %s", why, advice))
	case s.Status.Pods.Ready == 0 && s.Status.Pods.Failed > 0:
		return is(metav1.ConditionTrue, reasonNoPods, fmt.Sprintf("connections can be on SMC-R, but %d pods could not be set up: kubectl smcr attachments --node %s says why",
			s.Status.Pods.Failed, s.Status.Node))
	case s.Status.Pods.Ready == 0:
		return is(metav1.ConditionTrue, reasonNoPods, fmt.Sprintf(
			"connections can be on SMC-R, but no opted-in pod is ready for it: annotate pods or their namespace with %s=true; of those that are opted in, the annotation %s says what they lack",
			v1alpha1.AnnotationEnabled, v1alpha1.AnnotationStatus))
	}
	return is(metav1.ConditionTrue, reasonAccelerating, "connections of the opted-in pods can be on SMC-R")
}

// nameDevice is what to do about an agent without devices.
const nameDevice = "name one in agent.devices of the chart, or in agent.devicesOfNode if that has the node"

// nodeLack is why the agent itself can carry no connection over SMC-R: as the reason of a condition
// and in words, and what to do about it. All are "" if the agent can.
func nodeLack(s *Snapshot, up int) (reason, why, advice string) {
	switch {
	case s.Status.Unable != "":
		reason = reasonNodeUnfit
		if s.Status.UnableCode == agentapi.CodeOf(clc.ReasonNoDev) {
			reason = reasonNoDevices
		}
		return reason, s.Status.Unable, "see status.capabilities for what is missing"
	case podsHaveDevices(s):
	case len(s.Status.Devices) == 0:
		return reasonNoDevices, "the agent has no RDMA device", nameDevice
	case up == 0:
		return reasonNoActiveDevice, "no port of the RDMA devices is up", "see the condition DevicesHealthy"
	}
	return "", "", ""
}

// kernelCarries reports whether pods are on the kernel's datapath, which does not need the agent's
// devices.
func kernelCarries(s *Snapshot) bool {
	return slices.ContainsFunc(s.Attachments, func(a agentapi.Attachment) bool { return a.Datapath != "" && a.State != agentapi.StateIdle }) // failed: only to change its filter
}

// podsHaveDevices reports whether pods are on devices that they have for
// themselves.
func podsHaveDevices(s *Snapshot) bool {
	return slices.ContainsFunc(s.PodDevices, func(d agentapi.PodDevice) bool { return d.Used != nil && d.Used.Port == portActive })
}

func nodeDevices(s *Snapshot) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionDevicesHealthy, status, reason, message)
	}
	if len(s.Status.Devices) == 0 && len(s.PodDevices) == 0 {
		return is(metav1.ConditionFalse, reasonNoDevices, "the agent has no RDMA device: "+nameDevice)
	}
	var down, missing []string
	note := func(d *agentapi.Device, name string) {
		switch {
		case d.Missing != "" && len(missing) < maxDevices:
			missing = append(missing, d.Missing)
		case d.Port != portActive && len(down) < maxDevices:
			down = append(down, name)
		}
	}
	for _, d := range s.PodDevices {
		if d.Used != nil {
			note(d.Used, fmt.Sprintf("%s of pod %s", d.ID, strings.Join(d.Pods, ",")))
		}
	}
	for _, d := range s.Status.Devices {
		note(&d, fmt.Sprintf("%s (%s)", d.Name, cmp.Or(d.Interface, d.Address, "no interface")))
	}
	if len(missing) > 0 {
		return is(metav1.ConditionFalse, reasonDeviceMissing, strings.Join(missing, "; "))
	}
	if len(down) == 0 {
		return is(metav1.ConditionTrue, reasonPortsActive, "the ports of all RDMA devices are up")
	}
	return is(metav1.ConditionFalse, reasonPortDown,
		fmt.Sprintf("ports that are down: %s: check the interface, its address and the cable", strings.Join(down, ", ")))
}

func nodeMetrics(s *Snapshot) metav1.Condition {
	if s.Status.NoMetrics != "" {
		return condition(v1alpha1.ConditionMetricsServed, metav1.ConditionFalse, reasonNoPort, s.Status.NoMetrics)
	}
	return condition(v1alpha1.ConditionMetricsServed, metav1.ConditionTrue, reasonServing, "the agent serves metrics")
}

func nodeCNI(s *Snapshot) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionCNIInstalled, status, reason, message)
	}
	switch c := s.CNI; {
	case s.Uninstalled:
		return is(metav1.ConditionFalse, reasonUninstalled, "kube-smcr is uninstalled from this node")
	case c.State == "":
		return is(metav1.ConditionUnknown, reasonNotManaged, "the agent does not install the plugin (cni.install is false)")
	case c.State == cniStandby:
		return is(metav1.ConditionUnknown, c.State, cmp.Or(c.Detail, "another agent of this node installs the plugin"))
	case c.State == cniInstalled:
		return is(metav1.ConditionTrue, c.State, cmp.Or(c.Detail, "the plugin is in the CNI chain"))
	default:
		return is(metav1.ConditionFalse, c.State, cmp.Or(c.Detail, "the plugin is not in the CNI chain, so new pods are not attached: see the agent's log"))
	}
}
