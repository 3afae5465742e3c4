// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// awkward are values that are good names and, written plainly, numbers or switches of YAML.
var awkward = []string{
	"--values", "testdata/everything.yaml", "--set-string", "metrics.tlsSecret=123,agent.priorityClassName=1e3,controller.priorityClassName=1e3,multus.namespace=456",
	"--set-string", "multus.name=321,monitoring.dashboard.namespace=456,nameOverride=789,monitoring.serviceMonitor.interval=0",
}

// TestNamesOfDigits: a namespace, a release and other names may consist of digits.
func TestNamesOfDigits(t *testing.T) {
	c := admin(t)
	ensure(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "456"}})
	rendered, complaint := helm(t, append([]string{"template", "123", chartDir, "--namespace", "456"}, awkward...)...)
	if complaint != "" {
		t.Fatal(complaint)
	}
	for _, o := range objects(t, rendered) {
		if name, _, err := unstructured.NestedString(o.Object, "metadata", "name"); err != nil || name == "" {
			t.Errorf("%s: its name is no text: %v", o.GetKind(), err)
			continue
		}
		for _, field := range []string{"labels", "annotations"} {
			if _, _, err := unstructured.NestedStringMap(o.Object, "metadata", field); err != nil {
				t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
			}
		}
		if _, _, err := unstructured.NestedString(o.Object, "metadata", "namespace"); err != nil {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
		switch o.GetKind() {
		case "ServiceMonitor": // the API server does not know it
			endpoints, _, _ := unstructured.NestedSlice(o.Object, "spec", "endpoints")
			for _, e := range endpoints {
				if interval := e.(map[string]any)["interval"]; interval != "0" {
					t.Errorf("ServiceMonitor %s: interval %#v", o.GetName(), interval)
				}
				secret, _, err := unstructured.NestedString(e.(map[string]any), "tlsConfig", "ca", "secret", "name")
				if err != nil || secret != "123" {
					t.Errorf("ServiceMonitor %s: the certificate is in %q, %v", o.GetName(), secret, err)
				}
			}
		case "PrometheusRule", "NetworkAttachmentDefinition", "CustomResourceDefinition":
		case "Service": // must not begin with a digit before Kubernetes 1.34
		default:
			if err := c.Create(t.Context(), o, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
				t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
			}
		}
	}
}

// TestNames_dots: a release may have dots in its name. A name that is cut at one still is a name.
func TestNames_dots(t *testing.T) {
	c := admin(t)
	ensure(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	for _, release := range []string{"a-release-that-is-cut-behind-its-dot-xx.long", "team.smcr"} {
		t.Run(release, func(t *testing.T) {
			rendered, complaint := helm(t, "template", release, chartDir, "--namespace", namespace, "--set", "monitoring.serviceMonitor.enabled=true")
			if complaint != "" {
				t.Fatal(complaint)
			}
			for _, o := range objects(t, rendered) {
				if slices.Contains([]string{"ServiceMonitor", "CustomResourceDefinition"}, o.GetKind()) {
					continue
				}
				if err := c.Create(t.Context(), o, client.DryRunAll, client.FieldValidation("Strict")); err != nil {
					t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
				}
			}
		})
	}
}
