// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// awaitPolicy waits until the admission policy holds, which is a moment after it
// was made: until an agent cannot write an SMCRNode that is not its own.
func awaitPolicy(t *testing.T, agent client.Client) {
	t.Helper()
	root, other := admin(t), smcrObject("SMCRNode", "nobodys", "nobodys")
	awaitRefusal(t, "ValidatingAdmissionPolicy", func() error {
		err := apply(t.Context(), agent, other.DeepCopy())
		_ = root.Delete(t.Context(), other.DeepCopy())
		return err
	})
}

// awaitRefusal repeats a call until an admission policy forbids it with the text. A policy
// holds a moment after it was made; nothing tells when.
func awaitRefusal(t *testing.T, text string, call func() error) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; {
		err := call()
		if apierrors.IsForbidden(err) && strings.Contains(err.Error(), text) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the policy is not in force: %v", err)
		}
		time.Sleep(50 * time.Millisecond) // polls the API server
	}
}

// judge looks whether a call was allowed, or forbidden with a text.
func judge(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%v, want that it is allowed", err)
	case want != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want)):
		t.Errorf("%v, want that it is forbidden: %q", err, want)
	}
}

// agentEvent is an event as the reporter of an agent makes it.
func agentEvent(node, kind, name string) *corev1.Event {
	about := corev1.ObjectReference{APIVersion: v1alpha1.GroupVersion().String(), Kind: kind, Name: name}
	space := metav1.NamespaceDefault
	if kind == "Pod" {
		about.APIVersion, about.Namespace, space = "v1", namespace, namespace
	}
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: space, GenerateName: "e-"}, InvolvedObject: about, Reason: "SMCREnabled", Type: corev1.EventTypeNormal,
		Source: corev1.EventSource{Component: "kube-smcr-agent", Host: node}, ReportingController: v1alpha1.ReporterAgent, ReportingInstance: node,
	}
}

// TestAgentsTellOfTheirNode: agents make events about their own pod, SMCRNode and
// SMCRLinks, as themselves, and change none.
func TestAgentsTellOfTheirNode(t *testing.T) {
	ctx, root := t.Context(), admin(t)
	install(t, root)
	ensure(t, root, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	a := agentOf(t, root, "node-a")
	agentOf(t, root, "node-b")
	awaitPolicy(t, a)
	edited := func(e *corev1.Event, edit func(*corev1.Event)) *corev1.Event { edit(e); return e }
	own := func() *corev1.Event { return agentEvent("node-a", "Pod", "kube-smcr-agent-node-a") }
	const notItself, notIts = "with kube-smcr-agent on this node as their source", "only events about its own pod, its SMCRNode and its SMCRLinks"
	for _, tt := range []struct {
		name  string
		event *corev1.Event
		want  string // "" is allowed
	}{
		{"own pod", own(), ""},
		{"own pod, about another", edited(own(), func(e *corev1.Event) {
			e.Related = &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "shop", Name: "web-a", UID: "u"}
		}), ""},
		{"own node", agentEvent("node-a", "SMCRNode", "node-a"), ""},
		{"own link", agentEvent("node-a", "SMCRLink", linkOfA), ""},

		{"pod of a user", edited(own(), func(e *corev1.Event) {
			e.Namespace, e.InvolvedObject.Namespace, e.InvolvedObject.Name = "shop", "shop", "web-a"
		}), `cannot create resource "events" in API group "" in the namespace "shop"`},
		{"pod of another agent", agentEvent("node-a", "Pod", "kube-smcr-agent-node-b"), notIts},
		{"node of another", agentEvent("node-a", "SMCRNode", "node-b"), notIts},
		{"link of another", agentEvent("node-a", "SMCRLink", linkOfB), notIts},
		{"link of a node with a name that begins alike", agentEvent("node-a", "SMCRLink", "node-a-b-00000001"), notIts},
		{"core node", edited(agentEvent("node-a", "Node", "node-a"), func(e *corev1.Event) { e.InvolvedObject.APIVersion = "v1" }), notIts},
		{"kind of another group", edited(agentEvent("node-a", "SMCRNode", "node-a"), func(e *corev1.Event) { e.InvolvedObject.APIVersion = "example.com/v1" }), notIts},
		{"from another node", agentEvent("node-b", "Pod", "kube-smcr-agent-node-a"), notItself},
		{"as kubelet", edited(own(), func(e *corev1.Event) { e.Source.Component = "kubelet" }), notItself},
		{"as the controller", edited(own(), func(e *corev1.Event) { e.ReportingController = v1alpha1.ReporterController }), notItself},
	} {
		t.Run(tt.name, func(t *testing.T) { judge(t, a.Create(ctx, tt.event), tt.want) })
	}

	e := own()
	must(t, root.Create(ctx, e))
	patch := client.RawPatch(types.MergePatchType, []byte(`{"message":"x"}`))
	judge(t, a.Patch(ctx, e.DeepCopy(), patch), `cannot patch resource "events"`)
	judge(t, a.Delete(ctx, e.DeepCopy()), `cannot delete resource "events"`)
}

// TestAgentsOfNodesWithLongNames: what agents write holds the node's UID where a
// name does not fit into a label.
func TestAgentsOfNodesWithLongNames(t *testing.T) {
	ctx, root := t.Context(), admin(t)
	install(t, root)
	for _, tt := range []struct {
		name string
		node string
	}{
		{"as long as a label", strings.Repeat("a", 63)},
		{"a little longer", strings.Repeat("b", 64)},
		{"100 characters", strings.Repeat("c", 100)},
		{"a name in DNS", strings.Repeat("d", 60) + "." + strings.Repeat("e", 63) + ".example.com"},
		{"253 characters", strings.Repeat("f", 62) + strings.Repeat("."+strings.Repeat("g", 62), 3) + ".h"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			core := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: tt.node}}
			ensure(t, root, core)
			must(t, root.Get(ctx, client.ObjectKeyFromObject(core), core))
			label := tt.node
			if len(label) > 63 {
				label = string(core.UID)
			}
			a := agentAs(t, root, fmt.Sprintf("kube-smcr-agent-%d", len(tt.node)), tt.node)
			awaitPolicy(t, a)
			made := func(kind, name, labelled string) *unstructured.Unstructured {
				o := smcrObject(kind, name, tt.node)
				o.SetLabels(map[string]string{v1alpha1.LabelNode: labelled})
				return o
			}
			judge(t, apply(ctx, a, made("SMCRNode", tt.node, label)), "")
			judge(t, apply(ctx, a, made("SMCRLink", label+"-00000001", label)), "")
			judge(t, a.Create(ctx, agentEvent(tt.node, "SMCRLink", label+"-00000001")), "")
			judge(t, a.Create(ctx, agentEvent(tt.node, "SMCRNode", tt.node)), "")
			judge(t, a.Delete(ctx, made("SMCRLink", label+"-00000001", label)), "")
			if label != tt.node {
				judge(t, apply(ctx, a, made("SMCRNode", tt.node, tt.node[:50])), "only objects with the label smcr.io/node: "+label)
				judge(t, apply(ctx, a, made("SMCRLink", tt.node[:50]+"-00000001", label)), "may write only SMCRLinks of this node")
			}
		})
	}
}
