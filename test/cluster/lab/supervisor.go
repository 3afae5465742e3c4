// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv/place"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

// A supervisor is the process that runs a cluster. The processes of the nodes and of the control
// plane are its children, and end with it.
type supervisor struct {
	dir   string
	cfg   Config
	set   settings
	admin *client

	ready   chan struct{} // closed when the cluster is up, or upErr is set
	upErr   error
	control *machine.Machine
	nodes   []*node

	began      time.Time
	progressMu sync.Mutex
	progress   io.Writer // the supervisor's log
}

// A node is one node of the cluster, as its supervisor sees it.
type node struct {
	name     string
	number   int
	external bool // its machine is somebody else's

	mu      sync.Mutex // power and services
	machine *machine.Machine
}

// Supervise runs the cluster whose description is in dir. It removes the cluster and returns when ctx
// ends, when the lease, a file, is closed by the program that started the cluster, or when a client
// asks for the end. A program calls Supervise for its subcommand [SuperviseCommand].
func Supervise(ctx context.Context, dir string, lease io.Reader) error {
	if err := keepOnly(lockFD); err != nil {
		return fmt.Errorf("supervise a cluster: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(dir, configFile))
	if err != nil {
		return fmt.Errorf("supervise a cluster: %w", err)
	}
	s := &supervisor{dir: dir, ready: make(chan struct{}), progress: os.Stdout, began: time.Now()}
	if err := json.Unmarshal(text, &s.cfg); err != nil {
		return fmt.Errorf("supervise a cluster: %w", err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	if lease != nil {
		go func() {
			_, _ = io.Copy(io.Discard, lease)
			stop(errors.New("whoever started it is gone"))
		}()
	}
	listener, err := net.Listen("unix", socketOf(dir))
	if err != nil {
		return fmt.Errorf("supervise a cluster: %w", err)
	}
	front, err := listen()
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	var tasks sync.WaitGroup
	tasks.Go(func() {
		s.upErr = s.up(ctx, front.Addr().String())
		close(s.ready)
	})
	tasks.Go(func() { s.serve(listener, stop) })

	<-s.ready
	var fwd *forwarder
	if s.upErr == nil {
		fwd = forward(front, s.control)
		s.say("the cluster is up")
		<-ctx.Done()
	}
	err = s.down(ctx, fwd, front)
	_ = listener.Close()
	stop(nil)
	tasks.Wait()
	return errors.Join(s.upErr, err)
}

// lockFD is the descriptor by which the supervisor holds the lock of the cluster's directory.
const lockFD = 3

// keepOnly closes the descriptors that this process inherited, but for the first three and keep. The
// process outlives the one that started it, and would go on holding that one's locks and pipes,
// which others may wait for. Descriptors that this process opened itself have the mark
// close-on-exec, by which keepOnly tells them from inherited ones.
func keepOnly(keep int) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("look for inherited descriptors: %w", err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC != 0 {
			continue // opened by this process, or the descriptor of the directory, which is closed by now
		}
		if fd == keep {
			unix.CloseOnExec(fd) // the children do not inherit it
			continue
		}
		if err := unix.Close(fd); err != nil {
			return fmt.Errorf("close inherited descriptor %d: %w", fd, err)
		}
	}
	return nil
}

func (s *supervisor) say(format string, args ...any) {
	s.progressMu.Lock()
	defer s.progressMu.Unlock()
	_, _ = fmt.Fprintf(s.progress, "%6.1f s: %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

func (s *supervisor) root(name string) string { return filepath.Join(s.dir, "machines", name, "root") }
func (s *supervisor) logs(name string) string { return filepath.Join(s.cfg.LogDir, name) }

func (s *supervisor) cgroup(machine string) string {
	return filepath.Join(cgroupOf(s.dir), machine)
}

// cgroupOf returns the path of the cgroup of the cluster in dir.
func cgroupOf(dir string) string { return "kube-smcr-" + filepath.Base(dir) }

// up starts the control plane, the nodes and what runs on them, side by side where one does not
// need the other.
func (s *supervisor) up(ctx context.Context, front string) error {
	set, err := detect(s.cfg, s.dir)
	if err != nil {
		return err
	}
	s.set = set
	s.loadModules(ctx)
	root := s.root(controlPlane)
	ca, admin, err := prepareControlPlane(root, "https://"+front)
	if err != nil {
		return err
	}
	if s.admin, err = newClient(ca, s.dial); err != nil {
		return err
	}
	for i := range s.cfg.all() {
		n := &node{name: fmt.Sprintf("n%d", i+1), number: i + 1, external: i >= s.cfg.Nodes}
		s.nodes = append(s.nodes, n)
		own := set
		if n.external {
			own = set.elsewhere()
		}
		if err := prepareNode(s.root(n.name), s.cfg.Tools, n.name, n.number, own, ca); err != nil {
			return err
		}
	}
	if s.control, err = s.start(controlPlane); err != nil {
		return err
	}
	if err := wireControlPlane(s.control, s.cfg.all(), set.ipv6); err != nil {
		return err
	}
	// The first part that fails ends the waiting of the other parts.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var parts errorGroup
	part := func(f func() error) {
		parts.run(func() error {
			err := f()
			if err != nil {
				cancel(errElsewhere)
			}
			return err
		})
	}
	registered := make(chan struct{})
	part(func() error { return s.startControlPlane(ctx, registered) })
	for _, n := range s.nodes {
		if !n.external {
			part(func() error { return s.startNode(ctx, n, registered) })
		}
	}
	if err := parts.wait(); err != nil {
		return err
	}
	// The file is written last: a client that finds it finds a cluster that is up.
	return writeFile(s.dir, "kubeconfig", admin)
}

// loadModules loads br_netfilter, the one module that a cluster needs and that the kernel does not
// load by itself. Without it a pod that asks a Service whose pod is on the same bridge gets the
// answer from that pod's address, which it did not ask.
func (s *supervisor) loadModules(ctx context.Context) {
	if _, err := os.Stat("/proc/sys/net/bridge"); err == nil {
		return
	}
	if out, err := exec.CommandContext(ctx, "modprobe", "br_netfilter").CombinedOutput(); err != nil {
		s.say("services on the same node will not work: load br_netfilter: %v: %s", err, out)
	}
}

func (s *supervisor) start(name string) (*machine.Machine, error) {
	if err := os.MkdirAll(s.logs(name), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of logs: %w", err)
	}
	return machine.Start("/proc/self/exe", machine.Spec{
		Name:   name,
		Root:   s.root(name),
		Logs:   s.logs(name),
		Binds:  []machine.Bind{{From: s.cfg.Tools, To: toolsDir}},
		Cgroup: s.cgroup(name),
	})
}

var errElsewhere = errors.New("another part of the cluster did not start")

// errorGroup runs functions side by side and joins their errors.
type errorGroup struct {
	wg  sync.WaitGroup
	mu  sync.Mutex
	err error
}

func (g *errorGroup) run(f func() error) {
	g.wg.Go(func() {
		err := f()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.err = errors.Join(g.err, err)
	})
}

func (g *errorGroup) wait() error {
	g.wg.Wait()
	return g.err
}

// down ends the processes of the cluster and removes what they made.
func (s *supervisor) down(ctx context.Context, fwd *forwarder, front net.Listener) error {
	s.say("going down: %v", context.Cause(ctx))
	for _, n := range s.nodes {
		n.mu.Lock()
		if n.machine != nil {
			n.machine.PowerOff()
		}
		n.mu.Unlock()
	}
	if s.control != nil {
		s.control.PowerOff()
	}
	err := front.Close()
	if fwd != nil {
		fwd.close()
		err = nil // the server has closed the listener
	}
	return errors.Join(err, remove(s.dir))
}

// remove removes what the processes of a cluster leave behind: its cgroup and its directory.
func remove(dir string) error {
	err := machine.RemoveCgroup(cgroupOf(dir))
	return errors.Join(err, place.Remove(dir))
}

// serve answers clients until the listener is closed.
func (s *supervisor) serve(l net.Listener, stop context.CancelCauseFunc) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			defer func() { _ = conn.Close() }()
			var r request
			if err := json.NewDecoder(conn).Decode(&r); err != nil {
				return
			}
			var answer response
			if r.Op == opDown {
				stop(errors.New("asked to"))
			} else if err := s.handle(r); err != nil {
				answer.Error = err.Error()
			} else {
				answer.Info = s.info()
			}
			_ = json.NewEncoder(conn).Encode(answer)
		})
	}
}

func (s *supervisor) handle(r request) error {
	<-s.ready
	if s.upErr != nil {
		return s.upErr
	}
	switch r.Op {
	case opReady:
		return nil
	case opLoad:
		var parts errorGroup
		for _, n := range s.nodes {
			if !n.external {
				parts.run(func() error { return s.load(n, r.Path) })
			}
		}
		return parts.wait()
	case opAwait:
		ctx := context.Background()
		return poll(ctx, "node "+r.Node, startTimeout, func() error { return s.nodeReady(ctx, r.Node, r.Since) })
	case opService, opPowerOff, opPowerOn, opPort:
		if r.Node == "" && r.Op == opService {
			return act(s.control, r.Service, r.Action)
		}
		n, err := s.node(r.Node)
		if err != nil {
			return err
		}
		if n.external {
			return fmt.Errorf("the machine of node %s is not this cluster's: ask whoever started it", n.name)
		}
		return s.handleNode(n, r)
	default:
		return fmt.Errorf("unknown request %q", r.Op)
	}
}

func (s *supervisor) handleNode(n *node, r request) error {
	switch r.Op {
	case opPowerOff:
		return s.powerOff(n)
	case opPowerOn:
		return s.startNode(context.Background(), n, nil)
	case opPort:
		return setPort(s.control, n.number, r.NIC, r.Up)
	default: // opService
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.machine == nil {
			return fmt.Errorf("node %s is off", n.name)
		}
		err := act(n.machine, r.Service, r.Action)
		if err == nil && r.Service == containerd && (r.Action == actStart || r.Action == actRestart) {
			err = awaitContainerd(context.Background(), n.machine)
		}
		return err
	}
}

func act(m *machine.Machine, service string, a action) error {
	switch a {
	case actStop:
		return m.StopService(service)
	case actKill:
		return m.KillService(service)
	case actStart:
		return m.StartService(machine.Service{Name: service})
	case actRestart:
		return m.RestartService(service)
	case actPause:
		return m.PauseService(service)
	case actResume:
		return m.ResumeService(service)
	default:
		return fmt.Errorf("unknown action %q", a)
	}
}

func (s *supervisor) node(name string) (*node, error) {
	i := slices.IndexFunc(s.nodes, func(n *node) bool { return n.name == name })
	if i < 0 {
		return nil, fmt.Errorf("no node %q", name)
	}
	return s.nodes[i], nil
}

func (s *supervisor) powerOff(n *node) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine == nil {
		return fmt.Errorf("node %s is off already", n.name)
	}
	n.machine.PowerOff()
	n.machine = nil
	return machine.RemoveCgroup(s.cgroup(n.name))
}

// info is what a client needs to know of a cluster that is up.
func (s *supervisor) info() info {
	i := info{
		Supervisor: os.Getpid(), ControlPlane: s.control.PID(),
		Tools: s.cfg.Tools, Logs: s.cfg.LogDir, IPv6: s.set.ipv6, Images: s.cfg.Images,
	}
	for _, n := range s.nodes {
		own := nodeInfo{Name: n.name, Root: s.root(n.name), External: n.external}
		n.mu.Lock()
		if n.machine != nil {
			own.PID = n.machine.PID()
		}
		n.mu.Unlock()
		i.Nodes = append(i.Nodes, own)
	}
	return i
}
