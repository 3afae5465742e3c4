// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// setup measures the opening of connections.
func (b *bench) setup(ctx context.Context) error {
	jobs := b.setupJobs("opening connections over one veth pair", pathTCP)
	if err := b.Compare(ctx, "opening connections", &pair{mtu: 9000, firstContact: true}, jobs); err != nil {
		return fmt.Errorf("opening connections: %w", err)
	}
	jobs = b.setupJobs("opening connections between two pods", pathTCP)
	if err := b.Compare(ctx, "opening connections between pods", b.pods(""), jobs); err != nil {
		return fmt.Errorf("opening connections between pods: %w", err)
	}
	for _, held := range []struct{ name, node string }{
		{"SYNs held", ""},
		{"SYNs held, every destination asked each time", "  negativeCacheTTL: 0s\n"},
	} {
		jobs := b.setupJobs("opening connections between two pods, "+held.name, pathTCP)
		if err := b.Compare(ctx, held.name, b.heldPods(held.node), jobs); err != nil {
			return fmt.Errorf("opening connections between pods, %s: %w", held.name, err)
		}
	}
	return nil
}

// setupJobs open connections one by one, and eight at a time.
func (b *bench) setupJobs(group, base string) []engine.Job {
	first := func(name string, of engine.Metric) engine.Figure {
		c := &report.Case{Group: group, Name: "to the first byte back, " + name, Unit: "us", Lower: true, Base: base}
		return engine.Figure{Case: c, Of: of}
	}
	many := &report.Case{Group: group, Name: "8 at a time", Unit: "connections/s", Base: base}
	return []engine.Job{
		b.Openings(1, first("p50", engine.P50), first("p99", engine.P99)),
		b.Openings(8, engine.Figure{Case: many, Of: engine.OpsPerSecond}),
	}
}
