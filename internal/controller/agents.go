// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Reasons of the condition AgentAlive.
const (
	reasonAgentReady    = "AgentReady"
	reasonNodeNotReady  = "NodeNotReady"
	reasonAgentNoPod    = "AgentPodMissing"
	reasonAgentNotReady = "AgentPodNotReady"
	reasonAgentSilent   = "AgentSilent"
	reasonAgentLeft     = "AgentLeft"
)

// agentState returns the condition AgentAlive of a node, by what the agent's Lease says. A
// Lease says more than the agent's pod: when only kubelet has ended, the agent goes on, and
// when the node has lost its power, Kubernetes notices 40 s later. ok is false if the Lease
// does not say whether the agent lives, or not yet.
func agentState(v verdict, node *corev1.Node, agents []corev1.Pod) (state metav1.Condition, ok bool) {
	switch v {
	case renewed:
		return condition(v1alpha1.ConditionAgentAlive, metav1.ConditionTrue, reasonAgentReady, "the agent renews its Lease"), true
	case silent:
		if state = podState(node, agents); state.Status == metav1.ConditionFalse {
			return state, true
		}
		return condition(v1alpha1.ConditionAgentAlive, metav1.ConditionFalse, reasonAgentSilent,
			"the agent does not renew its Lease any more, though its pod counts as ready: the node has no power or no network, or the agent hangs"), true
	case noLease, unproved:
	}
	return state, false
}

// podState returns the condition AgentAlive of a node, by what Kubernetes says of its pods.
// The condition is true if the node and one of the agent's pods on the node are ready. During
// an upgrade of the agent there may be two such pods.
func podState(node *corev1.Node, agents []corev1.Pod) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, format string, args ...any) metav1.Condition {
		return condition(v1alpha1.ConditionAgentAlive, status, reason, fmt.Sprintf(format, args...))
	}
	if c := nodeCondition(node, corev1.NodeReady); c != nil && c.Status != corev1.ConditionTrue {
		return is(metav1.ConditionFalse, reasonNodeNotReady, "the node is not ready")
	}
	if len(agents) == 0 {
		return is(metav1.ConditionFalse, reasonAgentNoPod, "no pod of the node agent is on the node: check that the DaemonSet's node selector and tolerations allow one there, and that the node has room for one")
	}
	for i := range agents {
		if podReady(&agents[i]) {
			return is(metav1.ConditionTrue, reasonAgentReady, "the agent's pod is ready")
		}
	}
	return is(metav1.ConditionFalse, reasonAgentNotReady, "pod %s/%s is not ready: see kubectl describe and its log", agents[0].Namespace, agents[0].Name)
}

func nodeCondition(node *corev1.Node, kind corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == kind {
			return &node.Status.Conditions[i]
		}
	}
	return nil
}

func podReady(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue && pod.Status.Phase == corev1.PodRunning
		}
	}
	return false
}

// withoutTaint returns the taints of a node without the start-up taint, and whether the
// start-up taint was among them.
func withoutTaint(taints []corev1.Taint) (rest []corev1.Taint, had bool) {
	rest = []corev1.Taint{} // not nil: null would not be a list in a patch
	for _, t := range taints {
		if t.Key == v1alpha1.TaintAgentNotReady {
			had = true
		} else {
			rest = append(rest, t)
		}
	}
	return rest, had
}

// startupTaints are the start-up taints of a node: one for each effect at most.
func startupTaints(n *corev1.Node) []corev1.Taint {
	var out []corev1.Taint
	for _, t := range n.Spec.Taints {
		if t.Key == v1alpha1.TaintAgentNotReady {
			out = append(out, t)
		}
	}
	return out
}
