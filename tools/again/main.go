// SPDX-License-Identifier: Apache-2.0

// The again command is "go test" that runs each test which failed once more, alone.
// Most tests here look at real time, and on a machine that stands still for a second a test that
// is right may fail. If the test passes alone, the command ends well and names it:
//
//	FLAKY	github.com/smcr-io/kube-smcr/pkg/smcr	TestStack_closes: failed, and passed when it ran again alone
//
// Such a test, or what it tests, has a defect that is mended next; but it does not keep back a change
// that has nothing to do with it. The output of the first run stays in the output. A test that draws a seed
// ([testenv.Seed]) gets the same seed again: with another one it could miss the defect that it found.
//
// Nothing runs again after a data race, a panic, a time-out or a package that does not build, nor if many
// tests fail. Of a test that took minutes, as the scenarios of a cluster do, only the subtests that failed
// run again.
//
//	go run ./tools/again -race -count=1 ./pkg/smcr ./pkg/sdp
//
// Flags are those of go test in the form -name=value, and packages come behind them.
//
// While other tests run beside the command, a test that failed would not be alone. With AGAIN_LATER=file the command
// writes such tests to the file instead, and ends well. When the others have ended,
//
//	go run ./tools/again -later=file
//
// runs all tests of the file again, and says how that ended.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// endAfter is how long go test may take to end when it is told to.
const endAfter = 10 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "again:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) error {
	if len(args) == 1 {
		if file, ok := strings.CutPrefix(args[0], "-later="); ok {
			return later(ctx, out, file)
		}
	}
	flags := args
	for i, a := range args {
		if !strings.HasPrefix(a, "-") {
			flags = args[:i]
			break
		}
	}
	var said bytes.Buffer
	err := goTest(ctx, io.MultiWriter(out, &said), args)
	if err == nil || ctx.Err() != nil {
		return err
	}
	failed, why := failures(said.String())
	if why != "" {
		return fmt.Errorf("%w; nothing runs again: %s", err, why)
	}
	for i := range failed {
		failed[i].Flags = flags
	}
	if file := os.Getenv(laterEnv); file != "" {
		return put(out, file, failed)
	}
	return again(ctx, out, failed)
}

// again runs tests that failed, each alone, until one fails again.
func again(ctx context.Context, out io.Writer, failed []failure) error {
	for _, f := range failed {
		fmt.Fprintf(out, "again: %s of %s, alone\n", &f, f.Pkg)
		var env []string
		if f.Seed != "" {
			env = append(env, testenv.SeedEnv+"="+f.Seed)
		}
		if err := goTest(ctx, out, append(f.Flags[:len(f.Flags):len(f.Flags)], "-count=1", "-run="+f.pattern(), f.Pkg), env...); err != nil {
			return fmt.Errorf("%s failed twice: %w", f.Pkg, err)
		}
		fmt.Fprintf(out, "FLAKY\t%s\t%s: failed, and passed when it ran again alone\n", f.Pkg, &f)
	}
	return nil
}

func goTest(ctx context.Context, out io.Writer, args []string, env ...string) error {
	c := exec.CommandContext(ctx, "go", append([]string{"test"}, args...)...)
	c.Stdout, c.Stderr = out, out
	c.Env = append(os.Environ(), env...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = endAfter
	err := c.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("go test: %w", err)
	}
	return err
}
