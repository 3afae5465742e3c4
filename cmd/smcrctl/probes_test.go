// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// answering is an agent with this status; nil means that it hangs.
func answering(t *testing.T, status *agentapi.Status) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	hang := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+agentapi.PathStatus, func(w http.ResponseWriter, req *http.Request) {
		if status == nil {
			<-hang
			return
		}
		if err := json.NewEncoder(w).Encode(status); err != nil {
			t.Error(err)
		}
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l)
	}()
	t.Cleanup(func() {
		close(hang)
		_ = s.Close()
		<-done
	})
	return socket
}

func TestProbes(t *testing.T) {
	serving := agentapi.Status{Instance: "agent-x", Synced: true, Pods: agentapi.PodCount{Attached: 3, Ready: 2}}
	draining, starting := serving, serving
	draining.Draining = true
	starting.Synced = false
	alone, joined := serving, serving
	alone.Cluster = &agentapi.Cluster{Lacks: "the API server has not sent the pods yet: no route to host", Away: "no route to host"}
	joined.Cluster = &agentapi.Cluster{Joined: true, Away: "no route to host"}
	tests := []struct {
		name   string
		status *agentapi.Status
		args   []string
		env    string
		code   int
		want   string
	}{
		{"ready", &serving, []string{"ready"}, "", 0, "ready: 2 of 3 pods are served\n"},
		{"ready, this one", &serving, []string{"ready", "--instance", "agent-x"}, "", 0, "ready: 2 of 3"},
		{"ready, the pod's own", &serving, []string{"ready"}, "agent-x", 0, "ready: 2 of 3"},
		{"ready, another one", &serving, []string{"ready"}, "agent-y", exitNot, `not ready: agent "agent-x" manages this node, and not "agent-y"`},
		{"ready, any", &serving, []string{"ready", "--instance", ""}, "agent-y", 0, "ready: 2 of 3"},
		{"ready, draining", &draining, []string{"ready"}, "", exitNot, "not ready: the agent is stopping"},
		{"ready, starting", &starting, []string{"ready"}, "", exitNot, "not ready: the agent has not looked at all pods yet"},
		{"ready, before the first contact with the cluster", &alone, []string{"ready"}, "", exitNot, "not ready: the API server has not sent the pods yet: no route to host\n"},
		{"ready, after the loss of that contact", &joined, []string{"ready"}, "", 0, "ready: 2 of 3 pods are served\n"},
		{"alive, before the first contact with the cluster", &alone, []string{"alive"}, "", 0, "the agent answers\n"},
		{"ready json", &starting, []string{"ready", "-o", "json"}, "", exitNot, `"ready": false`},
		{"ready, hanging", nil, []string{"ready"}, "", exitError, "deadline exceeded"},
		{"ready, an argument", &serving, []string{"ready", "x"}, "", exitUsage, "see smcrctl ready --help"},
		{"alive", &starting, []string{"alive"}, "agent-y", 0, "the agent answers\n"},
		{"alive, draining", &draining, []string{"alive"}, "", 0, "the agent answers\n"},
		{"alive, hanging", nil, []string{"alive"}, "", exitError, "deadline exceeded"},
		{"alive, none", nil, []string{"alive", "--socket", "/nowhere/s"}, "", exitNotRunning, "the node agent is not running"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(agentapi.InstanceEnv, tt.env)
			var out bytes.Buffer
			args := append([]string{"--socket", answering(t, tt.status)}, tt.args...)
			if code := run(t.Context(), args, &out, &out); code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(out.String(), tt.want) {
				t.Errorf("output %q, want %q in it", out.String(), tt.want)
			}
		})
	}
}
