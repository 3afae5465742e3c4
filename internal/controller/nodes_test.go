// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// The objects of a node that is gone go, also when it went while no controller
// was there, and nothing else does.
func TestNodeGarbage(t *testing.T) {
	w := newWorld(t)
	gone, kept := "gone-"+w.ns, "kept-"+w.ns
	node, agent, smcr := w.node(gone)
	_, _, smcrKept := w.node(kept)
	l, lKept := newLink("gone-"+w.ns, gone, w.ns, "x"), newLink("kept-"+w.ns, kept, w.ns, "x")
	w.create(l)
	w.create(lKept)
	never := newLink("never-"+w.ns, "never-"+w.ns, w.ns, "x")
	w.create(never)
	w.run(w.asController())
	isGone := func(obj client.Object) error {
		switch err := w.get(obj); {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("%T %s is there", obj, obj.GetName())
	}
	w.eventually("a link of a node that never was", func() error { return isGone(never) })
	for _, o := range []client.Object{node, agent} {
		if err := w.Delete(t.Context(), o, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("the objects of the node", func() error { return errors.Join(isGone(smcr), isGone(l)) })
	w.never("the objects of another node", time.Second, func() error { return errors.Join(w.get(smcrKept), w.get(lKept)) })
	w.never("nothing brings them back", time.Second, func() error { return errors.Join(isGone(smcr), isGone(l)) })
}

func TestStartupTaint(t *testing.T) {
	w := newWorld(t)
	name := "n-" + w.ns
	n := newNode(name)
	startup := corev1.Taint{Key: v1alpha1.TaintAgentNotReady, Effect: corev1.TaintEffectNoSchedule}
	n.Spec.Taints = []corev1.Taint{
		startup,
		{Key: "example.com/mine", Value: "1", Effect: corev1.TaintEffectNoSchedule},
	}
	w.create(n)
	agent, smcr := newAgent(name), newSMCRNode(name)
	smcr.Status.Conditions[0].Status = metav1.ConditionFalse
	w.create(agent)
	w.create(smcr)
	w.run(w.limited(w.config, "controller.yaml", "kube-smcr-controller", "kube-smcr-controller-startup-taint"), func(c *Config) { c.StartupTaint = true })
	taints := func() (out []string) {
		for _, t := range n.Spec.Taints {
			if t.Key != corev1.TaintNodeNotReady { // the API server puts it on new nodes
				out = append(out, t.Key)
			}
		}
		return out
	}
	w.never("the taint stays while the agent is not ready", 2*time.Second, func() error {
		if err := w.get(n); err != nil {
			return err
		}
		if len(taints()) != 2 {
			return fmt.Errorf("taints are %v", taints())
		}
		return nil
	})
	update(w, smcr, func(n *v1alpha1.SMCRNode) {
		meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionReady).Status = metav1.ConditionTrue
	})
	w.eventually("only the taint goes", func() error {
		if err := w.get(n); err != nil {
			return err
		}
		if d := cmp.Diff([]string{"example.com/mine"}, taints()); d != "" {
			return errors.New(d)
		}
		return nil
	})
	update(w, n, func(n *corev1.Node) {
		for i := range n.Spec.Taints {
			if n.Spec.Taints[i].Key == "example.com/mine" {
				n.Spec.Taints[i] = startup
			}
		}
	})
	w.eventually("it goes also if it comes for another one", func() error {
		if err := w.get(n); err != nil {
			return err
		}
		if len(taints()) != 0 {
			return fmt.Errorf("taints are %v", taints())
		}
		return nil
	})
}

// A controller that starts to lead finds an agent that counts as gone, has a pod that is ready, and a Lease
// that was seen once: it came back while nobody led. Nothing is taken from it until its Lease says more.
func TestReconcile_agentCameBackUnseen(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	pod := newPod("shop", "web", "n", "")
	optedIn(v1alpha1.PodStatusEnabled)(pod)
	smcr := judged("n", reasonAgentSilent)
	smcr.UID = "u"
	var wrote []string
	of := func(client.Object) []string { return []string{"n"} }
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, newNode("n"), newAgent("n"), smcr, newLink("l", "n", "shop", "web"), pod).
		WithIndex(&corev1.Pod{}, indexPodNode, of).WithIndex(&v1alpha1.SMCRLink{}, indexLinkNode, of).
		WithIndex(&corev1.Pod{}, indexAgentNode, func(o client.Object) []string {
			if o.GetNamespace() == system {
				return []string{"n"}
			}
			return nil
		}).
		WithInterceptorFuncs(interceptor.Funcs{
			Delete: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.DeleteOption) error {
				wrote = append(wrote, "delete "+o.GetName())
				return nil
			},
			Apply: func(context.Context, client.WithWatch, runtime.ApplyConfiguration, ...client.ApplyOption) error {
				wrote = append(wrote, "condition")
				return nil
			},
			SubResourceApply: func(context.Context, client.Client, string, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
				wrote = append(wrote, "pod")
				return nil
			},
		}).Build()
	r := nodes{client: c, recorder: events.NewFakeRecorder(9), leases: newLeases(), missing: map[string]time.Time{}}
	began := time.Now()
	for i, want := range [][]string{nil, {"condition"}} {
		r.leases.saw("n", "n", began.Add(time.Duration(i)*time.Second))
		again, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "n"}})
		if err != nil || !cmp.Equal(want, wrote) || again.RequeueAfter == 0 {
			t.Errorf("after renewal %d it wrote %v, want %v; again after %v, %v", i+1, wrote, want, again.RequeueAfter, err)
		}
	}
}

// TestOfAgentGone: which conditions of the agent the controller has, beside AgentAlive.
func TestOfAgentGone(t *testing.T) {
	const gone = v1alpha1.ReasonAgentGone
	for _, tt := range []struct {
		name                   string
		ready, metrics         string // the reason of the condition; "": it is not there
		alive                  metav1.ConditionStatus
		left                   bool
		wantReady, wantMetrics bool
		wantStatus             metav1.ConditionStatus // of MetricsServed
	}{
		{name: "the agent ends", ready: "AgentReady", metrics: "Serving", alive: metav1.ConditionFalse, wantReady: true, wantMetrics: true, wantStatus: metav1.ConditionUnknown},
		{name: "one that serves no metrics ends", ready: "AgentReady", alive: metav1.ConditionFalse, wantReady: true},
		{name: "it lives, and has written nothing yet", ready: gone, metrics: gone, alive: metav1.ConditionTrue, wantReady: true, wantMetrics: true},
		{name: "it lives, and has written", ready: "AgentReady", metrics: "Serving", alive: metav1.ConditionTrue},
		{name: "it lives, and is to serve no metrics any more", ready: "AgentReady", metrics: gone, alive: metav1.ConditionTrue},
		{name: "it left", ready: gone, metrics: gone, alive: metav1.ConditionFalse, left: true},
	} {
		n := &v1alpha1.SMCRNode{}
		for kind, reason := range map[string]string{v1alpha1.ConditionReady: tt.ready, v1alpha1.ConditionMetricsServed: tt.metrics} {
			if reason != "" {
				n.Status.Conditions = append(n.Status.Conditions, metav1.Condition{Type: kind, Reason: reason})
			}
		}
		if tt.left {
			n.Status.Conditions = append(n.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionUninstalled, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonNodeLeft})
		}
		got := ofAgentGone(n, metav1.Condition{Status: tt.alive})
		ready, metrics := meta.FindStatusCondition(got, v1alpha1.ConditionReady), meta.FindStatusCondition(got, v1alpha1.ConditionMetricsServed)
		if (ready != nil) != tt.wantReady || (metrics != nil) != tt.wantMetrics || metrics != nil && metrics.Status != tt.wantStatus {
			t.Errorf("%s: %+v", tt.name, got)
		}
	}
}
