// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"maps"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Indexes of the caches.
const (
	indexPodNode       = "pod-node"       // pods by node
	indexAgentNode     = "agent-node"     // pods of the node agent by node
	indexLinkNode      = "link-node"      // SMCRLinks by node
	indexLinkNamespace = "link-namespace" // SMCRLinks by the namespace of their pods
	indexLinkEnd       = "link-end"       // SMCRLinks by this side's ends of their links
)

// cacheOptions makes the caches keep only the fields that are read here. A cluster's pods
// are the largest part of the memory: trimmed, a pod takes about a tenth.
//
// Reads return the object in the cache, not a copy: nobody may change it.
func cacheOptions(agents agentPods, daemonSet string) crcache.Options {
	return crcache.Options{
		DefaultUnsafeDisableDeepCopy: new(true),
		DefaultTransform:             crcache.TransformStripManagedFields(),
		ByObject: map[client.Object]crcache.ByObject{
			&corev1.Pod{}:          {Transform: trimmer(agents.trimPod)},
			&corev1.Namespace{}:    {Transform: trimmer(trimNamespace)},
			&corev1.Service{}:      {Transform: trimmer(trimService)},
			&corev1.Node{}:         {Transform: trimmer(trimNode)},
			&v1alpha1.SMCRLink{}:   {Transform: trimmer(trimLink)},
			&v1alpha1.SMCRNode{}:   {Transform: trimmer(trimSMCRNode)},
			&v1alpha1.SMCRPolicy{}: {},
			&appsv1.DaemonSet{}: {
				Namespaces: map[string]crcache.Config{agents.namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", daemonSet)}},
				Transform:  trimmer(trimDaemonSet),
			},
			// Those of the agents and of the leader.
			&coordinationv1.Lease{}: {Namespaces: map[string]crcache.Config{agents.namespace: {}}, Transform: trimmer(trimLease)},
			// Agents' events about pods are about their own pods, in this namespace.
			&corev1.Event{}: {Namespaces: map[string]crcache.Config{agents.namespace: {
				FieldSelector: fields.OneTermEqualSelector("reportingComponent", v1alpha1.ReporterAgent),
			}}},
		},
	}
}

func trimmer[T any](trim func(T) T) cache.TransformFunc {
	return func(obj any) (any, error) {
		if o, ok := obj.(T); ok {
			return trim(o), nil
		}
		return obj, nil // a tombstone of a deleted object
	}
}

func trimMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion, Generation: m.Generation,
		CreationTimestamp: m.CreationTimestamp, DeletionTimestamp: m.DeletionTimestamp,
		Labels: m.Labels, Annotations: ourAnnotations(m.Annotations),
	}
}

func ourAnnotations(all map[string]string) map[string]string {
	var out map[string]string
	for k, v := range all {
		if strings.HasPrefix(k, v1alpha1.Group+"/") {
			if out == nil {
				out = map[string]string{}
			}
			out[k] = v
		}
	}
	return out
}

// agentPods tells the pods of the node agent from others.
type agentPods struct {
	namespace string
	selector  labels.Selector
}

func (a agentPods) contain(pod *corev1.Pod) bool {
	return pod.Namespace == a.namespace && a.selector.Matches(labels.Set(pod.Labels))
}

func (a agentPods) trimPod(pod *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{
		ObjectMeta: trimMeta(&pod.ObjectMeta),
		Spec:       corev1.PodSpec{NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork, ResourceClaims: pod.Spec.ResourceClaims},
		Status: corev1.PodStatus{
			Phase: pod.Status.Phase, PodIPs: pod.Status.PodIPs, ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
		},
	}
	if a.contain(pod) {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady {
				out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
			}
		}
	}
	return out
}

func trimNamespace(ns *corev1.Namespace) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: trimMeta(&ns.ObjectMeta)}
}

func trimService(s *corev1.Service) *corev1.Service {
	out := &corev1.Service{
		ObjectMeta: trimMeta(&s.ObjectMeta),
		Spec:       corev1.ServiceSpec{Selector: s.Spec.Selector, ClusterIPs: s.Spec.ClusterIPs},
	}
	out.Labels = nil
	return out
}

func trimNode(n *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: trimMeta(&n.ObjectMeta), Spec: corev1.NodeSpec{Taints: n.Spec.Taints}}
	out.Labels = nil
	if c := nodeCondition(n, corev1.NodeReady); c != nil {
		out.Status.Conditions = []corev1.NodeCondition{{Type: c.Type, Status: c.Status}}
	}
	return out
}

func trimDaemonSet(d *appsv1.DaemonSet) *appsv1.DaemonSet {
	return &appsv1.DaemonSet{ObjectMeta: trimMeta(&d.ObjectMeta)}
}

func trimLease(l *coordinationv1.Lease) *coordinationv1.Lease {
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name: l.Name, Namespace: l.Namespace, UID: l.UID, ResourceVersion: l.ResourceVersion, OwnerReferences: l.OwnerReferences,
		},
		Spec: coordinationv1.LeaseSpec{RenewTime: l.Spec.RenewTime},
	}
}

func trimLink(l *v1alpha1.SMCRLink) *v1alpha1.SMCRLink {
	s := l.Status
	var ends []v1alpha1.LinkStatus
	for i := range s.Links {
		e := &s.Links[i]
		ends = append(ends, v1alpha1.LinkStatus{ID: e.ID, LocalGID: e.LocalGID, PeerGID: e.PeerGID, LocalQPN: e.LocalQPN, PeerQPN: e.PeerQPN})
	}
	var conditions []metav1.Condition
	if isEnding(&s) {
		conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Reason: v1alpha1.ReasonEnding}}
	}
	return &v1alpha1.SMCRLink{ObjectMeta: trimMeta(&l.ObjectMeta), Status: v1alpha1.SMCRLinkStatus{
		Node: s.Node, Namespace: s.Namespace, Pod: s.Pod, Policy: s.Policy, State: s.State, Redundancy: s.Redundancy,
		Peer: s.Peer, PeerPod: s.PeerPod, PCIAddresses: s.PCIAddresses, Links: ends,
		Conditions: conditions,
	}}
}

func trimSMCRNode(n *v1alpha1.SMCRNode) *v1alpha1.SMCRNode {
	return &v1alpha1.SMCRNode{ObjectMeta: trimMeta(&n.ObjectMeta), Status: v1alpha1.SMCRNodeStatus{
		Conditions: n.Status.Conditions, DeviceSummary: n.Status.DeviceSummary,
	}}
}

// addIndexes adds the indexes by which the reconcilers look objects up.
func addIndexes(ctx context.Context, f client.FieldIndexer, agents agentPods) error {
	err := f.IndexField(ctx, &v1alpha1.SMCRLink{}, indexLinkEnd, func(o client.Object) []string { return localEnds(o.(*v1alpha1.SMCRLink)) })
	if err != nil {
		return fmt.Errorf("index %s: %w", indexLinkEnd, err)
	}
	for _, ix := range []struct {
		obj  client.Object
		name string
		get  func(client.Object) string
	}{
		{&corev1.Pod{}, indexPodNode, func(o client.Object) string { return o.(*corev1.Pod).Spec.NodeName }},
		{&corev1.Pod{}, indexAgentNode, func(o client.Object) string {
			if pod := o.(*corev1.Pod); agents.contain(pod) {
				return pod.Spec.NodeName
			}
			return ""
		}},
		{&v1alpha1.SMCRLink{}, indexLinkNode, func(o client.Object) string { return o.(*v1alpha1.SMCRLink).Status.Node }},
		{&v1alpha1.SMCRLink{}, indexLinkNamespace, func(o client.Object) string { return o.(*v1alpha1.SMCRLink).Status.Namespace }},
	} {
		err := f.IndexField(ctx, ix.obj, ix.name, func(o client.Object) []string {
			if v := ix.get(o); v != "" {
				return []string{v}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("index %s: %w", ix.name, err)
		}
	}
	return nil
}

// sameForPolicies says whether a and b are equal in all that policies depend on.
func sameForPolicies(a, b *corev1.Pod) bool {
	return mayCarry(a) == mayCarry(b) && a.Spec.NodeName == b.Spec.NodeName &&
		maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
}

// sameForPeers says whether a and b are equal in all that the peers of policies depend on.
func sameForPeers(a, b *corev1.Pod) bool {
	if a.Status.Phase != b.Status.Phase || !maps.Equal(a.Labels, b.Labels) || len(a.Status.PodIPs) != len(b.Status.PodIPs) {
		return false
	}
	for i := range a.Status.PodIPs {
		if a.Status.PodIPs[i] != b.Status.PodIPs[i] {
			return false
		}
	}
	return true
}
