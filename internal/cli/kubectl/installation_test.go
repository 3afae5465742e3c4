// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli/kubectl/kubectltest"
)

// waiting is a pod that does not start, of a release and made for an owner, KIND/NAME; "": for itself.
func waiting(release, component, reason, owner string) string {
	kind, name, _ := strings.Cut(owner, "/")
	owners := ""
	if owner != "" {
		owners = fmt.Sprintf(`"ownerReferences":[{"controller":true,"kind":%q,"name":%q,"uid":"u-%s"}],`, kind, name, name)
	}
	return fmt.Sprintf(`{"metadata":{"namespace":"kube-smcr","name":"x",%s"labels":{"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/instance":%q,"app.kubernetes.io/component":%q}},
		"spec":{"nodeName":"node-a","hostNetwork":true},"status":{"phase":"Pending","containerStatuses":[{"image":"registry.example/smcr:1","state":{"waiting":{"reason":%q,"message":"not found"}}}]}}`,
		owners, release, component, reason)
}

// made is an object of the chart or, if chart is "", one that has the labels of pods. more are further
// fields of its metadata.
func made(namespace, name, release, component, chart, more string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":%q,"name":%q,"uid":"u-%s",%s"labels":{
		"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/instance":%q,"app.kubernetes.io/component":%q,"helm.sh/chart":%q}}}`,
		namespace, name, name, more, release, component, chart)
}

// What a user asks whose helm install does not end: which pod of the installation waits, and of what.
// Pods of others that have the product's labels are not of the installation.
func TestAskNodes_imageMissing(t *testing.T) {
	const chart = "kube-smcr-0.1.0"
	const named = "the installation waits for pod kube-smcr/x, which does not start: image registry.example/smcr:1: ErrImagePull: not found"
	const nobody = "is kube-smcr installed?"
	job := func(release, chart string) map[string]string {
		return map[string]string{"/apis/batch/v1/namespaces/kube-smcr/jobs/check": made("kube-smcr", "check", release, "check", chart, "")}
	}
	deployment := map[string]string{
		"/apis/apps/v1/namespaces/kube-smcr/replicasets/r": made("kube-smcr", "r", "s", "controller", "",
			`"ownerReferences":[{"controller":true,"kind":"Deployment","name":"d","uid":"u-d"}],`),
		"/apis/apps/v1/namespaces/kube-smcr/deployments/d": made("kube-smcr", "d", "s", "controller", chart, ""),
	}
	agents := func(namespace, created string) string {
		return made(namespace, "agents", "s", "agent", chart, fmt.Sprintf(`"creationTimestamp":%q,`, created))
	}
	const first, second = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
	elsewhere := map[string]string{"/apis/apps/v1/namespaces/other/daemonsets/agents": agents("other", first)}
	own := map[string]string{"/apis/apps/v1/namespaces/kube-smcr/daemonsets/agents": agents("kube-smcr", first)}
	for _, tt := range []struct {
		name, want string
		pod        string
		objects    []map[string]string
	}{
		{"a hook's", named, waiting("s", "check", "ErrImagePull", "Job/check"), []map[string]string{job("s", chart)}},
		{"the controller's", named, waiting("s", "controller", "ErrImagePull", "ReplicaSet/r"), []map[string]string{deployment, own}},
		{
			"its init container's", "the installation waits for pod kube-smcr/x, which does not start: image registry.example/init:1: CrashLoopBackOff: back-off",
			strings.Replace(waiting("s", "check", "PodInitializing", "Job/check"), `"containerStatuses"`,
				`"initContainerStatuses":[{"image":"registry.example/init:1","state":{"waiting":{"reason":"CrashLoopBackOff","message":"back-off"}}}],"containerStatuses"`, 1),
			[]map[string]string{job("s", chart)},
		},
		{"it just starts", nobody, waiting("s", "check", "ContainerCreating", "Job/check"), []map[string]string{job("s", chart)}},
		{"made for itself", nobody, waiting("s", "check", "ErrImagePull", ""), nil},
		{"of a Job that has the labels of pods", nobody, waiting("s", "check", "ErrImagePull", "Job/check"), []map[string]string{job("s", "")}},
		{"of a Job of another release", nobody, waiting("s", "check", "ErrImagePull", "Job/check"), []map[string]string{job("t", chart)}},
		{"of a Job that is not there", nobody, waiting("s", "check", "ErrImagePull", "Job/check"), nil},
		{"of something else", nobody, waiting("s", "check", "ErrImagePull", "StatefulSet/check"), nil},
		{"of another installation", "the DaemonSet other/agents has no pod", waiting("s", "check", "ErrImagePull", "Job/check"), []map[string]string{job("s", chart), elsewhere}},
		{"an agent", "its pod kube-smcr/x does not start: image registry.example/smcr:1: ErrImagePull: not found", waiting("s", "agent", "ErrImagePull", "DaemonSet/agents"), []map[string]string{own}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			objects := map[string]string{"/api/v1/namespaces/kube-smcr/pods/x": tt.pod}
			for _, o := range tt.objects {
				maps.Copy(objects, o)
			}
			c := newCluster(t, &kubectltest.Server{Objects: objects})
			answers, err := AskNodes[agentapi.Status](t.Context(), c, nil, "status")
			if len(answers) == 1 {
				err = answers[0].Err
			}
			if !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
	// Of two installations the older one's pods count.
	c := newCluster(t, &kubectltest.Server{Objects: map[string]string{
		"/apis/apps/v1/namespaces/kube-smcr/daemonsets/agents": agents("kube-smcr", first), "/apis/apps/v1/namespaces/other/daemonsets/agents": agents("other", second),
	}})
	if got, err := c.installed(t.Context()); err != nil || got != (installation{"kube-smcr", "s", "agents"}) {
		t.Errorf("the installation is %v, %v", got, err)
	}
}

// unscheduled is a pod that no node has room for. node is the node that the DaemonSet means it for, "" if none does.
func unscheduled(component, owner, node string) string {
	affinity := ""
	if node != "" {
		affinity = fmt.Sprintf(`"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchFields":[
			{"key":"metadata.name","operator":"In","values":[%q]}]}]}}},`, node)
	}
	pod := strings.Replace(waiting("s", component, "", owner), `"nodeName":"node-a",`, affinity, 1)
	head, _, _ := strings.Cut(pod, `"containerStatuses"`)
	return head + `"conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/1 nodes are available: 1 Insufficient memory."}]}}`
}

// An installation that is there is not said to be missing: what keeps its pods from the nodes is said.
func TestAskNodes_noPodOnNode(t *testing.T) {
	const chart = "kube-smcr-0.1.0"
	const full = "Unschedulable: 0/1 nodes are available: 1 Insufficient memory."
	const job, own, pod = "/apis/batch/v1/namespaces/kube-smcr/jobs/check", "/apis/apps/v1/namespaces/kube-smcr/daemonsets/agents", "/api/v1/namespaces/kube-smcr/pods/x"
	daemonSet := made("kube-smcr", "agents", "s", "agent", chart, "")
	agent := map[string]string{own: daemonSet, pod: unscheduled("agent", "DaemonSet/agents", "node-a")}
	for _, tt := range []struct {
		name, want string
		nodes      []string
		objects    map[string]string
	}{
		{"a full node", "node node-a: no kube-smcr agent runs there: its pod kube-smcr/x does not start: " + full, nil, agent},
		{"a full node that is named", "node node-a: no kube-smcr agent runs there: its pod kube-smcr/x does not start: " + full, []string{"node-a"}, agent},
		{"another node", "node node-b: no kube-smcr agent runs there: does the DaemonSet tolerate", []string{"node-b"}, agent},
		{
			"no node for a hook's Job", "the installation waits for pod kube-smcr/x, which does not start: " + full, nil,
			map[string]string{job: made("kube-smcr", "check", "s", "check", chart, ""), pod: unscheduled("check", "Job/check", "")},
		},
		{
			"pods that are refused", "the DaemonSet kube-smcr/agents has no pod: kubectl -n kube-smcr describe daemonset agents", nil,
			map[string]string{own: daemonSet},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			answers, err := AskNodes[agentapi.Status](t.Context(), newCluster(t, &kubectltest.Server{Objects: tt.objects}), tt.nodes, "status")
			if len(answers) == 1 {
				err = answers[0].Err
			}
			if !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestNodeOf(t *testing.T) {
	for name, tt := range map[string]struct{ spec, want string }{
		"on a node":        {`{"nodeName":"a"}`, "a"},
		"no affinity":      {`{}`, ""},
		"no node affinity": {`{"affinity":{"podAffinity":{}}}`, ""},
		"none required":    {`{"affinity":{"nodeAffinity":{}}}`, ""},
		"by a label":       {`{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"x","operator":"In","values":["a"]}]}]}}}}`, ""},
		"all but one":      {`{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchFields":[{"key":"metadata.name","operator":"NotIn","values":["a"]}]}]}}}}`, ""},
		"for a node":       {`{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchFields":[{"key":"metadata.name","operator":"In","values":["a"]}]}]}}}}`, "a"},
	} {
		var p corev1.Pod
		must(t, json.Unmarshal([]byte(tt.spec), &p.Spec))
		if got := nodeOf(&p); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}
