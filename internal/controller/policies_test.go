// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// The status of a policy follows its pods, what their agents say, and their
// links, within the time that users are promised.
func TestPolicyStatus_followsPodsAndLinks(t *testing.T) {
	w := newWorld(t)
	w.node("n1-" + w.ns)
	node := "n1-" + w.ns
	w.run(w.asController())
	p := w.policy("web", selecting("web"))
	w.eventually("a policy without pods says so", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonNoPods),
			hasCondition(p.Status.Conditions, v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonValid))
	})

	pod := w.pod("web-0", node, "10.1.0.1", labelled("app", "web"))
	w.eventually("a pod that is not opted in is said so", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonNotOptedIn))
	})
	update(w, pod, func(p *corev1.Pod) { optedIn("")(p) })
	w.eventually("an opted-in pod is pending", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsPending))
	})
	w.promptly("the status follows a pod", func() {
		update(w, pod, func(p *corev1.Pod) { optedIn("Fallback: X")(p) })
		w.eventually("a pod that fell back is said so", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsFallback))
		})
	}, func() {
		update(w, pod, func(p *corev1.Pod) { optedIn("Enabled")(p) })
		w.eventually("an enabled pod makes the policy ready", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionTrue, reasonAllAccelerated))
		})
	})
	l := newLink("l1-"+w.ns, node, w.ns, "web-0")
	l.Status.Redundancy = v1alpha1.RedundancySingle
	w.create(l)
	w.eventually("a single link is not redundant", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionLinksRedundant, metav1.ConditionFalse, reasonNotRedundant))
	})
	w.promptly("the status follows a link", func() {
		update(w, l, func(l *v1alpha1.SMCRLink) { l.Status.State = v1alpha1.LinkActive })
		w.eventually("a link that is up does not degrade", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionFalse, reasonHealthy))
		})
	}, func() {
		update(w, l, func(l *v1alpha1.SMCRLink) {
			l.Status.State, l.Status.Redundancy = v1alpha1.LinkDown, v1alpha1.RedundancyNone
		})
		w.eventually("a link that is down degrades", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonLinksDown))
		})
	})
	update(w, pod, func(p *corev1.Pod) { optedIn("Fallback: PEER_NO_SMC")(p) })
	w.eventually("the reason of a fallback is counted", func() error {
		want := []v1alpha1.ReasonCount{{Reason: "PEER_NO_SMC", Pods: 1}}
		if err := w.get(p); err != nil {
			return err
		}
		if d := cmp.Diff(want, p.Status.FallbackReasons); d != "" {
			return errors.New(d)
		}
		return hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsFallback)
	})
	if p.Status.ObservedGeneration != p.Generation {
		t.Errorf("observedGeneration is %d, want %d", p.Status.ObservedGeneration, p.Generation)
	}
	w.eventually("the change has an event", func() error {
		return w.hasEvent("SMCRPolicy", p.Name, reasonLinksDown)
	})

	// Nothing changes: nothing is written.
	w.eventually("the status is stable", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonLinksDown))
	})
	w.quiesced(p, coalesce+coalesce/2)
	version := p.ResourceVersion
	update(w, pod, func(p *corev1.Pod) { p.Annotations["example.com/other"] = "1" })
	update(w, l, func(l *v1alpha1.SMCRLink) { l.Status.Connections = 7 })
	w.never("an event that changes nothing writes nothing", 2*coalesce, func() error {
		if err := w.get(p); err != nil {
			return err
		}
		if p.ResourceVersion != version {
			return fmt.Errorf("resourceVersion went from %s to %s", version, p.ResourceVersion)
		}
		return nil
	})

	// The status is not what it is to be: as after a write of a controller that led before, or of somebody else.
	updateStatus(w, p, func(p *v1alpha1.SMCRPolicy) { p.Status.Pods, p.Status.FallbackReasons = v1alpha1.PolicyPods{}, nil })
	w.eventually("the status is written again", func() error {
		if err := w.get(p); err != nil {
			return err
		}
		if p.Status.Pods.Fallback != 1 || len(p.Status.FallbackReasons) != 1 {
			return fmt.Errorf("the status is %+v", p.Status)
		}
		return nil
	})
	w.quiesced(p, 2*coalesce+coalesce/2)
}

func (w *world) hasEvent(kind, name, reason string) error {
	var l eventsv1.EventList
	if err := w.List(w.t.Context(), &l); err != nil {
		return err
	}
	for _, e := range l.Items {
		if e.Regarding.Kind == kind && e.Regarding.Name == name && e.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("no event %s on %s %s among %d", reason, kind, name, len(l.Items))
}

// A namespace opts all its pods in; a pod's own word counts more.
func TestPolicyStatus_followsTheNamespacesOptIn(t *testing.T) {
	w := newWorld(t)
	w.node("n-" + w.ns)
	w.pod("a", "n-"+w.ns, "10.1.1.1")
	w.pod("b", "n-"+w.ns, "10.1.1.2", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "false" })
	w.pod("c", "n-"+w.ns, "10.1.1.3", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "yes" })
	w.pod("d", "n-"+w.ns, "10.1.1.4", func(p *corev1.Pod) { p.Spec.HostNetwork = true })
	p := w.policy("all")
	w.run(w.asController())
	counts := func(want v1alpha1.PolicyPods) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if d := cmp.Diff(want, p.Status.Pods); d != "" {
				return errors.New(d)
			}
			return nil
		}
	}
	w.eventually("nobody is opted in", counts(v1alpha1.PolicyPods{Matched: 3}))
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}
	update(w, ns, func(n *corev1.Namespace) { n.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"} })
	w.eventually("one pod is opted in by its namespace", counts(v1alpha1.PolicyPods{Matched: 3, OptedIn: 1, Pending: 1}))
}

func TestConflictingPolicies(t *testing.T) {
	w := newWorld(t)
	w.pod("a", "n-"+w.ns, "10.1.2.1")
	first := w.policy("prefer")
	second := w.policy("require", func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired })
	w.run(w.asController())
	w.eventually("both are told", func() error {
		return errors.Join(w.get(first), w.get(second),
			hasCondition(first.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionTrue, reasonOtherPolicy),
			hasCondition(second.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionTrue, reasonOtherPolicy))
	})
	update(w, second, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 5 })
	w.eventually("a priority resolves it", func() error {
		return errors.Join(w.get(first), w.get(second),
			hasCondition(first.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionFalse, reasonNoConflict),
			hasCondition(second.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionFalse, reasonNoConflict))
	})
}

// A policy on nodes with one RNIC says so and warns of nothing; it warns when a node has
// another one, and the links are single nevertheless.
func TestPolicies_oneRNIC(t *testing.T) {
	w := newWorld(t)
	name := "n-" + w.ns
	w.create(newNode(name))
	w.create(newAgent(name))
	smcr := newSMCRNode(name)
	smcr.Status.DeviceSummary = "1/1"
	w.create(smcr)
	w.pod("web-0", name, "10.6.0.1", optedIn("Enabled"))
	l := newLink("l-"+w.ns, name, w.ns, "web-0")
	l.Status.Redundancy = v1alpha1.RedundancySingle
	w.create(l)
	p := w.policy("one-rnic")
	w.run(w.asController())
	is := func(reason string) func() error {
		return func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionLinksRedundant, metav1.ConditionFalse, reason))
		}
	}
	w.eventually("nodes with one RNIC", is(reasonOneRNIC))
	if m := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionLinksRedundant).Message; !strings.Contains(m, "because their nodes have one: "+name) {
		t.Errorf("the message is %q", m)
	}
	w.never("nobody is warned", 2*time.Second, func() error {
		if w.hasEvent("SMCRPolicy", p.Name, reasonOneRNIC) == nil || w.hasEvent("SMCRPolicy", p.Name, reasonNotRedundant) == nil {
			return errors.New("there is an event")
		}
		return nil
	})
	update(w, smcr, func(n *v1alpha1.SMCRNode) { n.Status.DeviceSummary = "1/2" })
	w.eventually("a second RNIC that is down", is(reasonNotRedundant))
	w.eventually("there is an event", func() error { return w.hasEvent("SMCRPolicy", p.Name, reasonNotRedundant) })
}

func TestSamePolicy(t *testing.T) {
	is := func(uid types.UID, generation int64, matched int32) *v1alpha1.SMCRPolicy {
		return &v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{UID: uid, Generation: generation}, Status: v1alpha1.SMCRPolicyStatus{Pods: v1alpha1.PolicyPods{Matched: matched}}}
	}
	if !samePolicy(is("a", 1, 3), is("a", 1, 3)) || samePolicy(is("a", 1, 3), is("a", 2, 3)) || samePolicy(is("a", 1, 3), is("b", 1, 3)) {
		t.Error("a policy is known by its UID, and what it wants by its generation")
	}
	if samePolicy(is("a", 1, 3), is("a", 1, 4)) {
		t.Error("a status that is not what was computed last stays")
	}
}
