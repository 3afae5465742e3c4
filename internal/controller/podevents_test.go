// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

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

// TestPodEvents_clock: the clock of this machine does not matter. What comes after the first list is passed on, and of
// the list what is not much older than its youngest event.
func TestPodEvents_clock(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name     string
		ahead    time.Duration // of the controller's clock
		listed   bool
		youngest time.Duration // age of the youngest event of the first list; 0: it has no other
		age      time.Duration
		want     int
	}{
		{"watched", 0, false, 0, 0, 1},
		{"watched, by a clock that is ahead", 6 * time.Minute, false, 0, 0, 1},
		{"watched, by a clock that is behind", -time.Hour, false, 0, 0, 1},
		{"watched, and older than the list", 0, false, time.Minute, time.Hour, 1},
		{"listed", 0, true, time.Minute, 2 * time.Minute, 1},
		{"listed, by a clock that is ahead", 6 * time.Minute, true, time.Minute, 2 * time.Minute, 1},
		{"listed, and old", 0, true, time.Minute, time.Hour, 0},
		{"listed, and old by a clock that is behind", -time.Hour, true, time.Minute, time.Hour, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := time.Now().Add(-tt.ahead) // of the API server
			pod := newPod("shop", "p", "n", "10.0.0.1")
			pod.UID = "u"
			e := said("n", pod)
			e.Name, e.UID, e.CreationTimestamp = "e", "1", metav1.NewTime(now.Add(-tt.age))
			c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod, e).Build()
			r := &podEvents{client: c, log: slog.New(slog.DiscardHandler)}
			key := r.arrived(e, tt.listed)
			if tt.youngest > 0 {
				other := said("n", pod)
				other.Name, other.CreationTimestamp = "other", metav1.NewTime(now.Add(-tt.youngest))
				r.arrived(other, true)
			}
			if res, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: key}); err != nil || res.RequeueAfter != 0 {
				t.Errorf("%+v, %v", res, err)
			}
			var out eventsv1.EventList
			if err := c.List(t.Context(), &out, client.InNamespace("shop")); err != nil || len(out.Items) != tt.want {
				t.Errorf("%d events of the pod (%v), want %d", len(out.Items), err, tt.want)
			}
			if _, ok := r.pending[key]; ok {
				t.Error("the event is not forgotten")
			}
		})
	}
}

// TestPodEvents_gone: an event waits for a pod that the cache lacks, and not longer if the clock of this machine is behind.
func TestPodEvents_gone(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		e := said("n", newPod("shop", "gone", "n", "10.0.0.1"))
		e.Name, e.CreationTimestamp = "e", metav1.NewTime(time.Now().Add(time.Hour))
		r := &podEvents{client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(e).Build(), log: slog.New(slog.DiscardHandler)}
		req := ctrl.Request{NamespacedName: r.arrived(e, false)}
		for began := time.Now(); ; {
			res, err := r.Reconcile(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if res.RequeueAfter == 0 {
				if waited := time.Since(began); waited != podWait {
					t.Errorf("it waited %v, want %v", waited, podWait)
				}
				break
			}
			if time.Since(began) > podWait {
				t.Fatalf("it waits still after %v", time.Since(began))
			}
			<-time.After(res.RequeueAfter)
		}
		if len(r.pending) != 0 {
			t.Errorf("not forgotten: %v", r.pending)
		}
	})
}
