// SPDX-License-Identifier: Apache-2.0

// Bench compares SMC-R with TCP and with a proxy on one machine: make bench.
//
// Every measurement is made over all paths of its group in turn, round after
// round, and what counts are the ratios within a round: see package engine. A
// ratio is printed as median (minimum to maximum) of the rounds. The groups are
// those of -groups:
//
//	conn   smcr.Conn over software RoCEv2 against TCP on the same veth pair
//	path   unmodified programs in two pods, two node agents between them,
//	       against direct TCP and against haproxy
//	iwarp  software iWARP (pkg/rdma/softiwarp) against TCP on the same veth pair
//	sdp    SDP over software iWARP (pkg/sdp), copied and not, against TCP on the
//	       same veth pair
//	setup  opening connections
//	sweep  sizes from 64 B to 1 MiB, 1 to 64 connections: what -plot draws
//	scale  thousands of open connections: what they cost, and whether they
//	       slow others down
//	micro  the benchmarks of the packages: time and allocations per message
//
// # Who owns what
//
// The main process starts itself again as workers, one the server, one the
// client, each in a network namespace. The namespaces of conn have no names and
// die with the processes in them, as do those of iwarp and sdp; those of path are a lab (test/netns/lab),
// which is removed at the end and, should this process be killed, by the next
// run. Workers and haproxies die with the main process. Only the main goroutine
// makes namespaces and children, because it owns the main thread.
//
// # Limitations
//
// Everything runs on the cores of one machine, so that a path with more busy
// processes is worse off than between two machines. A veth pair hands packets
// of 64 KiB on in one piece, for TCP as for UDP: no NIC is measured.
//
// TCP's congestion control is the same on all paths, those of haproxies and of agents to pods among them, and
// is not this machine's, but the one of -congestion: BBR paces, and a stream over a veth pair has a third to three
// quarters of what it has with CUBIC, which is Linux' default. The benchmarks of micro have the machine's.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
)

func main() {
	// Client and server stand for two nodes that share this machine: each gets
	// half of the processors, on every path alike.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.NumCPU()/2))
	}
	engine.Main("bench", runWorker, run)
}

// settings are the flags.
type settings struct {
	groups []string
	engine.Settings
	congestion string
	rnics      int
}

var allGroups = []string{"conn", "iwarp", "sdp", "path", "setup", "sweep", "scale", "micro"}

func parseFlags(args []string) (settings, error) {
	var s settings
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	groups := f.String("groups", strings.Join(allGroups, ","), "what to measure")
	output := s.Define(f, 400*time.Millisecond, "the workers of group conn")
	f.StringVar(&s.congestion, "congestion", "cubic", "TCP's congestion control on all paths; Linux' own is cubic")
	f.IntVar(&s.rnics, "rnics", 1, "RNICs of each node in groups path and setup: 1 to 8")
	if err := f.Parse(args); err != nil {
		return s, err
	}
	s.groups = strings.Split(*groups, ",")
	for _, g := range s.groups {
		if !slices.Contains(allGroups, g) {
			return s, fmt.Errorf("-groups: unknown group %q, there are %s", g, strings.Join(allGroups, ", "))
		}
	}
	return s, s.Check(*output, f.NArg(), ", -rnics from 1 to 8", s.rnics >= 1 && s.rnics <= 8)
}

// bench is one run.
type bench struct {
	*engine.Engine
	rnics int
}

func run(ctx context.Context, args []string) error {
	s, err := parseFlags(args)
	if err != nil {
		return err
	}
	e, err := engine.New("bench", s.Settings)
	if err != nil {
		return err
	}
	if s.From == "" {
		e.Report.Congestion = s.congestion
	}
	b := &bench{e, s.rnics}
	measure := map[string]func(context.Context) error{
		"conn": b.conn, "iwarp": b.iwarp, "sdp": b.sdp, "path": b.path, "setup": b.setup, "sweep": b.sweep, "scale": b.scale, "micro": b.micro,
	}
	groups := make([]engine.Group, len(s.groups))
	for i, name := range s.groups {
		groups[i] = engine.Group{Name: name, Measure: measure[name]}
	}
	return b.Run(ctx, os.Stdout, groups...)
}
