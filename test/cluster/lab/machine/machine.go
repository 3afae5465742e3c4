// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// A Spec says what a machine is.
type Spec struct {
	// Name is its host name.
	Name string
	// Root is the directory that becomes its root. It may be empty.
	Root string
	// Logs is the directory that becomes its /var/log.
	Logs string
	// Binds are directories of the host that it sees, read only.
	Binds []Bind
	// Cgroup is the path of its cgroup in every hierarchy of the host, without a
	// slash in front. The machine sees it as the root.
	Cgroup string
}

// A Bind is a directory of the host that a machine sees.
type Bind struct{ From, To string }

// A Service is a process that runs until it is stopped. What it prints is
// appended to /var/log/NAME.log of the machine.
type Service struct {
	Name string
	Args []string
	Env  []string // besides PATH, HOME and SeldomGC
}

// SeldomGC has the programs of Kubernetes, all written in Go, collect garbage less often: tests
// lack processors more than memory.
const SeldomGC = "GOGC=400"

// Path is where a machine looks for programs; tools is a Bind that the lab
// makes.
const Path = "/opt/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// A Machine is a running machine.
type Machine struct {
	Spec Spec

	pid  int
	done chan struct{} // closed when process 1 has ended

	mu      sync.Mutex // one request at a time
	control net.Conn
	decoder *json.Decoder
}

// A request goes to process 1 of a machine.
type request struct {
	Op      operation `json:"op"`
	Service Service   `json:"service,omitzero"`
}

type operation string

const (
	opStart  operation = "start"
	opStop   operation = "stop"   // SIGTERM, then SIGKILL
	opKill   operation = "kill"   // SIGKILL
	opPause  operation = "pause"  // SIGSTOP
	opResume operation = "resume" // SIGCONT
	opState  operation = "state"
)

// A reply is the answer of process 1.
type reply struct {
	Error string `json:"error,omitempty"`
	// State is how a service ended; empty while it runs.
	State string `json:"state,omitempty"`
}

// Start starts a machine and returns when it has booted: its file systems are
// mounted, its network has no interface but lo, and no service runs.
func Start(program string, spec Spec) (*Machine, error) {
	if err := makeCgroup(spec.Cgroup); err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.Name, err)
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.Name, err)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.Name, err)
	}
	boot, err := os.OpenFile(filepath.Join(spec.Logs, "boot.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start machine %s: %w", spec.Name, err), ours.Close(), theirs.Close())
	}
	cmd := exec.Command(program, firstStage)
	cmd.Env = []string{specEnv + "=" + string(text), "PATH=" + Path, "HOME=/root", SeldomGC}
	cmd.ExtraFiles = []*os.File{theirs} // becomes controlFD
	cmd.Stdout, cmd.Stderr = boot, boot
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Setsid:     true,
		Pdeathsig:  unix.SIGKILL,
	}
	m := &Machine{Spec: spec, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig comes when the thread ends that started the process: this one
		// waits for it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(m.done)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	err = errors.Join(<-started, boot.Close(), theirs.Close())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start machine %s (it needs CAP_SYS_ADMIN): %w", spec.Name, err), ours.Close())
	}
	m.pid = cmd.Process.Pid
	if err := m.boot(ours); err != nil {
		m.PowerOff()
		return nil, err
	}
	return m, nil
}

// boot lets process 1 go on once it is in its cgroup, and waits until it has
// booted.
func (m *Machine) boot(control *os.File) error {
	conn, err := net.FileConn(control)
	if err := errors.Join(err, control.Close()); err != nil {
		return fmt.Errorf("start machine %s: %w", m.Spec.Name, err)
	}
	m.control, m.decoder = conn, json.NewDecoder(conn)
	if err := joinCgroup(m.Spec.Cgroup, m.pid); err != nil {
		return fmt.Errorf("start machine %s: %w", m.Spec.Name, err)
	}
	if _, err := conn.Write([]byte{'\n'}); err != nil {
		return fmt.Errorf("start machine %s: %w", m.Spec.Name, err)
	}
	if _, err := m.receive(); err != nil {
		return fmt.Errorf("boot machine %s: %w; see %s", m.Spec.Name, err, filepath.Join(m.Spec.Logs, "boot.log"))
	}
	return nil
}

func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control"), nil
}

// PowerOff ends all processes of the machine at once, without telling them.
func (m *Machine) PowerOff() {
	_ = unix.Kill(m.pid, unix.SIGKILL)
	<-m.done
	if m.control != nil {
		_ = m.control.Close()
	}
}

// PID is the process id of the machine's process 1 on the host.
func (m *Machine) PID() int { return m.pid }

// NetNS is the path of the machine's network namespace.
func (m *Machine) NetNS() string { return fmt.Sprintf("/proc/%d/ns/net", m.pid) }

// Path is where the host sees the machine's file name, its /run and other
// mounts included.
func (m *Machine) Path(name string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", m.pid), name)
}

// Command is a command that runs in the machine. It gets no terminal.
func (m *Machine) Command(ctx context.Context, args ...string) *exec.Cmd {
	return Command(ctx, m.pid, args...)
}

// Command is a command that runs in the machine whose process 1 is pid.
func Command(ctx context.Context, pid int, args ...string) *exec.Cmd {
	enter := append([]string{"-t", strconv.Itoa(pid), "-m", "-n", "-u", "-i", "-p", "-C", "--"}, args...)
	cmd := exec.CommandContext(ctx, "nsenter", enter...)
	cmd.Env = []string{"PATH=" + Path, "HOME=/root"}
	cmd.Dir = "/"
	return cmd
}

// StartService starts a service.
func (m *Machine) StartService(s Service) error {
	_, err := m.ask(request{Op: opStart, Service: s})
	return err
}

// StopService asks a service to end and waits for that; after some seconds it
// is killed.
func (m *Machine) StopService(name string) error { return m.do(opStop, name) }

// KillService kills a service and waits until it is gone.
func (m *Machine) KillService(name string) error { return m.do(opKill, name) }

// RestartService stops a service and starts it as it was started before.
func (m *Machine) RestartService(name string) error {
	if err := m.do(opStop, name); err != nil {
		return err
	}
	return m.StartService(Service{Name: name})
}

// PauseService stops a service from running, without its noticing.
func (m *Machine) PauseService(name string) error { return m.do(opPause, name) }

// ResumeService lets a paused service run again.
func (m *Machine) ResumeService(name string) error { return m.do(opResume, name) }

// ServiceEnded returns how a service ended, or nil while it runs.
func (m *Machine) ServiceEnded(name string) error {
	r, err := m.ask(request{Op: opState, Service: Service{Name: name}})
	if err != nil {
		return err
	}
	if r.State == "" {
		return nil
	}
	return fmt.Errorf("%s on %s ended: %s; see %s", name, m.Spec.Name, r.State, filepath.Join(m.Spec.Logs, name+".log"))
}

func (m *Machine) do(op operation, name string) error {
	_, err := m.ask(request{Op: op, Service: Service{Name: name}})
	return err
}

func (m *Machine) ask(r request) (reply, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := json.NewEncoder(m.control).Encode(r); err != nil {
		return reply{}, fmt.Errorf("%s %s on %s: %w", r.Op, r.Service.Name, m.Spec.Name, err)
	}
	answer, err := m.receive()
	if err != nil {
		return reply{}, fmt.Errorf("%s %s on %s: %w", r.Op, r.Service.Name, m.Spec.Name, err)
	}
	return answer, nil
}

func (m *Machine) receive() (reply, error) {
	var r reply
	if err := m.decoder.Decode(&r); err != nil {
		return reply{}, fmt.Errorf("its process 1 is gone: %w", err)
	}
	if r.Error != "" {
		return reply{}, errors.New(r.Error)
	}
	return r, nil
}
