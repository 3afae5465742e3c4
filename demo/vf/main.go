// SPDX-License-Identifier: Apache-2.0

// Command demo-vf shows in two guests with emulated SR-IOV NICs how pods get RoCE
// VFs of their own, and what that costs.
//
//	make demo-vf                 a pod on each node, redis over SMC-R on VFs, and a VF that is lost
//	make demo-vf ARGS=--times    ADD and DEL, beside the reference plugin's
//
// What follows "g0$" is a command that was run on that node, with its real output.
// Every statement is a check; one that does not hold ends the demo with exit code
// 1. It leaves nothing behind.
//
// # Limitations
//
// A pod is a network namespace here, and the container runtime is libcni. The NICs
// are igb as QEMU emulates it, with soft RoCE on their VFs, and the processors
// are emulated too: times are good for ratios only.
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// demoTimeout ends a demo in which something hangs.
const demoTimeout = 8 * time.Minute

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("demo-vf", flag.ContinueOnError)
	fs.SetOutput(stderr)
	times := fs.Bool("times", false, "measure ADD and DEL instead")
	pods := fs.Int("pods", 40, "how many pods are measured of each kind")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil || fs.NArg() > 0 || *pods < 1 {
		return transcript.ExitUsage
	}
	return transcript.Play("demo-vf", stdout, stderr, demoTimeout, func(ctx context.Context, t *transcript.Transcript) (err error) {
		d := &demo{Transcript: t}
		if *times {
			err = d.times(ctx, *pods)
		} else {
			err = d.show(ctx)
		}
		if d.lab != nil {
			err = errors.Join(err, d.lab.Close())
		}
		return err
	})
}

// demo is one run. It is owned by one goroutine.
type demo struct {
	*transcript.Transcript

	lab *lab.Lab
}
