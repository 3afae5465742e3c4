// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // a connection failed, or something was left
	exitUsage  = 2
)

func main() {
	if usesKernel(os.Args) {
		if err := afsmc.WithoutPreemption(); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(exitFailed)
		}
	}
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, usage())
		return exitUsage
	}
	var err error
	switch args[0] {
	case "serve":
		err = serveCommand(ctx, args[1:], os.Stdout)
	case "dial":
		err = dialCommand(ctx, args[1:], os.Stdout)
	default:
		err = usageError{usage()}
	}
	if ue := (usageError{}); errors.As(err, &ue) || errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, err)
		return exitUsage
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "peer:", err)
		return exitFailed
	}
	return exitOK
}

type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

func usage() string {
	return "usage: peer serve|dial [flags]\nscripts of dial:\n" + script.Usage()
}

// options are the flags of both roles.
type options struct {
	stack  string
	engine engineOptions
	kernel kernelOptions
	// timeout bounds each script, and the making of its connections.
	timeout time.Duration
}

func (o *options) register(f *flag.FlagSet) {
	f.StringVar(&o.stack, "stack", "engine", "engine, kernel or tcp")
	f.DurationVar(&o.timeout, "timeout", 5*time.Minute, "limit for one script on all its connections")
	o.engine.register(f)
	o.kernel.register(f)
}

// open makes the stack; the output gets its events.
func (o *options) open(out *output) (stack, error) {
	switch o.stack {
	case "engine":
		return openEngine(&o.engine, out)
	case "kernel":
		return &kernelStack{o: o.kernel}, nil
	case "tcp":
		return tcpStack{}, nil
	}
	return nil, usageError{fmt.Sprintf("-stack %q: want engine, kernel or tcp", o.stack)}
}

func serveCommand(ctx context.Context, args []string, w io.Writer) error {
	f := flag.NewFlagSet("peer serve", flag.ContinueOnError)
	var s server
	s.register(f)
	if err := f.Parse(args); err != nil {
		return err
	}
	out := newOutput(w)
	st, err := s.open(out)
	if err != nil {
		return err
	}
	return s.run(ctx, st, out)
}

func dialCommand(ctx context.Context, args []string, w io.Writer) error {
	f := flag.NewFlagSet("peer dial", flag.ContinueOnError)
	var d dialer
	var do string
	d.register(f)
	f.StringVar(&do, "do", "echo", "scripts, NAME[:KEY=VALUE]..., separated by commas")
	if err := f.Parse(args); err != nil {
		return err
	}
	for text := range strings.SplitSeq(do, ",") {
		s, err := script.Parse(text)
		if err != nil {
			return usageError{err.Error()}
		}
		d.specs = append(d.specs, s)
	}
	out := newOutput(w)
	st, err := d.open(out)
	if err != nil {
		return err
	}
	return d.run(ctx, st, out)
}
