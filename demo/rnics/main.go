// SPDX-License-Identifier: Apache-2.0

// Command demo-rdma shows what a platform team sees on nodes that have RDMA devices: a cluster with one
// node of this machine and two emulated ones with two soft RoCE devices of the kernel each, kube-smcr
// installed by Helm, redis on RNICs, a cable that is pulled under load and put back, and a node
// without RNICs that has software ones.
//
//	make demo-rdma
//	make demo-rdma KEEP=1      leave the cluster running until Ctrl-C
//
// What follows a dollar sign is a command that was run, with its real output.
// Every statement is a check; one that does not hold ends the demo with exit
// code 1. It leaves nothing behind.
//
// # Limitations
//
// The devices are soft RoCE (rxe) in guests that QEMU emulates: the verbs and the kernel are real, the speed is not.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

const (
	// demoTimeout ends a demo in which something hangs.
	demoTimeout = 12 * time.Minute
	// cleanTimeout is for removing everything.
	cleanTimeout = time.Minute
	// patience is for what Kubernetes does on emulated processors.
	patience = 2 * time.Minute
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("demo-rdma", flag.ContinueOnError)
	fs.SetOutput(stderr)
	keep := fs.Bool("keep", false, "leave the cluster running until Ctrl-C")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil || fs.NArg() > 0 {
		return transcript.ExitUsage
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(stderr, "demo-rdma: needs root, to make namespaces: sudo make demo-rdma")
		return transcript.ExitFailed
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "demo-rdma: %v\n", err)
		return transcript.ExitFailed
	}
	defer stop()
	d := &demo{Terminal: terminal.Terminal{Transcript: transcript.New(stdout), Patience: patience}}
	err = d.run(ctx)
	interrupted := ctx.Err() != nil
	if err != nil && !interrupted {
		d.Check("the demo is complete", false, "%v", err)
	}
	if *keep && !interrupted && d.cluster != nil {
		fmt.Fprintf(stdout, "\nkept until Ctrl-C:\n  export KUBECONFIG=%s\n", d.cluster.Kubeconfig())
		<-ctx.Done()
	}
	d.clean()
	return d.Summary(interrupted)
}

// demo is one run. It is owned by one goroutine.
type demo struct {
	terminal.Terminal

	dir     string // of the images
	cluster *guest.Cluster
}

// clean removes everything. It is never interrupted.
func (d *demo) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanTimeout)
	defer cancel()
	var err error
	if d.cluster != nil {
		if d.Failed() && d.P != nil {
			fmt.Fprintf(d.Out, "\nThe cluster, to find out why:\n%s", d.P.Diagnose(ctx))
		}
		err = d.cluster.Down(ctx)
	}
	if d.dir != "" {
		err = errors.Join(err, os.RemoveAll(d.dir))
	}
	if err != nil {
		d.Check("the cluster is removed", false, "%v", err)
	}
}
