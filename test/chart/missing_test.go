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
	"sigs.k8s.io/yaml"
)

// defaults returns the values of values.yaml.
func defaults(t *testing.T) map[string]any {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartDir, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := yaml.UnmarshalStrict(text, &values); err != nil {
		t.Fatal(err)
	}
	return values
}

// paths are all values, each below those that it is a part of.
func paths(values map[string]any) (all [][]string) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		all = append(all, []string{key})
		if below, ok := values[key].(map[string]any); ok {
			for _, p := range paths(below) {
				all = append(all, append([]string{key}, p...))
			}
		}
	}
	return all
}

// without is a copy of values that has no path, or nil there.
func without(values map[string]any, path []string, leaveNil bool) map[string]any {
	out := maps.Clone(values)
	if out == nil {
		out = map[string]any{}
	}
	below, _ := out[path[0]].(map[string]any)
	switch {
	case len(path) > 1 && (below != nil || leaveNil):
		out[path[0]] = without(below, path[1:], leaveNil)
	case len(path) == 1 && leaveNil:
		out[path[0]] = nil
	case len(path) == 1:
		delete(out, path[0])
	}
	return out
}

// The templates have the defaults themselves: Helm gives them no values.yaml.
func TestDefaultsAreThoseOfTheValues(t *testing.T) {
	text, err := yaml.Marshal(defaults(t))
	if err != nil {
		t.Fatal(err)
	}
	want := "{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}\n{{- /* values.yaml, by: go test ./test/chart -update */ -}}\n" +
		"{{- define \"smcr.defaults\" -}}\n" + string(text) + "{{- end -}}\n"
	file := filepath.Join(chartDir, "templates/_defaults.tpl")
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("%s has not the defaults of values.yaml (-want +got): go test ./test/chart -update\n%s", file, diff)
	}
}

func TestTemplatesFillTheValues(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(chartDir, "templates/*"))
	if err != nil {
		t.Fatal(err)
	}
	below, err := filepath.Glob(filepath.Join(chartDir, "templates/*/*"))
	if err != nil || len(below) == 0 {
		t.Fatalf("%d templates, %v", len(below), err)
	}
	for _, file := range slices.Concat(files, below) {
		if info, err := os.Stat(file); err != nil || info.IsDir() || strings.HasPrefix(filepath.Base(file), "_") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, rest, _ := strings.Cut(string(text), "\n"); !strings.HasPrefix(rest, `{{- include "smcr.fill" . -}}`) {
			t.Errorf("%s does not begin with smcr.fill: values that the release does not have would be nil", file)
		}
	}
}

// A release from before a value existed does not have it, nor the values around it,
// with helm upgrade --reuse-values. It is as if it had the default.
func TestMissingValues(t *testing.T) {
	// With every part of the chart, and otherwise the defaults.
	full := map[string]any{
		"monitoring": map[string]any{
			"serviceMonitor": map[string]any{"enabled": true}, "prometheusRule": map[string]any{"enabled": true}, "dashboard": map[string]any{"enabled": true},
		},
		"devicePlugin": map[string]any{"enabled": true, "vfs": true},
		"hardware":     map[string]any{"enabled": true},
		"dra":          map[string]any{"enabled": true},
		"multus":       map[string]any{"enabled": true, "resourceName": "smcr.io/roce_vf"},
		"agent":        map[string]any{"resourceQuota": true},
		"startupTaint": true,
	}
	render := func(t *testing.T, values map[string]any) (out, complaint string) {
		t.Helper()
		text, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return helm(t, "template", release, chartDir, "--namespace", namespace, "--values", file)
	}
	want, complaint := render(t, full)
	if complaint != "" {
		t.Fatal(complaint)
	}
	for _, path := range paths(defaults(t)) {
		name := strings.Join(path, ".")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, refused := want, ""
			if rest := without(full, path, false); !cmp.Equal(rest, full) {
				want, refused = render(t, rest)
			}
			got, complaint := render(t, without(full, path, true))
			switch {
			case name == "agent.devices":
				if !strings.Contains(complaint, "missing property 'devices'") {
					t.Errorf("null for devices is not refused: %q", complaint)
				}
			case complaint != refused:
				t.Errorf("%q, with the default %q", complaint, refused)
			case strings.HasPrefix(name, "controller.resources.") || strings.HasPrefix(name, "hooks.resources.") || strings.HasPrefix(name, "monitoring.dashboard.labels."):
				objects(t, got) // Kubernetes' own fields may be left out
			default:
				if diff := cmp.Diff(documents(want), documents(got)); diff != "" {
					t.Errorf("not as with the default (-want +got):\n%s", diff)
				}
			}
		})
	}
}
