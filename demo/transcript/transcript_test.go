// SPDX-License-Identifier: Apache-2.0

package transcript_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// A demo that fails, or takes too long, is not complete, and says why.
func TestPlay(t *testing.T) {
	for _, tc := range []struct {
		name string
		play func(context.Context, *transcript.Transcript) error
		code int
		want string
	}{
		{"holds", func(context.Context, *transcript.Transcript) error { return nil }, 0, "0 checks, all hold"},
		{"fails", func(context.Context, *transcript.Transcript) error { return errors.New("no power") }, transcript.ExitFailed, "is complete: no power"},
		{"too long", func(ctx context.Context, _ *transcript.Transcript) error { <-ctx.Done(); return ctx.Err() }, transcript.ExitFailed, "is complete: the demo took longer than 50ms"},
		{"interrupted", func(ctx context.Context, _ *transcript.Transcript) error {
			if err := unix.Kill(os.Getpid(), unix.SIGTERM); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}, transcript.ExitInterrupted, "interrupted after 0 s: terminated signal received"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			limit := 50 * time.Millisecond
			if tc.code == transcript.ExitInterrupted {
				limit = time.Minute
			}
			var stdout, stderr strings.Builder
			if code := transcript.Play("demo", &stdout, &stderr, limit, tc.play); code != tc.code || !strings.Contains(stdout.String(), tc.want) || stderr.Len() > 0 {
				t.Errorf("exit code %d, want %d with %q:\n%s%s", code, tc.code, tc.want, stdout.String(), stderr.String())
			}
		})
	}
}

func TestTranscript_Summary(t *testing.T) {
	for _, tc := range []struct {
		name        string
		holds       []bool
		interrupted error
		code        int
		want        string
	}{
		{"all hold", []bool{true, true}, nil, 0, "\n== Part 1  (S s)\n\n  [ok] it is so: because\n  [ok] it is so: because\n\n2 checks, all hold (S s)\n"},
		{"one does not", []bool{false, true}, nil, transcript.ExitFailed, "\n== Part 1  (S s)\n\n  [NOT SO] it is so: because\n  [ok] it is so: because\n\n" +
			"1 of 2 checks do not hold (S s):\n  it is so\n"},
		{"interrupted", nil, errors.New("a signal"), transcript.ExitInterrupted, "\n== Part 1  (S s)\n\n\ninterrupted after S s: a signal\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b strings.Builder
			tr := transcript.New(&b)
			tr.Title("Part %d", 1)
			for _, h := range tc.holds {
				tr.Check("it is so", h, "because\n")
			}
			if code := tr.Summary(tc.interrupted); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
			got := regexp.MustCompile(`\d+ s`).ReplaceAllString(b.String(), "S s")
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("printed (-want +got):\n%s", diff)
			}
		})
	}
}

// A reader of the output that goes away interrupts a demo, and nobody else to whom the process writes.
func TestInterruptible_readers(t *testing.T) {
	const child = "KUBE_SMCR_TEST_READER_GOES"
	if os.Getenv(child) != "" {
		os.Exit(writeUntilInterrupted())
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	if _, err := w.WriteString("x"); !errors.Is(err, unix.EPIPE) {
		t.Errorf("wrote to nobody: %v", err)
	}
	_ = w.Close()
	select {
	case <-ctx.Done():
		t.Error("interrupted by a pipe that is not the output")
	case <-time.After(50 * time.Millisecond):
	}

	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestInterruptible_readers$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = out.Close()
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != transcript.ExitInterrupted {
		t.Errorf("without a reader: %v, want exit code %d", err, transcript.ExitInterrupted)
	}
}

// writeUntilInterrupted writes to the output until that interrupts the process, for ten seconds at most.
func writeUntilInterrupted() int {
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		return transcript.ExitFailed
	}
	defer stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 10_000 {
		_, _ = os.Stdout.WriteString("x")
		select {
		case <-ctx.Done():
			return transcript.ExitInterrupted
		case <-tick.C:
		}
	}
	return transcript.ExitFailed
}
