// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// After an uninstallation nothing is left but policies, though controllers still
// run, and nodes that could not be cleaned are named. A node that its agent left before
// is clean.
func TestUninstall(t *testing.T) {
	w := newWorld(t)
	clean, dead, gone := "clean-"+w.ns, "dead-"+w.ns, "gone-"+w.ns
	_, _, smcr := w.node(clean)
	deadNode, _, _ := w.node(dead)
	w.create(newLink("l-"+w.ns, clean, w.ns, "web-0"))
	w.pod("web-0", clean, "10.5.0.1")
	before := w.shown("left-" + w.ns)
	before.leave()
	stuck := w.pod("stuck", dead, "", optedIn(""))
	p := w.policy("web", func(s *v1alpha1.SMCRPolicySpec) {
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
	})
	w.run(w.asController(), quick)
	w.eventually("the policy has peers", func() error {
		if err := w.get(p); err != nil || p.Status.PeerAddresses == 1 {
			return err
		}
		return fmt.Errorf("peerAddresses is %d", p.Status.PeerAddresses)
	})
	updateStatus(w, deadNode, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	w.eventually("pods without an agent", func() error {
		return errors.Join(w.says(before.pod, v1alpha1.PodStatusNoAgent), w.says(stuck, v1alpha1.PodStatusNoAgent))
	})
	w.create(newSMCRNode(gone)) // its node is not there; the controller sweeps it, or it is not waited for

	agent := make(chan error, 1)
	go func() { // the agent of the node that is alive
		for {
			err := w.Get(t.Context(), client.ObjectKeyFromObject(smcr), smcr)
			if err == nil && smcr.Annotations[v1alpha1.AnnotationUninstall] == "true" {
				meta.SetStatusCondition(&smcr.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionUninstalled, Status: metav1.ConditionTrue, Reason: "Clean"})
				err = w.Update(t.Context(), smcr)
				if err == nil {
					agent <- nil
					return
				}
			}
			select {
			case <-t.Context().Done():
				agent <- t.Context().Err()
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
		Namespace: system, Name: v1alpha1.AgentLeasePrefix + dead, Labels: map[string]string{v1alpha1.LabelNode: dead},
	}}
	w.create(lease)
	left, err := Uninstall(t.Context(), w.limited(w.config, "hooks.yaml", "kube-smcr-uninstall"), UninstallConfig{
		Namespace: system, Timeout: patient, LeaderGone: 3 * time.Second, Log: testLog(t),
	})
	if err != nil || !slices.Equal(left, []string{dead}) {
		t.Errorf("not clean are %v (%v), want %s", left, err, dead)
	}
	if err := <-agent; err != nil {
		t.Errorf("the agent was not told: %v", err)
	}
	w.never("nothing comes back", 2*coalesce, func() error {
		for _, l := range []client.ObjectList{&v1alpha1.SMCRLinkList{}, &v1alpha1.SMCRNodeList{}, &v1alpha1.SMCRPeerSliceList{}} {
			if err := w.List(t.Context(), l); err != nil {
				return err
			}
			if n := meta.LenList(l); n > 0 {
				return fmt.Errorf("%d objects in %T", n, l)
			}
		}
		if err := w.get(lease); !apierrors.IsNotFound(err) {
			return errors.Join(errors.New("the Lease of an agent is there"), err)
		}
		return errors.Join(w.says(before.pod, ""), w.says(stuck, ""), w.get(p))
	})
	// The next installation is not to wait for the lease of this one.
	w.releaseLease()
}

// slowCluster is an uninstallation of 40 nodes, whose API server takes a second for each write. An agent
// leaves its node clean when it is told, even if the answer to who told it is late.
func slowCluster(t *testing.T, timeout time.Duration) (u *uninstall, writes *atomic.Int32) {
	t.Helper()
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	b := fake.NewClientBuilder().WithScheme(scheme)
	for i := range 40 {
		name := fmt.Sprintf("n%02d", i)
		pod := newPod("shop", "p-"+name, name, "")
		optedIn("Enabled")(pod)
		b.WithObjects(newNode(name), newAgent(name), newSMCRNode(name), pod)
	}
	writes = new(atomic.Int32)
	b.WithInterceptorFuncs(interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, p client.Patch, o ...client.PatchOption) error {
			<-time.After(time.Second)
			if err := c.Patch(ctx, obj, p, o...); err != nil {
				return err
			}
			n := obj.(*v1alpha1.SMCRNode)
			meta.SetStatusCondition(&n.Status.Conditions, metav1.Condition{Type: v1alpha1.ConditionUninstalled, Status: metav1.ConditionTrue, Reason: "Clean"})
			return c.Update(ctx, n)
		},
		Create: func(ctx context.Context, _ client.WithWatch, _ client.Object, _ ...client.CreateOption) error {
			return slowly(ctx, writes)
		},
		SubResourceApply: func(ctx context.Context, _ client.Client, _ string, _ runtime.ApplyConfiguration, _ ...client.SubResourceApplyOption) error {
			return slowly(ctx, writes)
		},
	})
	c := UninstallConfig{Namespace: system, Timeout: timeout, Log: slog.New(slog.DiscardHandler)}
	return &uninstall{client: b.Build(), config: c, own: installation{namespace: system}, alone: map[string]time.Time{}}, writes
}

// slowly counts a write that takes a second.
func slowly(ctx context.Context, writes *atomic.Int32) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Second):
		writes.Add(1)
		return nil
	}
}

// Agents are told several at a time, none after the deadline, and only those count as left that did not
// leave their node clean while others were told.
func TestUninstall_slowAPIServer(t *testing.T) {
	for _, tt := range []struct {
		timeout time.Duration
		left    int
	}{
		{time.Minute, 0},
		{2500 * time.Millisecond, 0}, // the last ones have been told, and the answers come after the deadline
		{1500 * time.Millisecond, 40 - 2*writesAtOnce},
		{0, 0}, // they are told all the same
	} {
		t.Run(tt.timeout.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u, _ := slowCluster(t, tt.timeout)
				began := time.Now()
				left, err := u.agents(t.Context())
				if err != nil || len(left) != tt.left {
					t.Errorf("%d nodes are left (%v), want %d", len(left), err, tt.left)
				}
				if took := time.Since(began); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// Pods are cleaned and nodes told of several at a time.
func TestUninstall_manyWrites(t *testing.T) {
	for name, work := range map[string]func(context.Context, *uninstall){
		"pods":  func(ctx context.Context, u *uninstall) { u.cleanPods(ctx) },
		"nodes": func(ctx context.Context, u *uninstall) { u.tellOf(ctx, make([]string, 40)) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u, writes := slowCluster(t, time.Minute)
				began := time.Now()
				work(t.Context(), u)
				if took := time.Since(began); took > 5*time.Second || writes.Load() != 40 {
					t.Errorf("%d writes of 40 in %v", writes.Load(), took)
				}
			})
		})
	}
}

// Without definitions, agents and controllers there is nothing to do.
func TestUninstall_ofNothing(t *testing.T) {
	w := newWorld(t)
	left, err := Uninstall(t.Context(), w.limited(w.config, "hooks.yaml", "kube-smcr-uninstall"), UninstallConfig{
		Namespace: system, Timeout: time.Second, LeaderGone: time.Millisecond, Log: testLog(t),
	})
	if err != nil || len(left) > 0 {
		t.Errorf("not clean are %v (%v), want none", left, err)
	}
	w.releaseLease()
}

// Of two installations one is uninstalled: what the other one's agents and controller
// wrote stays. A node without an agent is not waited for, and named.
func TestUninstall_ofOneOfTwo(t *testing.T) {
	w := newWorld(t)
	own, theirs, same := "own-"+w.ns, "theirs-"+w.ns, "same-"+w.ns
	w.create(newNode(own)) // without an agent's pod
	w.create(newSMCRNode(own))
	of := func(node, agent string) {
		w.create(newNode(node))
		s := newSMCRNode(node)
		s.Status.AgentPod = agent
		w.create(s)
		w.create(newLink("l-"+node, node, w.ns, "web-0"))
	}
	of(theirs, "elsewhere/agent-1")
	of(same, system+"/other-agent-1")
	w.create(newLink("l-"+own, own, w.ns, "web-0"))
	w.create(&v1alpha1.SMCRPeerSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "s"}, Addresses: []string{"192.0.2.1"}})
	stays, goes := w.pod("stays", theirs, ""), w.pod("goes", own, "")
	for _, p := range []*corev1.Pod{stays, goes} {
		(&shown{w: w, pod: p}).status(v1alpha1.PodStatusNoAgent)
	}
	left, err := Uninstall(t.Context(), w.limited(w.config, "hooks.yaml", "kube-smcr-uninstall"), UninstallConfig{
		Namespace: system, DaemonSet: "agent", Timeout: time.Hour, LeaderGone: time.Millisecond, Log: testLog(t),
	})
	if err != nil || !slices.Equal(left, []string{own}) {
		t.Errorf("not clean are %v (%v), want %s", left, err, own)
	}
	var events corev1.EventList
	if err := w.List(t.Context(), &events, client.InNamespace(metav1.NamespaceDefault)); err != nil {
		t.Fatal(err)
	}
	told := slices.ContainsFunc(events.Items, func(e corev1.Event) bool {
		return e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == own && e.Reason == reasonNotClean && e.Message == NotClean
	})
	if !told {
		t.Errorf("no event says that %s is not clean", own)
	}
	if err := errors.Join(w.says(stays, v1alpha1.PodStatusNoAgent), w.says(goes, "")); err != nil {
		t.Error(err)
	}
	for _, node := range []string{theirs, same} {
		n := newSMCRNode(node)
		if err := w.get(n); err != nil || n.Annotations[v1alpha1.AnnotationUninstall] != "" {
			t.Errorf("SMCRNode of the other installation: %v, annotations %v", err, n.Annotations)
		}
		if err := w.get(newLink("l-"+node, node, w.ns, "web-0")); err != nil {
			t.Errorf("SMCRLink of the other installation: %v", err)
		}
	}
	if err := w.get(&v1alpha1.SMCRPeerSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "s"}}); err != nil {
		t.Error(err)
	}
	if err := w.get(newLink("l-"+own, own, w.ns, "web-0")); !apierrors.IsNotFound(err) {
		t.Errorf("own SMCRLink: %v, want that it is gone", err)
	}
	if err := w.get(newSMCRNode(own)); !apierrors.IsNotFound(err) {
		t.Errorf("own SMCRNode: %v, want that it is gone", err)
	}
	w.releaseLease()
}
