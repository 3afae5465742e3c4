// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// Main is the main function of a comparison: with the argument [WorkerArg] the process
// is a worker, else it runs the comparison with its arguments and a context that a
// signal ends. It does not return.
func Main(program string, worker func(io.Reader, io.Writer) error, run func(context.Context, []string) error) {
	if len(os.Args) > 1 && os.Args[1] == WorkerArg {
		// The main process decides when a worker ends.
		signal.Ignore(os.Interrupt)
		os.Exit(status(os.Stderr, program, worker(os.Stdin, os.Stdout)))
	}
	// A bed may make namespaces and children on this thread. The death signal of a
	// child is tied to the thread that started it.
	runtime.LockOSThread()
	ctx, stop, err := transcript.Interruptible()
	if err == nil {
		err = run(ctx, os.Args[1:])
		stop()
	}
	os.Exit(status(os.Stderr, program, err))
}

// status says on w why a program ends, if there is a reason, and returns its exit
// code.
func status(w io.Writer, program string, err error) int {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		_, _ = fmt.Fprintf(w, "%s: %v\n", program, err) // nobody else could be told
		return 1
	}
	return 0
}
