// SPDX-License-Identifier: Apache-2.0

package crd_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// outdated is a policy that the API server took before the rules about the form of memory.
const outdated = `{budget: {memory: "1e200"}}`

// TestStoredPolicies: a policy that was stored before a rule that it breaks can be labelled, held by a finalizer, let go, changed
// elsewhere and given a status. What breaks the rule stays until somebody changes it.
func TestStoredPolicies(t *testing.T) {
	c := newClient(t)
	u := refusal{object: "{metadata: {name: stored}, spec: " + outdated + "}"}.build(t)
	withOlderRules(t, c, func() {
		await(t, "the older rules", func() error { return c.Create(t.Context(), u.DeepCopy()) })
	})
	await(t, "the newer rules", func() error {
		if err := c.Create(t.Context(), refusal{spec: outdated}.build(t), client.DryRunAll); err == nil || !strings.Contains(err.Error(), "not an amount of memory") {
			return errNotYet
		}
		return nil
	})
	for _, tt := range []struct{ name, patch, want string }{
		{"annotation", `{"metadata": {"annotations": {"a": "b"}}}`, ""},
		{"finalizer", `{"metadata": {"finalizers": ["example.com/x"]}}`, ""},
		{"no finalizer", `{"metadata": {"finalizers": null}}`, ""},
		{"another field", `{"spec": {"priority": 5}}`, ""},
		{"another field of the budget", `{"spec": {"budget": {"connections": 5}}}`, ""},
		{"the field, as wrong", `{"spec": {"budget": {"memory": "1e201"}}}`, "not an amount of memory"},
	} {
		err := c.Patch(t.Context(), u.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(tt.patch)))
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	if err := c.Status().Patch(t.Context(), u.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status": {"peerAddresses": 3}}`))); err != nil {
		t.Errorf("status: %v", err)
	}
	if err := c.Delete(t.Context(), u); err != nil {
		t.Error(err)
	}
}

// withOlderRules runs f while the definition of SMCRPolicies has no rules about memory.
func withOlderRules(t *testing.T, c client.Client, f func()) {
	t.Helper()
	def := &apiextensionsv1.CustomResourceDefinition{}
	read := func() {
		t.Helper()
		if err := c.Get(t.Context(), client.ObjectKey{Name: "smcrpolicies.smcr.io"}, def); err != nil {
			t.Fatal(err)
		}
	}
	if err := apiextensionsv1.AddToScheme(c.Scheme()); err != nil {
		t.Fatal(err)
	}
	read()
	now := def.Spec.DeepCopy()
	spec := def.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"]
	budget := spec.Properties["budget"]
	memory := budget.Properties["memory"]
	memory.XValidations = nil
	budget.Properties["memory"] = memory
	if err := c.Update(t.Context(), def); err != nil {
		t.Fatal(err)
	}
	f()
	read()
	def.Spec = *now
	if err := c.Update(t.Context(), def); err != nil {
		t.Fatal(err)
	}
}

var errNotYet = errors.New("an object that breaks them is taken, or refused by other ones")

// await tries f until it succeeds: a definition holds a moment after it was changed.
func await(t *testing.T, what string, f func() error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = f()
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v, %v", what, err, last)
	}
}
