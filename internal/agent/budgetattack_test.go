// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// spawnProcess runs the agent as a process, as spawn does, and returns it.
func (n *testNode) spawnProcess(t testing.TB) *agentProcess {
	t.Helper()
	p := n.process(t, "")
	eventually(t, func() string {
		p.runs()
		n.client.Close()
		if err := n.client.Sync(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
	return p
}

// files counts the files that the process has open.
func (p *agentProcess) files() int {
	p.t.Helper()
	return len(value(os.ReadDir(filepath.Join("/proc", strconv.Itoa(p.cmd.Process.Pid), "fd")))(p.t))
}

// attachMore attaches another pod to the node.
func (n *testNode) attachMore(t testing.TB, name string, s *space, ifName string, addrs ...string) {
	t.Helper()
	att := cni.Attachment{
		ContainerID: "pod" + name, IfName: ifName, NetNS: s.path, NetNSID: s.ns.ID(),
		Network: "test", Pod: records.Pod{Namespace: "test", Name: name}, Created: time.Now(),
	}
	for _, a := range addrs {
		att.IPs = append(att.IPs, netip.MustParsePrefix(a))
	}
	must(t, cni.NewStore(n.dir).Write(att))
}

// holdOpen opens so many connections from a pod, and keeps them until the test ends.
// holdOpen counts those that a server answered.
func holdOpen(t testing.TB, from *space, to string, n int) (answered int) {
	t.Helper()
	var (
		mu sync.Mutex // guards answered
		wg sync.WaitGroup
	)
	slots := make(chan struct{}, 16)
	for range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			c, err := from.dialPlain(to)
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(waitLimit))
			_, err = c.Write([]byte("x"))
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, 1))
			}
			if err == nil {
				mu.Lock()
				answered++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return answered
}

// TestAttack_plainFlood: a pod opens ten times as many connections as may be
// carried as plain TCP. They work, but for a few that were under way: the agent
// has nothing to do with most.
func TestAttack_plainFlood(t *testing.T) {
	const relays = 64
	l := newProcessLab(t)
	l.a.writeConfig(t, fmt.Sprintf("  budgets: {pod: {connections: 1, relays: %d, pending: 64}}\n  negativeCacheTTL: 0s\n", relays)+preferAll)
	p := l.a.spawnProcess(t)
	l.b.spawnProcess(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	before := p.files()
	const conns = 10 * relays
	answered := holdOpen(t, l.a.pod, ln.Addr().String(), conns)
	s := l.a.status(t)
	if answered < conns*9/10 {
		t.Errorf("%d of %d connections work: %+v, reasons %v", answered, conns, s.Conns, s.Reasons)
	}
	if most := before + filesPerConn*(1+relays+64); p.files() > most {
		t.Errorf("the agent has %d files open, %d before, want at most %d", p.files(), before, most)
	}
	if s.NodeBudget.RelaysUsed > relays || s.Pods.Paused != 1 {
		t.Errorf("budget %+v, pods %+v", s.NodeBudget, s.Pods)
	}
}

// attacker is a machine without an agent that may reach a pod's service: its
// stacks are peers of their own.
type attacker struct {
	dev    rdma.Device
	option smcr.Option
	from   *space
}

func newAttacker(t testing.TB, host, from *space, roce string) *attacker {
	t.Helper()
	o := value(synopt.Open(synopt.Config{Mark: markWire}))(t)
	t.Cleanup(func() { must(t, o.Close()) })
	a := &attacker{option: o, from: from}
	must(t, host.ns.Do(func() error {
		d, err := soft.Open(soft.Config{Name: "attacker", Addr: netip.MustParseAddr(roce)})
		if err == nil {
			a.dev = d
			t.Cleanup(func() { _ = d.Close() })
		}
		return err
	}))
	return a
}

// dial opens a connection with the option on its SYN, and says nothing.
func (a *attacker) dial(ctx context.Context, to string) (*net.TCPConn, error) {
	return linux.DialInNS(ctx, a.from.ns, a.option.ControlDial, netip.Addr{}, netip.MustParseAddrPort(to))
}

// visit is a peer that connects once and goes. It reports whether it was on
// SMC-R.
func (a *attacker) visit(t testing.TB, to string) bool {
	t.Helper()
	s := value(smcr.NewStack(smcr.Config{Devices: []rdma.Device{a.dev}, Option: a.option}))(t)
	t.Cleanup(func() { _ = s.Close() })
	tcp := value(a.dial(t.Context(), to))(t)
	c, err := s.Client(t.Context(), tcp)
	if err != nil {
		return false // the connection was reset, which costs the agent nothing either
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	if _, err := c.Write([]byte("hello")); err == nil {
		_, _ = io.ReadFull(c, make([]byte, 5)) // nor does a loss
	}
	return c.Mode() == smcr.ModeSMCR
}

// TestAttack_nodeBudget: many peers come once each, to two pods whose budgets
// are as large as the node's together. What is registered is never more than the
// node's budget, and status and metrics say the same of it.
func TestAttack_nodeBudget(t *testing.T) {
	const budget = 64 << 20
	l := newSpaces(t)
	second := newSpace(t)
	join(t, "eth1", l.a.pod, second, []string{"10.79.0.1/24"}, []string{"10.79.0.2/24"})
	l.b.attach(t, podB+"/24")
	l.b.attachMore(t, "c", second, "eth1", "10.79.0.2/24")
	l.b.writeConfig(t, "  budgets: {pod: {memory: 64MiB, connections: 4096}, node: {memory: 64MiB, connections: 65536}}\n"+preferAll)
	l.b.spawnProcess(t)
	targets := []string{podB + ":9000", "10.79.0.2:9000"}
	serve(t, l.b.pod.listen(t, targets[0]), echo)
	serve(t, second.listen(t, targets[1]), echo)
	a := newAttacker(t, l.a.host, l.a.pod, l.a.roce[0])
	carried := [2]int{}
	for i := range 40 {
		if a.visit(t, targets[i%2]) {
			carried[i%2]++
		}
		rmbs := 0 // a part of what is registered
		for _, g := range value(l.b.client.Links(t.Context()))(t).LinkGroups {
			rmbs += g.RMBBytes
		}
		if s := l.b.status(t); s.NodeBudget.MemoryUsedBytes > budget || rmbs > budget {
			t.Fatalf("after %d peers %d bytes are registered, %d for RMBs", i+1, s.NodeBudget.MemoryUsedBytes, rmbs)
		}
	}
	if carried[0] == 0 || carried[1] == 0 {
		t.Errorf("%v connections of the two pods were on SMC-R", carried)
	}
	eventually(t, func() string { // a group may be given back between the two
		s, m := l.b.status(t), l.b.gauge(t, "kube_smcr_registered_memory_bytes")
		sum := 0
		for _, x := range value(l.b.client.Attachments(t.Context()))(t).Attachments {
			sum += x.Budget.MemoryUsedBytes
		}
		if used := s.NodeBudget.MemoryUsedBytes; int(m) != used || sum != used {
			return fmt.Sprintf("status says %d bytes, metrics %v, the pods together %d", used, m, sum)
		}
		return ""
	})
	if m := l.b.gauge(t, "kube_smcr_budget_memory_bytes"); m != budget {
		t.Errorf("the budget is %v in metrics", m)
	}
}

// gauge reads one metric without labels.
func (n *testNode) gauge(t testing.TB, name string) float64 {
	t.Helper()
	h := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", n.node.APISocket)
	}}}
	r := value(h.Get("http://agent" + agentapi.PathMetrics))(t)
	defer r.Body.Close()
	for line := range strings.Lines(string(value(io.ReadAll(r.Body))(t))) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			return value(strconv.ParseFloat(strings.TrimSpace(v), 64))(t)
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// TestAttack_silentClients: one machine's clients that offer the option and say
// nothing, ten times as many as the pod may have pending. They get three quarters of that;
// good clients on the same machine work, the agent's files are bounded, and all is
// free again when their time is over.
func TestAttack_silentClients(t *testing.T) {
	t.Parallel() // the test mostly waits
	const most = 32
	l := newSpaces(t)
	l.attach(t)
	l.a.writeConfig(t, preferAll)
	l.b.writeConfig(t, fmt.Sprintf("  budgets: {pod: {pending: %d}}\n", most)+preferAll)
	p := l.b.spawnProcess(t)
	ln := l.b.pod.listen(t, podB+":0")
	serve(t, ln, echo)
	o := value(synopt.Open(synopt.Config{Mark: markWire}))(t)
	t.Cleanup(func() { must(t, o.Close()) })
	a := &attacker{option: o, from: l.a.pod}
	before := p.files()
	var silent []*net.TCPConn
	defer func() {
		for _, c := range silent {
			_ = c.Close()
		}
	}()
	for range 10 * most {
		c, err := a.dial(t.Context(), ln.Addr().String())
		if err == nil {
			silent = append(silent, c)
		} else if !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	}
	if most := before + filesPerConn*2*most; p.files() > most {
		t.Errorf("the agent has %d files open, %d before, want at most %d", p.files(), before, most)
	}
	if s := l.b.status(t); s.NodeBudget.PendingUsed > most*sourceMost/100 || s.Pods.Paused != 0 {
		t.Errorf("budget %+v, pods %+v", s.NodeBudget, s.Pods)
	}
	if x := value(l.b.client.Attachments(t.Context()))(t).Attachments[0]; len(x.GreedySources) != 1 {
		t.Errorf("attachment %+v", x)
	}
	if answered := holdOpen(t, l.a.pod, ln.Addr().String(), 10); answered != 10 {
		t.Errorf("%d of 10 good clients work", answered)
	}
	eventually(t, func() string {
		if s := l.b.status(t); s.NodeBudget.PendingUsed != 0 || s.Pods.Paused != 0 {
			return fmt.Sprintf("budget %+v, pods %+v", s.NodeBudget, s.Pods)
		}
		return ""
	})
}

// TestAttack_greedyClient: one client opens 900 connections to a pod and says
// nothing. Another one, that must be on SMC-R, is: the pod's diversion does not
// pause. It is so, too, while the pod itself has it paused.
func TestAttack_greedyClient(t *testing.T) {
	l := newSpaces(t)
	evil := newSpace(t)
	join(t, "eth1", evil, l.b.pod, []string{"10.79.0.1/24"}, []string{"10.79.0.2/24"})
	l.a.attach(t, podA+"/24")
	l.b.attach(t, podB+"/24", "10.79.0.2/24")
	const required = "policies:\n- {name: must, mode: Required}\n"
	l.a.writeConfig(t, required)
	l.b.writeConfig(t, required)
	l.a.spawnProcess(t)
	l.b.spawnProcess(t)
	ln := l.b.pod.listen(t, "0.0.0.0:9000")
	serve(t, ln, echo)
	o := value(synopt.Open(synopt.Config{Mark: markWire}))(t)
	t.Cleanup(func() { must(t, o.Close()) })
	a := &attacker{option: o, from: evil}
	for range 900 {
		c, err := a.dial(t.Context(), "10.79.0.2:9000")
		if err == nil {
			defer c.Close()
		} else if !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	}
	if x := value(l.b.client.Attachments(t.Context()))(t).Attachments[0]; len(x.GreedySources) != 1 || x.GreedySources[0] != netip.MustParseAddr("10.79.0.1") {
		t.Errorf("attachment %+v", x)
	}
	if s := l.b.status(t); s.Pods.Paused != 0 {
		t.Errorf("pods %+v, budget %+v", s.Pods, s.NodeBudget)
	}
	if answered := holdOpen(t, l.a.pod, podB+":9000", 10); answered != 10 {
		t.Errorf("%d of 10 connections that must be on SMC-R work", answered)
	}
	if s := l.a.status(t); s.Conns.LiveSMCR != 10 || s.Conns.Reset != 0 {
		t.Errorf("%+v, %v", s.Conns, s.Reasons)
	}
}

// TestAttack_slowDetach: pods are opted out whose peers do not answer any more,
// which the end of their link groups waits for. Meanwhile another pod is attached,
// and a policy is in force for it, as fast as ever.
func TestAttack_slowDetach(t *testing.T) {
	const silent = 6
	l := newSpaces(t)
	l.attach(t)
	l.b.writeConfig(t, preferAll)
	l.a.writeConfig(t, preferAll)
	var pods []*space
	for i := range silent {
		s := newSpace(t)
		join(t, fmt.Sprintf("e%d", i), l.a.pod, s, []string{fmt.Sprintf("10.80.%d.1/24", i)}, []string{fmt.Sprintf("10.80.%d.2/24", i)})
		l.b.attachMore(t, fmt.Sprintf("evil%d", i), s, fmt.Sprintf("e%d", i), fmt.Sprintf("10.80.%d.2/24", i))
		pods = append(pods, s)
	}
	pa, pb := l.a.spawnProcess(t), l.b.spawnProcess(t)
	for i, s := range pods {
		addr := fmt.Sprintf("10.80.%d.2:9000", i)
		serve(t, s.listen(t, addr), echo)
		if holdOpen(t, l.a.pod, addr, 1) != 1 {
			t.Fatalf("no connection with %s", addr)
		}
	}
	if s := l.b.status(t); s.Conns.LiveSMCR != silent {
		t.Fatalf("%+v", s.Conns)
	}
	late := newSpace(t)
	pa.signal(syscall.SIGSTOP)
	pa.stopped()
	defer pa.signal(syscall.SIGCONT)
	text := strings.Replace(l.b.text(preferAll), "- name: all\n", "- name: others\n  pods: {names: [b, late]}\n", 1)
	must(t, os.WriteFile(filepath.Join(l.b.dir, "config.yaml"), []byte(text), 0o600))
	start := time.Now()
	pb.signal(syscall.SIGHUP)
	l.b.attachMore(t, "late", late, "eth0", "10.81.0.2/24")
	must(t, cni.Notify(t.Context(), l.b.node.APISocket, cni.Event{Verb: "ADD", ContainerID: "podlate"}))
	attached := time.Since(start)
	state := func(pod string) agentapi.Attachment {
		for _, x := range value(l.b.client.Attachments(t.Context()))(t).Attachments {
			if x.Pod == pod {
				return x
			}
		}
		return agentapi.Attachment{}
	}
	if x := state("test/late"); x.State != agentapi.StateReady {
		t.Errorf("answered before the pod was attached: %+v", x)
	}
	eventually(t, func() string {
		if x := state("test/b"); len(x.Policies) != 1 || x.Policies[0] != "others" {
			return fmt.Sprintf("policy not in force: %+v", x)
		}
		return ""
	})
	inForce := time.Since(start)
	// The ends have only begun: in turn they would take silent times this long.
	must(t, l.b.client.Sync(t.Context()))
	ended := time.Since(start)
	t.Logf("attached after %v, policy in force after %v, all detached after %v", attached, inForce, ended)
	for what, took := range map[string]time.Duration{"an attach": attached, "a policy": inForce, "all ends": ended} {
		if took > 2*time.Second {
			t.Errorf("%s took %v while %d pods with silent peers are detached", what, took, silent)
		}
	}
	for i := range silent {
		if x := state(fmt.Sprintf("test/evil%d", i)); x.State != agentapi.StateIdle {
			t.Errorf("%+v is not detached", x)
		}
	}
}
