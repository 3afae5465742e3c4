// SPDX-License-Identifier: Apache-2.0

// Command demo-vm-kernel shows the kernel's own SMC-R as the datapath of pods, which no agent touches: a cluster with
// one node of this machine and two emulated ones whose kernels have SMC-R and two soft RoCE devices each, kube-smcr
// installed by Helm, and redis, unmodified, first on TCP, then by the agents, and then on the kernel's SMC-R, with
// what each of them does; agents that are deleted under load; a policy that ends what it no longer allows; and a pod in its node's
// network.
//
//	make demo-vm-kernel
//	make demo-vm-kernel KEEP=1      leave the cluster running until Ctrl-C
//
// What follows a dollar sign is a command that was run, with its real output.
// Every statement is a check; one that does not hold ends the demo with exit
// code 1. It leaves nothing behind.
//
// # Limitations
//
// The devices are soft RoCE (rxe) in guests that QEMU emulates: kernels, verbs and policies are real. The numbers are
// for comparison with one another in the same guests.
package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

func main() {
	os.Exit(terminal.Command{
		Name: "demo-vm-kernel", Limit: 15 * time.Minute,
		Patience: 2 * time.Minute, // with what Kubernetes does on emulated processors
		New:      func(t *terminal.Terminal) terminal.Demo { return &demo{Terminal: t, numbers: map[string]rate{}} },
	}.Main(os.Args[1:], os.Stdout, os.Stderr))
}

// demo is one run. It is owned by one goroutine.
type demo struct {
	*terminal.Terminal

	dir     string // of the images
	cluster *guest.Cluster
	numbers map[string]rate // by the way of the bytes
	seen    terminal.Load
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
