// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// childEnv makes the test binary an agent with the configuration file that it
// names: tests that kill agents need processes.
const childEnv = "KUBE_SMCR_TEST_AGENT"

func TestMain(m *testing.M) {
	if file := os.Getenv(childEnv); file != "" {
		os.Exit(child(file))
	}
	if os.Getenv(keeperEnv) != "" {
		if err := linux.KeepQueues(os.NewFile(3, "agent"), func(err error) { fmt.Fprintln(os.Stderr, err) }); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if text := os.Getenv(attackerEnv); text != "" {
		if err := attack(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(sigurgEnv) != "" {
		os.Exit(awaitSIGURG())
	}
	goleak.VerifyTestMain(m)
}

// keeperEnv makes the test binary the keeper of an agent's queues.
const keeperEnv = "KUBE_SMCR_TEST_KEEPER"

func keeperCommand() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=", keeperEnv+"=1")
	cmd.Stderr = os.Stderr
	return cmd
}

func child(file string) int {
	b, err := os.ReadFile(file)
	var n *config.Node
	if err == nil {
		n, err = config.Parse(file, b)
	}
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err = Run(ctx, Config{
			Node: n, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Version: "child", Instance: os.Getenv(agentapi.InstanceEnv), Keeper: keeperCommand,
			Reload: hangups(), Load: func() (*config.Node, error) {
				b, err := os.ReadFile(file)
				if err != nil {
					return nil, err
				}
				return config.Parse(file, b)
			},
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// hangups tells of SIGHUP, for the life of the process.
func hangups() <-chan struct{} {
	hup, reload := make(chan os.Signal, 1), make(chan struct{}, 1)
	signal.Notify(hup, syscall.SIGHUP)
	go func() {
		for range hup {
			reload <- struct{}{}
		}
	}()
	return reload
}

const waitLimit = 20 * time.Second // for what takes milliseconds

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func value[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// eventually waits until f returns "", which otherwise says what is missing.
func eventually(t testing.TB, f func() string) {
	t.Helper()
	deadline := time.Now().Add(waitLimit)
	for {
		missing := f()
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %v: %s", waitLimit, missing)
		}
		runtime.Gosched()
		<-time.After(5 * time.Millisecond)
	}
}

// space is a network namespace of a test.
type space struct {
	path string
	ns   *linux.NetNS
}

func newSpace(t testing.TB) *space {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	// Not in /run/netns: "ip netns add" mounts that directory over itself, and
	// what was in it can then no longer be unmounted.
	s := &space{path: filepath.Join(t.TempDir(), fmt.Sprintf("ks-%08x", rand.Uint32()))}
	must(t, os.WriteFile(s.path, nil, 0o400))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread dies with its goroutine, unless it goes back
		home, err := netns.Get()
		if err == nil {
			var h netns.NsHandle
			if h, err = netns.New(); err == nil {
				err = unix.Mount("/proc/thread-self/ns/net", s.path, "", unix.MS_BIND, "")
				err = errors.Join(err, h.Close(), netns.Set(home))
			}
			err = errors.Join(err, home.Close())
		}
		if err == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	must(t, <-done)
	t.Cleanup(func() { must(t, errors.Join(unix.Unmount(s.path, unix.MNT_DETACH), os.Remove(s.path))) })
	s.ns = value(linux.OpenNetNS(s.path))(t)
	t.Cleanup(func() { must(t, s.ns.Close()) })
	// Duplicate address detection of link-local addresses costs a second.
	must(t, s.ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/accept_dad", []byte("0"), 0)
	}))
	s.links(t, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		return h.LinkSetUp(lo)
	})
	return s
}

func (s *space) links(t testing.TB, f func(*netlink.Handle) error) {
	t.Helper()
	fd := value(netns.GetFromPath(s.path))(t)
	defer fd.Close()
	h := value(netlink.NewHandleAt(fd))(t)
	defer h.Close()
	must(t, f(h))
}

// join puts the ends of a veth of this name into both, with these addresses.
func join(t testing.TB, name string, a, b *space, aAddrs, bAddrs []string) {
	t.Helper()
	fd := value(netns.GetFromPath(b.path))(t)
	defer fd.Close()
	a.links(t, func(h *netlink.Handle) error {
		la := netlink.NewLinkAttrs()
		la.Name = name
		la.MTU = 9000
		return h.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: name, PeerMTU: 9000, PeerNamespace: netlink.NsFd(fd)})
	})
	for s, addrs := range map[*space][]string{a: aAddrs, b: bAddrs} {
		s.links(t, func(h *netlink.Handle) error {
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			for _, text := range addrs {
				addr, err := netlink.ParseAddr(text)
				if err != nil {
					return err
				}
				addr.Flags = 2 // IFA_F_NODAD
				if err := h.AddrAdd(l, addr); err != nil {
					return err
				}
			}
			return h.LinkSetUp(l)
		})
	}
}

func (s *space) listen(t testing.TB, addr string) *net.TCPListener {
	t.Helper()
	l := value(linux.ListenInNS(t.Context(), s.ns, nil, netip.MustParseAddrPort(addr)))(t)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func (s *space) dial(t testing.TB, addr string) (*net.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	c, err := linux.DialInNS(ctx, s.ns, nil, netip.Addr{}, netip.MustParseAddrPort(addr))
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// testNode is an agent with its node's and its pod's namespaces.
type testNode struct {
	name   string
	host   *space
	pod    *space
	dir    string
	drain  time.Duration // 0: 5 s
	ttl    time.Duration // node.redirectTTL; 0: 1 s
	roce   []string      // addresses of its RDMA devices
	node   *config.Node
	client *agentapi.Client
	cfg    Config

	stop   func() error
	kill   func(os.Signal) error // and wait
	pid    int                   // of the agent's process
	freeze func(bool)
}

// lab is two nodes whose pods are on one network and whose two RDMA devices
// each are on two others.
type lab struct {
	a, b   *testNode
	option smcr.Option
}

const (
	podA, podB   = "10.78.0.1", "10.78.0.2"
	podA6, podB6 = "fd78::1", "fd78::2"
)

const preferAll = "policies:\n- name: all\n"

// newLab makes the namespaces, the option and the nodes; agents are started
// by start.
func newLab(t testing.TB) *lab {
	t.Helper()
	l := newSpaces(t)
	l.attach(t)
	o := value(synopt.Open(synopt.Config{Mark: markWire}))(t)
	t.Cleanup(func() { must(t, o.Close()) })
	l.option = o
	l.a.configure(t, l.option, preferAll)
	l.b.configure(t, l.option, preferAll)
	return l
}

// newSpaces makes the namespaces of a lab.
func newSpaces(t testing.TB) *lab {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables, testenv.BPF)
	l := &lab{a: &testNode{name: "a"}, b: &testNode{name: "b"}}
	for _, n := range []*testNode{l.a, l.b} {
		n.host, n.pod, n.dir = newSpace(t), newSpace(t), t.TempDir()
	}
	for i := range 2 {
		a, b := fmt.Sprintf("10.77.%d.1", i), fmt.Sprintf("10.77.%d.2", i)
		join(t, fmt.Sprintf("roce%d", i), l.a.host, l.b.host, []string{a + "/24"}, []string{b + "/24"})
		l.a.roce, l.b.roce = append(l.a.roce, a), append(l.b.roce, b)
	}
	join(t, "eth0", l.a.pod, l.b.pod, []string{podA + "/24", podA6 + "/64"}, []string{podB + "/24", podB6 + "/64"})
	return l
}

// newProcessLab is a lab whose agents are processes.
func newProcessLab(t testing.TB) *lab {
	t.Helper()
	l := newSpaces(t)
	l.attach(t)
	l.a.writeConfig(t, preferAll)
	l.b.writeConfig(t, preferAll)
	return l
}

func (l *lab) attach(t testing.TB) {
	t.Helper()
	l.a.attach(t, podA+"/24", podA6+"/64")
	l.b.attach(t, podB+"/24", podB6+"/64")
}

// text is the configuration of the node.
func (n *testNode) text(rest string) string {
	// Tests of held SYNs are in hold_test.go; the others are about what the agent does without queues.
	if !strings.Contains(rest, "holdSYNs") {
		rest = "  holdSYNs: false\n" + rest
	}
	devices := ""
	for _, a := range n.roce {
		devices += fmt.Sprintf("\n  - soft: {address: %s}", a)
	}
	return fmt.Sprintf(`node:
  name: %s
  devices:%s
  dataDir: %s
  apiSocket: %s/agent.sock
  metricsAddress: none
  redirectTTL: %v
  drainTimeout: %v
  logLevel: debug
%s`, n.name, devices, n.dir, n.dir, cmp.Or(n.ttl, time.Second), cmp.Or(n.drain, 5*time.Second), rest)
}

func (n *testNode) configure(t testing.TB, option smcr.Option, rest string) {
	t.Helper()
	n.node = value(config.Parse("test", []byte(n.text(rest))))(t)
	n.client = agentapi.NewClient(n.node.APISocket)
	t.Cleanup(n.client.Close)
	n.cfg = Config{
		Node: n.node, Log: testLog(t, n.name), Version: "test", Keeper: keeperCommand,
		platform: platform{
			smc:  newFakeSMC(), // what an agent of this machine pinned is not this one's
			host: linuxHost{n.host.path},
			openDevice: func(name string, d config.Device, share bool) (dev rdma.Device, stop func() error, err error) {
				err = n.host.ns.Do(func() error {
					s, err := soft.Open(soft.Config{Name: name, Addr: d.SoftAddress, Share: share, Dir: softDir(n.dir)})
					if err == nil {
						dev, stop = s, s.Close
					}
					return err
				})
				return dev, stop, err
			},
			openOption: func() (smcr.Option, func() error, error) { return option, func() error { return nil }, nil },
			preflight:  func() error { return nil },
			parkAfter:  5 * time.Millisecond, // so that tests meet parked sessions
			route: func(src, dst netip.Addr) (r clc.Route, err error) {
				err = n.host.ns.Do(func() error {
					r, err = route(src, dst)
					return err
				})
				return r, err
			},
		},
	}
}

func (n *testNode) attach(t testing.TB, addrs ...string) {
	t.Helper()
	att := cni.Attachment{
		ContainerID: "pod" + n.name, IfName: "eth0", NetNS: n.pod.path, NetNSID: n.pod.ns.ID(),
		Network: "test", Pod: records.Pod{Namespace: "test", Name: n.name}, Created: time.Now(),
	}
	for _, a := range addrs {
		att.IPs = append(att.IPs, netip.MustParsePrefix(a))
	}
	must(t, cni.NewStore(n.dir).Write(att))
}

// start runs the agent until the test ends or stop is called.
func (n *testNode) start(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, n.cfg) }()
	stopped := false
	n.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		return <-done
	}
	t.Cleanup(func() {
		if err := n.stop(); err != nil {
			t.Errorf("agent %s: %v", n.name, err)
		}
	})
	eventually(t, func() string {
		select {
		case err := <-done:
			stopped = true
			t.Fatalf("agent %s ended: %v", n.name, err)
		default:
		}
		if _, err := n.client.Status(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
	must(t, n.client.Sync(t.Context()))
}

func (n *testNode) writeConfig(t testing.TB, rest string) {
	t.Helper()
	text := n.text(rest)
	n.node = value(config.Parse("test", []byte(text)))(t)
	must(t, os.WriteFile(filepath.Join(n.dir, "config.yaml"), []byte(text), 0o600))
	n.client = agentapi.NewClient(n.node.APISocket)
	t.Cleanup(n.client.Close)
}

// agentProcess is an agent that is a process.
type agentProcess struct {
	t      testing.TB
	name   string
	cmd    *exec.Cmd
	exited chan error
}

// process starts an agent in the node's namespace, and kills it when the test
// ends.
func (n *testNode) process(t testing.TB, instance string) *agentProcess {
	t.Helper()
	cmd := exec.Command(value(os.Executable())(t))
	cmd.Env = append(os.Environ(), childEnv+"="+filepath.Join(n.dir, "config.yaml"), agentapi.InstanceEnv+"="+instance)
	cmd.Stderr = t.Output()
	must(t, n.host.ns.Do(cmd.Start)) // a new process begins in the namespace of the thread
	p := &agentProcess{t: t, name: n.name + " " + instance, cmd: cmd, exited: make(chan error, 1)}
	go func() { p.exited <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the process may have ended
		<-p.exited
	})
	return p
}

// kill sends a signal and waits for the end.
func (p *agentProcess) kill(sig os.Signal) error {
	p.signal(sig)
	return p.wait()
}

func (p *agentProcess) signal(sig os.Signal) {
	p.t.Helper()
	must(p.t, p.cmd.Process.Signal(sig))
}

func (p *agentProcess) wait() error {
	err := <-p.exited
	p.exited <- err
	return err
}

// stopped waits until no thread of the process runs any more.
func (p *agentProcess) stopped() {
	p.t.Helper()
	eventually(p.t, func() string {
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.cmd.Process.Pid))
		must(p.t, err)
		for _, f := range files {
			// "PID (NAME) STATE ..."
			if text, err := os.ReadFile(f); err == nil && !bytes.Contains(text, []byte(") T ")) {
				return fmt.Sprintf("%s: %s", f, text)
			}
		}
		return ""
	})
}

// runs fails the test if the process has ended.
func (p *agentProcess) runs() {
	p.t.Helper()
	select {
	case err := <-p.exited:
		p.exited <- err
		p.t.Fatalf("agent %s ended: %v", p.name, err)
	default:
	}
}

// spawn runs the agent as a process.
func (n *testNode) spawn(t testing.TB) {
	t.Helper()
	p := n.process(t, "")
	n.kill, n.pid = p.kill, p.cmd.Process.Pid
	n.freeze = func(frozen bool) {
		sig := syscall.SIGCONT
		if frozen {
			sig = syscall.SIGSTOP
		}
		p.signal(sig)
		if frozen {
			p.stopped()
		}
	}
	eventually(t, func() string {
		p.runs()
		n.client.Close()
		if err := n.client.Sync(t.Context()); err != nil {
			return err.Error()
		}
		return ""
	})
}

// killGroup kills the agent's process and its keeper at once, as the kernel does with all of a cgroup
// whose memory is full.
func (n *testNode) killGroup(t testing.TB) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	must(t, err)
	var keepers []int
	for _, name := range all {
		text, err := os.ReadFile(name)
		_, rest, _ := strings.Cut(string(text), ") ") // "PID (NAME) STATE PARENT ..."
		if f := strings.Fields(rest); err == nil && len(f) > 1 && f[1] == strconv.Itoa(n.pid) {
			keepers = append(keepers, value(strconv.Atoi(filepath.Base(filepath.Dir(name))))(t))
		}
	}
	if len(keepers) != 1 {
		t.Fatalf("the agent has %d child processes, want its keeper", len(keepers))
	}
	must(t, syscall.Kill(keepers[0], syscall.SIGKILL))
	_ = n.kill(syscall.SIGKILL)
}

func (n *testNode) status(t testing.TB) agentapi.Status {
	t.Helper()
	return value(n.client.Status(t.Context()))(t)
}

func testLog(t testing.TB, name string) *slog.Logger {
	if os.Getenv("KUBE_SMCR_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})).With("node", name)
}

// dialPlain connects from the pod as a program there does. It may be called by
// any goroutine.
func (s *space) dialPlain(addr string) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	return linux.DialInNS(ctx, s.ns, nil, netip.Addr{}, netip.MustParseAddrPort(addr))
}
