// SPDX-License-Identifier: Apache-2.0

package transcript

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Exit codes of a demo.
const (
	ExitFailed      = 1
	ExitUsage       = 2
	ExitInterrupted = 130
)

// Transcript is the output of one demo. It is owned by one goroutine.
type Transcript struct {
	Out    io.Writer
	began  time.Time
	checks int
	failed []string
}

// New begins a transcript.
func New(out io.Writer) *Transcript { return &Transcript{Out: out, began: time.Now()} }

// Title begins a part.
func (t *Transcript) Title(format string, args ...any) {
	fmt.Fprintf(t.Out, "\n== %s  (%.0f s)\n\n", fmt.Sprintf(format, args...), time.Since(t.began).Seconds())
}

// Say prints a line.
func (t *Transcript) Say(format string, args ...any) {
	fmt.Fprintf(t.Out, "%s\n", fmt.Sprintf(format, args...))
}

// Check notes whether a statement holds, and says what shows it.
func (t *Transcript) Check(what string, holds bool, format string, args ...any) {
	t.checks++
	verdict := "ok"
	if !holds {
		verdict = "NOT SO"
		t.failed = append(t.failed, what)
	}
	fmt.Fprintf(t.Out, "  [%s] %s: %s\n", verdict, what, strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// Failed reports whether a statement does not hold.
func (t *Transcript) Failed() bool { return len(t.failed) > 0 }

// Summary prints the result and returns the exit code. What interrupted the demo is nil if nothing did.
func (t *Transcript) Summary(interrupted error) int {
	seconds := time.Since(t.began).Seconds()
	switch {
	case interrupted != nil:
		fmt.Fprintf(t.Out, "\ninterrupted after %.0f s: %v\n", seconds, interrupted)
		return ExitInterrupted
	case !t.Failed():
		fmt.Fprintf(t.Out, "\n%d checks, all hold (%.0f s)\n", t.checks, seconds)
		return 0
	}
	fmt.Fprintf(t.Out, "\n%d of %d checks do not hold (%.0f s):\n  %s\n", len(t.failed), t.checks, seconds, strings.Join(t.failed, "\n  "))
	return ExitFailed
}

// Play plays a demo, for so long at most, and returns its exit code. The name is what an error that keeps it from beginning is
// told with.
func Play(name string, stdout, stderr io.Writer, limit time.Duration, play func(context.Context, *Transcript) error) int {
	ctx, stop, err := Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return ExitFailed
	}
	defer stop()
	limited, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the demo took longer than %v", limit))
	defer cancel()
	t := New(stdout)
	err = play(limited, t)
	interrupted := context.Cause(ctx)
	if err != nil && interrupted == nil {
		if limited.Err() != nil {
			err = errors.Join(context.Cause(limited), err)
		}
		t.Check("the demo is complete", false, "%v", err)
	}
	return t.Summary(interrupted)
}

// errNobodyReads is why a demo ends whose output is gone.
var errNobodyReads = errors.New("nobody reads the output")

// Interruptible returns a context that a signal ends, with it as the cause, and the end of the parent: who
// stops "go run" or make by a signal may reach the parent only. A reader of the output
// that goes away ends it too, so that a program can still remove what it made. Other ends of pipes and
// connections may go away.
func Interruptible() (context.Context, context.CancelFunc, error) {
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGTERM), 0, 0, 0); err != nil {
		return nil, nil, fmt.Errorf("ask for a signal at the parent's end: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-broken:
				if outputIsGone() {
					cancel(errNobodyReads)
				}
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		stop()
		signal.Stop(broken)
	}, nil
}

// outputIsGone reports whether nobody reads what this process writes to its output.
func outputIsGone() bool {
	fds := []unix.PollFd{{Fd: int32(unix.Stdout)}, {Fd: int32(unix.Stderr)}}
	if _, err := unix.Poll(fds, 0); err != nil {
		return false
	}
	return (fds[0].Revents|fds[1].Revents)&(unix.POLLERR|unix.POLLHUP) != 0
}
