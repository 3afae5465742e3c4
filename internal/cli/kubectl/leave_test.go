// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cli/kubectl/kubectltest"
)

// agentOn is the pod of an agent on a node.
func agentOn(node string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"kube-smcr","name":"agent-1","labels":{"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/component":"agent"}},
		"spec":{"nodeName":%q,"hostNetwork":true},"status":{"phase":"Running"}}`, node)
}

func TestLeave(t *testing.T) {
	const node, smcr = "/api/v1/nodes/node-a", "/apis/smcr.io/v1alpha1/smcrnodes/node-a"
	var patches []string
	s := &kubectltest.Server{
		Objects: map[string]string{node: `{"metadata":{"name":"node-a"}}`},
		Patched: func(path, body string) { patches = append(patches, path+" "+body) },
	}
	c := newCluster(t, s)
	must(t, c.Leave(t.Context(), "node-a"))
	must(t, c.Return(t.Context(), "node-a"))
	want := []string{node + ` {"metadata":{"labels":{"smcr.io/leave":"true"}}}`, node + ` {"metadata":{"labels":{"smcr.io/leave":null}}}`}
	if !slices.Equal(patches, want) {
		t.Errorf("patches %q, want %q", patches, want)
	}
	if err := c.Leave(t.Context(), "node-z"); !IsUsage(err) || !strings.Contains(err.Error(), "there is no node node-z") {
		t.Errorf("a node that is none: %v", err)
	}

	const (
		gone = `{"metadata":{"name":"node-a"},"status":{"conditions":[{"type":"Uninstalled","status":"True","reason":"NodeLeft"}]}}`
		pod  = "/api/v1/namespaces/kube-smcr/pods/agent-1"
	)
	for _, tt := range []struct {
		name    string
		objects map[string]string
		clean   bool
	}{
		{"left", map[string]string{smcr: gone}, true},
		{"an agent that does not answer", map[string]string{smcr: `{"metadata":{"name":"node-a"}}`}, false},
		{"an agent that is about to end", map[string]string{smcr: gone, pod: agentOn("node-a")}, false},
		{"an agent that has said nothing yet", map[string]string{pod: agentOn("node-a")}, false},
		{"an agent that is on no node yet", map[string]string{smcr: gone, pod: unscheduled("agent", "DaemonSet/agents", "node-a")}, true},
		{"the agent of another node", map[string]string{smcr: gone, pod: agentOn("node-b")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.objects[node] = `{"metadata":{"name":"node-a"}}`
			c := newCluster(t, &kubectltest.Server{Objects: tt.objects})
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			err := c.Leave(ctx, "node-a")
			if tt.clean && err != nil || !tt.clean && (err == nil || !strings.Contains(err.Error(), "node node-a is not clean yet")) {
				t.Errorf("%v, want that it is clean: %v", err, tt.clean)
			}
		})
	}
}

// TestLeave_forbidden: who may not see whether a node is clean is told so at once, and not after a while that it is not.
func TestLeave_forbidden(t *testing.T) {
	const smcr = "/apis/smcr.io/v1alpha1/smcrnodes/node-a"
	c := newCluster(t, &kubectltest.Server{Objects: map[string]string{"/api/v1/nodes/node-a": `{"metadata":{"name":"node-a"}}`}, Forbidden: []string{smcr}})
	err := c.Leave(t.Context(), "node-a")
	if err == nil || !strings.Contains(err.Error(), "you may not see") || !strings.Contains(err.Error(), "read SMCRNode node-a") {
		t.Errorf("%v, want that the SMCRNode may not be read", err)
	}
}

// TestAgents_impostor: a pod with the labels of an agent that anybody may make is not asked, and
// does not keep a node from being left.
func TestAgents_impostor(t *testing.T) {
	impostor := `{"metadata":{"namespace":"mallory","name":"agent-1","creationTimestamp":"2026-01-02T03:04:05Z","labels":{"app.kubernetes.io/part-of":"kube-smcr","app.kubernetes.io/component":"agent"}},
		"spec":{"nodeName":"node-a"},"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`
	s := &kubectltest.Server{Objects: map[string]string{"/api/v1/namespaces/mallory/pods/agent-1": impostor}}
	c := newCluster(t, s)
	if agents, err := c.agents(t.Context(), "node-a"); err != nil || len(agents) > 0 {
		t.Errorf("the impostor alone: %d agents, %v", len(agents), err)
	}
	s.Objects["/api/v1/namespaces/kube-smcr/pods/agent-1"] = agentOn("node-a")
	agents, err := c.agents(t.Context(), "node-a")
	must(t, err)
	if p := agents["node-a"]; p == nil || p.Namespace != "kube-smcr" {
		t.Errorf("beside an agent: %v is asked", p)
	}
}
