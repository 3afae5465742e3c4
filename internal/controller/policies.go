// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// policies writes the statuses of the SMCRPolicies of a namespace. Its key is the
// namespace, because the policies of a namespace are ranked against each other, and one
// pass over the pods serves all of them.
type policies struct {
	client   client.Client
	recorder events.EventRecorder
}

// samePolicy reports whether two states are of one policy, want the same, and have the same
// status. They may be of two policies: after a watch broke, one event may tell of a policy that
// was deleted and made anew under its name. A status that differs may be somebody else's, or it
// is one that this controller wrote, and that is out of date by now:
//
//	a pod changes        the controller computes and writes the status B; its cache has A still
//	it changes back      the controller computes A, as its cache has, and writes nothing
//	the cache gets B     the status is computed once more, and A is written
//
// So each write costs a pass that writes nothing if the status is right.
func samePolicy(old, now *v1alpha1.SMCRPolicy) bool {
	return old.UID == now.UID && old.Generation == now.Generation && equality.Semantic.DeepEqual(old.Status, now.Status)
}

func (r *policies) setUp(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("policies").WithOptions(options(1)).
		Watches(&v1alpha1.SMCRPolicy{}, mark(coalesce, func(old, now *v1alpha1.SMCRPolicy) []types.NamespacedName {
			if old != nil && now != nil && samePolicy(old, now) {
				return nil
			}
			return key(either(old, now).Namespace)
		})).
		Watches(&corev1.Pod{}, mark(coalesce, func(old, now *corev1.Pod) []types.NamespacedName {
			if old != nil && now != nil && sameForPolicies(old, now) {
				return nil
			}
			return key(either(old, now).Namespace)
		})).
		Watches(&corev1.Namespace{}, mark(coalesce, func(old, now *corev1.Namespace) []types.NamespacedName {
			if old != nil && now != nil && old.Annotations[v1alpha1.AnnotationEnabled] == now.Annotations[v1alpha1.AnnotationEnabled] {
				return nil
			}
			return key(either(old, now).Name)
		})).
		Watches(&v1alpha1.SMCRLink{}, mark(coalesce, func(old, now *v1alpha1.SMCRLink) []types.NamespacedName {
			switch {
			case old == nil || now == nil:
				return key(either(old, now).Status.Namespace)
			case old.Status.Namespace != now.Status.Namespace:
				return append(key(old.Status.Namespace), key(now.Status.Namespace)...)
			case equality.Semantic.DeepEqual(old.Status, now.Status): // the part of the status that the cache keeps
				return nil
			}
			return key(now.Status.Namespace)
		})).
		Watches(&v1alpha1.SMCRPeerSlice{}, mark(coalesce, func(old, now *v1alpha1.SMCRPeerSlice) []types.NamespacedName {
			if old != nil && now != nil && samePeers(old, now) {
				return nil
			}
			return key(either(old, now).Namespace)
		})).
		Watches(&v1alpha1.SMCRNode{}, mark(coalesce, func(old, now *v1alpha1.SMCRNode) []types.NamespacedName {
			if old != nil && now != nil && agentMissing(old) == agentMissing(now) && hasOneRNIC(old) == hasOneRNIC(now) {
				return nil
			}
			return r.namespacesOn(either(old, now).Name)
		})).
		Complete(r)
}

// samePeers says whether a and b are equal in what the status of their policy depends on, which
// has the number of its peers and not their addresses.
func samePeers(a, b *v1alpha1.SMCRPeerSlice) bool {
	return a.Policy == b.Policy && len(a.Addresses) == len(b.Addresses) && leftOut(a) == leftOut(b) &&
		a.PolicyGeneration == b.PolicyGeneration && equality.Semantic.DeepEqual(a.OwnerReferences, b.OwnerReferences)
}

// agentMissing says whether the controller found that no agent answers on the
// node.
func agentMissing(n *v1alpha1.SMCRNode) bool {
	return meta.IsStatusConditionFalse(n.Status.Conditions, v1alpha1.ConditionAgentAlive)
}

// hasOneRNIC says whether a node has a single RDMA device, or none: the second figure of
// 1/1, whether its port is up or not.
func hasOneRNIC(n *v1alpha1.SMCRNode) bool {
	_, all, _ := strings.Cut(n.Status.DeviceSummary, "/")
	return all == "0" || all == "1"
}

// namespacesOn returns the keys of the namespaces that have pods on a node.
func (r *policies) namespacesOn(node string) []types.NamespacedName {
	var pods corev1.PodList
	if err := r.client.List(context.Background(), &pods, client.MatchingFields{indexPodNode: node}); err != nil {
		return nil // the cache is being stopped, and so is the queue
	}
	seen := map[string]bool{}
	var out []types.NamespacedName
	for i := range pods.Items {
		if ns := pods.Items[i].Namespace; !seen[ns] {
			seen[ns] = true
			out = append(out, key(ns)...)
		}
	}
	return out
}

// Reconcile writes the status of each policy of the namespace whose status changed.
func (r *policies) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	v, err := r.view(ctx, req.Name)
	if err != nil || v == nil {
		return ctrl.Result{}, err
	}
	var errs []error
	now := metav1.Now()
	for name, status := range aggregate(v, now) {
		obj := v.policy(name)
		if equality.Semantic.DeepEqual(status, obj.Status) {
			continue
		}
		if err := r.write(ctx, obj, status); err != nil {
			errs = append(errs, err)
		}
	}
	return ctrl.Result{}, errors.Join(errs...)
}

// view reads what the statuses of the namespace's policies are computed from; nil if it
// has no policies.
func (r *policies) view(ctx context.Context, namespace string) (*namespaceView, error) {
	v := &namespaceView{name: namespace, agentGone: map[string]bool{}, oneRNIC: map[string]bool{}}
	in := client.InNamespace(namespace)
	var list v1alpha1.SMCRPolicyList
	if err := r.client.List(ctx, &list, in); err != nil {
		return nil, fmt.Errorf("list policies of %s: %w", namespace, err)
	}
	for i := range list.Items {
		if p := &list.Items[i]; p.DeletionTimestamp.IsZero() {
			v.policies = append(v.policies, compile(p))
		}
	}
	if len(v.policies) == 0 {
		return nil, nil
	}
	var ns corev1.Namespace
	if err := r.client.Get(ctx, types.NamespacedName{Name: namespace}, &ns); err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	v.annotations = ns.Annotations
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, in); err != nil {
		return nil, fmt.Errorf("list pods of %s: %w", namespace, err)
	}
	v.pods = pods.Items
	var links v1alpha1.SMCRLinkList
	if err := r.client.List(ctx, &links, client.MatchingFields{indexLinkNamespace: namespace}); err != nil {
		return nil, fmt.Errorf("list links of %s: %w", namespace, err)
	}
	v.links = links.Items
	var slices v1alpha1.SMCRPeerSliceList
	if err := r.client.List(ctx, &slices, in); err != nil {
		return nil, fmt.Errorf("list peer slices of %s: %w", namespace, err)
	}
	v.slices = slices.Items
	var nodes v1alpha1.SMCRNodeList
	if err := r.client.List(ctx, &nodes); err != nil {
		return nil, fmt.Errorf("list SMCRNodes: %w", err)
	}
	v.judgeNodes(nodes.Items)
	return v, nil
}

// judgeNodes notes which nodes have a single RDMA device, and on which nodes of the pods no agent
// answers: these have no SMCRNode, or one that says so.
func (v *namespaceView) judgeNodes(nodes []v1alpha1.SMCRNode) {
	answers := make(map[string]bool, len(nodes))
	for i := range nodes {
		answers[nodes[i].Name] = !agentMissing(&nodes[i])
		v.oneRNIC[nodes[i].Name] = hasOneRNIC(&nodes[i])
	}
	for i := range v.pods {
		if node := v.pods[i].Spec.NodeName; !answers[node] {
			v.agentGone[node] = true
		}
	}
}

func (v *namespaceView) policy(name string) *v1alpha1.SMCRPolicy {
	for _, p := range v.policies {
		if p.obj.Name == name {
			return p.obj
		}
	}
	return nil
}

func (r *policies) write(ctx context.Context, obj *v1alpha1.SMCRPolicy, status v1alpha1.SMCRPolicyStatus) error {
	apply, err := statusOf("SMCRPolicy", obj, &status, "")
	if err != nil {
		return err
	}
	err = r.client.Status().Apply(ctx, apply, client.FieldOwner(v1alpha1.ManagerController), client.ForceOwnership)
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // the policy was deleted, or replaced by one of the same name, whose event will come
	case err != nil:
		return fmt.Errorf("write the status of policy %s/%s: %w", obj.Namespace, obj.Name, err)
	}
	r.tell(obj, status.Conditions)
	return nil
}

// tell sends an event for each condition whose status changed, except Ready, which changes
// with every pod that starts, and except that nodes have one RNIC, which nobody is to be
// warned of.
func (r *policies) tell(obj *v1alpha1.SMCRPolicy, conditions []metav1.Condition) {
	for _, good := range []struct {
		kind   string
		status metav1.ConditionStatus
	}{
		{v1alpha1.ConditionAccepted, metav1.ConditionTrue},
		{v1alpha1.ConditionLinksRedundant, metav1.ConditionTrue},
		{v1alpha1.ConditionDegraded, metav1.ConditionFalse},
		{v1alpha1.ConditionConflicting, metav1.ConditionFalse},
	} {
		was, is := meta.FindStatusCondition(obj.Status.Conditions, good.kind), meta.FindStatusCondition(conditions, good.kind)
		if is == nil || is.Status == metav1.ConditionUnknown || is.Reason == reasonOneRNIC ||
			was != nil && was.Status == is.Status && was.Reason != reasonOneRNIC {
			continue
		}
		isGood := is.Status == good.status
		if was == nil && isGood {
			continue // the status is the same
		}
		kind := corev1.EventTypeWarning
		if isGood {
			kind = corev1.EventTypeNormal
		}
		r.recorder.Eventf(obj, nil, kind, is.Reason, "Observe", "%s is %s: %s", is.Type, is.Status, is.Message)
	}
}
