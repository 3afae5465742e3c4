// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// Job is one load with the figures to be taken of it.
type Job struct {
	Load    load.Load
	Figures []Figure
	Per     Amount // what the costs refer to
}

func (j *Job) name() string { return j.Figures[0].Case.Name }

// Figure is one row of the table, and how its value is found.
type Figure struct {
	Case *report.Case
	Of   Metric
}

// Metric takes one figure out of a result. A figure of 0 was not measured.
type Metric func(load.Result) float64

// Amount is what a load did, and how much of it.
type Amount struct {
	Name string // "round trip"
	Of   Metric
}

// Throughput is how the speed of streams is told.
type Throughput struct {
	Unit string // "Gbit/s"
	Of   Metric
	Per  Amount
}

// MiB is how much a stream has moved.
func MiB(r load.Result) float64 { return float64(r.Bytes) / (1 << 20) }

// MiBPerSecond is the speed of a stream.
func MiBPerSecond(r load.Result) float64 { return MiB(r) / r.Elapsed.Seconds() }

// PerMiB refers the costs of a stream to a MiB.
var PerMiB = Amount{Name: "MiB", Of: MiB}

// Micros is a duration in microseconds.
func Micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// P50 is the median in microseconds.
func P50(r load.Result) float64 { return Micros(r.P50) }

// P99 is the 99th percentile in microseconds.
func P99(r load.Result) float64 { return Micros(r.P99) }

// Ops counts operations.
func Ops(r load.Result) float64 { return float64(r.Ops) }

// OpsPerSecond is the speed in operations.
func OpsPerSecond(r load.Result) float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.Ops) / r.Elapsed.Seconds()
}

// RoundTrip is the job of a round trip of 64 bytes.
func (s *Settings) RoundTrip(group, prefix, base string, targets ...report.Target) Job {
	figure := func(name string, of Metric, targets []report.Target) Figure {
		return Figure{&report.Case{
			Group: group, Name: prefix + "64 B round trip, " + name, Unit: "us", Lower: true, Base: base, Targets: slices.Clone(targets),
		}, of}
	}
	return Job{
		Load:    load.Load{Kind: load.Echo, SizeBytes: 64, Conns: 1, Duration: s.Duration},
		Figures: []Figure{figure("p50", P50, targets), figure("p99", P99, nil)},
		Per:     Amount{"round trip", Ops},
	}
}

// Streams are jobs of streams with these sizes of write, on one connection and on
// eight, with the targets of so many.
func (s *Settings) Streams(group, prefix, base string, sizes []int, t Throughput, targets func(conns int) []report.Target) []Job {
	var jobs []Job
	for _, size := range sizes {
		for _, n := range []int{1, 8} {
			conns := "1 connection"
			if n > 1 {
				conns = fmt.Sprintf("%d connections", n)
			}
			jobs = append(jobs, Job{
				Load: load.Load{Kind: load.Stream, SizeBytes: size, Conns: n, Duration: s.Duration},
				Figures: []Figure{{&report.Case{
					Group: group, Name: fmt.Sprintf("%sstream of %d KiB writes, %s", prefix, size>>10, conns),
					Unit: t.Unit, Base: base, Targets: targets(n),
				}, t.Of}},
				Per: t.Per,
			})
		}
	}
	return jobs
}

// Always are the targets of a stream on however many connections.
func Always(targets ...report.Target) func(conns int) []report.Target {
	return func(int) []report.Target { return slices.Clone(targets) }
}

// Openings is the job of opening connections, so many at a time.
func (s *Settings) Openings(conns int, figures ...Figure) Job {
	return Job{load.Load{Kind: load.Setup, Conns: conns, Duration: s.Duration}, figures, Amount{"connection", Ops}}
}

// wanted are the jobs that -only asks for.
func (s *Settings) wanted(jobs []Job) []Job {
	return slices.DeleteFunc(slices.Clone(jobs), func(j Job) bool { return !strings.Contains(j.name(), s.Only) })
}
