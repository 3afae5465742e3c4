// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

var (
	attackFor  = flag.Duration("attack.for", 8*time.Second, "how long TestAttack_anything plays random mixes of attacks")
	attackSeed = flag.Uint64("attack.seed", 0, "the seed of TestAttack_anything; 0: any")
)

// The budgets of TestAttack_anything: small, so that ten times as much is soon
// there.
const (
	propertyConns  = 64 // on SMC-R, as relays and pending, each of a pod
	propertyMemory = 48 << 20
	propertyNode   = "  rmbe: 64KiB\n  sendBuffer: 64KiB\n  negativeCacheTTL: 2s\n  budgets:\n    node: {memory: 48MiB, connections: 256, relays: 256, pending: 256}\n    pod: {memory: 32MiB, connections: 64, relays: 64, pending: 64}\n"

	// What the agent may use beyond its state before the attack. A connection
	// that is being reset has its two files for a moment longer than its place,
	// and an agent on one processor accepts some dozens before the first is gone.
	propertyFiles      = filesPerConn*3*propertyConns + 128
	propertyGoroutines = 3*3*propertyConns + 256
	// Registered memory, 128 KiB of buffers for each connection that moves data,
	// and Go's heap, which its collector lets double.
	propertyResident = propertyMemory + 3*propertyConns*128<<10 + 64<<20

	// latencyFloor: below it the ratio of two times says more of the scheduler
	// than of the agent: a time slice of each of some threads on one processor.
	latencyFloor = 25 * time.Millisecond
)

// TestAttack_anything: whatever one pod and one peer of it do, the agent's files,
// goroutines, registered and resident memory stay within what the budgets say,
// it lives on under its memory limit, and connections of another pod are made and
// answered as before: their p99 is at most twice that of the same time beside a
// process that only spins on the attacker's processor. So what the attacker
// takes from everybody by being there is in both figures, and what is compared is
// what the agent makes of it.
func TestAttack_anything(t *testing.T) {
	seed := *attackSeed
	if seed == 0 {
		seed = testenv.Seed(t)
	}
	t.Logf("-attack.seed=%d -attack.for=%v", seed, *attackFor)
	l := newSpaces(t)
	evil, peer := newSpace(t), newSpace(t)
	join(t, "eth1", peer, evil, []string{"10.79.0.1/24"}, []string{"10.79.0.2/24"})
	l.attach(t)
	l.b.attachMore(t, "evil", evil, "eth1", "10.79.0.2/24")
	l.a.writeConfig(t, preferAll)
	l.b.writeConfig(t, propertyNode+preferAll)
	l.a.host.links(t, func(h *netlink.Handle) error { // the peer's RoCE address
		roce, err := h.LinkByName("roce0")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr("10.77.0.9/24")
		if err != nil {
			return err
		}
		return h.AddrAdd(roce, addr)
	})
	l.a.spawnProcess(t)
	limit := limitMemory(t, 256<<20)
	agent := l.b.spawnProcess(t)
	limit(agent)
	ln := l.b.pod.listen(t, podB+":9000")
	serve(t, ln, echo)
	serve(t, evil.listen(t, "10.79.0.2:8000"), echo)
	g := ground{
		Seed: seed, Pod: evil.path, Peer: peer.path, PodAddr: netip.MustParseAddr("10.79.0.2"), PeerAddr: netip.MustParseAddr("10.79.0.1"),
		Host: l.a.host.path, RoCE: netip.MustParseAddr("10.77.0.9"), VictimGID: netip.MustParseAddr(l.a.roce[0]),
		Service: 8000, Budget: propertyConns,
	}
	for i := range 16 {
		p := 9100 + i
		serve(t, peer.listen(t, fmt.Sprintf("10.79.0.1:%d", p)), echo)
		g.Ports = append(g.Ports, uint16(p))
	}

	watch := &watch{t: t, agent: agent, node: l.b}
	// A connection takes two ports of the pod for a minute after its end, of 28,000.
	pace := time.NewTicker(6 * time.Millisecond)
	defer pace.Stop()
	visit := func(d time.Duration) []time.Duration {
		var took []time.Duration
		for end := time.Now().Add(d); time.Now().Before(end); <-pace.C {
			start := time.Now()
			c, err := l.a.pod.dialPlain(podB + ":9000")
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(waitLimit))
				_, err = c.Write([]byte("hello"))
				if err == nil {
					_, err = io.ReadFull(c, make([]byte, 5))
				}
				_ = c.Close()
			}
			took = append(took, time.Since(start))
			if err != nil {
				for _, n := range []*testNode{l.a, l.b} {
					e := value(n.client.Explain(t.Context(), podA, podB+":9000"))(t)
					t.Logf("node %s: %+v", n.name, e)
				}
				t.Fatalf("a connection of another pod after %v: %v", time.Since(start), err)
			}
			if watch.look(); t.Failed() {
				t.FailNow()
			}
		}
		return took
	}
	visit(500 * time.Millisecond) // makes the link group
	watch.begin()
	calm := g
	calm.Spin = true
	stop := calm.start(t)
	before := p99(visit(2 * time.Second))
	stop()
	calmly := decided(l.b.status(t))
	stop = g.start(t)
	during := visit(*attackFor)
	stop()
	after := p99(during)
	t.Logf("%d connections of another pod: p99 %v, %v beside a process that spins", len(during), after, before)
	if most := 2 * max(before, latencyFloor); after > most && !underRaceDetector {
		t.Errorf("p99 %v, want at most %v", after, most)
	}
	if s := l.b.status(t); s.Conns.TotalSMCR < uint64(len(during)) {
		t.Errorf("the other pod's connections were not on SMC-R: %+v, reasons %v", s.Conns, s.Reasons)
	}
	eventually(t, func() string { // nothing is left behind
		if s := l.b.status(t); s.NodeBudget.PendingUsed != 0 || s.NodeBudget.RelaysUsed != 0 || s.NodeBudget.ConnsUsed != 0 || s.Pods.Paused != 0 {
			return fmt.Sprintf("budget %+v, pods %+v", s.NodeBudget, s.Pods)
		}
		return ""
	})
	s := l.b.status(t)
	if decided(s)-calmly <= uint64(len(during)) && len(s.Reasons) == 0 {
		t.Errorf("nothing was seen of the attack: %+v, %d connections of another pod", s.Conns, len(during))
	}
	for code := range s.Reasons {
		if !slices.Contains(agentapi.Codes(), code) {
			t.Errorf("the status has the reason %q", code)
		}
	}
	t.Logf("%v; %d connections on SMC-R, %d on TCP, %d reset, reasons %v", watch, s.Conns.TotalSMCR, s.Conns.TotalTCP, s.Conns.Reset, s.Reasons)
}

// decided is how many connections an agent decided about.
func decided(s agentapi.Status) uint64 { return s.Conns.TotalSMCR + s.Conns.TotalTCP + s.Conns.Reset }

// TestGround: an attacker that cannot attack, or stops, is an error.
func TestGround(t *testing.T) {
	space := newSpace(t)
	g := ground{Pod: space.path, Peer: space.path, Host: space.path, RoCE: netip.MustParseAddr("10.77.0.9")} // which no interface has
	if _, err := g.launch(t); err == nil || !strings.Contains(err.Error(), "10.77.0.9") {
		t.Errorf("without a RoCE address: %v, want an error that names it", err)
	}
	g.Spin = true
	end := value(g.launch(t))(t)
	if err := end(); err != nil {
		t.Errorf("one that spins: %v", err)
	}
}

func p99(ds []time.Duration) time.Duration {
	slices.Sort(ds)
	return ds[len(ds)*99/100].Round(10 * time.Microsecond)
}

// watch compares what the agent uses with what it may.
type watch struct {
	t         testing.TB
	agent     *agentProcess
	node      *testNode
	base, top usage
	next      time.Time
	began     bool
}

type usage struct{ files, goroutines, registered, resident int }

func (w *watch) now() usage {
	w.t.Helper()
	w.agent.runs()
	u := usage{files: w.agent.files(), goroutines: int(w.node.gauge(w.t, "go_goroutines")), registered: int(w.node.gauge(w.t, "kube_smcr_registered_memory_bytes"))}
	text := string(value(os.ReadFile(fmt.Sprintf("/proc/%d/status", w.agent.cmd.Process.Pid)))(w.t))
	_, rss, _ := strings.Cut(text, "VmRSS:")
	kb, _, _ := strings.Cut(strings.TrimSpace(rss), " ")
	u.resident = value(strconv.Atoi(kb))(w.t) << 10
	return u
}

func (w *watch) begin() { w.base, w.began = w.now(), true }

// look takes a sample, now and then.
func (w *watch) look() {
	w.t.Helper()
	if !w.began || time.Now().Before(w.next) {
		return
	}
	w.next = time.Now().Add(100 * time.Millisecond)
	u := w.now()
	for _, x := range []struct {
		what              string
		is, base, may     int
		top               *int
		notWhereRacesShow bool // the detector's memory is not the agent's
	}{
		{"files", u.files, w.base.files, propertyFiles, &w.top.files, false},
		{"goroutines", u.goroutines, w.base.goroutines, propertyGoroutines, &w.top.goroutines, false},
		{"bytes registered", u.registered, 0, propertyMemory, &w.top.registered, false},
		{"bytes resident", u.resident, w.base.resident, propertyResident, &w.top.resident, true},
	} {
		*x.top = max(*x.top, x.is)
		if x.is > x.base+x.may && (!x.notWhereRacesShow || !underRaceDetector) {
			w.t.Errorf("%d %s, %d before, want at most %d more", x.is, x.what, x.base, x.may)
		}
	}
}

func (w *watch) String() string {
	return fmt.Sprintf("at most %d files (%d before), %d goroutines (%d), %d MiB registered, %d MiB resident (%d)",
		w.top.files, w.base.files, w.top.goroutines, w.base.goroutines, w.top.registered>>20, w.top.resident>>20, w.base.resident>>20)
}

// start starts an attacker and waits until it attacks. stop ends it: one that has ended by itself is an error.
func (g ground) start(t testing.TB) (stop func()) {
	t.Helper()
	end := value(g.launch(t))(t)
	stop = sync.OnceFunc(func() {
		if err := end(); err != nil {
			t.Errorf("attacker: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// launch starts an attacker on one processor and waits until it attacks. end returns an error if it has ended before.
func (g ground) launch(t testing.TB) (end func() error, err error) {
	t.Helper()
	said := value(os.CreateTemp(t.TempDir(), "attacker"))(t)
	defer said.Close()
	cmd := exec.Command(value(os.Executable())(t))
	cmd.Env = append(os.Environ(), attackerEnv+"="+string(value(json.Marshal(g))(t)), "GOMAXPROCS=1")
	cmd.Stderr = said
	must(t, startOnOneProcessor(cmd))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	text := func() string { return string(value(os.ReadFile(said.Name()))(t)) }
	early := func(err error) error {
		return fmt.Errorf("it ended by itself: %w", errors.Join(err, errors.New(text())))
	}
	for began := time.Now(); !strings.Contains(text(), attackSaid); <-time.After(time.Millisecond) {
		select {
		case err := <-ended:
			return nil, early(err)
		default:
		}
		if time.Since(began) > waitLimit {
			_ = cmd.Process.Kill()
			return nil, fmt.Errorf("it does not attack after %v: %w", waitLimit, <-ended)
		}
	}
	return func() error {
		select {
		case err := <-ended:
			return early(err)
		default:
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(waitLimit, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		err := <-ended
		t.Logf("attacker: %v\n%s", err, text())
		return err
	}, nil
}

// startOnOneProcessor starts a program on the first processor that this one may use.
func startOnOneProcessor(cmd *exec.Cmd) error {
	done := make(chan error)
	go func() { // a process begins on the processors of its thread, which ends here
		runtime.LockOSThread()
		var all, one unix.CPUSet
		err := unix.SchedGetaffinity(0, &all)
		for i := range len(all) * 64 {
			if all.IsSet(i) {
				one.Set(i)
				break
			}
		}
		if err == nil {
			err = unix.SchedSetaffinity(0, &one)
		}
		done <- errors.Join(err, cmd.Start())
	}()
	return <-done
}

// limitMemory makes a control group with a limit of memory, and returns what
// puts an agent into it, if the machine's first version of control groups has
// one for memory. The second version has one tree for all, in which the
// agent must stay where its program of the TCP option is; there the bound of what
// is resident has to do.
func limitMemory(t testing.TB, bytes int) func(*agentProcess) {
	t.Helper()
	dir := filepath.Join("/sys/fs/cgroup/memory", fmt.Sprintf("kube-smcr-test-%08x", rand.Uint32()))
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) || underRaceDetector {
		t.Log("no limit of memory")
		_ = os.Remove(dir)
		return func(*agentProcess) {}
	}
	must(t, err)
	t.Cleanup(func() { // after the agent's end
		eventually(t, func() string {
			if err := os.Remove(dir); err != nil {
				return err.Error()
			}
			return ""
		})
	})
	write := func(name, value string) { must(t, os.WriteFile(filepath.Join(dir, name), []byte(value), 0o600)) }
	write("memory.limit_in_bytes", strconv.Itoa(bytes))
	return func(p *agentProcess) { write("cgroup.procs", strconv.Itoa(p.cmd.Process.Pid)) }
}
