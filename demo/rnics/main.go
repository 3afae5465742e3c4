// SPDX-License-Identifier: Apache-2.0

// Command demo-rdma shows what a platform team sees on nodes that have RDMA devices: a cluster with one
// node of this machine and two emulated ones with two soft RoCE devices of the kernel each, kube-smcr
// installed by Helm, redis on RNICs, a cable that is pulled under load and put back, pods that claim
// NICs of their own, and a node without RNICs that has software ones.
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
	"os"
	"time"

	"github.com/smcr-io/kube-smcr/demo/terminal"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

func main() {
	os.Exit(terminal.Command{
		Name: "demo-rdma", Limit: 12 * time.Minute,
		Patience: 2 * time.Minute, // with what Kubernetes does on emulated processors
		New:      func(t *terminal.Terminal) terminal.Demo { return &demo{Terminal: t} },
	}.Main(os.Args[1:], os.Stdout, os.Stderr))
}

// demo is one run. It is owned by one goroutine.
type demo struct {
	*terminal.Terminal

	dir     string // of the images
	cluster *guest.Cluster
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
