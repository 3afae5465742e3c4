// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

// TestSecondReleaseIsRefused: Helm refuses a second release in the cluster, in the same
// namespace and in another one, if the first one has agents; the first one is upgraded as before.
func TestSecondReleaseIsRefused(t *testing.T) {
	c := admin(t)
	kubeconfig := apiserver.Kubeconfig(t, server.Config(t))
	// Objects of the chart that other tests made are in the cluster, too.
	must(t, c.DeleteAllOf(t.Context(), &appsv1.DaemonSet{}, client.InNamespace(namespace)))
	first := []string{"first", chartDir, "--namespace", "first", "--kubeconfig", kubeconfig, "--no-hooks"}
	if _, complaint := helm(t, append([]string{"install", "--create-namespace"}, first...)...); complaint != "" {
		t.Fatal(complaint)
	}
	t.Cleanup(func() {
		if _, complaint := helm(t, "uninstall", "first", "--namespace", "first", "--no-hooks", "--kubeconfig", kubeconfig); complaint != "" {
			t.Error(complaint)
		}
	})
	second := func(in string) (complaint string) {
		_, complaint = helm(t, "install", "second", chartDir, "--namespace", in, "--create-namespace", "--dry-run=server", "--kubeconfig", kubeconfig)
		return complaint
	}
	// Labels, any template and pods of its own a DaemonSet of a tenant has, too.
	var ds appsv1.DaemonSet
	must(t, c.Get(t.Context(), client.ObjectKey{Namespace: "first", Name: "first-kube-smcr-agent"}, &ds))
	ensure(t, c, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "first", Name: "default"}})
	pod := func(name string, hostNetwork bool) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "first", Name: name, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(&ds, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))},
		}}
		p.Spec.Containers = []corev1.Container{{Name: "agent", Image: "agent"}}
		p.Spec.HostNetwork = hostNetwork
		return p
	}
	alone := pod("alone", true)
	alone.OwnerReferences = nil
	must(t, c.Create(t.Context(), alone))
	must(t, c.Create(t.Context(), pod("apart", false)))
	if complaint := second("second"); complaint != "" {
		t.Errorf("beside a DaemonSet without pods in their node's network: %s", complaint)
	}
	must(t, c.Create(t.Context(), pod("agent", true)))
	for _, in := range []string{"first", "second"} {
		complaint := second(in)
		if want := "kube-smcr is in this cluster already: release first in namespace first"; !strings.Contains(complaint, want) {
			t.Errorf("second release in namespace %s: %q, want %q", in, complaint, want)
		}
	}
	if _, complaint := helm(t, append([]string{"upgrade", "--dry-run=server"}, first...)...); complaint != "" {
		t.Errorf("upgrade of the first one: %s", complaint)
	}

	// A release that is being deleted does not keep another one from being installed.
	must(t, c.Get(t.Context(), client.ObjectKeyFromObject(&ds), &ds))
	ds.Finalizers = []string{"example.com/wait"}
	must(t, c.Update(t.Context(), &ds))
	must(t, c.Delete(t.Context(), &ds, client.PropagationPolicy(metav1.DeletePropagationBackground)))
	if complaint := second("second"); complaint != "" {
		t.Errorf("after the first one: %s", complaint)
	}
	must(t, c.Get(t.Context(), client.ObjectKeyFromObject(&ds), &ds))
	ds.Finalizers = nil
	must(t, c.Update(t.Context(), &ds))
}
