// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// sweepPart is the part of a measurement's length that one of the sweep has: there are many.
const sweepPart = 4

// sweep measures writes and messages of many sizes, and many connections: it is for plots.
func (b *bench) sweep(ctx context.Context) error {
	jobs := b.sweepJobs("conn", "smcr.Conn over software RoCEv2, MTU 9000")
	p := b.pair(9000)
	p.profiles = b.profiles("sweep", 9000)
	if err := b.Compare(ctx, "sweep of smcr.Conn", &p, jobs); err != nil {
		return err
	}
	jobs = b.sweepJobs("path", "unmodified programs in two pods, MTU 9000")
	return b.Compare(ctx, "sweep of pods", b.pods(""), jobs)
}

// swept is one way to vary a load.
type swept struct {
	chart  report.Chart
	values []int
	load   func(v int) load.Load
	figure engine.Figure // its case says how the values are told
	per    engine.Amount
}

// sweepJobs are streams and round trips over sizes, with one connection, and over connections, with one
// size. Their charts' names begin alike.
func (b *bench) sweepJobs(name, group string) []engine.Job {
	var jobs []engine.Job
	for _, s := range sweeps(name, group) {
		b.Report.Charts = append(b.Report.Charts, s.chart)
		for _, v := range s.values {
			c := *s.figure.Case
			c.Name = fmt.Sprintf("%s of %d: %s", s.chart.X, v, s.chart.Y)
			c.Group, c.Base = "sweep: "+group, pathTCP
			c.Points = []report.Point{{Chart: s.chart.Name, At: float64(v)}}
			l := s.load(v)
			l.Duration = b.Duration / sweepPart
			jobs = append(jobs, engine.Job{Load: l, Figures: []engine.Figure{{Case: &c, Of: s.figure.Of}}, Per: s.per})
		}
	}
	return jobs
}

func sweeps(name, where string) []swept {
	sizes := []int{64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
	conns := []int{1, 2, 4, 8, 16, 32, 64}
	throughput := engine.Figure{Case: &report.Case{Unit: "Gbit/s"}, Of: gigabits}
	roundTrip := engine.Figure{Case: &report.Case{Unit: "us", Lower: true}, Of: engine.P50}
	trip := engine.Amount{Name: "round trip", Of: engine.Ops}
	chart := func(what, over, title string, x report.Axis, y string) report.Chart {
		return report.Chart{Name: fmt.Sprintf("%s-%s-%s", name, what, over), Title: title, Where: where, X: x, Y: y}
	}
	return []swept{
		{
			chart("stream", "size", "Streams on 1 connection", report.WriteBytes, "throughput"), sizes,
			func(v int) load.Load { return load.Load{Kind: load.Stream, SizeBytes: v, Conns: 1} }, throughput, engine.PerMiB,
		},
		{
			chart("stream", "conns", "Streams of 64 KiB writes", report.Connections, "throughput"), conns,
			func(v int) load.Load { return load.Load{Kind: load.Stream, SizeBytes: 64 << 10, Conns: v} }, throughput, engine.PerMiB,
		},
		{
			chart("roundtrip", "size", "Round trips on 1 connection", report.MessageBytes, "round trip, p50"), sizes,
			func(v int) load.Load { return load.Load{Kind: load.Echo, SizeBytes: v, Conns: 1} }, roundTrip, trip,
		},
		{
			chart("roundtrip", "conns", "Round trips of 64 B, on all connections at once", report.Connections, "round trip, p50"), conns,
			func(v int) load.Load { return load.Load{Kind: load.Echo, SizeBytes: 64, Conns: v} }, roundTrip, trip,
		},
	}
}
