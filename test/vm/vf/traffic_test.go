// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// Ports of the servers in pods.
const (
	redisPort = 6379
	iperfPort = 5201
)

const agentConfig = `node:
  holdSYNs: false # emulated, a rendezvous may take longer than a SYN is held
  name: %s
  devices: [{rdma: {name: rxe9, address: eth0}}]
  eids: [SMCV2-DEFAULT-UEID]
  dataDir: ` + dataDir + `
  apiSocket: ` + dataDir + `/agent.sock
  metricsAddress: none
  redirectTTL: 15s
  negativeCacheTTL: 1s
  drainTimeout: 1s
  logLevel: debug
policies:
- {name: all}
`

// startAgent starts the node's agent until the test ends. The node has a device
// for all pods, too, which those with their own must not use.
func (n *node) startAgent(t *testing.T) {
	t.Helper()
	n.sh(t, "rdma link add rxe9 type rxe netdev eth0\ncat >/run/agent.yaml <<'EOF'\n"+fmt.Sprintf(agentConfig, n.Name())+"EOF\n")
	p, err := n.Start(context.WithoutCancel(t.Context()), "bash", "-c", "exec node-agent --config /run/agent.yaml >>/run/agent.log 2>&1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Signal(unix.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Errorf("the agent of %s ended: %v", n.Name(), err)
		}
		_, _ = n.Shell(context.WithoutCancel(t.Context()), "rdma link delete rxe9")
	})
	n.eventually(t, "the agent answers", func() error {
		var st agentapi.Status
		return n.ask(t, &st, "status")
	})
}

// ask asks the node's agent, for JSON.
func (n *node) ask(t *testing.T, v any, question ...string) error {
	t.Helper()
	out, err := n.Run(t.Context(), append([]string{"smcrctl", "--socket=" + dataDir + "/agent.sock", "-o", "json"}, question...)...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), v)
}

// awaitDevices waits until the agent has opened these devices for the pod.
func (p *pod) awaitDevices(devices ...string) {
	p.t.Helper()
	p.eventually(p.t, fmt.Sprintf("%s is served on %v", p.name, devices), func() error {
		var inv struct {
			ForPods []agentapi.PodDevice `json:"forPods"`
		}
		if err := p.ask(p.t, &inv, "devices"); err != nil {
			return err
		}
		var used []string
		for _, d := range inv.ForPods {
			if slices.Contains(d.Pods, "demo/"+p.name) && d.Used != nil {
				used = append(used, d.ID)
			}
		}
		if !slices.Equal(slices.Sorted(slices.Values(used)), slices.Sorted(slices.Values(devices))) {
			return fmt.Errorf("the agent uses %v: %+v", used, inv.ForPods)
		}
		return nil
	})
}

// awaitLinks waits until the pod has a link group of that redundancy with two active links.
func (p *pod) awaitLinks(redundancy string) agentapi.LinkGroup {
	p.t.Helper()
	var found agentapi.LinkGroup
	p.eventually(p.t, fmt.Sprintf("%s has a group %s", p.name, redundancy), func() error {
		var ls agentapi.Links
		if err := p.ask(p.t, &ls, "links"); err != nil {
			return err
		}
		for _, g := range ls.LinkGroups {
			active := 0
			for _, l := range g.Links {
				if l.State == "ACTIVE" {
					active++
				}
			}
			if g.Pod == "demo/"+p.name && g.Redundancy == redundancy && active == 2 {
				found = g
				return nil
			}
		}
		return fmt.Errorf("link groups %+v", ls.LinkGroups)
	})
	return found
}

// serve starts a server in the pod and waits until it listens.
func (p *pod) serve(port int, command string) {
	p.t.Helper()
	p.node.sh(p.t, fmt.Sprintf(`ip netns exec %[1]s %[2]s >/run/%[1]s-%[3]d.log 2>&1 </dev/null &
		until ip netns exec %[1]s ss -Hltn "sport = :%[3]d" | grep -q .; do
			kill -0 $! || { cat /run/%[1]s-%[3]d.log; exit 1; }
			sleep 0.2
		done`, p.name, command, port))
}

// traffic: two pods on each node have two VFs each, on two PFs. Their unmodified
// programs talk over SMC-R on these and over no other device, and survive the loss
// of one.
func (s *suite) traffic(t *testing.T) {
	type end struct {
		*pod
		address string
	}
	var ends [2][2]end // of nodes, pods
	s.both(t, func(t *testing.T, n *node) {
		if n.mode() == "ipvlan" { // what stays in the host has its GIDs from there
			for i, vf := range n.vfs {
				n.sh(t, fmt.Sprintf("ip address add 10.1.0.%d/24 dev %s noprefixroute", 200+i, vf.NetDev))
			}
		}
		n.startAgent(t)
		conf := n.conf(t, "traffic", nil)
		for i := range ends[n.index] {
			p := n.addPod(t, fmt.Sprintf("traffic-%d-%d", n.index, i))
			e := end{pod: p, address: p.add(conf, "net1", n.vfs[i].PCI)}
			p.add(conf, "net2", n.vfs[vfsPerPF+i].PCI)
			p.awaitDevices(n.vfs[i].PCI, n.vfs[vfsPerPF+i].PCI)
			ends[n.index][i] = e
		}
	})
	for i := range 2 { // each node is a server and a client
		server, client := ends[i][i], ends[1-i][i]
		server.serve(redisPort, "redis-server --port 6379 --bind 0.0.0.0 --save '' --protected-mode no")
		server.serve(iperfPort, "iperf3 -s")
		client.sh(fmt.Sprintf("redis-benchmark -h %s -n 200 -c 3 -d 1000 -t set,get -q", server.address))
		client.sh(fmt.Sprintf("iperf3 -c %s -t 1", server.address))
		g := client.awaitLinks("SYMMETRIC")
		t.Logf("%s: %+v", client.name, g)
	}
	for _, n := range s.nodes {
		var st agentapi.Status
		if err := n.ask(t, &st, "status"); err != nil || st.Conns.TotalSMCR < 8 || st.Conns.TotalTCP != 0 {
			t.Errorf("%s: connections %+v, not on SMC-R because of %v: %v", n.Name(), st.Conns, st.Reasons, err)
		}
		t.Logf("%s:\n%s", n.Name(), n.sh(t, "smcrctl --socket="+dataDir+"/agent.sock devices; smcrctl --socket="+dataDir+"/agent.sock links"))
	}
	s.both(t, func(t *testing.T, n *node) {
		client, server := ends[n.index][1-n.index], ends[1-n.index][1-n.index]
		client.loseVF(n.vfs[vfsPerPF+1-n.index], server.address)
	})
}

// loseVF has the pod's second VF without carrier for a while, and once more until it has
// another MAC, and then takes it away, on node 0 out of the pod, on node 1 from its
// driver: all that while redis answers. The connection goes on over the first one. The
// peer still has two, so the group has an asymmetric link.
func (p *pod) loseVF(vf lab.VF, server string) {
	p.t.Helper()
	flag := "/run/load-" + p.name
	load, err := p.Start(p.t.Context(), "ip", "netns", "exec", p.name, "bash", "-c", fmt.Sprintf(
		"touch %[1]s; while [ -e %[1]s ]; do echo PING; sleep 0.02; done | redis-cli -h %[2]s | sort | uniq -c", flag, server))
	if err != nil {
		p.t.Error(err)
		return
	}
	p.awaitLinks("SYMMETRIC")
	set := fmt.Sprintf("ip -n %s link set net2 ", p.name)
	if p.mode() == "ipvlan" {
		set = fmt.Sprintf("ip link set %s ", vf.NetDev)
	}
	for _, meanwhile := range []string{"true", fmt.Sprintf(set+"address 02:00:00:00:0b:%02x", p.index)} {
		p.node.sh(p.t, set+"down")
		p.awaitLinks("ASYMMETRIC LOCAL")
		p.node.sh(p.t, meanwhile+"; "+set+"up")
		p.awaitLinks("SYMMETRIC")
	}
	lose := fmt.Sprintf("ip -n %s link set net2 netns 1", p.name)
	if p.mode() == "ipvlan" { // it is in the host
		lose = fmt.Sprintf("echo %[1]s >/sys/bus/pci/devices/%[1]s/driver/unbind", vf.PCI)
	}
	p.node.sh(p.t, lose)
	g := p.awaitLinks("ASYMMETRIC LOCAL")
	for _, l := range g.Links {
		if l.Device != g.Links[0].Device {
			p.t.Errorf("%s: after %q the group has links on %s and %s", p.name, lose, g.Links[0].Device, l.Device)
		}
	}
	p.node.sh(p.t, "rm "+flag)
	var answers strings.Builder
	if err := load.Stream(nil, &answers, &answers); err != nil || len(strings.Fields(answers.String())) != 2 || !strings.Contains(answers.String(), "PONG") {
		p.t.Errorf("%s: redis answers over the time of %q: %v, %s; want PONG only", p.name, lose, err, answers.String())
	}
}
