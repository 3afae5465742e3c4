// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// Bed is a place with a client, a server and several paths between them.
type Bed interface {
	// SetUp builds the bed and returns the paths, in the order of the tables.
	SetUp(ctx context.Context) ([]Path, error)
	// Close removes what SetUp built, also when SetUp failed half-way.
	Close() error
}

// Path is one way between client and server: what is compared with others.
type Path struct {
	Name string
	Peers
	// Can says whether there is a way to make that load; nil: every load.
	Can func(load.Load) bool
	// Tool: a program of others, which may hang or fail. The path is left out from
	// then on, and the run goes on.
	Tool bool
	// StartCost says for which loads the cost of one without any operation is measured beforehand and
	// taken off: of programs that start for each load, of connections that are opened
	// for it, and of turns before those that count. With 64 connections and
	// short rounds that is more than what is measured. Nil: for none.
	StartCost func(load.Load) bool
	// Profile starts CPU profiles of the job with this number, and end ends them.
	// Nil: there are none of this path.
	Profile func(job int) (end func() error, err error)
}

// Peers are a client and a server that make load over one path.
type Peers interface {
	// Start makes the path ready for such a load: what happens only once, like first
	// contact, is not to be measured. The load has no duration.
	Start(ctx context.Context, l load.Load) error
	// Run makes a load and waits for its end.
	Run(ctx context.Context, l load.Load) (load.Result, error)
	// Used is what the peers, and all that works for this path, have used so far.
	Used() (Usage, error)
	// Check says whether the load before went the way that the path's name says.
	Check(ctx context.Context, l load.Load, r load.Result) error
}

// Usage is what a path has used.
type Usage struct {
	CPU time.Duration
	// Counted says that what follows was.
	Counted  bool
	Switches int64 // context switches
	UDPSends int64 // datagrams given to the kernel; one with UDP_SEGMENT counts once
	TCPSends int64 // TCP segments, as the network counts them: after segmentation
}

// Minus is what was used after v.
func (u Usage) Minus(v Usage) Usage {
	return Usage{u.CPU - v.CPU, u.Counted, u.Switches - v.Switches, u.UDPSends - v.UDPSends, u.TCPSends - v.TCPSends}
}

// per is the cost of each of n things. Where a start cost was more than all of it, as on a noisy machine, it is 0.
func (u Usage) per(what string, n float64) report.Cost {
	c := report.Cost{Per: what, Counted: u.Counted}
	if n > 0 {
		c.CPUMicros = Micros(max(u.CPU, 0)) / n
		each := func(count int64) float64 { return float64(max(count, 0)) / n }
		c.Switches, c.UDPSends, c.TCPSends = each(u.Switches), each(u.UDPSends), each(u.TCPSends)
	}
	return c
}
