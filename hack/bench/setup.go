// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// pathFirst is smcr.Conn with a new link group for each connection.
const pathFirst = "smcr.Conn, first contact"

// setup measures the opening of connections.
func (b *bench) setup(ctx context.Context) error {
	if err := b.setupConns(ctx); err != nil {
		return err
	}
	const group = "opening connections between two pods"
	return b.inPods(ctx, "opening connections between pods", b.setupJobs(group))
}

// setupJobs open connections one by one, and eight at a time.
func (b *bench) setupJobs(group string) []job {
	one := load.Load{Kind: load.Setup, Conns: 1, Duration: b.duration}
	many := load.Load{Kind: load.Setup, Conns: 8, Duration: b.duration}
	return []job{
		{one, []*report.Case{
			{Group: group, Name: "to the first byte back, p50", Unit: "us", Lower: true, Base: pathTCP},
			{Group: group, Name: "to the first byte back, p99", Unit: "us", Lower: true, Base: pathTCP},
		}, []metric{p50, p99}},
		{many, []*report.Case{{Group: group, Name: "8 at a time", Unit: "connections/s", Base: pathTCP}}, []metric{perSecond}},
	}
}

func (b *bench) setupConns(ctx context.Context) (err error) {
	p, err := newPair(9000, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	paths := p.paths()
	first := path{name: pathFirst, pids: paths[0].pids, run: func(l load.Load) (load.Result, error) {
		// A link group has registered memory of its own on both sides. The
		// bound keeps what lives at once far below the stacks' limits.
		l.Max = firstContacts
		r, err := p.client.call(request{Op: opLoad, Addr: serverPort(portSMCR), FirstContact: true, Load: l})
		return r.Result, err
	}}
	paths = append(paths, first)
	if err := warmUp(paths); err != nil {
		return err
	}
	if err := b.rounds(ctx, "opening connections", b.setupJobs("opening connections over one veth pair"), paths); err != nil {
		return fmt.Errorf("opening connections: %w", err)
	}
	return nil
}

// firstContacts bounds the link groups of one measurement and goroutine.
const firstContacts = 10
