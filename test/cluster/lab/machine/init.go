// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// The two stages of process 1: the first waits until it is in its cgroup
	// and makes the cgroup namespace, which only a program that it executes
	// then is in with all its threads.
	firstStage  = "machine-init"
	secondStage = "machine-boot"

	specEnv   = "KUBE_SMCR_MACHINE"
	controlFD = 3
)

// IsMachine says whether this process is process 1 of a machine, and its main
// is to call Main and nothing else.
func IsMachine() bool {
	return len(os.Args) == 2 && (os.Args[1] == firstStage || os.Args[1] == secondStage) && os.Getenv(specEnv) != ""
}

// Main is process 1 of a machine. It returns if the machine could not boot, or
// if whoever started it is gone.
func Main() error {
	if os.Args[1] == firstStage {
		return enterCgroupNamespace()
	}
	unix.CloseOnExec(controlFD)
	control := os.NewFile(controlFD, "control")
	var spec Spec
	err := json.Unmarshal([]byte(os.Getenv(specEnv)), &spec)
	if err == nil {
		err = boot(spec)
	}
	out := json.NewEncoder(control)
	if err != nil {
		return errors.Join(err, out.Encode(reply{Error: err.Error()}))
	}
	if err := out.Encode(reply{}); err != nil {
		return err
	}
	s := &services{running: map[string]*process{}, specs: map[string]Service{}}
	go s.reap()
	return s.serve(json.NewDecoder(control), out)
}

func enterCgroupNamespace() error {
	var start [1]byte
	if _, err := unix.Read(controlFD, start[:]); err != nil {
		return fmt.Errorf("wait for the start: %w", err)
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("make a cgroup namespace: %w", err)
	}
	return unix.Exec("/proc/self/exe", []string{os.Args[0], secondStage}, os.Environ())
}

// services are the processes that process 1 watches over. There is one
// goroutine that waits for children and one that serves requests.
type services struct {
	mu      sync.Mutex
	running map[string]*process // the last of each name, ended or not
	specs   map[string]Service
}

// A process is one run of a service.
type process struct {
	pid   int
	ended chan struct{} // closed when state is set
	state string        // how it ended
}

// serve answers requests until the machine's owner is gone.
func (s *services) serve(in *json.Decoder, out *json.Encoder) error {
	for {
		var r request
		if err := in.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read a request: %w", err)
		}
		var answer reply
		var err error
		switch r.Op {
		case opStart:
			err = s.start(r.Service)
		case opStop:
			err = s.stop(r.Service.Name, unix.SIGTERM)
		case opKill:
			err = s.stop(r.Service.Name, unix.SIGKILL)
		case opPause:
			err = s.signal(r.Service.Name, unix.SIGSTOP)
		case opResume:
			err = s.signal(r.Service.Name, unix.SIGCONT)
		case opState:
			answer.State, err = s.state(r.Service.Name)
		default:
			err = fmt.Errorf("unknown request %q", r.Op)
		}
		if err != nil {
			answer.Error = err.Error()
		}
		if err := out.Encode(answer); err != nil {
			return fmt.Errorf("answer a request: %w", err)
		}
	}
}

func (s *services) start(spec Service) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(spec.Args) == 0 {
		known, ok := s.specs[spec.Name]
		if !ok {
			return errors.New("it was never started")
		}
		spec = known
	}
	if p, ok := s.running[spec.Name]; ok && !p.gone() {
		return fmt.Errorf("it runs already, as process %d", p.pid)
	}
	program, err := exec.LookPath(spec.Args[0])
	if err != nil {
		return fmt.Errorf("find program: %w", err)
	}
	log, err := os.OpenFile("/var/log/"+spec.Name+".log", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open its log: %w", err)
	}
	defer func() { _ = log.Close() }()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("open its input: %w", err)
	}
	defer func() { _ = null.Close() }()
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, specEnv+"=") })
	pid, err := syscall.ForkExec(program, spec.Args, &syscall.ProcAttr{
		Dir:   "/",
		Env:   append(env, spec.Env...),
		Files: []uintptr{null.Fd(), log.Fd(), log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return fmt.Errorf("execute %s: %w", program, err)
	}
	s.specs[spec.Name] = spec
	s.running[spec.Name] = &process{pid: pid, ended: make(chan struct{})}
	return nil
}

func (p *process) gone() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func (s *services) find(name string) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.running[name]
	if !ok {
		return nil, errors.New("it was never started")
	}
	return p, nil
}

func (s *services) signal(name string, sig syscall.Signal) error {
	p, err := s.find(name)
	if err != nil {
		return err
	}
	if p.gone() {
		return fmt.Errorf("it has ended: %s", p.state)
	}
	return unix.Kill(p.pid, sig)
}

// stop ends a service; one that has ended is what was wanted.
func (s *services) stop(name string, sig syscall.Signal) error {
	p, err := s.find(name)
	if err != nil || p.gone() {
		return err
	}
	if err := unix.Kill(p.pid, sig); err != nil {
		return err
	}
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case <-p.ended:
		return nil
	case <-timer.C:
	}
	if err := unix.Kill(p.pid, unix.SIGKILL); err != nil {
		return err
	}
	<-p.ended
	return nil
}

func (s *services) state(name string) (string, error) {
	p, err := s.find(name)
	if err != nil || !p.gone() {
		return "", err
	}
	return p.state, nil
}

// reap waits for every child, also for those that others left to process 1.
func (s *services) reap() {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil {
			// Without children there is nothing to wait for but a new one.
			time.Sleep(reapInterval)
			continue
		}
		s.mu.Lock()
		for _, p := range s.running {
			if p.pid == pid && !p.gone() {
				p.state = fmt.Sprintf("exit status %d", status.ExitStatus())
				if status.Signaled() {
					p.state = fmt.Sprintf("signal %v", status.Signal())
				}
				close(p.ended)
			}
		}
		s.mu.Unlock()
	}
}
