// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/drive"
)

// hostPort is where programs of nodes serve, outside of pods.
const hostPort = 7100

// counters returns the counters of SMC in the kernel of a node.
func (s *suite) counters(n *guest.Node) smcnl.Counters {
	s.Helper()
	k, err := drive.Kernel(s.Context(), n.Guest)
	s.must(err)
	return k.Counters
}

// A program is the command traffic on a node, outside of pods, with sockets of the kernel's SMC.
type program struct {
	p     *lab.Process
	name  string
	hangs bool // it does not end

	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

// program starts the command on a node. It ends with the scenario, if not before.
func (s *suite) program(n *guest.Node, args ...string) *program {
	s.Helper()
	_, err := s.c.Machines().Build(s.Context(), "github.com/smcr-io/kube-smcr/test/cluster/traffic", lab.BuildOptions{})
	s.must(err)
	p := &program{name: n.Name + ": traffic " + strings.Join(args, " ")}
	p.p, err = n.Guest.Start(context.WithoutCancel(s.Context()), append(append([]string{"traffic"}, args...), "--smc")...)
	s.must(err)
	go func() { _ = p.p.Stream(nil, p, p) }() // ends with the program
	s.Cleanup(func() { p.stop(s) })
	return p
}

// Write takes what the program says.
func (p *program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

// last is the last whole line.
func (p *program) last() (now sum, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lines := strings.Split(p.text.String(), "\n")
	if len(lines) < 2 {
		return now, fmt.Errorf("%s says nothing", p.name)
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-2]), &now); err != nil {
		return now, fmt.Errorf("%s: %w: %s", p.name, err, p.text.String())
	}
	return now, nil
}

// grows is [suite.grows] of the program.
func (p *program) grows(s *suite, before sum, n int) sum {
	s.Helper()
	var now sum
	s.eventually(fmt.Sprintf("%d more of %s", n, p.name), func() error {
		var err error
		if now, err = p.last(); err == nil && now.OK < before.OK+n && now.Failed == before.Failed {
			err = fmt.Errorf("it has %+v", now)
		}
		return err
	})
	if now.Failed > before.Failed || now.Ended {
		s.Fatalf("%s has %+v, and had %+v", p.name, now, before)
	}
	return now
}

// programEnd is how long a program may take to end: its kernel closes its sockets, which waits for what is sent.
const programEnd = 90 * time.Second

// stop ends the program. One that hangs in its kernel fails the test, and goes with its guest.
func (p *program) stop(s *suite) {
	s.Helper()
	if p.hangs || p.p.Signal(unix.SIGTERM) != nil {
		return
	}
	ended := make(chan struct{})
	go func() {
		_ = p.p.Wait() // ended by us
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(programEnd):
		p.hangs = true
		s.Fatalf("%s has not ended %v after SIGTERM", p.name, programEnd)
	}
}
