// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// hosts: unmodified programs of cgroups in the nodes' own network on the kernel's SMC-R, and no others there.
func hosts(t *testing.T, l *lab.Lab) {
	build(t, l)
	b := &hostBed{bed{newHost(t, l.Guest(0), "db"), newHost(t, l.Guest(1), "web")}}
	b.server.configureHost(t, selected)
	b.client.configureHost(t, selected, clientOnly)
	b.startAgents(t)
	b.startRedis(t)
	for _, sub := range []struct {
		name string
		run  func(*hostBed, *testing.T)
	}{
		{"policy", (*hostBed).policy},
		{"others", (*hostBed).others},
		{"flushed", (*hostBed).flushed},
		{"agentKilled", (*hostBed).agentKilled},
		{"revoked", (*hostBed).revoked},
		{"notWanted", (*hostBed).notWanted},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(b, t) })
	}
}

// hostBed is two nodes, each with a pod in its own network.
type hostBed struct{ bed }

// newHost is a guest with a pod in its network, by that name: a cgroup below another one, as those of containers are.
func newHost(t *testing.T, g *lab.Guest, pod string) *node {
	t.Helper()
	n := &node{Guest: g, pod: pod, addr: g.Addr(0).String(), host: true}
	n.sh(t, "kernelsmc ueid flush; mkdir -p "+n.container())
	return n
}

// container is the directory of the cgroup that programs of the pod are in.
func (n *node) container() string { return "/sys/fs/cgroup/test.slice/" + n.pod + "/container" }

// inCgroup runs a program in the cgroup of the pod.
func (n *node) inCgroup(command string) string {
	return fmt.Sprintf("sh -c 'echo $$ >%s/cgroup.procs; exec %s'", n.container(), command)
}

// configureHost writes the configuration: the policy of the pod selects these ports of the other node; without ports there
// is no such pod, and a policy that selects its name.
func (n *node) configureHost(t *testing.T, ports ...int) {
	t.Helper()
	host := ""
	if len(ports) > 0 {
		host = fmt.Sprintf("  hostPods: [{namespace: demo, name: %s, cgroup: /test.slice/%[1]s}]\n", n.pod)
	}
	policies := fmt.Sprintf("[{name: kernel, datapath: Kernel, pods: {names: [%s]}, peers: {cidrs: [10.0.0.0/24]}, ports: %s}]", n.pod, strings.ReplaceAll(fmt.Sprint(ports), " ", ", "))
	n.sh(t, "mkdir -p /run/smcr; cat >/run/kp.yaml <<'EOF'\n"+fmt.Sprintf(strings.Replace(agentConfig, "policies:", host+"policies:", 1), n.Name(), policies)+"EOF\n")
}

// hostCounters are what the kernel counted in the network of a node.
func hostCounters(t *testing.T, n *node) smcnl.Counters {
	t.Helper()
	k, err := drive.Kernel(t.Context(), n.Guest)
	if err != nil {
		t.Fatal(err)
	}
	return k.Counters
}

// expect opens connections to a port by a redis-benchmark, and says how many are on SMC-R at the client and at the
// server, and how many are SMC's sockets that fell back.
func (b *hostBed) expect(t *testing.T, what string, port int, inCgroup bool, carried, clientFell, serverFell uint64) {
	t.Helper()
	command := fmt.Sprintf("redis-benchmark -h %s -p %d -n 60 -c 3 -t get -q", b.server.addr, port)
	if inCgroup {
		command = b.client.inCgroup(command)
	}
	c, s := hostCounters(t, b.client), hostCounters(t, b.server)
	b.client.sh(t, command)
	dc, ds := hostCounters(t, b.client).Sub(c), hostCounters(t, b.server).Sub(s)
	if dc.ClientV2 != carried || ds.ServerV2 != carried || dc.ClientFallbacks != clientFell || ds.ServerFallbacks != serverFell {
		t.Errorf("%s: client: %d on SMC-R, %d fell back; server: %d and %d; want %d, and %d and %d\nclient's agent: %s\nserver's agent: %s", what,
			dc.ClientV2, dc.ClientFallbacks, ds.ServerV2, ds.ServerFallbacks, carried, clientFell, serverFell, b.client.log(), b.server.log())
	}
}

// policy: the pods are on SMC-R where policies of both ends select that.
func (b *hostBed) policy(t *testing.T) {
	b.expect(t, "both select the port", selected, true, conns, 0, 0)
	b.expect(t, "the client selects the port", clientOnly, true, 0, conns, conns)
	for _, n := range []*node{b.client, b.server} {
		source := map[*node]string{b.client: "demo/web", b.server: b.client.addr}[n]
		e := ask[agentapi.Explanation](t, n, fmt.Sprintf("explain %s %s:%d", source, b.server.addr, clientOnly))
		want := map[*node]agentapi.Code{b.client: agentapi.CodeOf(clc.ReasonPeerNoSMC), b.server: agentapi.CodeNoPolicy}[n]
		if e.Code != want || e.Pod != "demo/"+n.pod {
			t.Errorf("%s: %+v", n.Name(), e)
		}
	}
}

// others: what is in the same network and not in a cgroup of the pod stays on TCP.
func (b *hostBed) others(t *testing.T) {
	b.expect(t, "a client that is in no pod", selected, false, 0, 0, conns)
	// A program that opens a socket of SMC by itself, and is in no pod: its option is nobody's to filter.
	server, err := drive.Serve(t.Context(), b.server.Guest, b.server.addr+":5000", "-stack", "kernel")
	if err != nil {
		t.Fatal(err)
	}
	before := hostCounters(t, b.client)
	if _, err := drive.Dial(t.Context(), b.client.Guest, "-stack", "kernel", "-to", b.server.addr+":5000", "-do", "echo"); err != nil {
		t.Error(err)
	}
	if d := hostCounters(t, b.client).Sub(before); d.ClientV2 != 1 {
		t.Errorf("a program that has its own sockets of SMC: %+v", d)
	}
	if _, err := server.Stop(); err != nil {
		t.Error(err)
	}
}

// flushed: a firewall that is loaded anew takes the filter away, and the agent makes it again.
func (b *hostBed) flushed(t *testing.T) {
	b.client.sh(t, "nft flush ruleset")
	b.client.eventually(t, "the filter is there again", func() error {
		_, err := b.client.Shell(t.Context(), "nft list tables | grep -q kube-smcr-option-")
		return err
	})
	b.expect(t, "after the flush", selected, true, conns, 0, 0)
	b.expect(t, "after the flush, the client selects the port", clientOnly, true, 0, conns, conns)
}

// agentKilled: the agents' end costs nothing, and what is opened meanwhile is on SMC-R.
func (b *hostBed) agentKilled(t *testing.T) {
	before := hostCounters(t, b.client)
	b.hold(t, "through", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, selected))
	b.client.eventually(t, "a connection is on SMC-R", func() error {
		if d := hostCounters(t, b.client).Sub(before); d.ClientV2 != 1 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGKILL)
	}
	b.expect(t, "without agents", selected, true, conns, 0, 0)
	b.startAgents(t)
	b.expect(t, "with agents again", selected, true, conns, 0, 0)
	b.mustLive(t, "through")
	for _, n := range []*node{b.client, b.server} {
		all := ask[agentapi.Conns](t, n, "conns")
		if !slices.ContainsFunc(all.Conns, func(c agentapi.Conn) bool {
			return c.Pod == "demo/"+n.pod && c.Datapath == "Kernel" && c.Mode == "SMC-R" && c.Dest.Port() == selected && c.Source.Addr().String() == b.client.addr && c.LinkGroup != 0
		}) {
			t.Errorf("%s: %+v", n.Name(), all)
		}
	}
}

// revoked: a live connection that a changed policy refuses is ended, and that of a program in no pod is not, nor one that fell
// back.
func (b *hostBed) revoked(t *testing.T) {
	server, err := drive.Serve(t.Context(), b.server.Guest, b.server.addr+":5000", "-stack", "kernel")
	if err != nil {
		t.Fatal(err)
	}
	before := hostCounters(t, b.client)
	b.client.sh(t, fmt.Sprintf("rm -f /tmp/ended-others; (peer dial -stack kernel -to %s:5000 -do hold || true; date +%%s%%N >/tmp/ended-others) >/run/others.log 2>&1 </dev/null &", b.server.addr))
	b.hold(t, "plain", fmt.Sprintf("socat PIPE TCP4:%s:%d", b.server.addr, clientOnly))
	b.client.eventually(t, "one is on SMC-R, and one fell back", func() error {
		if d := hostCounters(t, b.client).Sub(before); d.ClientV2 != 1 || d.ClientFallbacks != 1 {
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	b.client.configureHost(t, clientOnly)
	b.mustEnd(t, nanoseconds(t, b.client.sh(t, "date +%s%N; kill -HUP $(pidof node-agent)")), "through")
	b.mustLive(t, "others", "plain")
	b.client.mustExplain(t, "demo/web", fmt.Sprintf("%s:%d", b.server.addr, selected))
	b.client.sh(t, "pkill -x peer; kill $(pidof socat)")
	if _, err := server.Stop(); err != nil {
		t.Error(err)
	}
}

// notWanted: a pod that the configuration has no more is on TCP, also by listeners that are older. When these are gone nothing is
// left on the node.
func (b *hostBed) notWanted(t *testing.T) {
	b.client.configureHost(t, selected)
	b.client.sh(t, "kill -HUP $(pidof node-agent)")
	b.client.eventually(t, "the client selects the port again", func() error {
		_, err := b.client.Shell(t.Context(), fmt.Sprintf("nft list ruleset | grep -q %d", selected))
		return err
	})
	b.server.configureHost(t)
	if err := b.server.agent.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	b.server.awaitPod(t, "the pod has sockets of SMC from before", func(a agentapi.Attachment) bool {
		return a.Pod == "demo/db" && a.State == agentapi.StateIdle && a.Datapath == "Kernel" && strings.Contains(a.Detail, "restart them")
	})
	b.expect(t, "a listener from before", selected, true, 0, conns, conns)
	b.startRedis(t)
	b.server.eventually(t, "nothing is left", func() error {
		out, err := b.server.Shell(t.Context(), "ls -d /sys/fs/bpf/kube-smcr /run/smcr/kernel-eids.json 2>/dev/null || true; nft list tables | grep option || true; kernelsmc ueid list")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("%q", out)
		}
		return err
	})
	b.expect(t, "a listener that is new", selected, true, 0, conns, 0)
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGTERM)
	}
}
