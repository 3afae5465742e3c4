// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const pluginDir = "/usr/lib/cni"

func newLab(t *testing.T) *Lab {
	t.Helper()
	return newLabWith(t, Config{})
}

func newLabWith(t *testing.T, cfg Config) *Lab {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("setpriv"),
		testenv.Program(pluginDir+"/bridge"), testenv.Program(pluginDir+"/host-local"))
	cfg.PluginDirs = []string{pluginDir}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		left, err := l.Leftovers()
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %q, %v", left, err)
		}
	})
	return l
}

func TestLab_podsOfBothNodesReachEachOther(t *testing.T) {
	for _, tc := range []struct {
		name string
		cfg  Config
	}{{"one subnet", Config{}}, {"routed", Config{Routed: true}}} {
		t.Run(tc.name, func(t *testing.T) { testReach(t, tc.cfg) })
	}
}

func testReach(t *testing.T, cfg Config) {
	l := newLabWith(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var pods [2]*Pod
	for i, n := range l.Nodes {
		p, err := n.AddPod(ctx, PodConfig{Name: fmt.Sprintf("pod%d", i), WithoutSMCR: true})
		if err != nil {
			t.Fatal(err)
		}
		pods[i] = p
	}
	if _, err := pods[1].Start(Command{Args: []string{"bash", "-c", "cat >&2; sleep 600 & wait"}}); err != nil {
		t.Fatal(err)
	}
	if same := l.Nodes[0].podPrefixes()[0].Contains(pods[1].Addr4); same == cfg.Routed {
		t.Errorf("the pods have the addresses %v and %v", pods[0].Addr4, pods[1].Addr4)
	}
	for _, addr := range []string{pods[1].Addr4.String(), pods[1].Addr6.String()} {
		before, err := pods[0].ActiveOpens()
		if err != nil {
			t.Fatal(err)
		}
		// Nobody listens, so the pod answers with a reset: it was reached.
		_, err = pods[0].Run(ctx, Command{Args: []string{"bash", "-c", "exec 3<>/dev/tcp/" + addr + "/9"}})
		if err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("connect to %s: %v, want a refusal", addr, err)
		}
		after, err := pods[0].ActiveOpens()
		if err != nil || after != before+1 {
			t.Errorf("connections: %d and then %d, %v", before, after, err)
		}
	}
	if rx, tx, err := pods[0].Bytes(); rx == 0 || tx == 0 || err != nil {
		t.Errorf("bytes of the pod: %d, %d, %v", rx, tx, err)
	}
	if err := l.SplitSegments(true); err != nil {
		t.Error(err)
	}
}

func TestPod_hasNoPrivileges(t *testing.T) {
	l := newLab(t)
	p, err := l.Nodes[0].AddPod(t.Context(), PodConfig{Name: "pod", WithoutSMCR: true})
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.Run(t.Context(), Command{Args: []string{"grep", "-E", "^(Uid|Cap...|NoNewPrivs):", "/proc/self/status"}})
	if err != nil {
		t.Fatal(err)
	}
	none := "0000000000000000"
	want := strings.Join([]string{
		"Uid:\t65534\t65534\t65534\t65534", "CapInh:\t" + none, "CapPrm:\t" + none, "CapEff:\t" + none,
		"CapBnd:\t" + none, "CapAmb:\t" + none, "NoNewPrivs:\t1", "",
	}, "\n")
	if diff := cmp.Diff(want, out); diff != "" {
		t.Error(diff)
	}
}

func TestProc_endsWithItsChildren(t *testing.T) {
	l := newLab(t)
	p, err := l.Nodes[0].Start(Command{Args: []string{"bash", "-c", "trap '' TERM; sleep 600 & echo $!; wait"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	must(t, poll(ctx, "output", func() error {
		if p.Output() == "" {
			return errors.New("none yet")
		}
		return nil
	}))
	must(t, p.Kill())
	must(t, p.Kill())
	child := "/proc/" + strings.TrimSpace(p.Output())
	must(t, poll(ctx, "end of "+child, func() error {
		if cwd, err := os.Readlink(child + "/cwd"); err == nil {
			return fmt.Errorf("still in %s", cwd)
		}
		return nil
	}))
	var ee *ExitError
	if err := p.Wait(ctx); !errors.As(err, &ee) || ee.Code != -1 {
		t.Errorf("wait: %v, want a signal", err)
	}
}

// TestPod_StartTrusted: a trusted program in one pod starts one in another, which has no
// privileges, and what is in the background there ends with the trusted one.
func TestPod_StartTrusted(t *testing.T) {
	l := newLab(t)
	var pods [2]*Pod
	for i, n := range l.Nodes {
		p, err := n.AddPod(t.Context(), PodConfig{Name: fmt.Sprintf("pod%d", i), WithoutSMCR: true})
		if err != nil {
			t.Fatal(err)
		}
		pods[i] = p
	}
	entry := strings.Join(pods[1].Entry(), " ")
	p, err := pods[0].StartTrusted(Command{Args: []string{"bash", "-c", fmt.Sprintf(`setsid %[1]s sleep 600 &
		%[1]s grep -hE '^(Uid|CapEff|CapBnd|NoNewPrivs):' /proc/self/status
		%[1]s grep -cF %[2]s /proc/net/fib_trie
		grep -cF %[2]s /proc/net/fib_trie
		wait`, entry, pods[1].Addr4)}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	const lines = 6
	must(t, poll(ctx, "output", func() error {
		if n := strings.Count(p.Output(), "\n"); n < lines {
			return fmt.Errorf("%d lines: %s", n, p.Stderr())
		}
		return nil
	}))
	const none = "0000000000000000"
	want := "Uid:\t0\t0\t0\t0\nCapEff:\t" + none + "\nCapBnd:\t" + none + "\nNoNewPrivs:\t1\n2\n0\n"
	if diff := cmp.Diff(want, p.Output()); diff != "" {
		t.Errorf("in the pods (-want +got):\n%s", diff)
	}
	sleepers := func() (n int) {
		procs, err := processesIn(l.Dir)
		must(t, err)
		for _, p := range procs {
			if p.comm == "sleep" {
				n++
			}
		}
		return n
	}
	must(t, poll(ctx, "a program in the background", func() error {
		if n := sleepers(); n != 1 {
			return fmt.Errorf("%d are there, want 1", n)
		}
		return nil
	}))
	must(t, p.Kill())
	must(t, poll(ctx, "the end of the program in the background", func() error {
		if n := sleepers(); n > 0 {
			return fmt.Errorf("%d are there", n)
		}
		return nil
	}))
}

func TestLab_congestion(t *testing.T) {
	// Reno is in every kernel. The machine's may be it, too: then this says less.
	l := newLabWith(t, Config{TCPCongestion: "reno"})
	p, err := l.Nodes[1].AddPod(t.Context(), PodConfig{Name: "pod", WithoutSMCR: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, ns := range map[string]*linux.NetNS{"node": l.Nodes[0].NS, "pod": p.NS} {
		if got, err := linux.Sysctl(ns, "net/ipv4/tcp_congestion_control"); err != nil || got != "reno" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	_, err = New(Config{TCPCongestion: "carrier-pigeon"})
	if err == nil || !strings.Contains(err.Error(), `"carrier-pigeon"`) || !strings.Contains(err.Error(), "reno") {
		t.Errorf("error %v, want what is not there, and what is", err)
	}
}

// TestLab_makeNS: a process lives on when namespaces are made after its start. The
// kernel ends it with the thread that started it.
func TestLab_makeNS(t *testing.T) {
	l := newLab(t)
	const threads = 20
	var procs [threads]*Proc
	for i := range procs {
		p, err := l.Nodes[0].Start(Command{Args: []string{"sleep", "600"}})
		if err != nil {
			t.Fatal(err)
		}
		procs[i] = p
		name := fmt.Sprintf("more%d", i)
		ns, err := l.makeNS(name)
		if err != nil {
			t.Fatal(err)
		}
		must(t, l.removeNS(name, ns))
	}
	for i, p := range procs {
		select {
		case <-p.Done():
			t.Errorf("process %d ended: %v", i, p.Wait(t.Context()))
		default:
		}
	}
}

func TestNew_leavesNothingWhenItFails(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	if _, err := New(Config{MTU: 1}); err == nil {
		t.Error("a lab with MTU 1")
	}
	names, err := namespaces()
	must(t, err)
	for _, n := range names {
		if pid, ok := labPID(n); ok && pid == os.Getpid() {
			t.Errorf("namespace %s was left", n)
		}
	}
}

func TestTCPCounter(t *testing.T) {
	const text = "Ip: Forwarding DefaultTTL\nIp: 1 64\nTcp: RtoAlgorithm ActiveOpens PassiveOpens\nTcp: 1 42 7\n"
	if n, err := tcpCounter([]byte(text), "ActiveOpens"); n != 42 || err != nil {
		t.Errorf("ActiveOpens: %d, %v", n, err)
	}
	if n, err := tcpCounter([]byte(text), "Else"); err == nil {
		t.Errorf("unknown counter: %d", n)
	}
}

func TestListens(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000
   1: 0100007F:1F91 0100007F:A3B2 01 00000000:00000000 00:00000000 00000000
`
	for port, want := range map[uint16]bool{8080: true, 8081: false, 80: false} {
		if got := listens([]byte(table), port); got != want {
			t.Errorf("port %d: %v, want %v", port, got, want)
		}
	}
}

func TestPathMTU(t *testing.T) {
	for mtu, want := range map[int]int{9000: 4096, 4196: 4096, 4195: 2048, 1500: 1024, 576: 256, 100: 256} {
		if got := pathMTU(mtu); got != want {
			t.Errorf("MTU %d: %d, want %d", mtu, got, want)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
