// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestPodsAreForLinux: no pod goes to a node of another system, of which clusters may have some: its image has no program
// for them. So it is after an upgrade with the values of a chart that did not say so, and with other labels besides.
func TestPodsAreForLinux(t *testing.T) {
	const also = "agent.nodeSelector.pool=roce,controller.nodeSelector.pool=roce,hooks.nodeSelector.pool=roce"
	for _, args := range [][]string{nil, {"--set", also}, {"--set-json", `agent.nodeSelector=null`, "--set-json", `controller=null`, "--set-json", `hooks=null`}} {
		var kinds []string
		for _, o := range objects(t, template(t, args...)) {
			selector, ok, err := unstructured.NestedStringMap(o.Object, "spec", "template", "spec", "nodeSelector")
			if _, pods, _ := unstructured.NestedMap(o.Object, "spec", "template", "spec"); !pods {
				continue
			}
			if kinds = append(kinds, o.GetKind()); !ok || err != nil || selector["kubernetes.io/os"] != "linux" {
				t.Errorf("%s %s with %v: nodeSelector %v, %v", o.GetKind(), o.GetName(), args, selector, err)
			}
		}
		slices.Sort(kinds)
		if want := []string{"DaemonSet", "Deployment", "Job"}; !slices.Equal(slices.Compact(kinds), want) {
			t.Errorf("pods of %v, want %v", kinds, want)
		}
	}
}
