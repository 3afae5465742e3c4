// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// setup measures the opening of connections.
func (b *bench) setup(ctx context.Context) error {
	jobs := b.setupJobs("opening connections over one veth pair", pathTCP, nil, connRate())
	p := b.pair(9000)
	p.firstContact = true
	if err := b.Compare(ctx, "opening connections", &p, jobs); err != nil {
		return fmt.Errorf("opening connections: %w", err)
	}
	jobs = b.setupJobs("opening connections between two pods", pathTCP, nil, podsRate())
	if err := b.Compare(ctx, "opening connections between pods", b.pods(""), jobs); err != nil {
		return fmt.Errorf("opening connections between pods: %w", err)
	}
	for _, held := range []struct {
		name, node string
		rate       []report.Target
	}{
		{"SYNs held", "", podsRate()},
		{"SYNs held, every destination asked each time", "  negativeCacheTTL: 0s\n", nil}, // that is of TCP, let go
	} {
		jobs := b.setupJobs("opening connections between two pods, "+held.name, pathTCP, nil, held.rate)
		if err := b.Compare(ctx, held.name, b.heldPods(held.node), jobs); err != nil {
			return fmt.Errorf("opening connections between pods, %s: %w", held.name, err)
		}
	}
	return nil
}

// setupJobs open connections one by one, and eight at a time. The targets are those of the median time of
// one, and of the rate of eight.
func (b *bench) setupJobs(group, base string, one, eight []report.Target) []engine.Job {
	first := func(name string, of engine.Metric, targets []report.Target) engine.Figure {
		c := &report.Case{
			Group: group, Name: "to the first byte back, " + name, Unit: "us", Lower: true, Base: base, Targets: slices.Clone(targets),
		}
		return engine.Figure{Case: c, Of: of}
	}
	many := &report.Case{Group: group, Name: "8 at a time", Unit: "connections/s", Base: base, Targets: slices.Clone(eight)}
	return []engine.Job{
		b.Openings(1, first("p50", engine.P50, one), first("p99", engine.P99, nil)),
		b.Openings(8, engine.Figure{Case: many, Of: engine.OpsPerSecond}),
	}
}
