// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// Ports in the pods. The policy selects portCarried only, so that the other
// paths are left alone.
const (
	portCarried = 7003
	portPlain   = 7004 // selected on the client's node, and not on the server's
	portProxy   = 7101 // haproxy in the client's pod
	portSidecar = 7102 // haproxy in the server's pod
)

// Names of the paths.
const (
	pathTCP     = "TCP"
	pathConn    = "smcr.Conn"
	pathPods    = "SMC-R, 2 agents"
	pathLetGo   = "TCP, let go"
	pathHAProxy = "haproxy"
	pathSidecar = "2 haproxies"
)

// pluginDir is where distributions put the CNI plugins.
const pluginDir = "/usr/lib/cni"

// readyTimeout is for an agent or haproxy to start on a busy machine.
const readyTimeout = 20 * time.Second

// pods is a bed: a client and a server in two pods on two nodes, with an agent on
// each node and haproxies beside. The workers know nothing of SMC-R.
type pods struct {
	rnics      int
	congestion string // TCP's congestion control
	node       string // YAML for the agents' settings
	held       bool   // the agents hold SYNs
	log        func(format string, args ...any)

	dir            string
	lab            *lab.Lab
	client, server *worker
	agents         [2]*lab.Agent
	proxies        []*process
	serverIP       netip.Addr
	spaces         []*space // of client and server
	counted        uint64   // connections that the agents have carried, when asked last
}

// pods returns the bed. node is YAML for the agents' settings.
func (b *bench) pods(node string) *pods {
	return &pods{rnics: b.rnics, congestion: b.Report.Congestion, node: "  holdSYNs: false\n" + node, log: b.Logf}
}

// heldPods returns the bed with agents that hold SYNs. node is as above.
func (b *bench) heldPods(node string) *pods {
	p := b.pods("")
	p.node, p.held = node, true
	return p
}

// SetUp implements engine.Bed. The agents' log goes with the error if it fails.
func (p *pods) SetUp(ctx context.Context) (_ []engine.Path, err error) {
	// A name that lab.Sweep knows.
	if p.dir, err = os.MkdirTemp("", fmt.Sprintf("ks-%d-0000-bench-", os.Getpid())); err != nil {
		return nil, err
	}
	p.log("build the agent and the plugin, start two nodes")
	if err := buildPrograms(ctx, p.dir); err != nil {
		return nil, err
	}
	if _, err := lab.Sweep(); err != nil { // of others: it does not hinder this one
		p.log("remove what runs that were killed left: %v", err)
	}
	if p.lab, err = lab.New(lab.Config{PluginDirs: []string{p.dir, pluginDir}, RNICs: p.rnics, TCPCongestion: p.congestion}); err != nil {
		return nil, err
	}
	for i, name := range []string{"client", "server"} {
		pod, err := p.lab.Nodes[i].AddPod(ctx, lab.PodConfig{Name: name})
		if err != nil {
			return nil, err
		}
		p.serverIP = pod.Addr4 // of the last one, the server
		s, err := openSpace(name, pod.NS.Path())
		if err != nil {
			return nil, err
		}
		p.spaces = append(p.spaces, s)
		if err := s.manyConns(); err != nil {
			return nil, err
		}
	}
	if err := p.start(); err != nil {
		return nil, err
	}
	if err := p.ready(ctx); err != nil {
		return nil, err
	}
	return pathsOf(p.ways()), nil
}

// start starts what runs on the nodes and in the pods.
func (p *pods) start() (err error) {
	for i, n := range p.lab.Nodes {
		ports := strconv.Itoa(portCarried)
		if i == 0 && p.held {
			ports += ", " + strconv.Itoa(portPlain)
		}
		p.agents[i], err = n.StartAgent(lab.AgentConfig{
			Binary:   filepath.Join(p.dir, "node-agent"),
			Policies: fmt.Sprintf("  - name: bench\n    ports: [%s]\n", ports),
			Node:     p.node,
		})
		if err != nil {
			return err
		}
	}
	if p.client, err = startWorker(p.spaces[0], "client"); err != nil {
		return err
	}
	if p.server, err = startWorker(p.spaces[1], "server"); err != nil {
		return err
	}
	for _, port := range []int{portTCP, portCarried, portPlain} {
		if err := p.server.ask(request{Op: opServe, Addr: fmt.Sprintf("0.0.0.0:%d", port)}); err != nil {
			return err
		}
	}
	return p.startProxies()
}

// buildPrograms builds what runs on the nodes.
func buildPrograms(ctx context.Context, dir string) error {
	for _, c := range []string{"node-agent", "cni-plugin"} {
		name := c
		if c == "cni-plugin" {
			name = "smcr-cni"
		}
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(dir, name),
			"github.com/smcr-io/kube-smcr/cmd/"+c)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w: %s", name, err, out)
		}
	}
	return nil
}

// haproxyConf relays from one port. Nothing is tuned: one thread per core and
// 16 KiB buffers are the defaults.
func haproxyConf(bind, server netip.AddrPort) string {
	return fmt.Sprintf(`defaults
  mode tcp
  timeout connect 5s
  timeout client 10m
  timeout server 10m
listen relay
  bind %s
  server one %s
`, bind, server)
}

// startProxies starts a haproxy in each pod: the client's leads to the
// server's, the server's to the server.
func (p *pods) startProxies() error {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	confs := [2]string{
		haproxyConf(netip.AddrPortFrom(loopback, portProxy), netip.AddrPortFrom(p.serverIP, portSidecar)),
		haproxyConf(netip.AddrPortFrom(netip.IPv4Unspecified(), portSidecar), netip.AddrPortFrom(loopback, portTCP)),
	}
	for i, conf := range confs {
		name := "haproxy in the pod " + p.spaces[i].name
		file := filepath.Join(p.dir, p.spaces[i].name+"-haproxy.cfg")
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return err
		}
		proc, err := start(p.spaces[i], name, exec.Command("haproxy", "-db", "-f", file))
		if err != nil {
			return err
		}
		p.proxies = append(p.proxies, proc)
	}
	return nil
}

// ready waits for agents and haproxies.
func (p *pods) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for _, a := range p.agents {
		if err := a.WaitReady(ctx, 1); err != nil {
			return err
		}
	}
	for {
		err := p.reachProxies(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		for _, proxy := range p.proxies {
			if proxy.ended() {
				return fmt.Errorf("%s ended: %w", proxy.name, proxy.err)
			}
		}
		time.Sleep(20 * time.Millisecond) // polls the haproxies
	}
}

// reachProxies makes a connection over each haproxy.
func (p *pods) reachProxies(ctx context.Context) error {
	for _, w := range p.ways()[2:4] {
		if err := w.Start(ctx, load.Load{}); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	return nil
}

// ways are plain TCP, the agents, one haproxy and two. Each lists the processes that
// work for it.
func (p *pods) ways() []*way {
	to := func(name string, ip netip.Addr, port uint16, relays ...int) *way {
		return &way{
			name: name, client: p.client, req: request{Addr: netip.AddrPortFrom(ip, port).String()},
			pids: append(slices.Clone(relays), p.client.pid(), p.server.pid()), relays: relays,
		}
	}
	agents := to(pathPods, p.serverIP, portCarried, p.agents[0].PID(), p.agents[1].PID())
	agents.carried = p.carriedAll
	ways := []*way{
		to(pathTCP, p.serverIP, portTCP),
		agents,
		to(pathHAProxy, p.serverIP, portSidecar, p.proxies[1].pid()),
		to(pathSidecar, netip.AddrFrom4([4]byte{127, 0, 0, 1}), portProxy, p.proxies[0].pid(), p.proxies[1].pid()),
	}
	if p.held {
		ways = append(ways, to(pathLetGo, p.serverIP, portPlain))
	}
	return ways
}

// carriedAll says whether the agents carried that many connections more than when
// they were asked last.
func (p *pods) carriedAll(ctx context.Context, conns int) error {
	now, err := p.carried(ctx)
	if err == nil && now < p.counted+uint64(conns) {
		err = fmt.Errorf("%d connections were made, the agents carried %d", conns, now-p.counted)
	}
	p.counted = now
	return err
}

// carried returns how many connections the agents carried over SMC-R. It is an
// error if one was TCP: then the figures are not what their name says.
func (p *pods) carried(ctx context.Context) (uint64, error) {
	var least uint64
	for i, a := range p.agents {
		ctx, cancel := context.WithTimeout(ctx, readyTimeout)
		s, err := a.API.Status(ctx)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("agent of node %d: %w", i+1, err)
		}
		if s.Conns.TotalTCP > 0 {
			return 0, fmt.Errorf("agent of node %d: %d connections were TCP: %s", i+1, s.Conns.TotalTCP, reasons(s.Reasons))
		}
		if i == 0 || s.Conns.TotalSMCR < least {
			least = s.Conns.TotalSMCR
		}
	}
	return least, nil
}

// goroutines returns how many goroutines both agents have.
func (p *pods) goroutines(ctx context.Context) (sum float64, err error) {
	for i, a := range p.agents {
		ctx, cancel := context.WithTimeout(ctx, readyTimeout)
		text, err := a.API.Metrics(ctx)
		cancel()
		if err != nil {
			return 0, fmt.Errorf("agent of node %d: %w", i+1, err)
		}
		n, err := metric(text, "go_goroutines")
		if err != nil {
			return 0, fmt.Errorf("agent of node %d: %w", i+1, err)
		}
		sum += n
	}
	return sum, nil
}

// metric finds a metric without labels.
func metric(text, name string) (float64, error) {
	for line := range strings.Lines(text) {
		if n, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && n == name {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("there is no metric %s", name)
}

func reasons(m map[agentapi.Code]uint64) string {
	var s []string
	for code, n := range m {
		s = append(s, fmt.Sprintf("%s %d", code, n))
	}
	return strings.Join(s, ", ")
}

// Close implements engine.Bed.
func (p *pods) Close() error {
	var errs []error
	stopWorkers(p.client, p.server)
	for _, proxy := range p.proxies {
		proxy.stop()
	}
	for _, s := range p.spaces {
		errs = append(errs, s.close())
	}
	if p.lab != nil {
		errs = append(errs, p.lab.Close())
		left, err := p.lab.Leftovers()
		if len(left) > 0 {
			err = errors.Join(err, fmt.Errorf("left behind: %s", strings.Join(left, ", ")))
		}
		errs = append(errs, err)
	}
	if p.dir != "" {
		errs = append(errs, os.RemoveAll(p.dir))
	}
	return errors.Join(errs...)
}

// path measures the transparent path.
func (b *bench) path(ctx context.Context) error {
	return b.Compare(ctx, "pods", b.pods(""), b.pathJobs())
}

func (b *bench) pathJobs() []engine.Job {
	const group = "unmodified programs in two pods, a node agent on each node, MTU 9000"
	roundTrip := report.Target{Path: pathPods, Against: pathHAProxy, Limit: podsRoundTrip}
	return append([]engine.Job{b.RoundTrip(group, "", pathTCP, roundTrip)}, b.streams(group, "", podsTargets)...)
}
