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
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
)

func main() {
	os.Exit(terminal.Command{
		Name: "demo-k8s", Limit: 25 * time.Minute, Patience: 3 * time.Minute,
		New: func(t *terminal.Terminal) terminal.Demo { return &demo{Terminal: t} },
	}.Main(os.Args[1:], os.Stdout, os.Stderr))
}

// demo is one run. It is owned by one goroutine.
type demo struct {
	*terminal.Terminal

	dir     string // of the images
	cluster *lab.Cluster
}

// Down implements [terminal.Demo].
func (d *demo) Down(ctx context.Context) error {
	var err error
	if d.cluster != nil {
		err = d.cluster.Down(ctx)
	}
	if d.dir != "" {
		err = errors.Join(err, os.RemoveAll(d.dir))
	}
	return err
}
