// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
)

// process is a child in a namespace. It dies with this process.
type process struct {
	name string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // why, once done is closed
}

// killGrace is how long a child has to end when asked.
const killGrace = 3 * time.Second

// start starts a child inside a namespace. Only the main goroutine may call
// it: the child's death signal is tied to the thread.
func start(in *space, name string, cmd *exec.Cmd) (*process, error) {
	// Not in the terminal's process group: on Ctrl-C this process decides in
	// which order children end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := in.do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// stop asks the child to end, insists after a while, and waits.
func (p *process) stop() {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		_ = p.cmd.Process.Signal(sig) // it may have ended
		select {
		case <-p.done:
			return
		case <-time.After(killGrace):
		}
	}
}

// worker is this program as a load generator or server inside a namespace.
type worker struct {
	*process
	in     io.WriteCloser
	out    *bufio.Reader
	stderr *bytes.Buffer
}

// startWorker starts a worker. It ends when its standard input does.
func startWorker(in *space, name string) (*worker, error) {
	cmd := exec.Command("/proc/self/exe", engine.WorkerArg, name)
	w := &worker{stderr: new(bytes.Buffer)}
	cmd.Stderr = w.stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// A pipe of our own: Wait closes StdoutPipe's before all was read.
	r, out, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout = out
	w.process, err = start(in, name, cmd)
	if err = errors.Join(err, out.Close()); err != nil {
		return nil, err
	}
	w.in, w.out = stdin, bufio.NewReader(r)
	return w, nil
}

// call runs one request in the worker.
func (w *worker) call(req request) (response, error) {
	resp, err := engine.Ask[request, state](w.in, w.out, req)
	var gone *engine.GoneError
	switch {
	case errors.As(err, &gone):
		err = fmt.Errorf("worker %s: %w: %s", w.name, err, w.lastWords())
	case err != nil:
		err = fmt.Errorf("worker %s: %s: %w", w.name, req.Op, err)
	}
	return resp, err
}

// ask runs a request whose answer says nothing but whether it failed.
func (w *worker) ask(req request) error {
	_, err := w.call(req)
	return err
}

// stopWorkers ends the input of workers, so that they end, and waits. Some may
// not have been started.
func stopWorkers(workers ...*worker) {
	for _, w := range workers {
		if w != nil {
			_ = w.in.Close() // it may have ended
		}
	}
	for _, w := range workers {
		if w == nil {
			continue
		}
		select {
		case <-w.done:
		case <-time.After(killGrace):
			w.stop()
		}
	}
}

// lastWords waits for the end of a worker that no longer answers.
func (w *worker) lastWords() string {
	w.stop()
	return strings.TrimSpace(w.stderr.String())
}
