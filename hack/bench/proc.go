// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
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
	cmd := exec.Command("/proc/self/exe", workerArg, name)
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
	var resp response
	b, err := json.Marshal(req)
	if err != nil {
		return resp, err
	}
	if _, err := w.in.Write(append(b, '\n')); err != nil {
		return resp, fmt.Errorf("worker %s: %w: %s", w.name, err, w.lastWords())
	}
	line, err := w.out.ReadBytes('\n')
	if err != nil {
		return resp, fmt.Errorf("worker %s: %w: %s", w.name, err, w.lastWords())
	}
	if err := json.Unmarshal(line, &resp); err != nil {
		return resp, fmt.Errorf("worker %s: %w", w.name, err)
	}
	if resp.Err != "" {
		return resp, fmt.Errorf("worker %s: %s: %s", w.name, req.Op, resp.Err)
	}
	return resp, nil
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
