// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// path is one way between client and server.
type path struct {
	name string
	run  func(load.Load) (load.Result, error)
	pids []int // of the processes that work for it
	// relays are those among them between client and server.
	relays []int
	// check says, if there, whether that many connections went the way that
	// the name says.
	check func(least int) error
}

// metric takes one figure out of a result.
type metric func(load.Result) float64

func p50(r load.Result) float64 { return micros(r.P50) }
func p99(r load.Result) float64 { return micros(r.P99) }

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// gigabits is the throughput in Gbit/s.
func gigabits(r load.Result) float64 { return float64(r.Bytes) * 8 / float64(r.Elapsed) }

func perSecond(r load.Result) float64 { return float64(r.Ops) / r.Elapsed.Seconds() }

// job is one load with the figures to be taken of it.
type job struct {
	load    load.Load
	cases   []*report.Case
	metrics []metric // of the cases
}

// echoJob is a round trip of 64 bytes.
func (b *bench) echoJob(group, prefix, base string, targets ...report.Target) job {
	return job{
		load: load.Load{Kind: load.Echo, SizeBytes: 64, Duration: b.duration},
		cases: []*report.Case{
			{Group: group, Name: prefix + "64 B round trip, p50", Unit: "us", Lower: true, Base: base, Targets: targets},
			{Group: group, Name: prefix + "64 B round trip, p99", Unit: "us", Lower: true, Base: base},
		},
		metrics: []metric{p50, p99},
	}
}

// streamJobs are streams of two sizes of write, on one connection and on
// eight.
func (b *bench) streamJobs(group, prefix, base string, targets ...report.Target) []job {
	var jobs []job
	for _, size := range []int{64 << 10, 1 << 20} {
		for _, n := range []int{1, 8} {
			conns := "1 connection"
			if n > 1 {
				conns = fmt.Sprintf("%d connections", n)
			}
			jobs = append(jobs, job{
				load: load.Load{Kind: load.Stream, SizeBytes: size, Conns: n, Duration: b.duration},
				cases: []*report.Case{{
					Group: group, Name: fmt.Sprintf("%sstream of %d KiB writes, %s", prefix, size>>10, conns),
					Unit: "Gbit/s", Base: base, Targets: append([]report.Target(nil), targets...),
				}},
				metrics: []metric{gigabits},
			})
		}
	}
	return jobs
}

// rounds runs every job over every path, round after round, and adds the
// cases to the report.
func (b *bench) rounds(ctx context.Context, title string, jobs []job, paths []path) error {
	jobs = slices.DeleteFunc(jobs, func(j job) bool { return !strings.Contains(j.cases[0].Name, b.only) })
	for _, j := range jobs {
		b.report.Cases = append(b.report.Cases, j.cases...)
	}
	for round := range b.settings.rounds {
		fmt.Fprintf(b.log, "bench: %s: round %d of %d\n", title, round+1, b.settings.rounds)
		for _, j := range jobs {
			for i := range paths {
				if err := ctx.Err(); err != nil {
					return err
				}
				// Another one begins each round: none always runs with the
				// caches of the same predecessor.
				p := paths[(i+round)%len(paths)]
				if err := j.once(p); err != nil {
					return fmt.Errorf("%s over %s: %w", j.cases[0].Name, p.name, err)
				}
			}
		}
	}
	return nil
}

func (j job) once(p path) error {
	before := usageOf(p.pids)
	r, err := p.run(j.load)
	if err != nil {
		return err
	}
	used := usageOf(p.pids).minus(before)
	if p.check != nil {
		if err := p.check(max(j.load.Conns, 1)); err != nil {
			return err
		}
	}
	cost := used.per("round trip", float64(r.Ops))
	switch j.load.Kind {
	case load.Stream:
		cost = used.per("MiB", float64(r.Bytes)/(1<<20))
	case load.Setup:
		cost = used.per("connection", float64(r.Ops))
	case load.Echo, load.Idle:
	}
	for i, c := range j.cases {
		c.Add(p.name, j.metrics[i](r), r.Elapsed.Seconds(), cost)
	}
	return nil
}
