// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// A Process is a command that runs in a guest. Its output is kept until somebody reads it, so a
// command never waits for a reader.
type Process struct {
	// Stdin is the command's input. The caller closes it.
	Stdin io.WriteCloser
	// Stdout and Stderr are the command's output.
	Stdout, Stderr io.Reader
	// PID is the command's process ID in the guest.
	PID int

	link    *link
	stream  uint32
	command string

	stdout, stderr pipe
	taken          chan struct{} // of capacity 1: the guest has taken the last input
	started        chan struct{}
	startOnce      sync.Once
	done           chan struct{}

	mu     sync.Mutex // guards what follows
	cause  error      // why the command was killed
	result error      // how the command ended, once done is closed
	closed bool
}

// Start starts a command in the guest and returns when the command runs. When ctx ends, the command
// and its process group are killed.
func (g *Guest) Start(ctx context.Context, command ...string) (*Process, error) {
	return g.StartIn(ctx, "", nil, command...)
}

// StartIn is Start in a directory of the guest, with variables of the environment besides those
// that all commands have.
func (g *Guest) StartIn(ctx context.Context, dir string, env []string, command ...string) (*Process, error) {
	l, err := g.connected(ctx)
	if err != nil {
		return nil, err
	}
	p := &Process{
		command: strings.Join(command, " "), taken: make(chan struct{}, 1),
		started: make(chan struct{}), done: make(chan struct{}),
	}
	for _, out := range []*pipe{&p.stdout, &p.stderr} {
		out.changed.L, out.limit = &out.mu, maxBuffered
	}
	p.Stdin, p.Stdout, p.Stderr = &input{p}, &p.stdout, &p.stderr
	if err := l.open(p, wire.Command{Args: command, Env: env, Dir: dir}); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", g.Name(), p.command, err)
	}
	stop := context.AfterFunc(ctx, func() { p.kill(ctx) })
	go func() {
		<-p.done
		stop()
	}()
	select {
	case <-p.started:
		return p, nil
	case <-p.done:
		if p.PID != 0 {
			return p, nil
		}
		return nil, p.Wait()
	}
}

// kill has the guest kill the command, whose context has ended. If the guest does not say in time
// that the command ended, kill ends the Process without the guest.
func (p *Process) kill(ctx context.Context) {
	cause := fmt.Errorf("%s: %s: %w", p.link.guest.Name(), p.command, context.Cause(ctx))
	p.killFor(cause)
	select {
	case <-p.done:
	case <-time.After(killTimeout):
		p.mu.Lock()
		p.cause = nil
		p.mu.Unlock()
		p.end(fmt.Errorf("%w; killed, and not ended %v later: the kernel holds it", cause, killTimeout))
	}
}

func (p *Process) killFor(cause error) {
	p.mu.Lock()
	first := p.cause == nil
	if first {
		p.cause = cause
	}
	p.mu.Unlock()
	if first {
		go p.link.send(wire.Kill, p.stream, nil) // send blocks if the guest does not read
	}
}

// Signal sends a signal to the command.
func (p *Process) Signal(s unix.Signal) error {
	select {
	case <-p.done:
		return fmt.Errorf("%s: %s has ended: %w", p.link.guest.Name(), p.command, unix.ESRCH)
	default:
		p.link.send(wire.Signal, p.stream, []byte{byte(s)})
		return nil
	}
}

// Wait waits for the end of the command. The error is an *ExitError if the command ended by itself
// with another exit code than 0.
func (p *Process) Wait() error {
	<-p.done
	return p.result
}

// Stream copies stdin, nil for none, to the command and the command's output to the two writers
// while the command runs, never to both at a time, and waits for the command's end.
func (p *Process) Stream(stdin io.Reader, stdout, stderr io.Writer) error {
	var copies sync.WaitGroup
	var mu sync.Mutex
	copies.Go(func() { _, _ = io.Copy(&lockedWriter{&mu, stdout}, p.Stdout) })
	copies.Go(func() { _, _ = io.Copy(&lockedWriter{&mu, stderr}, p.Stderr) })
	go func() { // reading stdin may take for ever: nobody waits for this goroutine
		if stdin != nil {
			_, _ = io.Copy(p.Stdin, stdin)
		}
		_ = p.Stdin.Close()
	}()
	copies.Wait()
	return p.Wait()
}

// A lockedWriter is a writer that shares its lock with another writer.
type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w.Write(b)
}

// Done returns a channel that is closed when the command has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

func (p *Process) handle(m wire.Message) {
	switch m.Kind {
	case wire.Started:
		var a wire.Answer
		_ = json.Unmarshal(m.Payload, &a) // our own program wrote it, in the guest
		p.PID = a.PID
		p.startOnce.Do(func() { close(p.started) })
	case wire.Stdout:
		p.output(&p.stdout, m.Payload)
	case wire.Stderr:
		p.output(&p.stderr, m.Payload)
	case wire.StdinTaken:
		select {
		case p.taken <- struct{}{}:
		default:
		}
	case wire.Exit:
		var a wire.Answer
		_ = json.Unmarshal(m.Payload, &a)
		p.end(p.exit(a))
	default: // a message that only guests get
	}
}

// output keeps output of the command. Beyond a limit the command is killed.
func (p *Process) output(to *pipe, b []byte) {
	if !to.write(b) {
		p.killFor(fmt.Errorf("%s: %s: it printed more than %d MiB that nobody read", p.link.guest.Name(), p.command, to.limit>>20))
	}
}

func (p *Process) exit(a wire.Answer) error {
	g := p.link.guest.Name()
	switch {
	case a.Error != "":
		return fmt.Errorf("%s: %s: %s", g, p.command, a.Error)
	case a.Signal != 0 || a.Code != 0:
		return &ExitError{Guest: g, Command: p.command, Code: a.Code, Signal: a.Signal}
	default:
		return nil
	}
}

// end notes that the command has ended. Only the first call counts; and if the command was killed,
// the reason for that is the result, in place of the signal.
func (p *Process) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	p.result = err
	if p.cause != nil {
		p.result = p.cause
	}
	p.stdout.close()
	p.stderr.close()
	close(p.done)
}

// An input is the standard input of a command.
type input struct{ p *Process }

// Write sends one message at a time, and the next one when the guest has taken the one before.
func (i *input) Write(b []byte) (int, error) {
	for sent := 0; sent < len(b); {
		n := min(len(b)-sent, wire.MaxPayload)
		select {
		case <-i.p.done:
			return sent, io.ErrClosedPipe
		default:
		}
		i.p.link.send(wire.Stdin, i.p.stream, b[sent:sent+n])
		select {
		case <-i.p.taken:
		case <-i.p.done:
			return sent, io.ErrClosedPipe
		}
		sent += n
	}
	return len(b), nil
}

// Close ends the command's input.
func (i *input) Close() error {
	select {
	case <-i.p.done:
	default:
		i.p.link.send(wire.StdinEnd, i.p.stream, nil)
	}
	return nil
}

// A pipe keeps what is written until it is read.
type pipe struct {
	mu      sync.Mutex
	changed sync.Cond
	buf     bytes.Buffer
	limit   int
	ended   bool
}

// write reports whether there was room.
func (p *pipe) write(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.buf.Len()+len(b) > p.limit {
		return false
	}
	p.buf.Write(b)
	p.changed.Broadcast()
	return true
}

func (p *pipe) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.changed.Broadcast()
}

// Read waits for something to read.
func (p *pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.buf.Len() == 0 {
		if p.ended {
			return 0, io.EOF
		}
		p.changed.Wait()
	}
	return p.buf.Read(b)
}

// Exited reports whether an error says that a command ended with that code.
func Exited(err error, code int) bool {
	var exit *ExitError
	return errors.As(err, &exit) && exit.Signal == 0 && exit.Code == code
}
