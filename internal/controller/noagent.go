// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// This file is about nodes on which no agent is to run: those that an agent left clean, and
// those that never had one. While the product is installed, the status of their pods is
// NO_AGENT, and the SMCRNode of a node that was left says why. When the agents' DaemonSet is
// deleted, both are taken away:
//
//	kubectl smcr leave n1       the agent of n1 leaves, its SMCRNode stays; n2 never had one
//	late pods of n1, of n2      tellPods: NO_AGENT, until they are opted out
//	the DaemonSet is deleted    forget: the SMCRNode of n1 goes, and NO_AGENT on n1 and n2
//
// The SMCRNode of a node whose agent is gone without having left it clean stays even then.

// watchInstallation has all nodes reconciled when the DaemonSet of the agents comes or goes, and
// the nodes of a namespace's pods when the namespace is opted in or out.
func (r *nodes) watchInstallation(b *ctrl.Builder) *ctrl.Builder {
	if r.daemonSet != "" {
		b = b.Watches(&appsv1.DaemonSet{}, mark(0, func(old, now *appsv1.DaemonSet) []types.NamespacedName {
			if old != nil && now != nil && old.DeletionTimestamp.IsZero() == now.DeletionTimestamp.IsZero() {
				return nil
			}
			var all corev1.NodeList
			if err := r.client.List(context.Background(), &all); err != nil {
				return nil // the cache is being stopped, and so is the queue
			}
			out := make([]types.NamespacedName, 0, len(all.Items))
			for i := range all.Items {
				out = append(out, client.ObjectKeyFromObject(&all.Items[i]))
			}
			return out
		}))
	}
	return b.Watches(&corev1.Namespace{}, mark(coalesce, r.ofPodsIn))
}

// ofPodsIn returns the nodes of a namespace's pods when the namespace is opted in or out, and when
// it is new. In the latter case, events of its pods may have come before the namespace was in the
// cache, and withoutAgent has then left the pods' statuses alone.
func (r *nodes) ofPodsIn(old, now *corev1.Namespace) []types.NamespacedName {
	if now == nil || old != nil && old.Annotations[v1alpha1.AnnotationEnabled] == now.Annotations[v1alpha1.AnnotationEnabled] {
		return nil
	}
	var pods corev1.PodList
	if err := r.client.List(context.Background(), &pods, client.InNamespace(now.Name)); err != nil {
		return nil // the cache is being stopped, and so is the queue
	}
	var out []types.NamespacedName
	for i := range pods.Items {
		out = append(out, key(pods.Items[i].Spec.NodeName)...)
	}
	return out
}

// installed says whether the DaemonSet of the agents is there.
func (r *nodes) installed(ctx context.Context) (bool, error) {
	if r.daemonSet == "" {
		return true, nil
	}
	var ds appsv1.DaemonSet
	err := r.client.Get(ctx, types.NamespacedName{Namespace: r.agents.namespace, Name: r.daemonSet}, &ds)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("get the DaemonSet of the agents: %w", err)
	}
	return err == nil && ds.DeletionTimestamp.IsZero(), nil
}

// uninstalled returns the condition of an SMCRNode that says that the agent left the node
// clean, nil if it did not.
func uninstalled(n *v1alpha1.SMCRNode) *metav1.Condition {
	if c := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionUninstalled); c != nil && c.Status == metav1.ConditionTrue {
		return c
	}
	return nil
}

// left says whether the agent left a node on purpose, while the product stays installed on
// others, and has ended. If an agent is coming back, it has a pod already.
func left(n *v1alpha1.SMCRNode, agents []corev1.Pod) bool {
	c := uninstalled(n)
	return c != nil && c.Reason == v1alpha1.ReasonNodeLeft && len(agents) == 0
}

// forget deletes the SMCRNode and takes away the pods' statuses that say that a node has no agent:
// no installation is left. While an agent still runs, forget does nothing: the end of its pod is
// an event of its own.
func (r *nodes) forget(ctx context.Context, n *v1alpha1.SMCRNode, agents []corev1.Pod) (ctrl.Result, error) {
	if len(agents) > 0 {
		return ctrl.Result{}, nil
	}
	r.found(n.Name)
	var errs []error
	if n.UID != "" {
		errs = append(errs, r.remove(ctx, n, client.Preconditions{UID: &n.UID, ResourceVersion: &n.ResourceVersion}))
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.MatchingFields{indexPodNode: n.Name}); err != nil {
		return ctrl.Result{}, errors.Join(append(errs, fmt.Errorf("list the pods of %s: %w", n.Name, err))...)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		switch p.Annotations[v1alpha1.AnnotationStatus] {
		case v1alpha1.PodStatusNoAgent, v1alpha1.PodStatusKernelNoAgent:
			errs = append(errs, writePodStatus(ctx, r.client, p, ""))
		}
	}
	return ctrl.Result{}, errors.Join(errs...)
}

// withoutAgent is the status of a pod that has no agent; "" if the pod is not opted in. clean says
// that the agent left the node clean. Otherwise the kernel still carries the connections of a pod
// on datapath Kernel, and the status says so.
func (r *nodes) withoutAgent(ctx context.Context, pod *corev1.Pod, clean bool) (string, error) {
	was := pod.Annotations[v1alpha1.AnnotationStatus]
	is := v1alpha1.PodStatusNoAgent
	if !clean && (was == v1alpha1.PodStatusKernel || was == v1alpha1.PodStatusKernelNoAgent) {
		is = v1alpha1.PodStatusKernelNoAgent
	}
	if pod.Spec.HostNetwork {
		enabled, err := r.hostOptedIn(ctx, pod)
		switch {
		case err != nil:
			return was, err
		case !enabled:
			return "", nil
		}
		return is, nil
	}
	if claimed(pod) {
		return is, nil
	}
	var ns corev1.Namespace
	if err := r.client.Get(ctx, types.NamespacedName{Name: pod.Namespace}, &ns); err != nil {
		return was, client.IgnoreNotFound(err)
	}
	if enabled, _ := v1alpha1.OptIn(pod.Annotations, ns.Annotations); enabled {
		return is, nil
	}
	return "", nil
}

// hostOptedIn is [hostOptedIn] with the policies of the pod's namespace.
func (r *nodes) hostOptedIn(ctx context.Context, pod *corev1.Pod) (bool, error) {
	if !asks(pod) {
		return false, nil
	}
	var all v1alpha1.SMCRPolicyList
	if err := r.client.List(ctx, &all, client.InNamespace(pod.Namespace)); err != nil {
		return false, fmt.Errorf("list policies of %s: %w", pod.Namespace, err)
	}
	var ranked []*policy
	for i := range all.Items {
		if p := compile(&all.Items[i]); p.obj.DeletionTimestamp.IsZero() && p.selects(pod) {
			ranked = append(ranked, p)
		}
	}
	slices.SortFunc(ranked, func(a, b *policy) int { return v1alpha1.CompareRank(a.obj, b.obj) })
	return hostOptedIn(pod, ranked), nil
}
