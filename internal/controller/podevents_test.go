// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// said is an event of the agent of a node about a pod, as its reporter makes it.
func said(node string, pod *corev1.Pod) *corev1.Event {
	now := metav1.Now()
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: system, GenerateName: "agent-" + node + "."},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: system, Name: "agent-" + node},
		Related:        &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Reason:         "SMCREnabled", Message: "connections of this pod try SMC-R", Type: corev1.EventTypeNormal,
		Source: corev1.EventSource{Component: "kube-smcr-agent", Host: node}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: v1alpha1.ReporterAgent, ReportingInstance: node,
	}
}

// notes are what was said about a pod, by reason.
func (w *world) notes(pod string) map[string]int {
	w.t.Helper()
	var list corev1.EventList
	if err := w.List(w.t.Context(), &list, client.InNamespace(w.ns)); err != nil {
		w.t.Fatal(err)
	}
	out := map[string]int{}
	for _, e := range list.Items {
		if e.InvolvedObject.Name == pod && e.ReportingController == v1alpha1.ReporterController {
			out[e.Reason+": "+e.Message]++
		}
	}
	return out
}

// TestPodEvents: an event of an agent reaches its pod, once, and no pod of
// another node; also from an agent that is not confined by the admission policy.
func TestPodEvents(t *testing.T) {
	w := newWorld(t)
	mine, theirs := w.pod("mine", "node-a", "10.0.0.1"), w.pod("theirs", "node-b", "10.0.0.2")
	rights := w.asController()
	stop := w.run(rights)
	for _, tt := range []struct {
		name string
		edit func(*corev1.Event)
		pod  *corev1.Pod
	}{
		{"pod of another node", func(*corev1.Event) {}, theirs},
		{"an earlier pod of the name", func(e *corev1.Event) { e.Related.UID = "0123" }, mine},
		{"no UID", func(e *corev1.Event) { e.Related.UID = "" }, mine},
		{"somebody else's reason", func(e *corev1.Event) { e.Reason = "OOMKilling" }, mine},
		{"another reporter", func(e *corev1.Event) { e.ReportingController = "example.com/x" }, mine},
		{"no node", func(e *corev1.Event) { e.Source.Host = "" }, mine},
		{"a pod that does not exist", func(e *corev1.Event) { e.Related.Name = "nobody" }, mine},
	} {
		e := said("node-a", tt.pod)
		e.Message = tt.name
		tt.edit(e)
		w.create(e)
	}
	w.create(said("node-a", mine)) // the last one, so that the others were looked at
	want := map[string]int{"SMCREnabled: connections of this pod try SMC-R": 1}
	w.eventually("the event of the pod", func() error {
		if diff := cmp.Diff(want, w.notes("mine")); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
	if got := w.notes("theirs"); len(got) != 0 {
		t.Errorf("events about a pod of another node: %v", got)
	}

	// The next controller sees the same events, and says nothing twice.
	stop()
	w.run(rights)
	again := said("node-a", mine)
	again.Reason = "SMCRFallback"
	w.create(again)
	want["SMCRFallback: connections of this pod try SMC-R"] = 1
	w.eventually("the event of the pod", func() error {
		if diff := cmp.Diff(want, w.notes("mine")); diff != "" {
			return fmt.Errorf("(-want +got):\n%s", diff)
		}
		return nil
	})
}

// TestPodEvents_long: names as long as they may be, and an agent that tells late.
func TestPodEvents_long(t *testing.T) {
	w := newWorld(t)
	node := strings.Repeat("n", 100) + "." + strings.Repeat("o", 152)
	pod := w.pod(strings.Repeat("p", 199)+"."+strings.Repeat("q", 53), node, "10.0.0.1", func(p *corev1.Pod) { p.Labels = nil })
	e := said(node, pod)
	e.ObjectMeta = metav1.ObjectMeta{Namespace: system, Name: "long." + string(types.UID(w.ns))}
	e.InvolvedObject.Name = "agent-x"
	e.FirstTimestamp = metav1.NewTime(time.Now().Add(-time.Hour))
	w.create(e)
	w.run(w.asController())
	w.eventually("the event of the pod", func() error {
		if got := w.notes(pod.Name); len(got) != 1 {
			return fmt.Errorf("events %v", got)
		}
		return nil
	})
}
