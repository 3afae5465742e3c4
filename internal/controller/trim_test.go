// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestTrimPod: the caches keep of a pod what the reconcilers read, and nothing else. Only the agents'
// own pods keep whether they are ready.
func TestTrimPod(t *testing.T) {
	agents := agentPods{namespace: system, selector: labels.SelectorFromSet(labels.Set{"app": "agent"})}
	for _, tt := range []struct {
		namespace, app string
		agent          bool
	}{{system, "agent", true}, {system, "controller", false}, {"shop", "agent", false}} {
		p := newPod(tt.namespace, "p", "n1", "10.0.0.1")
		p.Labels["app"] = tt.app
		p.UID, p.ResourceVersion, p.Generation = "u", "7", 3
		p.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true", "kubectl.kubernetes.io/last-applied-configuration": "{}"}
		p.Finalizers, p.OwnerReferences = []string{"f"}, []metav1.OwnerReference{{Name: "o"}}
		p.Spec.HostNetwork = true
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic"}}
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "c"}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled}, {Type: corev1.PodReady, Status: corev1.ConditionTrue, Message: "long"}}
		want := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "p", Namespace: tt.namespace, UID: "u", ResourceVersion: "7", Generation: 3,
				Labels: p.Labels, Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"},
			},
			Spec: corev1.PodSpec{NodeName: "n1", HostNetwork: true, ResourceClaims: p.Spec.ResourceClaims},
			Status: corev1.PodStatus{
				Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}, ExtendedResourceClaimStatus: p.Status.ExtendedResourceClaimStatus,
			},
		}
		if tt.agent {
			want.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		got, err := trimmer(agents.trimPod)(p)
		if d := cmp.Diff(want, got); d != "" || err != nil {
			t.Errorf("%s/%s: %v (-want +got)\n%s", tt.namespace, tt.app, err, d)
		}
	}
	gone := cache.DeletedFinalStateUnknown{Key: "shop/p"}
	if got, err := trimmer(agents.trimPod)(gone); got != any(gone) || err != nil {
		t.Errorf("a tombstone became %v, %v", got, err)
	}
}

// TestTrimOthers: what the caches keep of nodes, services and links.
func TestTrimOthers(t *testing.T) {
	full := metav1.ObjectMeta{Name: "x", Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"other": "1"}}
	bare := metav1.ObjectMeta{Name: "x"}
	taint := []corev1.Taint{{Key: "k"}}
	node := trimNode(&corev1.Node{ObjectMeta: full, Spec: corev1.NodeSpec{Taints: taint, PodCIDR: "10.0.0.0/24"}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeDiskPressure}, {Type: corev1.NodeReady, Status: corev1.ConditionTrue, Message: "long"}},
	}})
	wantNode := &corev1.Node{ObjectMeta: bare, Spec: corev1.NodeSpec{Taints: taint}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
	}}
	if d := cmp.Diff(wantNode, node); d != "" {
		t.Errorf("node (-want +got)\n%s", d)
	}
	service := trimService(&corev1.Service{ObjectMeta: full, Spec: corev1.ServiceSpec{Selector: map[string]string{"s": "t"}, ClusterIPs: []string{"10.0.0.1"}, ExternalName: "e"}})
	wantService := &corev1.Service{ObjectMeta: bare, Spec: corev1.ServiceSpec{Selector: map[string]string{"s": "t"}, ClusterIPs: []string{"10.0.0.1"}}}
	if d := cmp.Diff(wantService, service); d != "" {
		t.Errorf("service (-want +got)\n%s", d)
	}
	link := newLink("l", "n", "shop", "p")
	link.Status.Policy = "q"
	got := trimLink(link)
	link.Status.Role, link.Status.LastError = "", "" // no reconciler reads these
	if d := cmp.Diff(link, got); d != "" {
		t.Errorf("link (-want +got)\n%s", d)
	}
	ns := trimNamespace(&corev1.Namespace{ObjectMeta: full, Spec: corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{"f"}}})
	if d := cmp.Diff(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "x", Labels: full.Labels}}, ns); d != "" {
		t.Errorf("namespace (-want +got)\n%s", d)
	}
}

// TestSamePods: which changes of a pod the reconcilers look at.
func TestSamePods(t *testing.T) {
	for _, tt := range []struct {
		name            string
		edit            func(*corev1.Pod)
		policies, peers bool // whether the pod stays the same for these reconcilers
	}{
		{"nothing", func(*corev1.Pod) {}, true, true},
		{"version", func(p *corev1.Pod) { p.ResourceVersion = "8" }, true, true},
		{"label", func(p *corev1.Pod) { p.Labels["x"] = "y" }, false, false},
		{"annotation", func(p *corev1.Pod) { p.Annotations["x"] = "y" }, false, true},
		{"node", func(p *corev1.Pod) { p.Spec.NodeName = "m" }, false, true},
		{"ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, false, false},
		{"other address", func(p *corev1.Pod) { p.Status.PodIPs[0].IP = "10.0.0.2" }, true, false},
		{"more addresses", func(p *corev1.Pod) { p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00::1"}) }, true, false},
		{"being deleted", func(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }, false, true},
	} {
		a, b := newPod("shop", "a", "n", "10.0.0.1"), newPod("shop", "a", "n", "10.0.0.1")
		tt.edit(b)
		for _, order := range [][2]*corev1.Pod{{a, b}, {b, a}} {
			if got := sameForPolicies(order[0], order[1]); got != tt.policies {
				t.Errorf("%s: the same for policies: %t", tt.name, got)
			}
			if got := sameForPeers(order[0], order[1]); got != tt.peers {
				t.Errorf("%s: the same for peers: %t", tt.name, got)
			}
		}
	}
	// For the policies a pod that carries no connections before and after is the same, whatever its phase.
	a, b := newPod("shop", "a", "n", ""), newPod("shop", "a", "n", "")
	a.Status.Phase, b.Status.Phase = corev1.PodPending, corev1.PodFailed
	if !sameForPolicies(a, b) || sameForPeers(a, b) {
		t.Errorf("from pending to failed: the same for policies %t, for peers %t", sameForPolicies(a, b), sameForPeers(a, b))
	}
}
