// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestAgentState: an agent's Lease counts more than the state of the agent's pod. As long as the Lease has not
// been renewed, nothing is said of the agent.
func TestAgentState(t *testing.T) {
	node := &corev1.Node{}
	up := newPod(system, "up", "n", "")
	up.Status.Phase = corev1.PodRunning
	up.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	for _, tt := range []struct {
		name    string
		verdict verdict
		agents  []corev1.Pod
		status  metav1.ConditionStatus // "": nothing is said
		reason  string
	}{
		{"renewed, no pod", renewed, nil, metav1.ConditionTrue, reasonAgentReady},
		{"silent, the pod counts as ready", silent, []corev1.Pod{*up}, metav1.ConditionFalse, reasonAgentSilent},
		{"silent, no pod", silent, nil, metav1.ConditionFalse, reasonAgentNoPod},
		{"no Lease", noLease, []corev1.Pod{*up}, "", ""},
		{"unproved", unproved, nil, "", ""},
	} {
		c, ok := agentState(tt.verdict, node, tt.agents)
		if ok != (tt.status != "") || ok && (c.Type != v1alpha1.ConditionAgentAlive || c.Status != tt.status || c.Reason != tt.reason) {
			t.Errorf("%s: %+v, %t, want %s %s", tt.name, c, ok, tt.status, tt.reason)
		}
	}
}

// TestPodState: to Kubernetes an agent is alive if its node is ready, and if one of its pods runs and is
// ready. During an upgrade there are two pods.
func TestPodState(t *testing.T) {
	node := func(ready corev1.ConditionStatus) *corev1.Node {
		return &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse}, {Type: corev1.NodeReady, Status: ready},
		}}}
	}
	pod := func(name string, phase corev1.PodPhase, ready corev1.ConditionStatus) corev1.Pod {
		p := newPod(system, name, "n", "")
		p.Status.Phase = phase
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: ready}}
		return *p
	}
	yes, no := corev1.ConditionTrue, corev1.ConditionFalse
	up, starts, ends := pod("up", corev1.PodRunning, yes), pod("starts", corev1.PodRunning, no), pod("ends", corev1.PodSucceeded, yes)
	silent := *newPod(system, "silent", "n", "")
	for _, tt := range []struct {
		name   string
		node   *corev1.Node
		agents []corev1.Pod
		status metav1.ConditionStatus
		reason string
		says   string
	}{
		{"alive", node(yes), []corev1.Pod{up}, metav1.ConditionTrue, reasonAgentReady, ""},
		{"upgrade", node(yes), []corev1.Pod{starts, up}, metav1.ConditionTrue, reasonAgentReady, ""},
		{"node without conditions", &corev1.Node{}, []corev1.Pod{up}, metav1.ConditionTrue, reasonAgentReady, ""},
		{"node not ready", node(no), []corev1.Pod{up}, metav1.ConditionFalse, reasonNodeNotReady, ""},
		{"node unknown", node(corev1.ConditionUnknown), []corev1.Pod{up}, metav1.ConditionFalse, reasonNodeNotReady, ""},
		{"no pod", node(yes), nil, metav1.ConditionFalse, reasonAgentNoPod, "tolerations"},
		{"starts", node(yes), []corev1.Pod{starts, ends}, metav1.ConditionFalse, reasonAgentNotReady, "pod kube-smcr/starts is not ready"},
		{"ended", node(yes), []corev1.Pod{ends}, metav1.ConditionFalse, reasonAgentNotReady, "ends"},
		{"says nothing", node(yes), []corev1.Pod{silent}, metav1.ConditionFalse, reasonAgentNotReady, "silent"},
	} {
		c := podState(tt.node, tt.agents)
		if c.Type != v1alpha1.ConditionAgentAlive || c.Status != tt.status || c.Reason != tt.reason || !strings.Contains(c.Message, tt.says) {
			t.Errorf("%s: %+v, want %s %s (%s)", tt.name, c, tt.status, tt.reason, tt.says)
		}
	}
}

// TestWithoutTaint: only the start-up taint is taken off. The rest is a list and not nil, even if no taint is
// left.
func TestWithoutTaint(t *testing.T) {
	ours, other := corev1.Taint{Key: v1alpha1.TaintAgentNotReady, Effect: corev1.TaintEffectNoSchedule}, corev1.Taint{Key: "other"}
	for _, tt := range []struct {
		in, want []corev1.Taint
		had      bool
	}{
		{nil, []corev1.Taint{}, false},
		{[]corev1.Taint{ours}, []corev1.Taint{}, true},
		{[]corev1.Taint{other}, []corev1.Taint{other}, false},
		{[]corev1.Taint{ours, other, ours}, []corev1.Taint{other}, true},
	} {
		rest, had := withoutTaint(tt.in)
		if d := cmp.Diff(tt.want, rest); d != "" || had != tt.had {
			t.Errorf("%v: had %t (-want +got)\n%s", tt.in, had, d)
		}
	}
}
