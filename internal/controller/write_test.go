// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

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

// TestWrite_replaced: an object that is deleted, or replaced by one of the same name, while what was read of it waits to
// be written is no error: the other one's event comes.
func TestWrite_replaced(t *testing.T) {
	w := newWorld(t)
	p, pod := w.policy("p"), w.pod("web", "n1", "", optedIn(""))
	link := newLink("l-"+w.ns, "n1", w.ns, "web")
	w.makeLink(link)
	nobody := newPod(w.ns, "nobody", "n1", "")
	for _, obj := range []client.Object{p, pod, link, nobody} {
		obj.SetUID("of-an-earlier-one")
		obj.SetResourceVersion("1")
	}
	for name, write := range map[string]func() error{
		"policy":                       func() error { return (&policies{client: w}).write(t.Context(), p, v1alpha1.SMCRPolicyStatus{}) },
		"link":                         func() error { return (&pairs{client: w}).write(t.Context(), link, "shop/other") },
		"pod":                          func() error { return writePodStatus(t.Context(), w, pod, v1alpha1.PodStatusNoAgent) },
		"pod, to take its status away": func() error { return writePodStatus(t.Context(), w, pod, "") },
		"no pod":                       func() error { return writePodStatus(t.Context(), w, nobody, v1alpha1.PodStatusNoAgent) },
	} {
		if err := write(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := w.says(pod, ""); err != nil {
		t.Error(err)
	}
}
