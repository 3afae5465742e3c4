// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
