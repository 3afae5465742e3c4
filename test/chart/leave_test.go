// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// No agent is on a node with the label smcr.io/leave, whatever affinity it is given.
func TestNodesThatAreLeft(t *testing.T) {
	in := func(key string, values ...string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
	}
	arch := in(corev1.LabelArchStable, "amd64", "arm64")
	stay := corev1.NodeSelectorRequirement{Key: v1alpha1.LabelLeave, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"true"}}
	const required = "agent.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms="
	for _, tt := range []struct {
		name, json string
		want       []corev1.NodeSelectorTerm
	}{
		{"none", "", []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{arch, stay}}}},
		{"pods only", `agent.affinity={"podAntiAffinity":{}}`, []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{arch, stay}}}},
		{
			"two terms", required + `[{"matchExpressions":[{"key":"a","operator":"In","values":["1"]}]},{"matchFields":[{"key":"metadata.name","operator":"In","values":["n"]}]},{}]`,
			[]corev1.NodeSelectorTerm{
				{MatchExpressions: []corev1.NodeSelectorRequirement{in("a", "1"), arch, stay}},
				{MatchExpressions: []corev1.NodeSelectorRequirement{arch, stay}, MatchFields: []corev1.NodeSelectorRequirement{in("metadata.name", "n")}},
				{},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var args []string
			if tt.json != "" {
				args = []string{"--set-json", tt.json}
			}
			ds := find[*appsv1.DaemonSet](t, template(t, args...), "-agent")
			got := ds.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Helm prints which nodes are not clean, and nothing else of the Job.
func TestUninstallIsPrinted(t *testing.T) {
	job := find[*batchv1.Job](t, template(t), "-uninstall")
	if got := job.Annotations["helm.sh/hook-output-log-policy"]; got != "hook-succeeded,hook-failed" {
		t.Errorf("Helm prints the log when the Job has %q", got)
	}
	if got := strings.Join(job.Spec.Template.Spec.Containers[0].Args, " "); !strings.Contains(got, "--log-level=warn") || !strings.Contains(got, "--daemonset=kube-smcr-agent") {
		t.Errorf("arguments %s", got)
	}
	if got := find[*batchv1.Job](t, template(t), "-crds").Annotations["helm.sh/hook-output-log-policy"]; got != "hook-failed" {
		t.Errorf("Helm prints the log of the CRDs' Job when it has %q", got)
	}
}
