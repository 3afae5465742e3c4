// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// agentDir is the agent's directory in a guest, with its socket and its log.
const (
	agentDir    = "/run/bench-smcr"
	agentSocket = agentDir + "/agent.sock"
	agentLog    = agentDir + "/agent.log"
)

// relayConfig is the file of a relay's configuration, which a program without rights reads.
const relayConfig = "/run/bench-nginx.conf"

// agentConfig is an agent's configuration. Emulated, a rendezvous may take longer than a SYN is held.
const agentConfig = `node:
  holdSYNs: false
  name: %s
  devices: [{rdma: {name: ` + device + `, address: eth0}}]
  dataDir: ` + agentDir + `
  apiSocket: ` + agentSocket + `
  metricsAddress: none
  redirectTTL: 15s
  negativeCacheTTL: 1s
  drainTimeout: 1s
policies:
- {name: kernel, datapath: Kernel, pods: {names: [kernel]}, peers: {cidrs: [10.0.0.0/24]}, ports: [%[2]d, %[3]d]}
- {name: agents, pods: {names: [agents]}, peers: {cidrs: [10.0.0.0/24]}, ports: [%[2]d, %[3]d]}
`

// configOf is the configuration of the agent of a guest.
func configOf(guest string) string { return fmt.Sprintf(agentConfig, guest, portLoad, portRedis) }

// podOf is a pod of a guest.
func (p *podPair) podOf(guest int, k podKind) *lab.Pod {
	return &lab.Pod{Guest: p.lab.Guest(guest), Namespace: "bench", Name: k.String(), Addr: netip.PrefixFrom(k.addr(guest), 24), AgentDir: agentDir}
}

// addPods makes the pods of a guest and starts its agent, which attaches those that are its own.
func (p *podPair) addPods(ctx context.Context, guest int) error {
	g := p.lab.Guest(guest)
	if err := removePods(ctx, g); err != nil { // of a run that was killed, in guests that stayed
		return err
	}
	for _, k := range podKinds {
		pod := p.podOf(guest, k)
		if err := pod.AddMacvlan(ctx); err != nil {
			return err
		}
		if k == plainPod {
			continue
		}
		if err := pod.CNI(ctx, "ADD"); err != nil {
			return err
		}
		p.attached[guest] = append(p.attached[guest], k)
	}
	if _, err := g.Shell(ctx, "mkdir -p "+agentDir+"; cat >"+agentDir+"/config.yaml <<'EOF'\n"+configOf(g.Name())+"EOF\n"); err != nil {
		return err
	}
	return startFor(ctx, &p.agents, g, "bash", "-c", "exec node-agent --config "+agentDir+"/config.yaml >"+agentLog+" 2>&1")
}

// startFor starts a program in a guest that is one of those of the bed, and ends with it.
func startFor(ctx context.Context, all *[]*lab.Process, g *lab.Guest, command ...string) error {
	proc, err := g.Start(context.WithoutCancel(ctx), command...)
	if err != nil {
		return err
	}
	*all = append(*all, proc)
	return nil
}

// detach takes the pods from the agent, and waits until it has taken from the kernel what it gave it.
func (p *podPair) detach(ctx context.Context, guest int, kinds []podKind) error {
	g := p.lab.Guest(guest)
	for _, k := range kinds {
		if err := p.podOf(guest, k).CNI(ctx, "DEL"); err != nil {
			return err
		}
	}
	_, err := g.Shell(ctx, "for i in $(seq 100); do [ -e /sys/fs/bpf/kube-smcr ] || exit 0; sleep 0.1; done; tail -n 20 "+agentLog+" >&2; exit 1")
	if err != nil {
		err = fmt.Errorf("the agent of %s leaves something behind: %w", g.Name(), err)
	}
	return err
}

// removePods removes the pods of a guest, and what the agent has on disk.
func removePods(ctx context.Context, g *lab.Guest) error {
	var names []string
	for _, k := range podKinds {
		names = append(names, k.String())
	}
	_, err := g.Shell(ctx, "for n in "+strings.Join(names, " ")+"; do [ ! -e /run/netns/$n ] || ip netns del $n; done; rm -rf "+agentDir+" /sys/fs/bpf/kube-smcr")
	return err
}

// startPrograms starts the programs of the pods: workers, redis, relays.
func (p *podPair) startPrograms(ctx context.Context) error {
	for i, g := range p.guests() {
		// What opens AF_SMC itself has the buffers that the agent gave the other pod's.
		_, err := g.Shell(ctx, fmt.Sprintf(`for n in net.smc.wmem net.smc.rmem; do
			nsenter --net=/run/netns/%s sysctl -qw $n=$(nsenter --net=/run/netns/%s sysctl -n $n); done`, plainPod, kernelPod))
		if err != nil {
			return err
		}
		for _, k := range podKinds {
			// A signal of Go's runtime would have the kernel's SMC drop what it had to tell of a close, see package afsmc.
			w, err := startWorker(ctx, g, []string{"GODEBUG=asyncpreemptoff=1"}, p.podOf(i, k).In(p.program)...)
			if err != nil {
				return err
			}
			p.workers[i][k] = w
		}
	}
	for _, k := range podKinds {
		if err := p.serve(ctx, k); err != nil {
			return err
		}
	}
	if _, err := p.workers[0][plainPod].call(request{Op: opServe, Stack: stackKernel, Addr: fmt.Sprintf("%s:%d", plainPod.addr(0), portAFSMC)}); err != nil {
		return err
	}
	return p.startRelays(ctx)
}

// serve starts the servers of a pod.
func (p *podPair) serve(ctx context.Context, k podKind) error {
	w := p.workers[0][k]
	if _, err := w.call(request{Op: opServe, Stack: stackTCP, Addr: fmt.Sprintf("%s:%d", k.addr(0), portLoad)}); err != nil {
		return err
	}
	err := startFor(ctx, &p.programs, p.lab.Guest(0), p.podOf(0, k).In(
		"redis-server", "--port", fmt.Sprint(portRedis), "--bind", k.addr(0).String(), "--save", "", "--protected-mode", "no", "--loglevel", "warning", "--dir", "/tmp",
	)...)
	if err != nil {
		return err
	}
	_, err = w.call(request{Op: opAwait, Addr: fmt.Sprint(portRedis)})
	return err
}

// startRelays starts nginx in both pods that nobody attached. Nothing is tuned; without half closes streams could not be measured.
func (p *podPair) startRelays(ctx context.Context) error {
	for i, g := range p.guests() {
		var servers strings.Builder
		var ports []int
		for _, port := range []int{portLoad, portRedis} {
			at, to := port+portServerSide, fmt.Sprintf("%s:%d", plainPod.addr(0), port)
			if i > 0 {
				at, to = port+portClientSide, fmt.Sprintf("%s:%d", plainPod.addr(0), port+portServerSide)
			}
			ports = append(ports, at)
			fmt.Fprintf(&servers, "server { listen %d; proxy_pass %s; proxy_half_close on; }\n", at, to)
		}
		if _, err := g.Shell(ctx, fmt.Sprintf(`chmod 1777 /tmp; cat >%s <<'EOF'
load_module /usr/lib/nginx/modules/ngx_stream_module.so;
daemon off; worker_processes 1; pid /tmp/bench-nginx.pid; error_log stderr;
events { worker_connections 512; }
stream {
%s}
EOF`, relayConfig, &servers)); err != nil {
			return err
		}
		if err := startFor(ctx, &p.programs, g, p.podOf(i, plainPod).In("nginx", "-e", "stderr", "-p", "/tmp", "-c", relayConfig)...); err != nil {
			return err
		}
		for _, port := range ports {
			if _, err := p.workers[i][plainPod].call(request{Op: opAwait, Addr: fmt.Sprint(port)}); err != nil {
				return err
			}
		}
	}
	return nil
}

// agentState is what an agent says.
type agentState struct {
	// SMCR are the connections that it carried over SMC-R, TCP those over TCP.
	SMCR uint64 `json:"smcr"`
	TCP  uint64 `json:"tcp"`
	// Ready are the pods that it attached, with their datapath if that is not the agent.
	Ready []string `json:"ready,omitempty"`
	// Details say what the others wait for.
	Details []string `json:"details,omitempty"`
}

// askAgent asks the agent with that API socket.
func askAgent(ctx context.Context, socket string) (s state, err error) {
	c := agentapi.NewClient(socket)
	defer c.Close()
	status, err := c.Status(ctx)
	if err != nil {
		return s, err
	}
	all, err := c.Attachments(ctx)
	if err != nil {
		return s, err
	}
	s.Agent = agentState{SMCR: status.Conns.TotalSMCR, TCP: status.Conns.TotalTCP}
	for _, a := range all.Attachments {
		if a.State == agentapi.StateReady && (a.Datapath != "" || status.Accelerating) {
			s.Agent.Ready = append(s.Agent.Ready, strings.TrimSpace(a.Pod+" "+a.Datapath))
		} else {
			s.Agent.Details = append(s.Agent.Details, fmt.Sprintf("%s is %s: %s", a.Pod, a.State, a.Detail))
		}
	}
	for _, code := range slices.Sorted(maps.Keys(status.Reasons)) {
		s.Agent.Details = append(s.Agent.Details, fmt.Sprintf("%d connections not on SMC-R: %s", status.Reasons[code], code))
	}
	slices.Sort(s.Agent.Ready)
	return s, nil
}

// awaitAgent waits until the agent of a guest has attached its pods. w is the worker in the guest's own network.
func (p *podPair) awaitAgent(ctx context.Context, w *worker) error {
	want := []string{"bench/agents", "bench/kernel Kernel"}
	for end := time.Now().Add(agentLimit); ; {
		r, err := w.call(request{Op: opAgent, Addr: agentSocket})
		if err == nil && slices.Equal(r.State.Agent.Ready, want) {
			return nil
		}
		if time.Now().After(end) {
			text, lerr := w.guest.Run(ctx, "tail", "-n", "20", agentLog)
			return errors.Join(fmt.Errorf("the agent of %s did not attach its pods: %+v\n%s", w.guest.Name(), r.State.Agent, text), err, lerr)
		}
		if err := pause(ctx, agentPoll); err != nil { // polls the agent
			return err
		}
	}
}
