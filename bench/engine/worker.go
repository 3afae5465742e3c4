// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"runtime/pprof"
	"slices"

	"github.com/smcr-io/kube-smcr/bench/load"
)

// WorkerArg is the first argument of a program as a worker.
const WorkerArg = "worker"

// Answer is a worker's answer. State is the program's own.
type Answer[State any] struct {
	Err    string      `json:"err,omitempty"`
	Result load.Result `json:"result"`
	State  State       `json:"state"`
}

// Serve obeys requests until the input ends.
func Serve[Request, State any](in io.Reader, out io.Writer, do func(Request) (Answer[State], error)) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, lineLimit)
	enc := json.NewEncoder(out)
	for lines.Scan() {
		var req Request
		if err := json.Unmarshal(lines.Bytes(), &req); err != nil {
			return err
		}
		answer, err := do(req)
		if err != nil {
			answer.Err = err.Error()
		}
		if err := enc.Encode(answer); err != nil {
			return err
		}
	}
	return lines.Err()
}

// A GoneError is that a worker cannot be reached. Its last words may say why.
type GoneError struct{ Err error }

// Error implements error.
func (e *GoneError) Error() string { return e.Err.Error() }

// Unwrap returns what happened to the pipe.
func (e *GoneError) Unwrap() error { return e.Err }

// Ask runs one request in a worker: in is its standard input, out its output.
func Ask[Request, State any](in io.Writer, out *bufio.Reader, req Request) (answer Answer[State], err error) {
	b, err := json.Marshal(req)
	if err != nil {
		return answer, err
	}
	if _, err := in.Write(append(b, '\n')); err != nil {
		return answer, &GoneError{err}
	}
	line, err := out.ReadBytes('\n')
	if err != nil {
		return answer, &GoneError{err}
	}
	if err := json.Unmarshal(line, &answer); err != nil {
		return answer, err
	}
	if answer.Err != "" {
		return answer, errors.New(answer.Err)
	}
	return answer, nil
}

// Profile is a CPU profile of this process. The zero value is ready.
type Profile struct{ file *os.File }

// Set begins a profile in a file, or ends the one that runs.
func (p *Profile) Set(file string) error {
	if p.file != nil {
		pprof.StopCPUProfile()
		err := p.file.Close()
		p.file = nil
		return err
	}
	if file == "" {
		return nil
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	p.file = f
	return pprof.StartCPUProfile(f)
}

// Opened is what a worker has open. The zero value is ready.
type Opened struct {
	Profile Profile
	Held    load.Held // connections of both sides that stay open
	closes  []func() error
}

// Add notes how something is closed that was opened after all before it.
func (o *Opened) Add(closing func() error) { o.closes = append(o.closes, closing) }

// Serve answers the connections of a listener until Close.
func (o *Opened) Serve(l net.Listener) {
	o.Add(l.Close)
	go load.Serve(l, &o.Held)
}

// Close closes everything, the newest first.
func (o *Opened) Close() error {
	errs := []error{o.Profile.Set("")}
	_ = o.Held.Close() // the other side may have ended first
	for _, f := range slices.Backward(o.closes) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// ListenTCP listens for plain TCP, which the kernel must not make another protocol.
func ListenTCP(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	return lc.Listen(ctx, "tcp", addr)
}

// DialTCP connects by plain TCP.
func DialTCP(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	return d.DialContext(ctx, "tcp", addr)
}
