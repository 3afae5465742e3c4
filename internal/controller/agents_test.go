// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

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

// TestSameNode: the taints themselves are compared, and not how many there are.
func TestSameNode(t *testing.T) {
	ours, other := corev1.Taint{Key: v1alpha1.TaintAgentNotReady, Effect: corev1.TaintEffectNoSchedule}, corev1.Taint{Key: "other"}
	noExecute := corev1.Taint{Key: v1alpha1.TaintAgentNotReady, Effect: corev1.TaintEffectNoExecute}
	node := func(uid types.UID, ready corev1.ConditionStatus, taints ...corev1.Taint) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: uid}, Spec: corev1.NodeSpec{Taints: taints}}
		if ready != "" {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
		}
		return n
	}
	const yes, no = corev1.ConditionTrue, corev1.ConditionFalse
	for _, tt := range []struct {
		name string
		a, b *corev1.Node
		want bool
	}{
		{"same", node("a", yes, ours, other), node("a", yes, other, ours), true},
		{"one taint for another", node("a", yes, other), node("a", yes, ours), false},
		{"of another effect", node("a", yes, ours), node("a", yes, noExecute), false},
		{"more of others", node("a", yes, ours), node("a", yes, ours, other), true},
		{"made anew", node("a", yes), node("b", yes), false},
		{"ready", node("a", no), node("a", yes), false},
		{"first condition", node("a", ""), node("a", no), false},
	} {
		for _, order := range [][2]*corev1.Node{{tt.a, tt.b}, {tt.b, tt.a}} {
			if got := sameNode(order[0], order[1]); got != tt.want {
				t.Errorf("%s: the same: %t", tt.name, got)
			}
		}
	}
}

// TestNodes_ofAgent: what a node loses counts as what it gets, also in one event.
func TestNodes_ofAgent(t *testing.T) {
	r := &nodes{agents: agentPods{namespace: system, selector: labels.SelectorFromSet(labels.Set{"app": "agent"})}}
	pod := func(edit func(*corev1.Pod)) *corev1.Pod {
		p := newPod(system, "p", "n1", "10.0.0.1")
		p.Labels["app"], p.UID = "agent", "u"
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if edit != nil {
			edit(p)
		}
		return p
	}
	n1, n2 := types.NamespacedName{Name: "n1"}, types.NamespacedName{Name: "n2"}
	for _, tt := range []struct {
		name     string
		old, now *corev1.Pod
		want     []types.NamespacedName
	}{
		{"new", nil, pod(nil), []types.NamespacedName{n1}},
		{"gone", pod(nil), nil, []types.NamespacedName{n1}},
		{"same", pod(nil), pod(nil), nil},
		{"not ready", pod(nil), pod(func(p *corev1.Pod) { p.Status.Conditions = nil }), []types.NamespacedName{n1}},
		{"another pod", pod(nil), pod(func(p *corev1.Pod) { p.UID = "v" }), []types.NamespacedName{n1}},
		{"another pod elsewhere", pod(nil), pod(func(p *corev1.Pod) { p.UID, p.Spec.NodeName = "v", "n2" }), []types.NamespacedName{n1, n2}},
		{"no agent's any more", pod(nil), pod(func(p *corev1.Pod) { p.Labels["app"] = "x" }), []types.NamespacedName{n1}},
		{"an agent's now", pod(func(p *corev1.Pod) { p.Labels["app"] = "x" }), pod(nil), []types.NamespacedName{n1}},
		{"somebody else's", nil, pod(func(p *corev1.Pod) { p.Labels["app"] = "x" }), nil},
		{"without a node", nil, pod(func(p *corev1.Pod) { p.Spec.NodeName = "" }), nil},
	} {
		if d := cmp.Diff(tt.want, r.ofAgent(tt.old, tt.now)); d != "" {
			t.Errorf("%s (-want +got)\n%s", tt.name, d)
		}
	}
}

// TestSameConditions: an agent that leaves a node and one whose product goes say so by the reason.
func TestSameConditions(t *testing.T) {
	node := func(reason string) *v1alpha1.SMCRNode {
		return &v1alpha1.SMCRNode{Status: v1alpha1.SMCRNodeStatus{Conditions: []metav1.Condition{
			condition(v1alpha1.ConditionUninstalled, metav1.ConditionTrue, reason, ""),
		}}}
	}
	if !sameConditions(node("A"), node("A")) || sameConditions(node("A"), node(v1alpha1.ReasonNodeLeft)) || sameConditions(node("A"), &v1alpha1.SMCRNode{}) {
		t.Error("the reason does not count, or more than the reason does")
	}
}

func TestSamePeers(t *testing.T) {
	slice := func(policy string, addresses ...string) *v1alpha1.SMCRPeerSlice {
		return &v1alpha1.SMCRPeerSlice{Policy: policy, Addresses: addresses}
	}
	if !samePeers(slice("p", "10.0.0.1"), slice("p", "10.0.0.2")) || samePeers(slice("p", "10.0.0.1"), slice("p")) {
		t.Error("of one policy not only the number counts")
	}
	if samePeers(slice("p", "10.0.0.1"), slice("q", "10.0.0.1")) {
		t.Error("the peers of another policy are the same")
	}
	more := slice("p", "10.0.0.1")
	more.Annotations = map[string]string{annotationLeftOut: "1"}
	if samePeers(slice("p", "10.0.0.1"), more) || !samePeers(more, more.DeepCopy()) {
		t.Error("how many have no room does not count, or more than that does")
	}
}
