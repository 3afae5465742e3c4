// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// Config says how to run a story.
type Config struct {
	// Bin is the directory with [Binaries]. Required.
	Bin string
	// Captures is the directory for the captures of [Applications]. Required there.
	Captures string
	// Quick makes smaller transfers, and repeats each fault at most twice.
	Quick bool
	// Repeat is how often each fault of [Failover] happens; 1 if 0.
	Repeat int
	// Slack is how many times its target a stall of [Failover] may last, where
	// a machine is busy with other work; 1 if 0.
	Slack int
	// AgentLog returns what gets the log of a node's agent, if it is given.
	AgentLog func(node string) io.Writer
}

// An Audience is told what happens, by the goroutine that runs the story.
type Audience interface {
	// Progress is told what is done now, in a line.
	Progress(line string)
	// Check is told whether a statement holds.
	Check(c Check)
	// Show gets a table, or what a program printed, in whole lines.
	Show(text string)
}

// Check is a statement and whether it holds.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// Nodes are two nodes with pods and agents, and whom to tell what happens there.
// They are owned by one goroutine.
type Nodes struct {
	cfg      Config
	audience Audience
	began    time.Time
	tables   []string // of our own namespace, before
	switched bool     // the networks of RNICs
	settings string   // of the agents, beyond addresses and paths

	lab            *lab.Lab
	client, server *lab.Pod
	legacy         *lab.Pod      // no agent knows it
	agents         [2]*lab.Agent // nil while they do not run
}

// Programs are what a story needs of the distribution; those of util-linux and
// the like are everywhere.
func Programs() []string {
	return []string{
		"nginx", "curl", "redis-server", "redis-benchmark", "iperf3", "tcpdump", "tshark", "nft", "setpriv",
		filepath.Join(cniDir, "bridge"), filepath.Join(cniDir, "host-local"),
	}
}

// Binaries are our own programs that a story runs.
func Binaries() []string { return []string{"node-agent", "smcr-cni", "smcrctl"} }

// cniDir is where distributions put the CNI plugins.
const cniDir = "/usr/lib/cni"

func (n *Nodes) progress(format string, args ...any) {
	n.audience.Progress(fmt.Sprintf(format, args...))
}

func (n *Nodes) show(format string, args ...any) { n.audience.Show(fmt.Sprintf(format, args...)) }

// check tells whether a statement holds, and goes on.
func (n *Nodes) check(what string, holds bool, format string, args ...any) {
	n.audience.Check(Check{Name: what, OK: holds, Detail: fmt.Sprintf(format, args...)})
}

// step is a part of a story.
type step struct {
	title string
	do    func(context.Context) error
}

// play does the steps within a time. The first error ends it.
func (n *Nodes) play(ctx context.Context, limit time.Duration, steps []step) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it took longer than %v", limit))
	defer cancel()
	n.sweep()
	for _, step := range steps {
		n.progress("%s", step.title)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	return nil
}

// LookAround returns commands with which somebody can look around while the nodes
// are there, if they are.
func (n *Nodes) LookAround() []string {
	if n.lab == nil || n.server == nil {
		return nil
	}
	bin, err := filepath.Abs(n.cfg.Bin)
	if err != nil {
		bin = n.cfg.Bin
	}
	out := []string{fmt.Sprintf("ip netns exec %s curl -s http://%s:%d/small -o /dev/null", filepath.Base(n.client.NS.Path()), n.server.Addr4, portHTTP)}
	for _, node := range n.lab.Nodes {
		out = append(out, fmt.Sprintf("%s/smcrctl --socket %s links", bin, node.Socket()))
	}
	return out
}

// build makes the nodes and pods.
func (n *Nodes) build(ctx context.Context) (err error) {
	if n.tables, err = ownTables(ctx); err != nil {
		return err
	}
	if n.lab, err = lab.New(lab.Config{PluginDirs: []string{n.cfg.Bin, cniDir}, Switched: n.switched, Routed: true}); err != nil {
		return err
	}
	for _, p := range []struct {
		pod  **lab.Pod
		node int
		cfg  lab.PodConfig
	}{
		{&n.client, 0, lab.PodConfig{Name: "client"}},
		{&n.server, 1, lab.PodConfig{Name: "server"}},
		{&n.legacy, 1, lab.PodConfig{Name: "legacy", WithoutSMCR: true}},
	} {
		if *p.pod, err = n.lab.Nodes[p.node].AddPod(ctx, p.cfg); err != nil {
			return err
		}
	}
	n.progress("  %s: client %s; %s: server %s, legacy %s (no smcr-cni in its chain)",
		n.client.Node.Name, n.client.Addr4, n.server.Node.Name, n.server.Addr4, n.legacy.Addr4)
	status, err := n.client.Run(ctx, lab.Command{Args: []string{"cat", "/proc/self/status"}})
	if err != nil {
		return err
	}
	n.check("pods have no privileges", unprivileged(status), "user, capabilities and no_new_privs of a process in a pod")
	return nil
}

// startAgents starts both agents and waits until they serve their pods.
func (n *Nodes) startAgents(ctx context.Context) error {
	for i := range n.lab.Nodes {
		if err := n.startAgent(i); err != nil {
			return err
		}
	}
	for i := range n.lab.Nodes {
		if err := n.waitAgent(ctx, i); err != nil {
			return err
		}
	}
	n.progress("  both agents serve their pods")
	return nil
}

func (n *Nodes) startAgent(i int) error {
	var log io.Writer
	if n.cfg.AgentLog != nil {
		log = n.cfg.AgentLog(n.lab.Nodes[i].Name)
	}
	a, err := n.lab.Nodes[i].StartAgent(lab.AgentConfig{Binary: filepath.Join(n.cfg.Bin, "node-agent"), Node: n.settings, Log: log})
	n.agents[i] = a
	return err
}

func (n *Nodes) waitAgent(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := n.agents[i].WaitReady(ctx, 1); err != nil {
		return fmt.Errorf("agent of %s: %w", n.lab.Nodes[i].Name, err)
	}
	return nil
}

// smcrctl runs it against the client's agent, and returns what it prints. Exit
// code 4 is an answer too.
func (n *Nodes) smcrctl(ctx context.Context, args ...string) (string, error) {
	args = append([]string{"--socket", n.client.Node.Socket()}, args...)
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, filepath.Join(n.cfg.Bin, "smcrctl"), args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var ee *exec.ExitError
	if errors.As(err, &ee) && ee.ExitCode() == 4 {
		err = nil
	}
	if err != nil {
		return "", fmt.Errorf("smcrctl %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return string(out), nil
}

// quiesce waits until no agent carries a connection.
func (n *Nodes) quiesce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	for _, a := range n.agents {
		if a == nil {
			continue
		}
		err := a.WaitStatus(ctx, "the end of all connections", func(s agentapi.Status) bool { return s.Conns.Live == 0 })
		if err != nil {
			return err
		}
	}
	return nil
}

// Close removes everything and checks whether it did. It is never interrupted.
func (n *Nodes) Close() {
	if n.lab == nil {
		return
	}
	n.progress("clean up")
	var left []string
	err := n.lab.Close()
	if err == nil {
		left, err = n.lab.Leftovers()
	}
	if err == nil {
		var tables []string
		tables, err = ownTables(context.Background())
		left = append(left, n.newTables(tables)...)
	}
	switch {
	case err != nil:
		n.check("nothing is left behind", false, "%v", err)
	default:
		n.check("nothing is left behind", len(left) == 0, "%s", describe(left, "no namespace, process, directory or table"))
	}
}

// sweep removes what killed runs left. What stays does not hinder this one.
func (n *Nodes) sweep() {
	swept, err := lab.Sweep()
	for _, s := range swept {
		n.progress("removed %s, left by a run that was killed", s)
	}
	if err != nil {
		n.progress("remove what runs that were killed left: %v", err)
	}
}

// ownTables lists the nftables tables of our own namespace.
func ownTables(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "nft", "list", "tables").Output()
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n"), nil
}

// newTables are tables of ours that were not there before.
func (n *Nodes) newTables(now []string) []string {
	var out []string
	for _, t := range now {
		if strings.Contains(t, "kube-smcr") && !slices.Contains(n.tables, t) {
			out = append(out, t+" in the machine's own namespace")
		}
	}
	return out
}

// describe lists things, or says that there are none.
func describe(things []string, none string) string {
	if len(things) == 0 {
		return none
	}
	return strings.Join(things, "; ")
}

// writeFile writes a file that the pods' processes may read.
func writeFile(name, text string) error { return os.WriteFile(name, []byte(text), 0o644) }
