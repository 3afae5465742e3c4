// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// testRenewEvery is how often agents renew their Leases, see renewEvery in
// internal/kube/report.
const testRenewEvery = 2500 * time.Millisecond

// promised is how long after the end of an agent people see it.
const promised = 10 * time.Second

// shown is a node with an agent, one pod and one link, and what there is to see of them.
type shown struct {
	w    *world
	node *corev1.Node
	pod  *corev1.Pod // web-NODE
	agt  *corev1.Pod
	smcr *v1alpha1.SMCRNode
	link *v1alpha1.SMCRLink
}

func (w *world) shown(name string) *shown {
	w.t.Helper()
	s := &shown{w: w}
	s.node, s.agt, s.smcr = w.node(name)
	s.pod = w.pod("web-"+name, name, "", optedIn(v1alpha1.PodStatusEnabled))
	s.link = newLink("l-"+name, name, w.ns, s.pod.Name)
	w.makeLink(s.link)
	return s
}

// makeLink makes a link that the controller may delete.
func (w *world) makeLink(l *v1alpha1.SMCRLink) {
	w.t.Helper()
	if err := w.Create(w.t.Context(), l); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := w.Delete(context.Background(), l); client.IgnoreNotFound(err) != nil {
			w.t.Error(err)
		}
	})
}

// alive returns an error if anything says that the agent is gone.
func (s *shown) alive() error {
	if err := errors.Join(s.w.get(s.smcr), s.w.get(s.pod), s.w.get(s.link)); err != nil {
		return err
	}
	if got := s.pod.Annotations[v1alpha1.AnnotationStatus]; got != v1alpha1.PodStatusEnabled {
		return fmt.Errorf("the pod's status is %q", got)
	}
	if c := meta.FindStatusCondition(s.smcr.Status.Conditions, v1alpha1.ConditionReady); c.Status != metav1.ConditionTrue {
		return fmt.Errorf("the node is %+v", c)
	}
	if meta.IsStatusConditionFalse(s.smcr.Status.Conditions, v1alpha1.ConditionAgentAlive) {
		return errors.New("the agent counts as gone")
	}
	return nil
}

// gone returns an error if not all says that the agent is gone.
func (s *shown) gone(because string) error {
	if err := errors.Join(s.w.get(s.smcr), s.w.get(s.pod)); err != nil {
		return err
	}
	if err := s.w.get(s.link); !apierrors.IsNotFound(err) {
		return errors.Join(errors.New("the link is there"), err)
	}
	if got, want := s.pod.Annotations[v1alpha1.AnnotationStatus], "Fallback: NO_AGENT"; got != want {
		return fmt.Errorf("the pod's status is %q, want %q", got, want)
	}
	errs := []error{hasCondition(s.smcr.Status.Conditions, v1alpha1.ConditionAgentAlive, metav1.ConditionFalse, because)}
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAccelerating, v1alpha1.ConditionDevicesHealthy} {
		errs = append(errs, hasCondition(s.smcr.Status.Conditions, kind, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone))
	}
	return errors.Join(errs...)
}

// works writes the conditions of an agent that works.
func (s *shown) works(servesMetrics bool) {
	s.w.t.Helper()
	is := func(kind, reason string) any {
		return map[string]any{"type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-11-21T08:00:00Z"}
	}
	all := []any{is("Ready", "AgentReady"), is("Accelerating", "PodsReady"), is("DevicesHealthy", "AllPortsActive")}
	if servesMetrics {
		all = append(all, is("MetricsServed", "Serving"))
	}
	s.w.applyAs("SMCRNode", s.smcr.Name, map[string]any{"conditions": all})
}

// metrics returns an error if the condition MetricsServed has another status; "": if there is one.
func (s *shown) metrics(want metav1.ConditionStatus, reason string) error {
	if err := s.w.get(s.smcr); err != nil {
		return err
	}
	if c := meta.FindStatusCondition(s.smcr.Status.Conditions, v1alpha1.ConditionMetricsServed); want == "" && c != nil {
		return fmt.Errorf("MetricsServed is there: %+v", c)
	} else if want == "" {
		return nil
	}
	return hasCondition(s.smcr.Status.Conditions, v1alpha1.ConditionMetricsServed, want, reason)
}

// back writes what an agent that starts writes.
func (s *shown) back() {
	s.w.t.Helper()
	s.works(false)
	s.status(v1alpha1.PodStatusEnabled)
	s.link.ResourceVersion, s.link.UID = "", ""
	s.w.makeLink(s.link)
}

// makesLinkAgain makes the link again, as an agent does, if the controller deleted it: that may have seen it before it saw that the
// agent is back.
func (s *shown) makesLinkAgain() {
	s.w.t.Helper()
	if err := s.w.get(s.link); client.IgnoreNotFound(err) != nil {
		s.w.t.Fatal(err)
	} else if err != nil {
		s.link.ResourceVersion, s.link.UID = "", ""
		s.w.makeLink(s.link)
	}
}

// status writes the pod's annotation as an agent does; "" takes it away.
func (s *shown) status(status string) {
	s.w.t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{}}
	u.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	u.SetNamespace(s.pod.Namespace)
	u.SetName(s.pod.Name)
	if status != "" {
		u.SetAnnotations(map[string]string{v1alpha1.AnnotationStatus: status})
	}
	if err := s.w.Status().Apply(s.w.t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership); err != nil {
		s.w.t.Fatal(err)
	}
}

// applyAs writes an object's status as an agent does.
func (w *world) applyAs(kind, name string, status map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion().WithKind(kind))
	u.SetName(name)
	if err := w.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership); err != nil {
		w.t.Fatal(err)
	}
}

// renews renews the Lease of a node's agent until the returned function is called.
func (w *world) renews(c client.Client, node string) (die func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: v1alpha1.AgentLeasePrefix + node}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			at := metav1.NowMicro()
			u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"renewTime": at.UTC().Format(metav1.RFC3339Micro)}}}
			u.SetGroupVersionKind(coordinationv1.SchemeGroupVersion.WithKind("Lease"))
			u.SetNamespace(lease.Namespace)
			u.SetName(lease.Name)
			cctx, done := context.WithTimeout(ctx, testRenewEvery)
			_ = c.Apply(cctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent)) // tried again
			done()
			select {
			case <-ctx.Done():
				return
			case <-time.After(testRenewEvery):
			}
		}
	})
	die = func() { cancel(); wg.Wait() }
	w.t.Cleanup(func() {
		die()
		if err := w.Delete(context.Background(), lease); client.IgnoreNotFound(err) != nil {
			w.t.Error(err)
		}
	})
	return die
}

// aliveSays waits until the controller says that an agent is alive, by its Lease.
func (s *shown) aliveSays(message string) {
	s.w.t.Helper()
	s.w.eventually("the agent of "+s.smcr.Name+" lives", func() error {
		if err := errors.Join(s.w.get(s.smcr), hasCondition(s.smcr.Status.Conditions, v1alpha1.ConditionAgentAlive, metav1.ConditionTrue, reasonAgentReady)); err != nil {
			return err
		}
		if c := meta.FindStatusCondition(s.smcr.Status.Conditions, v1alpha1.ConditionAgentAlive); c.Message != message {
			return errors.New(c.Message)
		}
		return nil
	})
}

const (
	byLease = "the agent renews its Lease"
	byPod   = "the agent's pod is ready"
)

// TestAgentGone_power: a node that loses its power says nothing, and neither does Kubernetes
// say anything of it for 40 s. All of it is unknown within 10 s, and nothing of another node.
func TestAgentGone_power(t *testing.T) {
	w := newWorld(t)
	a, b := w.shown("a-"+w.ns), w.shown("b-"+w.ns)
	dead, _ := w.renews(w, a.smcr.Name), w.renews(w, b.smcr.Name)
	p := w.policy("all")
	kernel := w.pod("kernel", a.node.Name, "", optedIn(v1alpha1.PodStatusKernel))
	w.run(w.asController(), elected)
	a.aliveSays(byLease)
	b.aliveSays(byLease)
	dead()
	began := time.Now()
	w.eventually("the node without power", func() error { return a.gone(reasonAgentSilent) })
	if took := time.Since(began); took > promised {
		t.Errorf("to be seen after %v, want %v at most", took, promised)
	} else {
		t.Logf("to be seen after %v", took)
	}
	w.eventually("a pod whose kernel carries on", func() error { return w.says(kernel, v1alpha1.PodStatusKernelNoAgent) })
	w.eventually("its policy is degraded", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonAgentsMissing))
	})
	w.eventually("there is an event", func() error { return w.hasEvent("SMCRNode", a.smcr.Name, "AgentLost") })

	late := w.pod("late", a.node.Name, "", optedIn(""))
	out := w.pod("out", a.node.Name, "")
	w.eventually("a pod that comes to a node without an agent", func() error {
		if err := w.get(late); err != nil || late.Annotations[v1alpha1.AnnotationStatus] != v1alpha1.PodStatusNoAgent {
			return fmt.Errorf("its annotations are %v (%w)", late.Annotations, err)
		}
		return nil
	})
	updateStatus(w, a.node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	w.eventually("Kubernetes has noticed, too", func() error { return a.gone(reasonNodeNotReady) })
	if err := w.get(out); err != nil || out.Annotations[v1alpha1.AnnotationStatus] != "" {
		t.Errorf("a pod that is not opted in has the annotations %v (%v)", out.Annotations, err)
	}
	if err := b.alive(); err != nil {
		t.Errorf("the other node: %v", err)
	}

	w.renews(w, a.smcr.Name)
	a.back()
	a.aliveSays(byLease)
	a.makesLinkAgain()
	w.never("the agent, which is back, has the last word", 3*time.Second, a.alive)
	a.status("")
	if err := w.get(a.pod); err != nil || a.pod.Annotations[v1alpha1.AnnotationStatus] != "" {
		t.Errorf("an agent that takes the status away leaves %v (%v)", a.pod.Annotations, err)
	}
}

// TestAgentGone_livesOn: an agent that lives is not gone: not when kubelet ends, so that
// Kubernetes says of its pod and node that they are not ready, not when it starts again, and
// not when a controller starts that has never heard of it.
func TestAgentGone_livesOn(t *testing.T) {
	w := newWorld(t)
	a := w.shown("a-" + w.ns)
	die := w.renews(w, a.smcr.Name)
	api := w.asController()
	stop := w.run(api, elected)
	a.aliveSays(byLease)
	updateStatus(w, a.node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	updateStatus(w, a.agt, func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse })
	w.never("an agent without kubelet", 2*agentGrace, a.alive)

	die()
	w.never("an agent whose container starts", testRenewEvery, a.alive)
	die = w.renews(w, a.smcr.Name)
	stop()
	w.releaseLease()
	stop = w.run(api, elected)
	w.never("an agent that started again, and a controller that starts", silentAfter+2*time.Second, a.alive)

	// The agent ends while no controller is there: the next one finds an old Lease.
	stop()
	die()
	w.releaseLease()
	stop = w.run(api, elected)
	w.eventually("an agent that ended while no controller was there", func() error { return a.gone(reasonNodeNotReady) })
	stop()
	w.releaseLease()
	w.run(api, elected)
	w.never("a controller that starts finds the old Lease of an agent that is gone", silentAfter+2*time.Second, func() error {
		return a.gone(reasonNodeNotReady)
	})
}

// TestAgentGone_apiServer: an API server that does not answer makes no agent gone, neither
// while it is away nor when it is back, though nobody renews a Lease meanwhile.
func TestAgentGone_apiServer(t *testing.T) {
	w := newWorld(t)
	proxy, through := server.NewProxy(t)
	c, err := client.New(through, client.Options{Scheme: w.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	a := w.shown("a-" + w.ns)
	w.renews(c, a.smcr.Name)
	w.run(w.limited(through, "controller.yaml", "kube-smcr-controller"), elected)
	a.aliveSays(byLease)
	proxy.TakeAway()
	w.never("an API server that is away", silentAfter+2*time.Second, a.alive)
	proxy.GiveBack()
	w.never("an API server that was away", silentAfter+testRenewEvery, a.alive)
}

// TestAgentGone_withTheLeader: the leader was on the node that lost its power. The next one
// says so within the same time.
func TestAgentGone_withTheLeader(t *testing.T) {
	w := newWorld(t)
	proxy, through := server.NewProxy(t)
	c, err := client.New(through, client.Options{Scheme: w.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	a, b := w.shown("a-"+w.ns), w.shown("b-"+w.ns)
	w.renews(c, a.smcr.Name)
	w.renews(w, b.smcr.Name)
	api := w.limited(through, "controller.yaml", "kube-smcr-controller")
	w.run(api, elected)
	a.aliveSays(byLease)
	w.run(w.direct(api), elected)
	w.never("a second replica starts", 2*testRenewEvery, a.alive)
	proxy.TakeAway() // of the leader, and of the agent of its node
	began := time.Now()
	w.eventually("the node of the leader", func() error { return a.gone(reasonAgentSilent) })
	if took := time.Since(began); took > promised {
		t.Errorf("to be seen after %v, want %v at most", took, promised)
	} else {
		t.Logf("to be seen after %v", took)
	}
	if err := b.alive(); err != nil {
		t.Errorf("the other node: %v", err)
	}
	proxy.GiveBack()
}

// elected is with leader election, whose times are those of the product but for the Lease
// that the next controller waits for.
func elected(c *Config) {
	c.LeaderElect = true
}

// TestAgentGone_byPods: agents of an earlier version have no Lease; their pods say it.
func TestAgentGone_byPods(t *testing.T) {
	w := newWorld(t)
	a := w.shown("n-" + w.ns)
	w.run(w.asController(), elected)
	a.aliveSays(byPod)
	ready := func(s corev1.ConditionStatus) {
		updateStatus(w, a.agt, func(p *corev1.Pod) { p.Status.Conditions[0].Status = s })
	}
	ready(corev1.ConditionFalse)
	ready(corev1.ConditionTrue)
	w.never("a container that starts again is nothing", agentGrace+time.Second, a.alive)
	ready(corev1.ConditionFalse)
	w.eventually("the agent's pod is not ready", func() error { return a.gone(reasonAgentNotReady) })
	a.back()
	ready(corev1.ConditionTrue)
	a.aliveSays(byPod)
	updateStatus(w, a.node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	w.eventually("the node is not ready", func() error { return a.gone(reasonNodeNotReady) })
	if err := w.Delete(t.Context(), a.agt, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	updateStatus(w, a.node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.eventually("the agent's pod is gone", func() error { return a.gone(reasonAgentNoPod) })
}

// TestAgentGone_metrics: nobody knows whether an agent that is gone serves metrics. One that is back says it, or is to
// serve none, in whichever order the controller notices that it lives and reads what it wrote.
func TestAgentGone_metrics(t *testing.T) {
	w := newWorld(t)
	a, none := w.shown("n-"+w.ns), w.shown("none-"+w.ns)
	a.works(true)
	w.run(w.asController(), elected)
	a.aliveSays(byPod)
	none.aliveSays(byPod)
	ready := func(s *shown, is corev1.ConditionStatus) {
		updateStatus(w, s.agt, func(p *corev1.Pod) { p.Status.Conditions[0].Status = is })
	}
	ends := func(s *shown, want metav1.ConditionStatus, reason string) {
		ready(s, corev1.ConditionFalse)
		w.eventually("the agent is gone", func() error { return errors.Join(s.gone(reasonAgentNotReady), s.metrics(want, reason)) })
	}
	ends(none, "", "") // it never served any
	ends(a, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone)
	a.works(true)
	ready(a, corev1.ConditionTrue)
	a.aliveSays(byPod)
	if err := a.metrics(metav1.ConditionTrue, "Serving"); err != nil {
		t.Error(err)
	}

	ends(a, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone)
	ready(a, corev1.ConditionTrue)
	a.aliveSays(byPod)
	if err := a.metrics(metav1.ConditionUnknown, v1alpha1.ReasonAgentGone); err != nil {
		t.Error(err)
	}
	a.works(false)
	w.eventually("the agent is to serve none", func() error { return a.metrics("", "") })
	if err := hasCondition(a.smcr.Status.Conditions, v1alpha1.ConditionAgentAlive, metav1.ConditionTrue, reasonAgentReady); err != nil {
		t.Error(err)
	}

	a.works(true)
	ends(a, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone)
	a.works(false)
	ready(a, corev1.ConditionTrue)
	w.eventually("the agent is to serve none, and wrote first", func() error { return a.metrics("", "") })
}
