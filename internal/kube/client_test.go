// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestSource_noteUpdate: a configuration is made anew only if something changed that it is made of.
func TestSource_noteUpdate(t *testing.T) {
	meta := metav1.ObjectMeta{
		Namespace: "shop", Name: "x", UID: "1", ResourceVersion: "5", Generation: 1, Labels: map[string]string{"a": "b"},
		Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"},
	}
	policy := &v1alpha1.SMCRPolicy{ObjectMeta: meta, Status: v1alpha1.SMCRPolicyStatus{PeersGeneration: new(int64(1))}}
	policy.Spec.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "web"}
	namespace := &metav1.PartialObjectMetadata{ObjectMeta: meta}
	slice := &v1alpha1.SMCRPeerSlice{ObjectMeta: meta, Policy: "p", Addresses: []string{"10.1.1.1"}}
	pod := &corev1.Pod{ObjectMeta: meta, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.1.1.1"}}}}
	for _, tt := range []struct {
		name   string
		object client.Object
		change func(client.Object)
		want   bool
	}{
		{"counts in the status of a policy", policy, func(o client.Object) { o.(*v1alpha1.SMCRPolicy).Status.Pods.Matched = 7 }, false},
		{"its peers are resolved", policy, func(o client.Object) { o.(*v1alpha1.SMCRPolicy).Status.PeersGeneration = new(int64(2)) }, true},
		{"the controller has seen it", policy, func(o client.Object) { o.(*v1alpha1.SMCRPolicy).Status.ObservedGeneration = 1 }, true},
		{"its spec", policy, func(o client.Object) { o.(*v1alpha1.SMCRPolicy).Spec.Priority = 1 }, true},
		{"made anew", policy, func(o client.Object) { o.SetUID("2") }, true},
		{"labels of a namespace", namespace, func(o client.Object) { o.SetLabels(nil) }, false},
		{"its opt-in", namespace, func(o client.Object) { o.SetAnnotations(nil) }, true},
		{"labels of a slice", slice, func(o client.Object) { o.SetLabels(nil) }, false},
		{"its addresses", slice, func(o client.Object) { o.(*v1alpha1.SMCRPeerSlice).Addresses = nil }, true},
		{"conditions of a pod", pod, func(o client.Object) {
			o.(*corev1.Pod).Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady}}
		}, false},
		{"its end", pod, func(o client.Object) { o.(*corev1.Pod).Status.Phase = corev1.PodSucceeded }, true},
		{"its labels", pod, func(o client.Object) { o.SetLabels(nil) }, true},
	} {
		was, is := tt.object.DeepCopyObject(), tt.object.DeepCopyObject().(client.Object)
		is.SetResourceVersion("6")
		tt.change(is)
		old, err1 := trim(was)
		now, err2 := trim(is)
		s := &Source{dirty: make(chan struct{}, 1)}
		s.noteUpdate(old, now)
		if got := len(s.dirty) > 0; got != tt.want || err1 != nil || err2 != nil {
			t.Errorf("%s: made anew %t, want %t; %v, %v", tt.name, got, tt.want, err1, err2)
		}
		if v := old.(client.Object).GetResourceVersion(); v != "5" {
			t.Errorf("%s: the object in the store has the resource version %s now", tt.name, v)
		}
	}
}
