// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// outputDelay is how long the output of a command is read after its end: a
// daemon that it left may hold the pipe for ever.
const outputDelay = time.Second

// A command is a process that the host asked for.
type command struct {
	port   *port
	stream uint32
	cmd    *exec.Cmd
	stdin  chan []byte // nil ends it; the host sends one at a time
	ended  chan struct{}
}

// start starts a command. It tells the host, also of an error.
func (p *port) start(stream uint32, payload []byte) {
	var want wire.Command
	err := json.Unmarshal(payload, &want)
	if err == nil && len(want.Args) == 0 {
		err = errors.New("no command")
	}
	if err == nil {
		c := &command{port: p, stream: stream, stdin: make(chan []byte, 2), ended: make(chan struct{})}
		err = c.start(want)
	}
	if err != nil {
		p.answer(wire.Exit, stream, wire.Answer{Error: err.Error()})
	}
}

func (p *port) answer(kind wire.Kind, stream uint32, a wire.Answer) {
	text, err := json.Marshal(a)
	if err != nil {
		panic(err) // of two numbers and a string
	}
	p.send(kind, stream, text)
}

func (c *command) start(want wire.Command) error {
	if err := c.port.programs.refresh(); err != nil {
		return err
	}
	c.cmd = exec.Command(c.port.programs.find(want.Args[0]), want.Args[1:]...)
	c.cmd.Env = append(os.Environ(), want.Env...)
	c.cmd.Dir = "/root"
	if want.Dir != "" {
		c.cmd.Dir = want.Dir
	}
	c.cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	c.cmd.WaitDelay = outputDelay
	c.cmd.Stdout = &output{c, wire.Stdout}
	c.cmd.Stderr = &output{c, wire.Stderr}
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := c.cmd.Start(); err != nil {
		return err
	}
	c.port.mu.Lock()
	c.port.commands[c.stream] = c
	c.port.mu.Unlock()
	c.port.answer(wire.Started, c.stream, wire.Answer{PID: c.cmd.Process.Pid})
	go c.feed(stdin)
	go c.wait()
	return nil
}

// feed gives the command its input. Input that it does not want is taken all
// the same: the host finds out by how it ends.
func (c *command) feed(stdin io.WriteCloser) {
	for {
		select {
		case b := <-c.stdin:
			if b == nil {
				_ = stdin.Close()
				continue
			}
			_, _ = stdin.Write(b)
			c.port.send(wire.StdinTaken, c.stream, nil)
		case <-c.ended:
			return
		}
	}
}

func (c *command) wait() {
	err := c.cmd.Wait()
	close(c.ended)
	c.port.remove(c.stream)
	var a wire.Answer
	if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		a.Code = status.ExitStatus()
		if status.Signaled() {
			a.Signal = int(status.Signal())
		}
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		a.Error = err.Error()
	}
	c.port.answer(wire.Exit, c.stream, a)
}

func (c *command) handle(m wire.Message) {
	switch m.Kind {
	case wire.Stdin:
		c.input(m.Payload)
	case wire.StdinEnd:
		c.input(nil)
	case wire.Signal:
		if len(m.Payload) == 1 {
			_ = c.cmd.Process.Signal(unix.Signal(m.Payload[0]))
		}
	case wire.Kill:
		c.kill()
	default: // not for a command
	}
}

func (c *command) input(b []byte) {
	select {
	case c.stdin <- b:
	case <-c.ended:
	}
}

func (c *command) kill() { _ = unix.Kill(-c.cmd.Process.Pid, unix.SIGKILL) }

// An output sends what a command prints.
type output struct {
	c    *command
	kind wire.Kind
}

func (o *output) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		n := min(len(rest), wire.MaxPayload)
		if !o.c.port.send(o.kind, o.c.stream, rest[:n]) {
			return len(b) - len(rest), io.ErrClosedPipe
		}
		rest = rest[n:]
	}
	return len(b), nil
}
