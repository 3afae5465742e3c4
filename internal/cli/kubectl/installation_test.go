// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

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
		{"of another installation", nobody, waiting("s", "check", "ErrImagePull", "Job/check"), []map[string]string{job("s", chart), elsewhere}},
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
	if got, err := c.installed(t.Context()); err != nil || got != (installation{"kube-smcr", "s"}) {
		t.Errorf("the installation is %v, %v", got, err)
	}
}
