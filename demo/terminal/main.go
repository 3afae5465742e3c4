// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// cleanTimeout is for removing everything.
const cleanTimeout = time.Minute

// Command is a demo on a cluster, as a program.
type Command struct {
	Name string
	// Limit ends a demo in which something hangs, and Patience is that of its Terminal.
	Limit, Patience time.Duration
	// New makes the demo, which shows by the terminal.
	New func(t *Terminal) Demo
}

// Demo is what is shown. Its methods are called one after the other.
type Demo interface {
	Parts() []Part
	// Down removes all that the parts made, also those that failed.
	Down(ctx context.Context) error
}

// Part is a part of a demo. An error ends the demo.
type Part struct {
	Title string
	Do    func(ctx context.Context) error
}

// Main plays the demo, removes what it made, and returns the exit code. With -keep it waits in between.
func (c Command) Main(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet(c.Name, flag.ContinueOnError)
	fs.SetOutput(stderr)
	keep := fs.Bool("keep", false, "leave the cluster running until Ctrl-C")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil || fs.NArg() > 0 {
		return transcript.ExitUsage
	}
	if os.Geteuid() != 0 {
		fmt.Fprintf(stderr, "%s: needs root, to make namespaces: sudo make %s\n", c.Name, c.Name)
		return transcript.ExitFailed
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", c.Name, err)
		return transcript.ExitFailed
	}
	defer stop()
	t := &Terminal{Transcript: transcript.New(stdout), Patience: c.Patience}
	d := c.New(t)
	err = c.play(ctx, t, d.Parts())
	interrupted := context.Cause(ctx)
	if err != nil && interrupted == nil {
		t.Check("the demo is complete", false, "%v", err)
	}
	if *keep && interrupted == nil && t.P != nil {
		fmt.Fprintf(stdout, "\nkept until Ctrl-C:\n  export KUBECONFIG=%s\n", t.P.Lab.Kubeconfig())
		<-ctx.Done()
	}
	clean(t, d)
	return t.Summary(interrupted)
}

func (c Command) play(ctx context.Context, t *Terminal, parts []Part) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Limit, fmt.Errorf("the demo took longer than %v", c.Limit))
	defer cancel()
	for _, p := range parts {
		t.Title("%s", p.Title)
		if err := p.Do(ctx); err != nil {
			return fmt.Errorf("%s: %w", p.Title, err)
		}
	}
	return nil
}

// clean removes everything. It is never interrupted.
func clean(t *Terminal, d Demo) {
	ctx, cancel := context.WithTimeout(context.Background(), cleanTimeout)
	defer cancel()
	if t.Failed() && t.P != nil {
		fmt.Fprintf(t.Out, "\nThe cluster, to find out why:\n%s", t.P.Diagnose(ctx))
	}
	if err := d.Down(ctx); err != nil {
		t.Check("the cluster is removed", false, "%v", err)
	}
}
