// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
)

// way is a path from the client's worker to the server's. It is the [engine.Peers]
// of its path.
type way struct {
	name   string
	client *worker
	req    request // what the client is asked for, but for the load
	most   int     // operations per connection; 0: no bound
	pids   []int   // of the processes that work for it
	// relays are the processes among pids that relay between client and server.
	relays []int
	// carried says, if there, whether that many connections were opened since the
	// last time, and went the way that the name says.
	carried func(ctx context.Context, conns int) error
}

// Start makes a connection: first contact, and everything else that happens only
// once.
func (w *way) Start(ctx context.Context, _ load.Load) error {
	l := load.Load{Kind: load.Echo, SizeBytes: 64}
	r, err := w.Run(ctx, l)
	if err != nil {
		return err
	}
	return w.Check(ctx, l, r)
}

// Run makes a load in the client's worker. Idle connections stay open.
func (w *way) Run(_ context.Context, l load.Load) (load.Result, error) {
	req := w.req
	req.Op, req.Load = opLoad, l
	if l.Kind == load.Idle {
		req.Op = opHold
	}
	req.Load.Max = w.most
	resp, err := w.client.call(req)
	return resp.Result, err
}

// Used adds the processes up.
func (w *way) Used() (engine.Usage, error) { return usageOf(w.pids), nil }

// Check asks whoever knows.
func (w *way) Check(ctx context.Context, l load.Load, _ load.Result) error {
	if w.carried == nil {
		return nil
	}
	return w.carried(ctx, max(l.Conns, 1))
}

// pathsOf are the ways as paths. Where opening connections is what is measured, nothing is taken off for it.
func pathsOf(ways []*way) []engine.Path {
	paths := make([]engine.Path, len(ways))
	for i, w := range ways {
		paths[i] = engine.Path{Name: w.name, Peers: w, StartCost: func(l load.Load) bool { return l.Kind != load.Setup }}
	}
	return paths
}
