// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// Names of the paths.
const (
	pathVerbs    = "RDMA WRITE"
	pathConn     = "smcr.Conn"
	pathKernel   = "kernel SMC-R"
	pathRsockets = "rsockets"
	pathTCP      = "TCP"
)

// What smcr.Conn has to reach.
const (
	ofVerbs     = 0.9 // of the throughput of RDMA WRITE
	ofKernel    = 1.0 // of the kernel's throughput
	ofRoundTrip = 1.2 // times the kernel's round trip
)

// path is one way between client and server.
type path struct {
	name string
	// run makes a load; speed is that of the last one, 0 for the first.
	run func(ctx context.Context, l load.Load, speed float64) (load.Result, error)
	// can tells whether there is a way to make that load.
	can func(load.Load) bool
	// warm: the first connection makes what others use again.
	warm bool
	// tool: a program of others, which may hang over rxe.
	tool bool
}

// job is one load with the figures to be taken of it.
type job struct {
	load    load.Load
	cases   []*report.Case
	metrics []func(load.Result) float64 // of the cases; 0: not measured
	per     string                      // what the costs refer to
	units   func(load.Result) float64   // how many of it
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

const group = "two guests"

// jobs are all that is measured.
func (b *bench) jobs() []job {
	ops := func(r load.Result) float64 { return float64(r.Ops) }
	all := []job{{
		load: load.Load{Kind: load.Echo, SizeBytes: 64, Conns: 1, Duration: b.duration},
		cases: []*report.Case{
			{Group: group, Name: "64 B round trip, p50", Unit: "us", Lower: true, Base: pathKernel, Targets: []report.Target{{Path: pathConn, Against: pathKernel, Limit: ofRoundTrip}}},
			{Group: group, Name: "64 B round trip, p99", Unit: "us", Lower: true, Base: pathKernel},
		},
		metrics: []func(load.Result) float64{
			func(r load.Result) float64 { return micros(r.P50) }, func(r load.Result) float64 { return micros(r.P99) },
		},
		per: "round trip", units: ops,
	}}
	for _, size := range []int{4 << 10, 64 << 10, 1 << 20} {
		for _, n := range []int{1, 8} {
			conns := "1 connection"
			if n > 1 {
				conns = fmt.Sprintf("%d connections", n)
			}
			all = append(all, job{
				load: load.Load{Kind: load.Stream, SizeBytes: size, Conns: n, Duration: b.duration},
				cases: []*report.Case{{
					Group: group, Name: fmt.Sprintf("stream of %d KiB writes, %s", size>>10, conns),
					Unit: "MiB/s", Base: pathVerbs, Targets: []report.Target{
						{Path: pathConn, Against: pathVerbs, Limit: ofVerbs}, {Path: pathConn, Against: pathKernel, Limit: ofKernel},
					},
				}},
				metrics: []func(load.Result) float64{func(r load.Result) float64 { return float64(r.Bytes) / (1 << 20) / r.Elapsed.Seconds() }},
				per:     "GiB", units: func(r load.Result) float64 { return float64(r.Bytes) / (1 << 30) },
			})
		}
	}
	all = append(all, job{
		load:    load.Load{Kind: load.Setup, Conns: 1, Duration: b.duration},
		cases:   []*report.Case{{Group: group, Name: "opening connections", Unit: "connections/s", Base: pathKernel}},
		metrics: []func(load.Result) float64{func(r load.Result) float64 { return float64(r.Ops) / r.Elapsed.Seconds() }},
		per:     "connection", units: ops,
	})
	return slices.DeleteFunc(all, func(j job) bool { return !strings.Contains(j.cases[0].Name, b.only) })
}

// paths are all ways between the guests.
func (b *bench) paths(p *pair) []path {
	every := func(load.Load) bool { return true }
	all := []path{
		{pathVerbs, p.perftest, every, false, true},
		{pathConn, p.worker(stackEngine), every, true, false},
		{pathKernel, p.worker(stackKernel), every, true, false},
		{pathRsockets, p.rstream, func(l load.Load) bool { return l.Kind != load.Setup && l.Conns*l.SizeBytes <= rstreamBytes }, false, true},
		{pathTCP, p.worker(stackTCP), every, false, false},
	}
	return slices.DeleteFunc(all, func(w path) bool {
		return b.settings.paths != "" && !slices.Contains(strings.Split(b.settings.paths, ","), w.name)
	})
}

// worker runs the common load between the workers.
func (p *pair) worker(s stack) func(context.Context, load.Load, float64) (load.Result, error) {
	return func(_ context.Context, l load.Load, _ float64) (load.Result, error) {
		var before, after response
		var err error
		if s == stackKernel {
			if before, err = p.client.call(request{Op: opState}); err != nil {
				return load.Result{}, err
			}
		}
		r, err := p.client.call(request{Op: opLoad, Stack: s, Addr: p.addr(ports[s]), Load: l})
		if err != nil || s != stackKernel {
			return r.Result, err
		}
		if after, err = p.client.call(request{Op: opState}); err != nil {
			return load.Result{}, err
		}
		if after.State.KernelTCP != before.State.KernelTCP {
			return load.Result{}, fmt.Errorf("%d connections of AF_SMC were TCP", after.State.KernelTCP-before.State.KernelTCP)
		}
		if r.Result.Ops > 0 && after.State.KernelSMCR == before.State.KernelSMCR {
			return load.Result{}, fmt.Errorf("the kernel counted no connection over SMC-R")
		}
		return r.Result, nil
	}
}

// course is one job over one path.
type course struct {
	job   *job
	path  path
	first time.Duration // CPU of the load without any operation
	skip  float64       // operations in it nevertheless
	speed float64       // operations per second of the last round
	slow  *slowRun      // the only run, of a path that takes very long
}

// slowRun is what a path did that takes longer than slowLimit for the least that
// can be asked of it: it counts as its first round, and there is no other one.
type slowRun struct {
	result load.Result
	cpu    time.Duration
}

// rounds runs every job over every path, round after round.
func (b *bench) rounds(ctx context.Context, p *pair) error {
	jobs, paths := b.jobs(), b.paths(p)
	var courses [][]*course
	for i := range jobs {
		b.report.Cases = append(b.report.Cases, jobs[i].cases...)
		var of []*course
		for _, w := range paths {
			if w.can(jobs[i].load) {
				of = append(of, &course{job: &jobs[i], path: w})
			}
		}
		courses = append(courses, of)
	}
	began := time.Now()
	fmt.Fprintln(b.log, "bench-vm: what each path costs before it begins")
	for _, of := range courses {
		for i, c := range of {
			if err := c.prepare(ctx, p); err != nil {
				if !c.path.tool || ctx.Err() != nil {
					return err
				}
				fmt.Fprintf(b.log, "bench-vm: left out: %v\n", err)
				of[i] = nil
			}
		}
	}
	for round := range b.settings.rounds {
		fmt.Fprintf(b.log, "bench-vm: round %d of %d, after %v\n", round+1, b.settings.rounds, time.Since(began).Round(time.Second))
		for _, of := range courses {
			for i := range of {
				if err := ctx.Err(); err != nil {
					return err
				}
				// Another one begins each round, as in hack/bench.
				if c := of[(i+round)%len(of)]; c != nil && (c.slow == nil || round == 0) {
					err := c.once(ctx, p)
					if err != nil && (!c.path.tool || ctx.Err() != nil) {
						return err
					}
					if err != nil { // the rounds before count
						fmt.Fprintf(b.log, "bench-vm: left out from here on: %v\n", err)
						of[(i+round)%len(of)] = nil
					}
				}
			}
		}
	}
	return b.profiles(ctx, p, courses)
}

// prepare makes the load without any operation, or as few as can be.
func (c *course) prepare(ctx context.Context, p *pair) error {
	l := c.job.load
	l.Duration = 0
	if c.path.warm {
		if _, err := c.path.run(ctx, l, 0); err != nil {
			return fmt.Errorf("%s over %s: %w", c.job.cases[0].Name, c.path.name, err)
		}
	}
	began := time.Now()
	r, cpu, err := c.measure(ctx, p, l)
	if time.Since(began) > slowLimit {
		c.slow = &slowRun{r, cpu}
		return err
	}
	c.first, c.skip, c.speed = cpu, c.job.units(r), speed(r)
	return err
}

func speed(r load.Result) float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Ops) / r.Elapsed.Seconds()
}

func (c *course) measure(ctx context.Context, p *pair, l load.Load) (load.Result, time.Duration, error) {
	before, err := p.busy()
	if err != nil {
		return load.Result{}, 0, err
	}
	r, err := c.path.run(ctx, l, c.speed)
	if err != nil {
		return r, 0, fmt.Errorf("%s over %s: %w", c.job.cases[0].Name, c.path.name, err)
	}
	after, err := p.busy()
	return r, after - before, err
}

// once measures one round.
func (c *course) once(ctx context.Context, p *pair) error {
	var r load.Result
	var cpu time.Duration
	if c.slow != nil {
		r, cpu = c.slow.result, c.slow.cpu
	} else {
		var err error
		if r, cpu, err = c.measure(ctx, p, c.job.load); err != nil {
			return err
		}
		c.speed = speed(r)
	}
	cost := report.Cost{Per: c.job.per}
	if n := c.job.units(r) - c.skip; n > 0 {
		cost.CPUMicros = micros(max(cpu-c.first, 0)) / n
	}
	for i, k := range c.job.cases {
		if v := c.job.metrics[i](r); v > 0 {
			k.Add(c.path.name, v, r.Elapsed.Seconds(), cost)
		}
	}
	return nil
}

// profiles runs each job of the workers once more, under the profiler, which
// costs time.
func (b *bench) profiles(ctx context.Context, p *pair, courses [][]*course) error {
	if b.profile == "" {
		return nil
	}
	for i, of := range courses {
		for _, c := range of {
			if c == nil || c.path.name != pathConn {
				continue
			}
			name := func(w *worker) string { return fmt.Sprintf("%d-%s.pprof", i, w.guest.Name()) }
			for _, w := range []*worker{p.client, p.server} {
				if _, err := w.call(request{Op: opProfile, Addr: "/host/" + name(w)}); err != nil {
					return err
				}
			}
			l := c.job.load
			l.Duration *= 4
			_, err := c.path.run(ctx, l, c.speed)
			if err != nil {
				return err
			}
			for _, w := range []*worker{p.client, p.server} {
				if _, err := w.call(request{Op: opProfile}); err != nil {
					return err
				}
				if err := copyFile(filepath.Join(p.lab.Share(), name(w)), filepath.Join(b.profile, name(w))); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
