// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// AgentConfig says how to run a node's agent.
type AgentConfig struct {
	// Binary is the path of node-agent. Required.
	Binary string
	// Policies is the YAML list of the policies; empty selects everything
	// between pods.
	Policies string
	// Node is YAML that is added to the node's settings, indented by two.
	Node string
	// Log gets the agent's log, if given.
	Log io.Writer
}

// Agent is a running node agent.
type Agent struct {
	*Proc
	// API asks it. It is closed when the process ends.
	API *agentapi.Client
}

var agentYAML = template.Must(template.New("agent").Parse(`node:
  name: {{.Name}}
  devices:{{range .RNICs}}
  - soft: {address: {{.Address}}, mtu: {{$.MTU}}}{{end}}
  dataDir: {{.DataDir}}
  apiSocket: {{.Socket}}
  metricsAddress: none
{{.More}}policies:
{{.Policies}}`))

// StartAgent starts the node's agent. It need not be ready when StartAgent
// returns: see WaitReady.
func (n *Node) StartAgent(cfg AgentConfig) (*Agent, error) {
	binary, err := filepath.Abs(cfg.Binary)
	if err != nil {
		return nil, fmt.Errorf("agent of %s: %w", n.Name, err)
	}
	if cfg.Policies == "" {
		var cidrs []string
		for _, m := range n.lab.Nodes {
			for _, p := range m.podPrefixes() {
				if s := fmt.Sprintf("%q", p.String()); !slices.Contains(cidrs, s) {
					cidrs = append(cidrs, s)
				}
			}
		}
		cfg.Policies = fmt.Sprintf("  - name: pods\n    peers: {cidrs: [%s]}\n", strings.Join(cidrs, ", "))
	}
	var b bytes.Buffer
	err = agentYAML.Execute(&b, map[string]any{
		"Name": n.Name, "RNICs": n.RNICs, "MTU": pathMTU(n.lab.cfg.MTU), "DataDir": n.DataDir(), "Socket": n.Socket(),
		"More": cfg.Node, "Policies": cfg.Policies,
	})
	if err != nil {
		return nil, fmt.Errorf("agent of %s: %w", n.Name, err)
	}
	file := filepath.Join(n.Dir, "node-agent.yaml")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		return nil, fmt.Errorf("agent of %s: %w", n.Name, err)
	}
	p, err := n.Start(Command{Args: []string{binary, "--config", file}, Log: cfg.Log})
	if err != nil {
		return nil, fmt.Errorf("agent of %s: %w", n.Name, err)
	}
	a := &Agent{Proc: p, API: agentapi.NewClient(n.Socket())}
	go func() {
		<-p.Done()
		a.API.Close()
	}()
	return a, nil
}

// pathMTU is the largest path MTU of InfiniBand whose RoCEv2 packets fit.
func pathMTU(mtu int) int {
	const headers = 100 // IPv6, UDP, BTH, RETH, ICRC
	size := 4096
	for size > 256 && size+headers > mtu {
		size /= 2
	}
	return size
}

// WaitReady waits until the agent serves so many pods.
func (a *Agent) WaitReady(ctx context.Context, pods int) error {
	return a.WaitStatus(ctx, fmt.Sprintf("%d pods that are ready", pods), func(s agentapi.Status) bool {
		return s.Accelerating && s.Pods.Ready >= pods
	})
}

// WaitStatus waits until the agent's status is as wanted.
func (a *Agent) WaitStatus(ctx context.Context, what string, wanted func(agentapi.Status) bool) error {
	err := poll(ctx, what, func() error {
		select {
		case <-a.Done():
			return errEnded
		default:
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		s, err := a.API.Status(ctx)
		if err == nil && !wanted(s) {
			err = fmt.Errorf("status is pods %+v, connections %+v, problems %q", s.Pods, s.Conns, s.Problems)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%w\nthe agent's log ends with:\n%s", err, tail(a.Stderr(), 2000))
	}
	return nil
}

var errEnded = errors.New("the agent ended")

func tail(s string, n int) string { return s[max(0, len(s)-n):] }
