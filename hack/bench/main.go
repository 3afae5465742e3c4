// SPDX-License-Identifier: Apache-2.0

// Bench compares SMC-R with TCP and with a proxy on one machine: make bench.
//
// Every measurement is made over all paths of its group in turn, round after
// round, and what counts are the ratios within a round: other work on the
// machine and its clock hit all paths alike. A ratio is printed as median
// (minimum to maximum) of the rounds. The groups are those of -groups:
//
//	conn   smcr.Conn over software RoCEv2 against TCP on the same veth pair
//	path   unmodified programs in two pods, two node agents between them,
//	       against direct TCP and against haproxy
//	setup  opening connections
//	scale  thousands of open connections: what they cost, and whether they
//	       slow others down
//	micro  the benchmarks of the packages: time and allocations per message
//
// # Who owns what
//
// The main process starts itself again as workers, one the server, one the
// client, each in a network namespace. The namespaces of conn have no names and
// die with the processes in them; those of path are a lab (test/netns/lab),
// which is removed at the end and, should this process be killed, by the next
// run. Workers and haproxies die with the main process. Only the main goroutine
// makes namespaces and children, because it owns the main thread.
//
// # Limitations
//
// Everything runs on the cores of one machine, so that a path with more busy
// processes is worse off than between two machines. A veth pair hands packets
// of 64 KiB on in one piece, for TCP as for UDP: no NIC is measured.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/report"
	"github.com/smcr-io/kube-smcr/hack/internal/transcript"
)

func main() {
	// Client and server stand for two nodes that share this machine: each gets
	// half of the processors, on every path alike.
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.NumCPU()/2))
	}
	if len(os.Args) > 1 && os.Args[1] == workerArg {
		// The main process decides when a worker ends.
		signal.Ignore(os.Interrupt)
		exit(runWorker(os.Stdin, os.Stdout))
	}
	runtime.LockOSThread() // see newSpace and start
	ctx, stop, err := transcript.Interruptible()
	if err == nil {
		err = run(ctx, os.Args[1:])
		stop()
	}
	exit(err)
}

func exit(err error) {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench: "+err.Error())
		os.Exit(1)
	}
	os.Exit(0)
}

// settings are the flags.
type settings struct {
	groups   []string
	rounds   int
	duration time.Duration
	json     bool
	jsonFile string
	profile  string
	rnics    int
	only     string
}

var allGroups = []string{"conn", "path", "setup", "scale", "micro"}

func parseFlags(args []string) (settings, error) {
	var s settings
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	groups := f.String("groups", strings.Join(allGroups, ","), "what to measure")
	f.IntVar(&s.rounds, "rounds", 5, "rounds of each measurement")
	f.DurationVar(&s.duration, "time", 400*time.Millisecond, "length of a measurement")
	output := f.String("o", "table", "output: table or json")
	f.StringVar(&s.jsonFile, "json-file", "", "write JSON to this file too")
	f.StringVar(&s.profile, "profile", "", "write CPU profiles of the workers of group conn into this directory")
	f.StringVar(&s.only, "only", "", "measure only what has this in its name, like \"round trip\"")
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
	switch *output {
	case "table":
	case "json":
		s.json = true
	default:
		return s, fmt.Errorf("-o: unknown output %q, there are table and json", *output)
	}
	if s.rounds < 1 || s.rounds > 1000 || s.duration < time.Millisecond || s.duration > 10*time.Second ||
		s.rnics < 1 || s.rnics > 8 || f.NArg() > 0 {
		return s, errors.New("want -rounds from 1 to 1000, -time from 1ms to 10s, -rnics from 1 to 8, and no arguments")
	}
	return s, nil
}

// bench is one run.
type bench struct {
	settings
	report *report.Report
	log    io.Writer
}

func run(ctx context.Context, args []string) error {
	s, err := parseFlags(args)
	if err != nil {
		return err
	}
	b := &bench{settings: s, log: os.Stderr}
	if b.report, err = report.New(s.rounds, s.duration); err != nil {
		return err
	}
	var errs []error
	for _, g := range s.groups {
		// One group that fails does not keep the others from being measured,
		// and what was measured before a mistake is shown all the same.
		if err := b.group(ctx, g); err != nil && ctx.Err() == nil {
			errs = append(errs, fmt.Errorf("%s: %w", g, err))
		}
	}
	if ctx.Err() != nil {
		errs = append(errs, errors.New("interrupted"))
	}
	for _, c := range b.report.Cases {
		c.Judge()
	}
	return errors.Join(append(errs, b.print(os.Stdout))...)
}

func (b *bench) group(ctx context.Context, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	switch name {
	case "conn":
		return b.conn(ctx)
	case "path":
		return b.path(ctx)
	case "setup":
		return b.setup(ctx)
	case "scale":
		return b.scale(ctx)
	case "micro":
		return b.micro(ctx)
	}
	return nil
}

func (b *bench) print(w io.Writer) error {
	if b.jsonFile != "" {
		f, err := os.Create(b.jsonFile)
		if err != nil {
			return err
		}
		if err := errors.Join(b.report.WriteJSON(f), f.Close()); err != nil {
			return err
		}
	}
	if b.json {
		return b.report.WriteJSON(w)
	}
	return b.report.WriteTable(w)
}
