// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// rights are rules one by one: GROUP RESOURCE VERB NAME.
func rights(rules []rbacv1.PolicyRule) []string {
	var out []string
	for _, r := range rules {
		names := r.ResourceNames
		if len(names) == 0 {
			names = []string{"*"}
		}
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					for _, name := range names {
						out = append(out, strings.Join([]string{group, resource, verb, name}, " "))
					}
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// rolesOf are the rights of each role of a text, by kind and name.
func rolesOf(t *testing.T, text string) map[string][]string {
	t.Helper()
	roles := map[string][]string{}
	for _, doc := range documents(text) {
		var role struct {
			Kind     string
			Metadata struct{ Name string }
			Rules    []rbacv1.PolicyRule
		}
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		// A role of its own for what a switch allows is part of the chart's.
		name := role.Kind + " " + strings.TrimSuffix(role.Metadata.Name, "-startup-taint")
		if role.Kind == "ClusterRole" || role.Kind == "Role" {
			roles[name] = append(roles[name], rights(role.Rules)...)
			slices.Sort(roles[name])
		}
	}
	return roles
}

// The rights that the chart gives are those that the tests of the controller
// run with.
func TestRightsAreThoseOfTheTests(t *testing.T) {
	got := rolesOf(t, template(t, "--set", "startupTaint=true"))
	delete(got, "ClusterRole kube-smcr-agent") // is compared on the real cluster
	delete(got, "ClusterRole kube-smcr-metrics-reader")
	delete(got, "Role kube-smcr-agent-events") // TestAgentsTellOfTheirNode
	delete(got, "Role kube-smcr-agent-lease")  // TestAgentsAreConfinedToTheirNode
	delete(got, "Role kube-smcr-agent")        // as the ClusterRole
	want := map[string][]string{}
	for _, file := range []string{"controller.yaml", "hooks.yaml"} {
		text, err := os.ReadFile(filepath.Join("../../config/rbac", file))
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(want, rolesOf(t, string(text)))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-config/rbac +chart):\n%s", diff)
	}
}

// No component can read secrets, run commands in pods or give itself rights.
func TestRightsThatNobodyHas(t *testing.T) {
	for _, r := range renderings(t) {
		for _, doc := range documents(template(t, r.args...)) {
			var rules []rbacv1.PolicyRule
			switch parse(t, doc).GetKind() {
			case "ClusterRole", "Role":
				switch o := typed(t, doc).(type) {
				case *rbacv1.ClusterRole:
					rules = o.Rules
				case *rbacv1.Role:
					rules = o.Rules
				}
			}
			for _, right := range rights(rules) {
				for _, never := range []string{"secrets", "configmaps", "pods/exec", "rbac.authorization.k8s.io", "*/", "serviceaccounts"} {
					if strings.Contains(right, never) || strings.HasPrefix(right, "* ") || strings.Contains(right, " * *") {
						t.Errorf("%s: %s: %s", r.name, parse(t, doc).GetName(), right)
					}
				}
			}
		}
	}
}
