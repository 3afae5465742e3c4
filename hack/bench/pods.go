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
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// Ports in the pods. The policy selects portCarried only, so that the other
// paths are left alone.
const (
	portCarried = 7003
	portProxy   = 7101 // haproxy in the client's pod
	portSidecar = 7102 // haproxy in the server's pod
)

// Names of the paths.
const (
	pathTCP     = "TCP"
	pathConn    = "smcr.Conn"
	pathPods    = "SMC-R, 2 agents"
	pathHAProxy = "haproxy"
	pathSidecar = "2 haproxies"
)

// pluginDir is where distributions put the CNI plugins.
const pluginDir = "/usr/lib/cni"

// readyTimeout is for an agent or haproxy to start on a busy machine.
const readyTimeout = 20 * time.Second

// pods are a client and a server in two pods on two nodes, with an agent on
// each node and haproxies beside. The workers know nothing of SMC-R.
type pods struct {
	lab            *lab.Lab
	client, server *worker
	agents         [2]*lab.Agent
	proxies        []*process
	serverIP       netip.Addr
	undo           []func() error
}

// newPods builds the room. node is YAML for the agents' settings. The agents'
// log goes with the error if it fails.
func newPods(ctx context.Context, dir string, rnics int, node string) (p *pods, err error) {
	p = &pods{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if _, err := lab.Sweep(); err != nil {
		return p, err
	}
	if p.lab, err = lab.New(lab.Config{PluginDirs: []string{dir, pluginDir}, RNICs: rnics}); err != nil {
		return p, err
	}
	var spaces [2]*space
	var addrs [2]netip.Addr
	for i, name := range []string{"client", "server"} {
		pod, err := p.lab.Nodes[i].AddPod(ctx, lab.PodConfig{Name: name})
		if err != nil {
			return p, err
		}
		addrs[i] = pod.Addr4
		if spaces[i], err = openSpace(name, pod.NS.Path()); err != nil {
			return p, err
		}
		p.undo = append(p.undo, spaces[i].close)
		if err := spaces[i].manyConns(); err != nil {
			return p, err
		}
	}
	for i, n := range p.lab.Nodes {
		p.agents[i], err = n.StartAgent(lab.AgentConfig{
			Binary:   filepath.Join(dir, "node-agent"),
			Policies: fmt.Sprintf("  - name: bench\n    ports: [%d]\n", portCarried),
			Node:     node,
		})
		if err != nil {
			return p, err
		}
	}
	p.serverIP = addrs[1]
	if p.client, err = startWorker(spaces[0], "client"); err != nil {
		return p, err
	}
	if p.server, err = startWorker(spaces[1], "server"); err != nil {
		return p, err
	}
	for _, port := range []int{portTCP, portCarried} {
		if _, err := p.server.call(request{Op: opServe, Addr: fmt.Sprintf("0.0.0.0:%d", port)}); err != nil {
			return p, err
		}
	}
	if err := p.startProxies(dir, spaces); err != nil {
		return p, err
	}
	return p, p.ready(ctx)
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
func (p *pods) startProxies(dir string, spaces [2]*space) error {
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	confs := [2]string{
		haproxyConf(netip.AddrPortFrom(loopback, portProxy), netip.AddrPortFrom(p.serverIP, portSidecar)),
		haproxyConf(netip.AddrPortFrom(netip.IPv4Unspecified(), portSidecar), netip.AddrPortFrom(loopback, portTCP)),
	}
	for i, conf := range confs {
		name := "haproxy in the pod " + spaces[i].name
		file := filepath.Join(dir, spaces[i].name+"-haproxy.cfg")
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return err
		}
		proc, err := start(spaces[i], name, exec.Command("haproxy", "-db", "-f", file))
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
		err := warmUp(p.paths()[2:])
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

// paths are the four ways. Each lists the processes that work for it.
func (p *pods) paths() []path {
	way := func(name string, ip netip.Addr, port uint16, relays ...int) path {
		addr := netip.AddrPortFrom(ip, port).String()
		return path{
			name: name, relays: relays, pids: append(slices.Clone(relays), p.client.pid(), p.server.pid()),
			run: func(l load.Load) (load.Result, error) {
				op := opLoad
				if l.Kind == load.Idle {
					op = opHold
				}
				r, err := p.client.call(request{Op: op, Addr: addr, Load: l})
				return r.Result, err
			},
		}
	}
	ways := []path{
		way(pathTCP, p.serverIP, portTCP),
		way(pathPods, p.serverIP, portCarried, p.agents[0].PID(), p.agents[1].PID()),
	}
	if len(p.proxies) == 2 {
		ways = append(ways,
			way(pathHAProxy, p.serverIP, portSidecar, p.proxies[1].pid()),
			way(pathSidecar, netip.AddrFrom4([4]byte{127, 0, 0, 1}), portProxy, p.proxies[0].pid(), p.proxies[1].pid()))
	}
	return ways
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

func reasons(m map[agentapi.Code]uint64) string {
	var s []string
	for code, n := range m {
		s = append(s, fmt.Sprintf("%s %d", code, n))
	}
	return strings.Join(s, ", ")
}

func (p *pods) close() error {
	var errs []error
	stopWorkers(p.client, p.server)
	for _, proxy := range p.proxies {
		proxy.stop()
	}
	for _, u := range p.undo {
		errs = append(errs, u())
	}
	if p.lab == nil {
		return errors.Join(errs...)
	}
	errs = append(errs, p.lab.Close())
	left, err := p.lab.Leftovers()
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left behind: %s", strings.Join(left, ", ")))
	}
	return errors.Join(append(errs, err)...)
}

// withPods builds the room and calls f with it. node is YAML for the agents'
// settings.
func (b *bench) withPods(ctx context.Context, node string, f func(*pods) error) (err error) {
	dir, err := os.MkdirTemp("", fmt.Sprintf("ks-%d-0000-bench-", os.Getpid())) // a name that lab.Sweep knows
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fmt.Fprintln(b.log, "bench: build the agent and the plugin, start two nodes")
	if err := buildPrograms(ctx, dir); err != nil {
		return err
	}
	p, err := newPods(ctx, dir, b.rnics, node)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	return f(p)
}

// checkedPaths are the paths, warm, and with a check that connections of the
// transparent path were on SMC-R.
func (p *pods) checkedPaths(ctx context.Context) ([]path, error) {
	paths := p.paths()
	if err := warmUp(paths); err != nil {
		return nil, err
	}
	conns := uint64(0)
	for i := range paths {
		if paths[i].name != pathPods {
			continue
		}
		paths[i].check = func(least int) error {
			now, err := p.carried(ctx)
			if err == nil && now < conns+uint64(least) {
				err = fmt.Errorf("%d connections were made, the agents carried %d", least, now-conns)
			}
			conns = now
			return err
		}
		if err := paths[i].check(1); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// inPods builds the room and runs jobs over the paths in it.
func (b *bench) inPods(ctx context.Context, title string, jobs []job) error {
	return b.withPods(ctx, "", func(p *pods) error {
		paths, err := p.checkedPaths(ctx)
		if err != nil {
			return err
		}
		return b.rounds(ctx, title, jobs, paths)
	})
}

// path measures the transparent path.
func (b *bench) path(ctx context.Context) error {
	const group = "unmodified programs in two pods, a node agent on each node, MTU 9000"
	targets := []report.Target{
		{Path: pathPods, Against: pathHAProxy, Limit: 1},
		{Path: pathPods, Against: pathSidecar, Limit: 1},
	}
	jobs := append([]job{b.echoJob(group, "", pathTCP, targets...)}, b.streamJobs(group, "", pathTCP, targets...)...)
	return b.inPods(ctx, "pods", jobs)
}
