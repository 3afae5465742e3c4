// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// nodesOf returns, for each object of the chart that makes pods, the terms one of which their node must match.
func nodesOf(t *testing.T, args ...string) map[string][]corev1.NodeSelectorTerm {
	t.Helper()
	out := map[string][]corev1.NodeSelectorTerm{}
	for _, doc := range documents(template(t, args...)) {
		tmpl := podTemplate(typed(t, doc))
		if tmpl == nil {
			continue
		}
		var terms []corev1.NodeSelectorTerm
		if a := tmpl.Spec.Affinity; a != nil && a.NodeAffinity != nil {
			terms = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		}
		out[strings.TrimPrefix(parse(t, doc).GetName(), release+"-")] = terms
	}
	return out
}

// No pod of the chart is on a node that the image has no programs for, whatever affinity the values have: there it would
// never start, and an update of the agents would wait for it.
func TestArchitectures(t *testing.T) {
	in := func(key string, values ...string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
	}
	term := func(all ...corev1.NodeSelectorRequirement) []corev1.NodeSelectorTerm {
		return []corev1.NodeSelectorTerm{{MatchExpressions: all}}
	}
	stay := corev1.NodeSelectorRequirement{Key: "smcr.io/leave", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"true"}}
	both := in(corev1.LabelArchStable, "amd64", "arm64")
	const affinity = `.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"In","values":["1"]}]}]}}}`
	for _, tt := range []struct {
		name                    string
		args                    []string
		agent, controller, jobs []corev1.NodeSelectorTerm
	}{
		{"default", nil, term(both, stay), term(both), term(both)},
		{"with affinities", []string{"--set-json", "agent" + affinity, "--set-json", "controller" + affinity}, term(in("a", "1"), both, stay), term(in("a", "1"), both), term(both)},
		{"of another image", []string{"--set", "image.architectures={s390x}"}, term(in(corev1.LabelArchStable, "s390x"), stay), term(in(corev1.LabelArchStable, "s390x")), term(in(corev1.LabelArchStable, "s390x"))},
		{"all", []string{"--set-json", "image.architectures=[]"}, term(stay), nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := map[string][]corev1.NodeSelectorTerm{"agent": tt.agent, "controller": tt.controller, "check": tt.jobs, "crds": tt.jobs, "uninstall": tt.jobs}
			if diff := cmp.Diff(want, nodesOf(t, tt.args...)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Where the nodes' architecture is all that is asked of them, replicas of the controller are still spread.
func TestArchitectures_spread(t *testing.T) {
	if d := find[*appsv1.Deployment](t, template(t), "-controller"); len(d.Spec.Template.Spec.TopologySpreadConstraints) != 1 {
		t.Errorf("constraints %v", d.Spec.Template.Spec.TopologySpreadConstraints)
	}
}

// A release is built for the architectures that the chart has.
func TestArchitecturesOfReleases(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, ".github/workflows/release.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var workflow struct {
		Jobs map[string]struct {
			Steps []struct{ With map[string]any }
		}
	}
	if err := yaml.Unmarshal(text, &workflow); err != nil {
		t.Fatal(err)
	}
	var values struct {
		Image struct{ Architectures []string }
	}
	if text, err = yaml.Marshal(defaults(t)); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	want := "linux/" + strings.Join(values.Image.Architectures, ",linux/")
	for _, job := range workflow.Jobs {
		for _, step := range job.Steps {
			if p, ok := step.With["platforms"]; ok {
				if p != want {
					t.Errorf("releases are built for %v, and the chart is for %s", p, want)
				}
				return
			}
		}
	}
	t.Error("no step builds the image of a release")
}
