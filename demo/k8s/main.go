// SPDX-License-Identifier: Apache-2.0

// Command demo-k8s shows what a user of Kubernetes sees: a cluster of three
// nodes on this machine, kube-smcr installed by Helm, redis and nginx as pods
// that opt in by an annotation, and what becomes of their connections.
//
//	make demo-k8s
//	make demo-k8s KEEP=1      leave the cluster running until Ctrl-C
//
// What follows a dollar sign is a command that was run, with its real output.
// Every statement is a check; one that does not hold ends the demo with exit
// code 1. It leaves nothing behind.
//
// # Where the figures come from
//
// The agents say how many connections were on SMC-R, and how many bytes went
// through RDMA. Bytes by TCP are what passed the client pod's interface in both
// directions, headers included: RDMA goes from node to node, and not that way.
//
// # Limitations
//
// The nodes share two cores, so speed says little here: make demo and make
// bench measure it.
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
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
)

const (
	// demoTimeout ends a demo in which something hangs.
	demoTimeout = 8 * time.Minute
	// cleanTimeout is for removing everything.
	cleanTimeout = time.Minute
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("demo-k8s", flag.ContinueOnError)
	fs.SetOutput(stderr)
	keep := fs.Bool("keep", false, "leave the cluster running until Ctrl-C")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil || fs.NArg() > 0 {
		return transcript.ExitUsage
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(stderr, "demo-k8s: needs root, to make namespaces: sudo make demo-k8s")
		return transcript.ExitFailed
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "demo-k8s: %v\n", err)
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
	cluster *lab.Cluster
}

// clean removes everything. It is never interrupted.
func (d *demo) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanTimeout)
	defer cancel()
	var err error
	if d.cluster != nil {
		if d.Failed() {
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
