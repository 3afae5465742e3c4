// SPDX-License-Identifier: Apache-2.0

package main

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
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

const (
	// demoTimeout ends a demo in which something hangs.
	demoTimeout = 5 * time.Minute
	// readyTimeout is for an agent or a server to start on a busy machine.
	readyTimeout = 20 * time.Second
	// runTimeout is for one run of an application.
	runTimeout = time.Minute
	// settleTimeout is for connections to end, on both sides, after the
	// application closed them.
	settleTimeout = 10 * time.Second
)

// Ports of the servers.
const (
	portHTTP  = 8080
	portRedis = 6379
	portIperf = 5201
)

// demo is one run. It is owned by one goroutine.
type demo struct {
	opts   options
	out    io.Writer
	began  time.Time
	report report
	tables []string // of our own namespace, before

	lab            *lab.Lab
	client, server *lab.Pod
	legacy         *lab.Pod      // no agent knows it
	agents         [2]*lab.Agent // nil while they do not run
	bodies         bodies
	failovers      failovers // with --failover
}

func (d *demo) progress(format string, args ...any) {
	fmt.Fprintf(d.out, "%6.1fs  %s\n", time.Since(d.began).Seconds(), fmt.Sprintf(format, args...))
}

// check notes whether a statement holds, and goes on.
func (d *demo) check(what string, holds bool, format string, args ...any) {
	c := check{Name: what, OK: holds, Detail: fmt.Sprintf(format, args...)}
	d.report.Checks = append(d.report.Checks, c)
	verdict := "ok"
	if !holds {
		verdict = "NOT SO"
	}
	d.progress("  %-6s %s: %s", verdict, c.Name, c.Detail)
}

func (d *demo) run(ctx context.Context) error {
	limit, steps := demoTimeout, d.steps()
	if d.opts.failover {
		limit, steps = failoverTimeout, d.failoverSteps()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the demo took longer than %v", limit))
	defer cancel()
	if err := d.sweep(); err != nil {
		return err
	}
	for _, step := range steps {
		d.progress("%s", step.title)
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.title, err)
		}
	}
	return nil
}

// step is a part of the demo.
type step struct {
	title string
	do    func(context.Context) error
}

func (d *demo) steps() []step {
	return []step{
		{"two nodes, and pods attached by bridge, host-local and smcr-cni", d.build},
		{"servers, without any privilege", d.startServers},
		{"the applications over plain TCP, no agent runs", d.measurePlain},
		{"the agents", d.startAgents},
		{"a small transfer under tcpdump, looked at by tshark", d.capture},
		{"the applications again, with SMC-R", d.measureSMCR},
		{"a server that has no SMC-R", d.fallback},
		{"the client's agent is killed", d.killAgent},
		{"the agent starts again", d.restartAgent},
	}
}

// keep shows how to look around, and waits.
func (d *demo) keep(ctx context.Context) {
	if d.lab == nil || d.server == nil {
		return
	}
	abs, err := filepath.Abs(d.opts.bin)
	if err != nil {
		abs = d.opts.bin
	}
	fmt.Fprintf(d.out, "\nkept until Ctrl-C; for example:\n")
	fmt.Fprintf(d.out, "  ip netns exec %s curl -s http://%s:%d/small -o /dev/null\n", filepath.Base(d.client.NS.Path()), d.server.Addr4, portHTTP)
	for _, n := range d.lab.Nodes {
		fmt.Fprintf(d.out, "  %s/smcrctl --socket %s links\n", abs, n.Socket())
	}
	<-ctx.Done()
}

// build makes the nodes and pods.
func (d *demo) build(ctx context.Context) (err error) {
	if d.tables, err = ownTables(ctx); err != nil {
		return err
	}
	if d.lab, err = lab.New(lab.Config{PluginDirs: []string{d.opts.bin, cniDir}, Switched: d.opts.failover, Routed: true}); err != nil {
		return err
	}
	for _, p := range []struct {
		pod  **lab.Pod
		node int
		cfg  lab.PodConfig
	}{
		{&d.client, 0, lab.PodConfig{Name: "client"}},
		{&d.server, 1, lab.PodConfig{Name: "server"}},
		{&d.legacy, 1, lab.PodConfig{Name: "legacy", WithoutSMCR: true}},
	} {
		if *p.pod, err = d.lab.Nodes[p.node].AddPod(ctx, p.cfg); err != nil {
			return err
		}
	}
	d.progress("  %s: client %s; %s: server %s, legacy %s (no smcr-cni in its chain)",
		d.client.Node.Name, d.client.Addr4, d.server.Node.Name, d.server.Addr4, d.legacy.Addr4)
	status, err := d.client.Run(ctx, lab.Command{Args: []string{"cat", "/proc/self/status"}})
	if err != nil {
		return err
	}
	d.check("pods have no privileges", unprivileged(status), "user, capabilities and no_new_privs of a process in a pod")
	return nil
}

// startAgents starts both agents and waits until they serve their pods.
func (d *demo) startAgents(ctx context.Context) error {
	for i := range d.lab.Nodes {
		if err := d.startAgent(i); err != nil {
			return err
		}
	}
	for i := range d.lab.Nodes {
		if err := d.waitAgent(ctx, i); err != nil {
			return err
		}
	}
	d.progress("  both agents serve their pods")
	return nil
}

func (d *demo) startAgent(i int) error {
	var log io.Writer
	if d.opts.verbose {
		log = &prefixed{out: d.out, prefix: d.lab.Nodes[i].Name}
	}
	a, err := d.lab.Nodes[i].StartAgent(lab.AgentConfig{Binary: filepath.Join(d.opts.bin, "node-agent"), Node: d.settings(), Log: log})
	d.agents[i] = a
	return err
}

// settings are what the agents are told beyond addresses and paths.
func (d *demo) settings() string {
	if d.opts.failover {
		// A connection that fell back must not make the next ones TCP.
		return "  negativeCacheTTL: 0s\n"
	}
	return ""
}

func (d *demo) waitAgent(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := d.agents[i].WaitReady(ctx, 1); err != nil {
		return fmt.Errorf("agent of %s: %w", d.lab.Nodes[i].Name, err)
	}
	return nil
}

// smcrctl runs it against the client's agent, and returns what it prints. Exit
// code 4 is an answer too.
func (d *demo) smcrctl(ctx context.Context, args ...string) (string, error) {
	args = append([]string{"--socket", d.client.Node.Socket()}, args...)
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, filepath.Join(d.opts.bin, "smcrctl"), args...)
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

// settle waits until no agent carries a connection.
func (d *demo) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	for _, a := range d.agents {
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

// ownTables lists the nftables tables of our own namespace.
func ownTables(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "nft", "list", "tables").Output()
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	return strings.Split(strings.TrimSpace(string(out)), "\n"), nil
}

// newTables are tables of ours that were not there before.
func (d *demo) newTables(now []string) []string {
	var out []string
	for _, t := range now {
		if strings.Contains(t, "kube-smcr") && !slices.Contains(d.tables, t) {
			out = append(out, t+" in the machine's own namespace")
		}
	}
	return out
}

// prefixed puts a name in front of every line.
type prefixed struct {
	mu     sync.Mutex // guards what is below
	out    io.Writer
	prefix string
}

// Write implements io.Writer.
func (p *prefixed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(string(b)) {
		fmt.Fprintf(p.out, "%s: %s\n", p.prefix, strings.TrimRight(line, "\n"))
	}
	return len(b), nil
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
