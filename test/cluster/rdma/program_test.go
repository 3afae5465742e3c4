// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"io"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// hostPort is where programs of nodes serve, outside of pods.
const hostPort = 7100

// counters are those of a node's kernel's SMC.
func (s *suite) counters(n *guest.Node) smcnl.Counters {
	s.Helper()
	k, err := drive.Kernel(s.Context(), n.Guest)
	s.must(err)
	return k.Counters
}

// A program is the command traffic on a node, outside of pods, with sockets of the kernel's SMC.
type program struct{ p *lab.Process }

// program starts the command on a node. It ends with the scenario, if not before.
func (s *suite) program(n *guest.Node, args ...string) *program {
	s.Helper()
	_, err := s.c.Machines().Build(s.Context(), "github.com/smcr-io/kube-smcr/test/cluster/traffic", lab.BuildOptions{})
	s.must(err)
	started, err := n.Guest.Start(context.WithoutCancel(s.Context()), append(append([]string{"traffic"}, args...), "--smc")...)
	s.must(err)
	p := &program{started}
	go func() { _ = p.p.Stream(nil, io.Discard, io.Discard) }() // ends with the program
	s.Cleanup(p.stop)
	return p
}

// stop ends the program.
func (p *program) stop() {
	if p.p.Signal(unix.SIGTERM) == nil {
		_ = p.p.Wait() // ended by us
	}
}
