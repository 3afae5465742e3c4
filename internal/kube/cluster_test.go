// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

// slowly is how soon reports are to arrive on a machine that is busy.
const slowly = 30 * time.Second

// clusterConfig is for an agent of the world's node, with everything of a node
// in the world's directory.
func (w *world) clusterConfig() ClusterConfig {
	w.t.Helper()
	for _, d := range []string{"bin", "net.d"} {
		if err := os.Mkdir(filepath.Join(w.dir, d), 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
	text := fmt.Sprintf("node:\n  devices: [{soft: {address: node}}]\n  dataDir: %[1]s/data\n  apiSocket: %[1]s/a.sock\n  metricsAddress: none\n"+
		"  cni: {install: true, binDir: %[1]s/bin, confDir: %[1]s/net.d}\n", w.dir)
	for name, text := range map[string]string{
		"node-agent.yaml":        text,
		"smcr-cni":               "#!/bin/sh\necho smcr-cni, the CNI plugin of kube-smcr\n",
		"net.d/10-kind.conflist": `{"cniVersion":"1.0.0","name":"kindnet","plugins":[{"type":"ptp"}]}`,
	} {
		if err := os.WriteFile(filepath.Join(w.dir, name), []byte(text), 0o755); err != nil {
			w.t.Fatal(err)
		}
	}
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}})
	return ClusterConfig{
		REST: server.Config(w.t), Node: w.node, Pod: "kube-smcr/agent-x", Version: "test", Plugin: filepath.Join(w.dir, "smcr-cni"),
		Base: w.base, Log: slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
}

// TestRunAgent_metrics: in a cluster an agent gives its metrics by TLS, and to who
// may get /metrics, unless it is told otherwise.
func TestRunAgent_metrics(t *testing.T) {
	w := newWorld(t)
	cfg := w.clusterConfig()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	file := filepath.Join(w.dir, "node-agent.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte("metricsAddress: none"), []byte("metricsAddress: "+address), 1)
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	w.runAgent(cfg)
	apiserver.MetricsAreGuarded(t, server.Config(t), w.namespace, address)
}

// runAgent runs it until the test ends, or until stop, which wants no error.
func (w *world) runAgent(cfg ClusterConfig) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- RunAgent(ctx, cfg) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				w.t.Errorf("RunAgent = %v", err)
			}
		case <-time.After(slowly):
			w.t.Error("the agent does not end")
		}
	}
	w.t.Cleanup(func() {
		stop()
		if w.t.Failed() {
			w.log.mu.Lock()
			defer w.log.mu.Unlock()
			w.t.Log(w.log.b.String())
		}
	})
	return stop
}

// TestRunAgent: the life of an agent in a cluster, from its first report to a
// node that is left clean.
func TestRunAgent(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	w := newWorld(t)
	p := w.pod("a", enabled("true"))
	cfg := w.clusterConfig()
	stop := w.runAgent(cfg)

	node := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
	condition := func(kind string) string {
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil {
			return err.Error()
		}
		if c := meta.FindStatusCondition(node.Status.Conditions, kind); c == nil || c.Status != metav1.ConditionTrue {
			return fmt.Sprintf("condition %s: %+v", kind, c)
		}
		return ""
	}
	within(t, slowly, func() string { return condition(v1alpha1.ConditionReady) + condition(v1alpha1.ConditionCNIInstalled) })
	status := func(want string) {
		t.Helper()
		within(t, slowly, func() string {
			if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
				return err.Error()
			}
			if got := p.Annotations[v1alpha1.AnnotationStatus]; got != want {
				return fmt.Sprintf("status %q, want %q", got, want)
			}
			return ""
		})
	}
	status("Pending: NOT_ATTACHED")
	w.change(p, func() { p.Annotations[v1alpha1.AnnotationEnabled] = "false" })
	status("")
	w.change(p, func() { p.Annotations[v1alpha1.AnnotationEnabled] = "true" })
	status("Pending: NOT_ATTACHED")

	w.change(node, func() {
		node.Annotations = map[string]string{v1alpha1.AnnotationUninstall: "true"}
	})
	within(t, slowly, func() string { return condition(v1alpha1.ConditionUninstalled) })
	status("")
	for _, gone := range []string{"bin/smcr-cni", "data", "a.sock"} {
		if _, err := os.Stat(filepath.Join(w.dir, gone)); !errors.Is(err, fs.ErrNotExist) {
			left, _ := filepath.Glob(filepath.Join(w.dir, gone, "*"))
			t.Errorf("%s is left behind (%v): %v", gone, err, left)
		}
	}
	if b, err := os.ReadFile(filepath.Join(w.dir, "net.d/10-kind.conflist")); err != nil || strings.Contains(string(b), "smcr") {
		t.Errorf("the network's configuration: %s, %v", b, err)
	}
	// A change after that leaves nothing either.
	w.policy("p", nil)
	stop()
	if left, _ := filepath.Glob(filepath.Join(w.dir, "data", "*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestRunAgent_ready: an agent is ready once it has met the API server, and stays so when it loses it; that is
// said elsewhere. Before, Helm would take an installation for done in which no pod can be opted in.
func TestRunAgent_ready(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	w := newWorld(t)
	proxy, rc := server.NewProxy(t)
	proxy.TakeAway()
	cfg := w.clusterConfig()
	cfg.REST, cfg.Agent.Instance = rc, "agent-x"
	served := make(chan []prometheus.Collector, 1)
	cfg.run = func(ctx context.Context, c agent.Config) error {
		served <- c.Collectors
		return agent.Run(ctx, c)
	}
	w.runAgent(cfg)
	collectors := <-served
	up := collectors[slices.IndexFunc(collectors, func(m prometheus.Collector) bool { _, ok := m.(upMetric); return ok })]
	api := agentapi.NewClient(filepath.Join(w.dir, "a.sock"))
	defer api.Close()
	status := func() (s agentapi.Status, ready string) {
		s, err := api.Status(t.Context())
		if err != nil {
			return s, err.Error()
		}
		if s.Cluster == nil {
			t.Fatal("the status of an agent in a cluster says nothing of the cluster")
		}
		return s, agentapi.ReadinessOf(s, "agent-x").Detail // what the chart's probe says
	}
	const ready, notYet = "ready: 0 of 0 pods are served", "not ready: the API server has not sent the namespaces yet: "
	within(t, slowly, func() string {
		s, got := status()
		if !strings.HasPrefix(got, notYet) || testutil.ToFloat64(up) != 0 || !strings.Contains(strings.Join(s.Problems, "\n"), "the API server has not sent the namespaces yet") || s.Cluster.Away == "" {
			return fmt.Sprintf("without the API server %q, problems %q, %+v", got, s.Problems, s.Cluster)
		}
		return ""
	})

	proxy.GiveBack()
	within(t, time.Minute, func() string {
		if s, got := status(); got != ready || s.Cluster.Away != "" || len(clusterProblems(s)) != 0 || testutil.ToFloat64(up) != 1 {
			return fmt.Sprintf("with the API server %q, problems %q, %+v", got, s.Problems, s.Cluster)
		}
		return ""
	})
	node := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
	if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil {
		t.Errorf("the agent is ready, and nobody sees it in the cluster: %v", err)
	}

	proxy.TakeAway()
	within(t, slowly, func() string {
		s, got := status()
		if got != ready {
			t.Fatalf("%q when the API server went away: an update would go on with other nodes", got)
		}
		if s.Cluster.Away == "" || time.Since(s.Cluster.AwaySince) > slowly || len(clusterProblems(s)) != 1 || testutil.ToFloat64(up) != 0 {
			return fmt.Sprintf("%+v, problems %q", s.Cluster, s.Problems)
		}
		return ""
	})
	proxy.GiveBack()
	within(t, time.Minute, func() string {
		if s, got := status(); got != ready || s.Cluster.Away != "" || testutil.ToFloat64(up) != 1 {
			return fmt.Sprintf("%q, %+v when the API server is back", got, s.Cluster)
		}
		return ""
	})
}

// clusterProblems are the problems that are about the API server.
func clusterProblems(s agentapi.Status) (out []string) {
	for _, p := range s.Problems {
		if strings.Contains(p, "API server") {
			out = append(out, p)
		}
	}
	return out
}

// TestRunAgent_fails: what is wrong with the agent or its file is said.
func TestRunAgent_fails(t *testing.T) {
	w := newWorld(t)
	cfg := w.clusterConfig()
	broken := errors.New("no RDMA device")
	cfg.run = func(_ context.Context, c agent.Config) error {
		if n := c.Node; n.Name != w.node || !n.InCluster() {
			t.Errorf("started with %+v", n)
		}
		return broken
	}
	if err := RunAgent(t.Context(), cfg); !errors.Is(err, broken) {
		t.Errorf("RunAgent = %v, want %v", err, broken)
	}
	cfg.Base = func() (*config.Node, error) { return nil, broken }
	if err := RunAgent(t.Context(), cfg); !errors.Is(err, broken) {
		t.Errorf("RunAgent = %v, want %v", err, broken)
	}
}

// TestRunAgent_reread: SIGHUP takes over what is new in the file, and no mistake.
func TestRunAgent_reread(t *testing.T) {
	w := newWorld(t)
	p := w.pod("a", enabled("true"))
	cfg := w.clusterConfig()
	reread := make(chan struct{})
	cfg.Reread = reread
	started := make(chan agent.Config, 1)
	cfg.run = func(ctx context.Context, c agent.Config) error {
		started <- c
		<-ctx.Done()
		return nil
	}
	w.runAgent(cfg)
	c := <-started
	if here := (config.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}); c.Gone(here) || !c.Gone(config.Pod{Namespace: p.Namespace, Name: "b"}) {
		t.Error("the agent does not learn which pods there are")
	}
	file := filepath.Join(w.dir, "node-agent.yaml")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	write := func(more string) {
		t.Helper()
		if err := os.WriteFile(file, append(bytes.Clone(before), more...), 0o600); err != nil {
			t.Fatal(err)
		}
		reread <- struct{}{}
	}
	write("  defaultPeers: {cidrs: [192.0.2.0/24]}\n")
	<-c.Reload
	id := config.Pod{Namespace: p.Namespace, Name: p.Name}
	decide := func() config.Decision {
		n, err := c.Load()
		if err != nil {
			t.Fatal(err)
		}
		return n.Decide(id, netip.MustParseAddrPort("192.0.2.9:80"))
	}
	within(t, prompt, func() string {
		if d := decide(); d != byDefault {
			return fmt.Sprintf("decided %+v", d)
		}
		return ""
	})
	write("  defaultPers: {}\n")
	within(t, prompt, func() string {
		if !w.log.has("did you mean defaultPeers") {
			return "the mistake was not reported"
		}
		return ""
	})
	if d := decide(); d != byDefault {
		t.Errorf("decided %+v", d)
	}
}

// TestRunAgent_rereadRefused: a changed setting that takes a restart is refused before the agent sees it, and
// is among the agent's refused reloads.
func TestRunAgent_rereadRefused(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	w := newWorld(t)
	cfg := w.clusterConfig()
	reread := make(chan struct{})
	cfg.Reread, cfg.run = reread, agent.Run
	w.runAgent(cfg)
	api := agentapi.NewClient(filepath.Join(w.dir, "a.sock"))
	defer api.Close()
	refused := func(want int) {
		t.Helper()
		within(t, slowly, func() string {
			text, err := api.Metrics(t.Context())
			if line := fmt.Sprintf("kube_smcr_reloads_total{result=\"refused\"} %d\n", want); err != nil || !strings.Contains(text, line) {
				return fmt.Sprintf("no %q in the metrics, %v", line, err)
			}
			return ""
		})
	}
	refused(0)
	file := filepath.Join(w.dir, "node-agent.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, append(text, "  rmbe: 256KiB\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	reread <- struct{}{}
	refused(1)
	if !w.log.has("node.rmbe") {
		t.Error("the refused field is not in the log")
	}
}

// TestRunAgent_directoryReplaced: an agent ends in order when it does not see the node's CNI directory any more.
func TestRunAgent_directoryReplaced(t *testing.T) {
	w := newWorld(t)
	cfg := w.clusterConfig()
	dir := filepath.Join(w.dir, "net.d")
	held, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	file := filepath.Join(w.dir, "node-agent.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text = bytes.Replace(text, []byte(dir), fmt.Appendf(nil, "/proc/self/fd/%d", held.Fd()), 1) // as a mount shows it
	if err := errors.Join(os.WriteFile(file, text, 0o600), os.RemoveAll(dir)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	cfg.run = func(ctx context.Context, c agent.Config) error {
		defer close(ended)
		c.Manages(true)
		<-ctx.Done()
		return nil
	}
	w.runAgent(cfg)
	select {
	case <-ended:
	case <-time.After(slowly):
		t.Error("the agent goes on")
	}
	if !w.log.has("was removed or replaced on the node: the agent starts again") {
		t.Error("the agent does not say why it ends")
	}
}
