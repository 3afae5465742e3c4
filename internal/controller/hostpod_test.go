// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

func inHostNetwork(p *corev1.Pod) { p.Spec.HostNetwork = true }

// hostPod is a running pod in its node's network.
func hostPod(name string, edits ...func(*corev1.Pod)) *corev1.Pod {
	p := newPod("shop", name, "n1", "192.0.2.1")
	for _, e := range append(edits, inHostNetwork) {
		e(p)
	}
	return p
}

// onKernel are policies of which the first of the rank is the kernel's, but for the mode of another one.
func onKernel(other v1alpha1.PolicyMode) []*v1alpha1.SMCRPolicy {
	first := newPolicy("shop", "first", func(s *v1alpha1.SMCRPolicySpec) { s.Datapath, s.Priority = v1alpha1.DatapathKernel, 1 })
	return []*v1alpha1.SMCRPolicy{newPolicy("shop", "a-second", func(s *v1alpha1.SMCRPolicySpec) { s.Mode = other }), first}
}

// TestHostPod: which pods in the node's network the controller takes for opted in, as their agents do; those alone count for policies, and are
// told that their agent is gone.
func TestHostPod(t *testing.T) {
	kernel := optedIn(v1alpha1.PodStatusKernel)
	agents := []*v1alpha1.SMCRPolicy{newPolicy("shop", "first")}
	other := []*v1alpha1.SMCRPolicy{newPolicy("shop", "first", selecting("other"), func(s *v1alpha1.SMCRPolicySpec) { s.Datapath = v1alpha1.DatapathKernel })}
	optional := []*v1alpha1.SMCRPolicy{newPolicy("shop", "first", func(s *v1alpha1.SMCRPolicySpec) { s.Datapath = v1alpha1.DatapathKernelIfAvailable })}
	leaves := onKernel(v1alpha1.ModePrefer)[1:]
	leaves[0].DeletionTimestamp, leaves[0].Finalizers = &metav1.Time{Time: time.Unix(1, 0)}, []string{"test/wait"}
	elsewhere := onKernel(v1alpha1.ModePrefer)[1:]
	elsewhere[0].Namespace = "bank"
	for _, tt := range []struct {
		name     string
		pod      *corev1.Pod
		policies []*v1alpha1.SMCRPolicy
		want     v1alpha1.PolicyPods // of the first policy
		gone     string              // its status when its agent is gone
	}{
		{"on the kernel's datapath", hostPod("web", kernel), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1, Kernel: 1}, v1alpha1.PodStatusKernelNoAgent},
		{"where it is available", hostPod("web", kernel), optional, v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Accelerated: 1, Kernel: 1}, v1alpha1.PodStatusKernelNoAgent},
		{"not yet chosen", hostPod("web", optedIn("")), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Pending: 1}, v1alpha1.PodStatusNoAgent},
		{"that cannot be had", hostPod("web", optedIn("Pending: POD_FAILED")), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{Matched: 1, OptedIn: 1, Pending: 1}, v1alpha1.PodStatusNoAgent},
		{"not annotated", hostPod("web"), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{}, ""},
		{"opted out, with a status from before", hostPod("web", kernel, func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "false" }), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{}, ""},
		{"of another datapath", hostPod("web", kernel), agents, v1alpha1.PolicyPods{}, ""},
		{"of a policy with mode Required", hostPod("web", kernel), onKernel(v1alpha1.ModeRequired), v1alpha1.PolicyPods{}, ""},
		{"of no policy", hostPod("web", kernel), other, v1alpha1.PolicyPods{}, ""},
		{"ended", hostPod("web", kernel, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), onKernel(v1alpha1.ModePrefer), v1alpha1.PolicyPods{}, v1alpha1.PodStatusKernel},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := namespaceView{name: "shop", annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}, pods: []corev1.Pod{*tt.pod}}
			for _, p := range tt.policies {
				v.policies = append(v.policies, compile(p))
			}
			if diff := cmp.Diff(tt.want, aggregate(&v, metav1.Now())["first"].Pods); diff != "" {
				t.Errorf("pods of the policy (-want +got):\n%s", diff)
			}
			if got := statusWithoutAgent(t, tt.pod, tt.policies); got != tt.gone {
				t.Errorf("without its agent: %q, want %q", got, tt.gone)
			}
		})
	}
	for name, policies := range map[string][]*v1alpha1.SMCRPolicy{"being deleted": leaves, "of another namespace": elsewhere} {
		if got := statusWithoutAgent(t, hostPod("web", kernel), policies); got != "" {
			t.Errorf("with a policy %s, without its agent: %q", name, got)
		}
	}
}

// statusWithoutAgent is what the controller leaves on a pod whose agent is gone.
func statusWithoutAgent(t *testing.T, pod *corev1.Pod, policies []*v1alpha1.SMCRPolicy) string {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	b := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod.DeepCopy(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}}}).
		WithIndex(&corev1.Pod{}, indexPodNode, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} })
	for _, p := range policies {
		b.WithObjects(p.DeepCopy())
	}
	status := pod.Annotations[v1alpha1.AnnotationStatus]
	b.WithInterceptorFuncs(interceptor.Funcs{SubResourceApply: func(_ context.Context, _ client.Client, _ string, o runtime.ApplyConfiguration, _ ...client.SubResourceApplyOption) error {
		status = o.(interface{ GetAnnotations() map[string]string }).GetAnnotations()[v1alpha1.AnnotationStatus]
		return nil
	}})
	r := nodes{client: b.Build()}
	if _, err := r.tellPods(t.Context(), "n1", false); err != nil {
		t.Fatal(err)
	}
	return status
}

// A pod in its node's network is no peer that selectors find, opted in or not: its address is the node's, which other programs have, too.
func TestSelectPods_hostNetwork(t *testing.T) {
	pods := []corev1.Pod{*newPod("shop", "a", "n", "10.0.0.1"), *hostPod("web", optedIn(v1alpha1.PodStatusKernel))}
	if got := selectPods(pods, []labels.Selector{labels.Everything()}); !cmp.Equal([]int{0}, got) {
		t.Errorf("selected %v", got)
	}
}

// The reconcilers look at a pod in its node's network that asks to be opted in when it begins and ends to run, and not at others there.
func TestSamePods_hostNetwork(t *testing.T) {
	pending := func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }
	if a, b := hostPod("a", optedIn(""), pending), hostPod("a", optedIn("")); sameForPolicies(a, b) {
		t.Error("one that asks and begins to run is the same")
	}
	if a, b := hostPod("a", pending), hostPod("a"); !sameForPolicies(a, b) {
		t.Error("one that does not ask is not the same")
	}
}
