// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// Ports of the server's redis: policies of both ends select the first, that of the client only the
// second, and none the third.
const (
	selected   = 6379
	clientOnly = 6380
	unselected = 6381
)

// node is a guest with an agent and one pod, which has a macvlan child of the interface of the node's
// soft RoCE.
type node struct {
	*lab.Guest
	pod, addr string
	host      bool // the pod is in the network of the node
	agent     *lab.Process
}

// pollEvery is the pause between two looks.
const pollEvery = 300 * time.Millisecond

// sh runs a script, which must succeed.
func (n *node) sh(t *testing.T, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := n.Shell(ctx, script)
	if err != nil {
		t.Fatalf("%s: %v\n%s\nthe agent says:\n%s", n.Name(), err, out, n.log())
	}
	return strings.TrimSpace(out)
}

// log is what the agent said last.
func (n *node) log() string {
	out, err := n.Shell(context.Background(), "tail -n 30 /run/kp.log 2>/dev/null || true")
	if err != nil {
		return err.Error()
	}
	return out
}

// inPod runs a program in the pod's network, without rights.
func (n *node) inPod(command string) string { return strings.Join(n.asPod().In(command), " ") }

// in runs a program in the pod, whose network net enters.
func (n *node) in(command string) string {
	if n.host {
		return n.inCgroup(command)
	}
	return n.inPod(command)
}

func (n *node) net() string {
	if n.host {
		return ""
	}
	return "nsenter --net=/run/netns/" + n.pod + " "
}

// newNode makes a node's pod, whose interface add makes.
func newNode(t *testing.T, g *lab.Guest, pod string, last int, add func(*lab.Pod, context.Context) error) *node {
	t.Helper()
	n := &node{Guest: g, pod: pod, addr: fmt.Sprintf("10.0.0.%d", last)}
	p := n.asPod()
	n.sh(t, "kernelsmc ueid flush") // it is the agent's to give one
	if err := add(p, t.Context()); err != nil {
		t.Fatal(err)
	}
	n.sh(t, fmt.Sprintf("ip -n %s address add %s/64 dev eth0 nodad", pod, n.six()))
	if err := p.CNI(t.Context(), "ADD"); err != nil {
		t.Fatal(err)
	}
	return n
}

// asPod is the pod of the node.
func (n *node) asPod() *lab.Pod {
	return &lab.Pod{Guest: n.Guest, Namespace: "demo", Name: n.pod, Addr: netip.PrefixFrom(netip.MustParseAddr(n.addr), 24), AgentDir: "/run/smcr"}
}

// six is the pod's address for IPv6.
func (n *node) six() string {
	_, last, _ := strings.Cut(n.addr, "10.0.0.")
	return "fd00:10::" + last
}

const agentConfig = `node:
  name: %s
  devices: [{rdma: {name: rxe0, address: eth0}}]
  dataDir: /run/smcr
  apiSocket: /run/smcr/agent.sock
  metricsAddress: none
  logLevel: debug
policies: %s
`

// kernelPolicy selects ports on the kernel's SMC-R, with the other guest and its pod.
func kernelPolicy(ports ...int) string {
	return fmt.Sprintf("[{name: kernel, datapath: Kernel, peers: {cidrs: [10.0.0.0/24, \"fd00:10::/64\"]}, ports: %s}]", strings.ReplaceAll(fmt.Sprint(ports), " ", ", "))
}

// configure writes the configuration.
func (n *node) configure(t *testing.T, policies string) {
	t.Helper()
	n.sh(t, "mkdir -p /run/smcr; cat >/run/kp.yaml <<'EOF'\n"+fmt.Sprintf(agentConfig, n.Name(), policies)+"EOF\n")
}

// reconfigure makes the agent take over another configuration.
func (n *node) reconfigure(t *testing.T, policies string) {
	t.Helper()
	n.configure(t, policies)
	if err := n.agent.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// startAgents starts the agents of both nodes, and waits until their pods are on the kernels' SMC-R.
func (b *bed) startAgents(t *testing.T) {
	t.Helper()
	for _, n := range []*node{b.server, b.client} {
		n.startAgent(t)
	}
	for _, n := range []*node{b.server, b.client} {
		n.awaitPod(t, "the pod is on its kernel's SMC-R", func(a agentapi.Attachment) bool {
			return a.Pod == "demo/"+n.pod && a.State == agentapi.StateReady && a.Datapath == "Kernel"
		})
	}
}

func (n *node) startAgent(t *testing.T) {
	t.Helper()
	p, err := n.Start(context.WithoutCancel(t.Context()), "bash", "-c", "exec node-agent --config /run/kp.yaml >>/run/kp.log 2>&1")
	if err != nil {
		t.Fatal(err)
	}
	n.agent = p
}

// endAgent ends the agent by a signal.
func (n *node) endAgent(t *testing.T, s unix.Signal) {
	t.Helper()
	if err := n.agent.Signal(s); err != nil {
		t.Fatal(err)
	}
	if err := n.agent.Wait(); s == unix.SIGTERM && err != nil {
		t.Errorf("the agent ended: %v\n%s", err, n.log())
	}
}

// awaitPod waits until the agent says of its pod what is wanted.
func (n *node) awaitPod(t *testing.T, what string, is func(agentapi.Attachment) bool) {
	t.Helper()
	n.eventually(t, what, func() error {
		out, err := n.Run(t.Context(), "smcrctl", "--socket=/run/smcr/agent.sock", "attachments", "-o", "json")
		if err != nil {
			return err
		}
		var as agentapi.Attachments
		if err := json.Unmarshal([]byte(out), &as); err != nil {
			return err
		}
		if !slices.ContainsFunc(as.Attachments, is) {
			return fmt.Errorf("attachments %+v", as.Attachments)
		}
		return nil
	})
}

// eventually looks until it sees what it waits for.
func (n *node) eventually(t *testing.T, what string, look func() error) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(pollEvery) { // polls what it was told
		err := look()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %s: %v\n%s", n.Name(), what, err, n.log())
		}
	}
}

// counters are what the kernel counted in the pod.
func (n *node) counters(t *testing.T) smcnl.Counters {
	t.Helper()
	var k report.Kernel
	if err := json.Unmarshal([]byte(n.sh(t, "nsenter --net=/run/netns/"+n.pod+" kernelsmc")), &k); err != nil {
		t.Fatal(err)
	}
	return k.Counters
}

// bed is two nodes, with a server in the pod of one and clients in that of the other.
type bed struct{ server, client *node }

// build puts our programs into the guests.
func build(t *testing.T, l *lab.Lab) {
	t.Helper()
	if err := l.BuildNode(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// pods: unmodified programs of two pods on the kernel's SMC-R.
func pods(t *testing.T, l *lab.Lab) {
	build(t, l)
	if _, err := l.Build(t.Context(), module+"/test/vm/kernelpath/sockets/sockprobe", lab.BuildOptions{}); err != nil {
		t.Fatal(err)
	}
	b := &bed{newNode(t, l.Guest(0), "server", 50, (*lab.Pod).AddMacvlan), newNode(t, l.Guest(1), "client", 51, (*lab.Pod).AddIPVLAN)}
	b.server.configure(t, kernelPolicy(selected))
	b.client.configure(t, kernelPolicy(selected, clientOnly))
	b.startAgents(t)
	b.firstContact(t)
	b.startRedis(t)
	for _, sub := range []struct {
		name string
		run  func(*bed, *testing.T)
	}{
		{"policy", (*bed).policy},
		{"fallback", (*bed).fallback},
		{"sockets", (*bed).sockets},
		{"agentKilled", (*bed).agentKilled},
		{"revoked", (*bed).revoked},
		{"deviceGone", (*bed).deviceGone},
		{"policyChanged", (*bed).policyChanged},
		{"detached", (*bed).detached},
	} {
		t.Run(sub.name, func(t *testing.T) { sub.run(b, t) })
	}
}

// firstContact makes a link group between the nodes, which the pods' connections join. For a server in a pod
// the kernel chooses the GID of the pod's address, of an interface in another namespace than the soft RoCE
// of Linux 6.12, which cannot send from it. An RNIC can.
func (b *bed) firstContact(t *testing.T) {
	t.Helper()
	port := 5000
	b.client.eventually(t, "the nodes have a link group", func() (err error) { // if the rendezvous took too long, once more
		at := fmt.Sprintf("10.0.0.1:%d", port)
		port++
		s, err := drive.Serve(t.Context(), b.server.Guest, at, "-stack", "kernel") // one whose rendezvous failed has ended
		if err != nil {
			return err
		}
		_, failed := drive.Dial(t.Context(), b.client.Guest, "-stack", "kernel", "-to", at, "-do", "echo")
		// The server says of a rendezvous that failed what the client does, and nothing else may have failed.
		if r, err := s.Stop(); err != nil && (failed == nil || r.End == nil || r.End.Err != "" || r.End.Bad == 0) {
			t.Fatalf("%v; at the client: %v", err, failed)
		}
		if failed != nil {
			return failed
		}
		k, err := drive.Kernel(t.Context(), b.client.Guest)
		if err == nil && len(k.Groups) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}

// startRedis starts a redis for each port, anew, in the server's pod.
func (b *bed) startRedis(t *testing.T) {
	t.Helper()
	for _, port := range []int{selected, clientOnly, unselected} {
		b.server.startRedis(t, port)
	}
}

// startRedis starts a redis in the pod, anew.
func (n *node) startRedis(t *testing.T, port int) {
	t.Helper()
	n.sh(t, fmt.Sprintf(`
		pid=/run/redis-%[2]s-%[1]d.pid
		if [ -e $pid ]; then kill $(cat $pid); while %[3]sss -Hltn "sport = :%[1]d" | grep -q .; do sleep 0.1; done; fi
		cd /tmp; %[4]s >/run/redis-%[2]s-%[1]d.log 2>&1 </dev/null & echo $! >$pid
		until %[3]sss -Hltn "sport = :%[1]d" | grep -q .; do kill -0 $!; sleep 0.1; done`,
		port, n.pod, n.net(), n.in(fmt.Sprintf(`redis-server --port %d --bind 0.0.0.0 --save "" --protected-mode no`, port))))
}

// connect opens connections from the client's pod, and returns how many were on SMC-R at each end, by the
// kernels' counters.
func (b *bed) connect(t *testing.T, port int) (client, server uint64) {
	t.Helper()
	c, s := b.client.counters(t), b.server.counters(t)
	b.client.sh(t, b.client.inPod(fmt.Sprintf("redis-benchmark -h %s -p %d -n 60 -c 3 -t get -q", b.server.addr, port)))
	dc, ds := b.client.counters(t).Sub(c), b.server.counters(t).Sub(s)
	if dc.ClientErrors+ds.ServerErrors != 0 {
		t.Errorf("rendezvous broke connections: client %+v, server %+v", dc, ds)
	}
	return dc.ClientV2, ds.ServerV2
}

// conns is how many connections a redis-benchmark has: its clients, and one that asks for the configuration.
const conns = 4

// expect says which ports connections are on SMC-R to.
func (b *bed) expect(t *testing.T, want map[int]bool) {
	t.Helper()
	for port, smcr := range want {
		client, server := b.connect(t, port)
		n := uint64(0)
		if smcr {
			n = conns
		}
		if client != n || server != n {
			t.Errorf("port %d: %d and %d connections on SMC-R, want %d\nclient's agent: %s\nserver's agent: %s", port, client, server, n, b.client.log(), b.server.log())
		}
	}
}

// policy: both ends' policies select what is on SMC-R, by peer and port.
func (b *bed) policy(t *testing.T) {
	b.expect(t, map[int]bool{selected: true, clientOnly: false, unselected: false})
}

// agentKilled: an agent that is killed costs a connection nothing, nor does the next one; connections that
// are opened meanwhile are on SMC-R.
func (b *bed) agentKilled(t *testing.T) {
	before := b.client.counters(t)
	load, err := b.client.Start(t.Context(), "bash", "-c", "touch /tmp/load; while [ -e /tmp/load ]; do echo PING; sleep 0.02; done | "+
		b.client.inPod(fmt.Sprintf("redis-cli -h %s -p %d", b.server.addr, selected))+" | sort | uniq -c >/tmp/answers")
	if err != nil {
		t.Fatal(err)
	}
	b.client.eventually(t, "the load's connection is on SMC-R", func() error {
		if got := b.client.counters(t).Sub(before); got.ClientV2 != 1 {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGKILL)
	}
	b.expect(t, map[int]bool{selected: true, clientOnly: false})
	b.startAgents(t)
	b.expect(t, map[int]bool{selected: true})
	b.client.sh(t, "rm /tmp/load")
	err = load.Wait()
	if got := strings.Fields(b.client.sh(t, "cat /tmp/answers")); err != nil || len(got) != 2 || got[1] != "PONG" {
		t.Errorf("load: %v: answers %q", err, got)
	} else {
		t.Logf("%s answers on one connection", got[0])
	}
}

// policyChanged: another policy holds for new connections at once.
func (b *bed) policyChanged(t *testing.T) {
	b.server.reconfigure(t, kernelPolicy(clientOnly))
	b.server.awaitPeers(t, clientOnly)
	b.expect(t, map[int]bool{selected: false, clientOnly: true})
}

// detached: without a policy the pod is on TCP, also by listeners that are older. When these are gone, nothing
// is left of the datapath on the node.
func (b *bed) detached(t *testing.T) {
	b.server.reconfigure(t, "[]")
	b.server.awaitPod(t, "the pod has sockets of SMC from before", func(a agentapi.Attachment) bool {
		return a.State == agentapi.StateIdle && a.Datapath == "Kernel" && strings.Contains(a.Detail, "restart them")
	})
	b.expect(t, map[int]bool{selected: false, clientOnly: false})
	b.startRedis(t)
	b.server.awaitPod(t, "the pod is detached", func(a agentapi.Attachment) bool {
		return a.State == agentapi.StateIdle && a.Datapath == ""
	})
	b.server.eventually(t, "nothing is left", func() error {
		out, err := b.server.Shell(t.Context(), `ls -d /sys/fs/bpf/kube-smcr /run/smcr/kernel-eids.json 2>/dev/null || true
			nsenter --net=/run/netns/server nft list tables; nsenter --net=/run/netns/server sysctl -n net.smc.wmem net.smc.rmem
			kernelsmc ueid list`)
		if want := "65536\n65536"; err == nil && strings.TrimSpace(out) != want {
			err = fmt.Errorf("%q, want %q", out, want)
		}
		return err
	})
	b.expect(t, map[int]bool{selected: false, clientOnly: false})
	for _, n := range []*node{b.client, b.server} {
		n.endAgent(t, unix.SIGTERM)
	}
}
