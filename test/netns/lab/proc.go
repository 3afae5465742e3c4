// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Command says what to run in a namespace.
type Command struct {
	Args []string
	// Stdout gets the output; nil keeps it for Output. Stderr is always kept.
	Stdout io.Writer
	// Log also gets the output of both kinds, if given.
	Log io.Writer
}

// Proc is a process in the lab, with what it started in turn.
type Proc struct {
	name   string
	cmd    *exec.Cmd
	stdout output
	stderr output
	done   chan struct{}
	err    error // of Wait; read it after done
}

// output keeps the beginning of what a process writes.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
	log io.Writer
}

// Write implements io.Writer.
func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf.Write(b[:min(len(b), maxOutput-min(o.buf.Len(), maxOutput))])
	if o.log != nil {
		return o.log.Write(b)
	}
	return len(b), nil
}

// String returns what was written so far.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// Start starts a command on the node, with the privileges of the caller.
func (n *Node) Start(c Command) (*Proc, error) {
	return n.lab.start(n.NS, n.Dir, c, c.Args)
}

// Start starts a command in the pod, without any privilege and without a way
// to get one.
func (p *Pod) Start(c Command) (*Proc, error) {
	id := fmt.Sprint(nobody)
	args := []string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups"}
	args = append(args, unprivileged...)
	// The change of user cancels the signal that start asks for.
	args = append(args, "--pdeathsig", "KILL", "--")
	return p.Node.lab.start(p.NS, p.Dir, c, append(args, c.Args...))
}

// unprivileged are the arguments of setpriv that take all privileges from a program.
var unprivileged = []string{"--bounding-set", "-all", "--inh-caps", "-all", "--ambient-caps", "-all", "--no-new-privs"}

// Entry is the beginning of the command line by which a trusted program that runs as
// root, such as one of [Pod.StartTrusted] in another pod, starts one in this pod. It
// keeps the process id, directory and user, but no privilege.
func (p *Pod) Entry() []string {
	return append(append([]string{"nsenter", "--net=" + p.NS.Path(), "setpriv"}, unprivileged...), "--")
}

// StartTrusted starts a command in the pod's network namespace with the privileges of
// the caller, so that it can start others by [Pod.Entry]: a test suite that starts its
// servers in another pod. It has a namespace of process ids of its own, which ends with
// the process however that ends, with all that was started in it.
func (p *Pod) StartTrusted(c Command) (*Proc, error) {
	// The shell is process 1, and so collects processes whose parents have ended. It
	// would not stay if there was nothing left for it to do.
	args := append([]string{
		"unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "bash", "-c", `"$@"; exit $?`, "bash",
	}, c.Args...)
	return p.Node.lab.start(p.NS, p.Node.Dir, c, args)
}

// Run starts a command in the pod and waits for its end. It returns what the
// command wrote to its standard output.
func (p *Pod) Run(ctx context.Context, c Command) (string, error) {
	proc, err := p.Start(c)
	if err != nil {
		return "", err
	}
	err = proc.Wait(ctx)
	return proc.Output(), err
}

func (l *Lab) start(ns *linux.NetNS, dir string, c Command, args []string) (*Proc, error) {
	name := filepath.Base(c.Args[0])
	p := &Proc{name: name, cmd: exec.Command(args[0], args[1:]...), done: make(chan struct{})}
	p.stdout.log, p.stderr.log = c.Log, c.Log
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, &p.stdout, &p.stderr
	if c.Stdout != nil {
		p.cmd.Stdout = c.Stdout
	}
	p.cmd.Env = append(os.Environ(), "LC_ALL=C", "HOME="+dir, "TMPDIR="+dir)
	// A group of its own: a Ctrl-C at the terminal is for us alone, and what
	// the process starts ends with it. And it must not outlive us: the thread
	// that Do hands back to the scheduler lives as long as we do.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.cmd.WaitDelay = time.Second
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		p.killGroup()
		close(p.done)
	}()
	l.onClose("stop "+name, p.Stop)
	return p, nil
}

// killGroup kills what the process left behind. It comes right after the end of
// the process, so that its id cannot be another one's yet.
func (p *Proc) killGroup() { _ = syscall.Kill(-p.PID(), syscall.SIGKILL) } // mostly there is nobody

// PID is the process id.
func (p *Proc) PID() int { return p.cmd.Process.Pid }

// Output returns what the process wrote to its standard output so far.
func (p *Proc) Output() string { return p.stdout.String() }

// Stderr returns what the process wrote to its standard error so far.
func (p *Proc) Stderr() string { return p.stderr.String() }

// Done is closed when the process ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Wait waits for the end of the process. When ctx ends first the process is
// ended. The error says what the process complained about.
func (p *Proc) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("%s did not end: %w", p.name, context.Cause(ctx)), p.Kill())
	}
	if p.err == nil {
		return nil
	}
	said := strings.TrimSpace(p.Stderr())
	if said == "" {
		said = strings.TrimSpace(p.Output())
	}
	return &ExitError{Name: p.name, Code: p.cmd.ProcessState.ExitCode(), Said: said, err: p.err}
}

// ExitError is a process that ended with an error.
type ExitError struct {
	Name string
	// Code is its exit code, -1 if a signal ended it.
	Code int
	// Said is what it wrote about it.
	Said string
	err  error
}

// Error implements error.
func (e *ExitError) Error() string {
	const most = 500
	said := e.Said
	if len(said) > most {
		said = "... " + said[len(said)-most:]
	}
	return fmt.Sprintf("%s: %v: %s", e.Name, e.err, said)
}

// Unwrap returns what the system says.
func (e *ExitError) Unwrap() error { return e.err }

// Stop asks the process to end, and kills it and its children if it does not.
// Stopping what has ended is no error.
func (p *Proc) Stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
	}
	return p.Kill()
}

// Kill kills the process and its children, and waits until it is gone.
func (p *Proc) Kill() error {
	select {
	case <-p.done:
		return nil
	default:
	}
	_ = p.cmd.Process.Kill() // it may have ended
	select {
	case <-p.done:
		return nil
	case <-time.After(killTimeout):
		return fmt.Errorf("%s (%d) is still there %v after SIGKILL", p.name, p.PID(), killTimeout)
	}
}
