// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

// TestSecondReleaseIsRefused: Helm refuses a second release in the cluster, in the same
// namespace and in another one; the first one is upgraded as before.
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
	for _, in := range []string{"first", "second"} {
		_, complaint := helm(t, "install", "second", chartDir, "--namespace", in, "--create-namespace", "--dry-run=server", "--kubeconfig", kubeconfig)
		if want := "kube-smcr is in this cluster already: release first in namespace first"; !strings.Contains(complaint, want) {
			t.Errorf("second release in namespace %s: %q, want %q", in, complaint, want)
		}
	}
	if _, complaint := helm(t, append([]string{"upgrade", "--dry-run=server"}, first...)...); complaint != "" {
		t.Errorf("upgrade of the first one: %s", complaint)
	}

	// A release that is being deleted does not keep another one from being installed.
	var ds appsv1.DaemonSet
	must(t, c.Get(t.Context(), client.ObjectKey{Namespace: "first", Name: "first-kube-smcr-agent"}, &ds))
	ds.Finalizers = []string{"example.com/wait"}
	must(t, c.Update(t.Context(), &ds))
	must(t, c.Delete(t.Context(), &ds, client.PropagationPolicy(metav1.DeletePropagationBackground)))
	if _, complaint := helm(t, "install", "second", chartDir, "--namespace", "second", "--dry-run=server", "--kubeconfig", kubeconfig); complaint != "" {
		t.Errorf("after the first one: %s", complaint)
	}
	must(t, c.Get(t.Context(), client.ObjectKeyFromObject(&ds), &ds))
	ds.Finalizers = nil
	must(t, c.Update(t.Context(), &ds))
}
