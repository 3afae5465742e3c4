// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// smcr-cni can wire the VF itself: alone, with the settings, addresses and what
// Multus passes on.
func TestMultusWiring(t *testing.T) {
	out := template(t, "--set", "multus.enabled=true,multus.wiring=smcr-cni,multus.resourceName=smcr.io/roce_vf",
		"--set-json", `multus.settings={"vlan":100,"type":"other"}`, "--set-json", `multus.ipam={"type":"static"}`,
		"--show-only", "templates/multus.yaml")
	o := parse(t, documents(out)[0])
	text, _, err := unstructured.NestedString(o.Object, "spec", "config")
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := yaml.UnmarshalStrict([]byte(text), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"cniVersion": "1.0.0", "name": "smcr-sriov", "plugins": []any{map[string]any{
		"type": "smcr-cni", "vlan": 100.0, "ipam": map[string]any{"type": "static"},
		"dataDir": "/run/kube-smcr", "agentSocket": "/run/kube-smcr/agent.sock",
		"capabilities": map[string]any{"deviceID": true, "CNIDeviceInfoFile": true, "mac": true, "ips": true},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
	if r := o.GetAnnotations()["k8s.v1.cni.cncf.io/resourceName"]; r != "smcr.io/roce_vf" {
		t.Errorf("resource %q", r)
	}
}
