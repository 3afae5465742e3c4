// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// theDaemonSet is the name of the agents' DaemonSet, as the controller's rights have it.
const theDaemonSet = "kube-smcr-agent"

// installed makes the DaemonSet of the agents.
func (w *world) installed() *appsv1.DaemonSet {
	w.t.Helper()
	ds := newDaemonSet(system, theDaemonSet, 0)
	w.create(ds)
	return ds
}

func withDaemonSet(c *Config) {
	c.LeaderElect, c.DaemonSet = true, theDaemonSet
}

const whyLeft = "the agent left the node clean: the node has the label smcr.io/leave=true"

// leave writes what an agent that leaves its node writes last, and ends its pod.
func (s *shown) leave() {
	s.w.t.Helper()
	is := func(kind, status, reason string) any {
		return map[string]any{"type": kind, "status": status, "reason": reason, "message": whyLeft, "lastTransitionTime": "2026-11-21T08:00:00Z"}
	}
	s.w.applyAs("SMCRNode", s.smcr.Name, map[string]any{"conditions": []any{
		is("Ready", "False", v1alpha1.ReasonAgentGone), is("Accelerating", "False", v1alpha1.ReasonAgentGone),
		is("DevicesHealthy", "Unknown", v1alpha1.ReasonAgentGone), is("Uninstalled", "True", v1alpha1.ReasonNodeLeft),
	}})
	if err := s.w.Delete(s.w.t.Context(), s.agt, client.GracePeriodSeconds(0)); err != nil {
		s.w.t.Fatal(err)
	}
}

// left returns an error if not all says that the agent left the node.
func (s *shown) left() error {
	if err := errors.Join(s.w.get(s.smcr), s.w.get(s.pod)); err != nil {
		return err
	}
	if err := s.w.get(s.link); !apierrors.IsNotFound(err) {
		return errors.Join(errors.New("the link is there"), err)
	}
	if got := s.pod.Annotations[v1alpha1.AnnotationStatus]; got != v1alpha1.PodStatusNoAgent {
		return fmt.Errorf("the pod's status is %q", got)
	}
	all := s.smcr.Status.Conditions
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAgentAlive} {
		if c := meta.FindStatusCondition(all, kind); c == nil || c.Message != whyLeft {
			return fmt.Errorf("%s is %+v", kind, c)
		}
	}
	return errors.Join(hasCondition(all, v1alpha1.ConditionAgentAlive, metav1.ConditionFalse, reasonAgentLeft),
		hasCondition(all, v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ReasonAgentGone),
		hasCondition(all, v1alpha1.ConditionAccelerating, metav1.ConditionFalse, v1alpha1.ReasonAgentGone),
		hasCondition(all, v1alpha1.ConditionDevicesHealthy, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone))
}

func (w *world) isGone(obj client.Object) error {
	if err := w.get(obj); !apierrors.IsNotFound(err) {
		return errors.Join(fmt.Errorf("%T %s is there", obj, obj.GetName()), err)
	}
	return nil
}

// says returns an error if a pod has another status.
func (w *world) says(p *corev1.Pod, want string) error {
	if err := w.get(p); err != nil {
		return err
	}
	if got := p.Annotations[v1alpha1.AnnotationStatus]; got != want {
		return fmt.Errorf("the status of pod %s is %q, want %q", p.Name, got, want)
	}
	return nil
}

// TestNodeLeft: a node that its agent left on purpose says so, and why, until an agent is
// back, the Node is deleted, or nothing is installed any more.
func TestNodeLeft(t *testing.T) {
	w := newWorld(t)
	ds := w.installed()
	a, b, c := w.shown("a-"+w.ns), w.shown("b-"+w.ns), w.shown("c-"+w.ns)
	dieA, dieB := w.renews(w, a.smcr.Name), w.renews(w, b.smcr.Name)
	api := w.asController()
	stop := w.run(api, withDaemonSet)
	a.aliveSays(byLease)
	b.aliveSays(byLease)
	c.aliveSays(byPod)

	// The agent that leaves has no time to say it to its pods and link groups.
	began := time.Now()
	dieA()
	a.leave()
	w.eventually("a node that was left", a.left)
	if took := time.Since(began); took > promised {
		t.Errorf("to be seen after %v, want %v at most", took, promised)
	} else {
		t.Logf("to be seen after %v", took)
	}
	w.eventually("there is an event", func() error { return w.hasEvent("SMCRNode", a.smcr.Name, reasonAgentLeft) })
	late, out := w.pod("late", a.node.Name, "", optedIn("")), w.pod("out", a.node.Name, "")
	w.eventually("a pod that comes to a node that was left", func() error { return w.says(late, v1alpha1.PodStatusNoAgent) })
	w.never("it says so still when its Lease counts as silent, and when another controller leads", silentAfter+time.Second, a.left)
	stop()
	w.releaseLease()
	w.run(api, withDaemonSet)
	w.never("a controller that starts", silentAfter+2*time.Second, a.left)
	if err := errors.Join(b.alive(), c.alive(), w.says(out, "")); err != nil {
		t.Error(err)
	}

	// The agent is back, and leaves again.
	a.agt = newAgent(a.node.Name)
	w.create(a.agt)
	dieA = w.renews(w, a.smcr.Name)
	a.back()
	a.aliveSays(byLease)
	a.makesLinkAgain()
	w.never("the agent, which is back, has the last word", 3*time.Second, a.alive)
	kernel := w.pod("kernel", a.node.Name, "", optedIn(v1alpha1.PodStatusKernel))
	dieA()
	a.leave()
	w.eventually("a node that was left again", a.left)
	w.eventually("a pod that is not on its kernel's SMC-R any more", func() error { return w.says(kernel, v1alpha1.PodStatusNoAgent) })

	// Its Node is deleted.
	c.leave()
	w.eventually("a third node that was left", c.left)
	if err := w.Delete(t.Context(), c.node); err != nil {
		t.Fatal(err)
	}
	w.eventually("the SMCRNode goes with its Node", func() error { return w.isGone(c.smcr) })

	// Nothing is installed any more. A node whose agent is gone without a word is not clean.
	dieB()
	if err := w.Delete(t.Context(), b.agt, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	w.eventually("an agent that is gone", func() error { return b.gone(reasonAgentNoPod) })
	if err := errors.Join(a.left(), w.Delete(t.Context(), ds)); err != nil {
		t.Fatal(err)
	}
	w.eventually("the SMCRNode goes with the product", func() error {
		return errors.Join(w.isGone(a.smcr), w.says(a.pod, ""), w.says(late, ""))
	})
	if err := b.gone(reasonAgentNoPod); err != nil {
		t.Errorf("the node that is not clean: %v", err)
	}
}

// namespaces is a client that has nothing but namespaces.
type namespaces struct {
	client.Client
	annotations map[string]string // of all of them
}

func (c namespaces) Get(_ context.Context, _ client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	obj.SetAnnotations(c.annotations)
	return nil
}

// TestWithoutAgent: what a pod's kernel carries goes on without the agent, unless that left the node clean.
func TestWithoutAgent(t *testing.T) {
	const (
		enabled, kernel, kernelGone = v1alpha1.PodStatusEnabled, v1alpha1.PodStatusKernel, v1alpha1.PodStatusKernelNoAgent
		none                        = v1alpha1.PodStatusNoAgent
	)
	r := nodes{client: namespaces{}}
	for _, tt := range []struct{ was, gone, left string }{
		{"", none, none},
		{enabled, none, none},
		{none, none, none},
		{"Pending: POD_FAILED", none, none},
		{kernel, kernelGone, none},
		{kernelGone, kernelGone, none},
	} {
		for clean, want := range map[bool]string{false: tt.gone, true: tt.left} {
			pod := newPod("shop", "web", "n1", "")
			optedIn(tt.was)(pod)
			if got, err := r.withoutAgent(t.Context(), pod, clean); err != nil || got != want {
				t.Errorf("of %q, left clean %t: %q, %v, want %q", tt.was, clean, got, err, want)
			}
			if tt.was != "" {
				delete(pod.Annotations, v1alpha1.AnnotationEnabled)
				pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic"}}
				if got, err := r.withoutAgent(t.Context(), pod, clean); err != nil || got != want {
					t.Errorf("of %q, by a claim, left clean %t: %q, %v, want %q", tt.was, clean, got, err, want)
				}
			}
			pod.Annotations[v1alpha1.AnnotationEnabled] = "false"
			if got, err := r.withoutAgent(t.Context(), pod, clean); err != nil || got != "" {
				t.Errorf("of %q, opted out: %q, %v", tt.was, got, err)
			}
		}
	}
}

// TestNeverAnAgent: opted-in pods of nodes that never had an agent say so while the product
// is installed, and no longer. One that starts is waited for.
func TestNeverAnAgent(t *testing.T) {
	w := newWorld(t)
	none, starts := newNode("none-"+w.ns), newNode("starts-"+w.ns)
	w.create(none)
	w.create(starts)
	agent := newAgent(starts.Name)
	agent.Status.Conditions[0].Status = corev1.ConditionFalse
	w.create(agent)
	in, waits, out := w.pod("in", none.Name, "", optedIn("")), w.pod("waits", starts.Name, "", optedIn("")), w.pod("out", none.Name, "")
	says := func(status string) func() error {
		return func() error { return errors.Join(w.says(in, status), w.says(waits, ""), w.says(out, "")) }
	}
	w.run(w.asController(), withDaemonSet)
	w.never("nothing is installed", agentGrace+2*time.Second, says(""))
	ds := w.installed()
	w.eventually("it is installed", says(v1alpha1.PodStatusNoAgent))
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}
	update(w, ns, func(n *corev1.Namespace) { n.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"} })
	w.eventually("the namespace is opted in", func() error { return w.says(out, v1alpha1.PodStatusNoAgent) })
	claims := w.pod("claims", none.Name, "", func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: new("nic")}}
	})
	w.eventually("a pod that claims", func() error { return w.says(claims, v1alpha1.PodStatusNoAgent) })
	update(w, ns, func(n *corev1.Namespace) { n.Annotations = nil })
	w.eventually("the namespace is opted out", says(v1alpha1.PodStatusNoAgent))
	if err := w.says(claims, v1alpha1.PodStatusNoAgent); err != nil {
		t.Errorf("a pod that may be opted in by its claim: %v", err)
	}
	update(w, in, func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "false" })
	w.eventually("a pod is opted out", says(""))
	update(w, in, func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "true" })
	w.eventually("a pod is opted in", says(v1alpha1.PodStatusNoAgent))
	w.never("an agent that starts", agentGrace+2*time.Second, func() error { return w.says(waits, "") })
	w.policy("kernel", func(p *v1alpha1.SMCRPolicySpec) {
		p.Datapath, p.Isolation = v1alpha1.DatapathKernel, v1alpha1.IsolationNode
	})
	host := w.pod("host", none.Name, "", optedIn(""), inHostNetwork)
	w.eventually("a pod in the node's network", func() error { return w.says(host, v1alpha1.PodStatusNoAgent) })
	if err := w.Delete(t.Context(), ds); err != nil {
		t.Fatal(err)
	}
	w.eventually("it is uninstalled", func() error { return errors.Join(says("")(), w.says(claims, ""), w.says(host, "")) })
}

// TestNodes_podsBeforeTheirNamespace: nobody can say whether a pod is opted in before its namespace is known. The
// namespace's event leads to the pod's node then.
func TestNodes_podsBeforeTheirNamespace(t *testing.T) {
	r := &nodes{client: lagging{node: "n1"}}
	pod := newPod("new", "p", "n1", "10.0.0.1")
	pod.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"}
	if got, err := r.withoutAgent(t.Context(), pod, false); got != "" || err != nil {
		t.Fatalf("status %q, %v of a pod whose namespace is not known", got, err)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "new"}}
	if got := r.ofPodsIn(nil, ns); len(got) != 1 || got[0].Name != "n1" {
		t.Errorf("nodes %v of a new namespace", got)
	}
	if got := append(r.ofPodsIn(ns, ns.DeepCopy()), r.ofPodsIn(ns, nil)...); len(got) != 0 {
		t.Errorf("nodes %v of a namespace that did not change, and of one that is gone", got)
	}
}
