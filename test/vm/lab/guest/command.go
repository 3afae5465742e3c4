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

// outputDelay is how long the output of a command is read after its end, for those
// that it left: a daemon may hold the pipe for ever. What is in the pipe by then is
// read all the same.
const outputDelay = time.Second

// A command is a process that the host asked for.
type command struct {
	port   *port
	stream uint32
	cmd    *exec.Cmd
	stdin  chan []byte // nil ends it; the host sends one at a time
	ended  chan struct{}

	outputs [2]*output
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
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := c.run(); err != nil {
		_ = stdin.Close()
		return err
	}
	c.port.mu.Lock()
	c.port.commands[c.stream] = c
	c.port.mu.Unlock()
	c.port.answer(wire.Started, c.stream, wire.Answer{PID: c.cmd.Process.Pid})
	for _, o := range c.outputs {
		go o.copy()
	}
	go c.feed(stdin)
	go c.wait()
	return nil
}

// run starts the process, with a pipe for each output.
func (c *command) run() error {
	var theirs [len(c.outputs)]*os.File
	defer func() {
		for _, f := range theirs {
			_ = f.Close() // the process has its own
		}
	}()
	for i, kind := range [...]wire.Kind{wire.Stdout, wire.Stderr} {
		ours, end, err := os.Pipe()
		if err != nil {
			c.closeOutputs()
			return err
		}
		c.outputs[i], theirs[i] = &output{c: c, kind: kind, pipe: ours, copied: make(chan struct{})}, end
	}
	c.cmd.Stdout, c.cmd.Stderr = theirs[0], theirs[1]
	if err := c.cmd.Start(); err != nil {
		c.closeOutputs()
		return err
	}
	return nil
}

func (c *command) closeOutputs() {
	for _, o := range c.outputs {
		if o != nil {
			_ = o.pipe.Close()
		}
	}
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
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	delay := time.Now().Add(outputDelay)
	for _, o := range c.outputs {
		err = errors.Join(err, o.finish(delay))
	}
	close(c.ended)
	c.port.remove(c.stream)
	var a wire.Answer
	if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		a.Code = status.ExitStatus()
		if status.Signaled() {
			a.Signal = int(status.Signal())
		}
	}
	if err != nil {
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
	c      *command
	kind   wire.Kind
	pipe   *os.File
	copied chan struct{} // closed when copy has ended
	err    error         // of copy
}

// copy sends what comes, until the end or the pipe's deadline.
func (o *output) copy() {
	defer close(o.copied)
	_, o.err = io.Copy(o, o.pipe)
	if !errors.Is(o.err, os.ErrDeadlineExceeded) {
		_ = o.pipe.Close() // a command whose output nobody takes is not to wait for that
	}
}

// finish ends the output of a command that has ended: after some delay, for what
// others print to it, and with what is in the pipe.
func (o *output) finish(delay time.Time) error {
	_ = o.pipe.SetReadDeadline(delay) // it fails if copy has closed the pipe
	<-o.copied
	if !errors.Is(o.err, os.ErrDeadlineExceeded) {
		return o.err
	}
	return errors.Join(o.drain(), o.pipe.Close())
}

// drain sends what is in the pipe, and not what comes later.
func (o *output) drain() error {
	raw, err := o.pipe.SyscallConn()
	if err != nil {
		return err
	}
	var left int
	var failed error
	err = raw.Control(func(fd uintptr) { left, failed = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	if err = errors.Join(err, failed, o.pipe.SetReadDeadline(time.Time{})); err != nil {
		return err
	}
	_, err = io.CopyN(o, o.pipe, int64(left))
	return err
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
