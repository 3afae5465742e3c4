// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// patience bounds what is waited for in a guest, which is slow, and slower if
// others work on this machine. It is longer than the agent takes to try again what
// failed.
const patience = 5 * time.Minute

// anew is how long connections of a load may take to be on SMC-R before the load is
// started anew: a rendezvous that a slow machine did not end in the time of CLC
// leaves a connection on TCP as long as it lives.
const anew = 20 * time.Second

// pollEvery is the pause between two looks.
const pollEvery = 300 * time.Millisecond

// node is a guest that is a node of a cluster: with pods, and an agent.
type node struct {
	*lab.Guest
	index int
	agent *lab.Process
}

// newNode makes soft RoCE, the kernel's SMC-R and the network of the node's pods:
// 10.244.INDEX.0/24, which the other guest reaches by this one.
func newNode(t *testing.T, g *lab.Guest, index int) *node {
	t.Helper()
	n := &node{Guest: g, index: index}
	if err := drive.SetUpKernel(t.Context(), g, 0); err != nil {
		t.Fatal(err)
	}
	n.sh(t, fmt.Sprintf(`
		sysctl -qw net.ipv4.ip_forward=1
		ip link add pods0 type bridge
		ip address add 10.244.%d.1/24 dev pods0
		ip link set pods0 up
		ip route add 10.244.%d.0/24 via 10.0.0.%d`, index, 1-index, 2-index))
	return n
}

// giveUp is when what is waited for from now on is given up: a minute before the
// tests of the package have to end, so that it is named.
func giveUp(t *testing.T) time.Time {
	t.Helper()
	end := time.Now().Add(patience)
	if all, ok := t.Deadline(); ok && all.Add(-time.Minute).Before(end) {
		end = all.Add(-time.Minute)
	}
	return end
}

// try runs a script.
func (n *node) try(t *testing.T, script string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithDeadline(t.Context(), giveUp(t))
	defer cancel()
	out, err := n.Shell(ctx, script)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, out)
	}
	return strings.TrimSpace(out), err
}

// sh runs a script, which must succeed.
func (n *node) sh(t *testing.T, script string) string {
	t.Helper()
	out, err := n.try(t, script)
	if err != nil {
		t.Fatalf("%v%s", err, n.log(t))
	}
	return out
}

// log is what the agent said last.
func (n *node) log(t *testing.T) string {
	t.Helper()
	out, err := n.Shell(t.Context(), "tail -n 30 /run/agent.log 2>/dev/null || true")
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("the agent of %s says:\n%s", n.Name(), out)
}

// pod is a network namespace that the CNI plugin attached.
type pod struct {
	*node
	name, addr string
}

// addPod makes a pod as a container runtime does, with our plugin after one that
// made its interface.
func (n *node) addPod(t *testing.T, name string, number int) *pod {
	t.Helper()
	p := &pod{node: n, name: name, addr: fmt.Sprintf("10.244.%d.%d", n.index, number)}
	n.sh(t, fmt.Sprintf(`
		ip netns add %[1]s
		ip link add v%[1]s type veth peer name eth0 netns %[1]s
		ip link set v%[1]s master pods0 up
		ip -n %[1]s link set lo up
		ip -n %[1]s link set eth0 up
		ip -n %[1]s address add %[2]s/24 dev eth0
		ip -n %[1]s route add default via 10.244.%[3]d.1`, name, p.addr, n.index))
	asPod := lab.Pod{Guest: n.Guest, Namespace: "demo", Name: name, Addr: netip.PrefixFrom(netip.MustParseAddr(p.addr), 24), AgentDir: "/run/smcr"}
	if err := asPod.CNI(t.Context(), "ADD"); err != nil {
		t.Fatalf("%v\n%s", err, n.log(t))
	}
	return p
}

// inPod is the beginning of a command line that runs a program as a container
// without any right, and without the device, would.
func (p *pod) inPod() string {
	return fmt.Sprintf("ip netns exec %s unshare --mount sh -c 'mount -t tmpfs none /dev/infiniband && cd /tmp && exec %s \"$@\"' sh ", p.name, strings.Join(lab.WithoutRights(), " "))
}

// start starts a server in the pod and waits until it listens.
func (p *pod) start(t *testing.T, port int, command string) {
	t.Helper()
	p.sh(t, fmt.Sprintf(`%s %s >/run/%s-%d.log 2>&1 </dev/null &
		for i in $(seq 500); do ip netns exec %[3]s ss -Hltn "sport = :%[4]d" | grep -q . && exit 0; sleep 0.2; done
		cat /run/%[3]s-%[4]d.log; exit 1`, p.inPod(), command, p.name, port))
}

const agentConfig = `node:
  holdSYNs: false # emulated, a rendezvous may take longer than a SYN is held
  name: %s
  devices: [{rdma: {name: rxe0, address: eth0}}]
  eids: [` + drive.UEID + `]
  dataDir: /run/smcr
  apiSocket: /run/smcr/agent.sock
  metricsAddress: none
  redirectTTL: 15s
  negativeCacheTTL: 1s
  drainTimeout: 1s
  logLevel: debug
policies:
- {name: all}
`

// startAgent starts the node's agent, by a program if one is given, and waits
// until it serves its pods.
func (n *node) startAgent(t *testing.T, pods int, by ...string) {
	t.Helper()
	n.sh(t, "mkdir -p /run/smcr; cat >/run/agent.yaml <<'EOF'\n"+fmt.Sprintf(agentConfig, n.Name())+"EOF\n")
	// It outlives the subtest.
	p, err := n.Start(context.WithoutCancel(t.Context()), "bash", "-c", "exec "+strings.Join(by, " ")+" node-agent --config /run/agent.yaml >>/run/agent.log 2>&1")
	if err != nil {
		t.Fatal(err)
	}
	n.agent = p
	n.await(t, fmt.Sprintf("%d pods are served", pods), func(s agentapi.Status) bool { return s.Accelerating && s.Pods.Ready == pods })
}

// endAgent ends the agent by a signal.
func (n *node) endAgent(t *testing.T, s unix.Signal) {
	t.Helper()
	if err := n.agent.Signal(s); err != nil {
		t.Fatal(err)
	}
	err := n.agent.Wait()
	var exit *lab.ExitError
	if s == unix.SIGTERM && err != nil || errors.As(err, &exit) && exit.Signal != int(s) {
		t.Errorf("the agent ended: %v\n%s", err, n.log(t))
	}
}

// status is the agent's.
func (n *node) status(t *testing.T) (s agentapi.Status, err error) {
	t.Helper()
	ctx, cancel := context.WithDeadline(t.Context(), giveUp(t))
	defer cancel()
	out, err := n.Run(ctx, "smcrctl", "--socket=/run/smcr/agent.sock", "status", "-o", "json")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// await waits until the agent's status is as wanted.
func (n *node) await(t *testing.T, what string, is func(agentapi.Status) bool) agentapi.Status {
	t.Helper()
	var s agentapi.Status
	n.eventually(t, what, func() (err error) {
		if s, err = n.status(t); err == nil && !is(s) {
			err = fmt.Errorf("status %+v", s)
		}
		return err
	})
	return s
}

// eventually looks until it sees what it waits for.
func (n *node) eventually(t *testing.T, what string, look func() error) {
	t.Helper()
	if err := until(giveUp(t), look); err != nil {
		t.Fatalf("%s: %s: %v\n%s", n.Name(), what, err, n.log(t))
	}
}

// until looks until it sees what it waits for, or until then.
func until(then time.Time, look func() error) error {
	for ; ; time.Sleep(pollEvery) { // polls what it was told
		err := look()
		if err == nil || time.Now().After(then) {
			return err
		}
	}
}

// A load is a program at work in a guest, and what it started.
type load struct {
	*lab.Process
	cancel context.CancelFunc
}

// ended reports whether the program has.
func (l *load) ended() bool {
	select {
	case <-l.Done():
		return true
	default:
		return false
	}
}

// kill ends the load, however it fares.
func (l *load) kill() {
	l.cancel()
	_ = l.Wait()
}

// load starts a program, and starts it anew until so many connections of it are on
// SMC-R by what an agent counts.
func (n *node) load(t *testing.T, agent *node, conns int, command ...string) *load {
	t.Helper()
	var l *load
	agent.eventually(t, fmt.Sprintf("%d connections of %q are on SMC-R", conns, command), func() error {
		before, err := agent.status(t)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(t.Context())
		l = &load{cancel: cancel}
		if l.Process, err = n.Start(ctx, command...); err != nil {
			cancel()
			return err
		}
		err = until(time.Now().Add(anew), func() error {
			st, err := agent.status(t)
			if err == nil && !l.ended() && (st.Conns.LiveSMCR < conns || st.Conns.TotalSMCR < before.Conns.TotalSMCR+uint64(conns)) {
				err = fmt.Errorf("connections %+v, before %+v, reasons %v", st.Conns, before.Conns, st.Reasons)
			}
			return err
		})
		if l.ended() {
			err = fmt.Errorf("the load has ended: %w", errors.Join(l.Wait(), err))
		}
		if err != nil {
			t.Logf("the load begins anew: %v", err)
			l.kill()
		}
		return err
	})
	return l
}
