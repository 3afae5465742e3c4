// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cli/kubectl/kubectltest"
)

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

	// The agent does not answer.
	c = newCluster(t, &kubectltest.Server{Objects: map[string]string{node: `{"metadata":{"name":"node-a"}}`, smcr: `{"metadata":{"name":"node-a"}}`}})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := c.Leave(ctx, "node-a"); err == nil || !strings.Contains(err.Error(), "node node-a is not clean yet") {
		t.Errorf("no agent: %v", err)
	}
}
