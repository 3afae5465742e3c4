// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestStatusOf: an apply configuration has the status and the object's UID, and nothing that another
// manager owns.
func TestStatusOf(t *testing.T) {
	obj := newPolicy("shop", "p", func(s *v1alpha1.SMCRPolicySpec) { s.Priority = 7 })
	obj.UID, obj.ResourceVersion, obj.Labels = "u", "9", map[string]string{"a": "b"}
	for name, status := range map[string]any{
		"struct": &v1alpha1.SMCRPolicyStatus{ObservedGeneration: 4},
		"map":    map[string]any{"observedGeneration": int64(4)},
	} {
		c, err := statusOf("SMCRPolicy", obj, status, "")
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			APIVersion, Kind string
			Metadata         map[string]any
			Spec             any
			Status           map[string]any
		}
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(map[string]any{"name": "p", "namespace": "shop", "uid": "u"}, got.Metadata); d != "" {
			t.Errorf("%s: metadata (-want +got)\n%s", name, d)
		}
		if got.APIVersion != v1alpha1.GroupVersion().String() || got.Kind != "SMCRPolicy" || got.Spec != nil || got.Status["observedGeneration"] != 4.0 {
			t.Errorf("%s: %s", name, b)
		}
	}
	if c, err := statusOf("SMCRPolicy", obj, map[string]any{}, obj.ResourceVersion); err != nil {
		t.Error(err)
	} else if b, err := json.Marshal(c); err != nil || !strings.Contains(string(b), `"resourceVersion":"9"`) {
		t.Errorf("%s (%v), want the resource version that was asked for", b, err)
	}
	if _, err := statusOf("SMCRPolicy", obj, "no struct", ""); err == nil || !strings.Contains(err.Error(), "encode the status of SMCRPolicy p") {
		t.Errorf("a status that is none: %v", err)
	}
}
