// SPDX-License-Identifier: Apache-2.0

// Bench-vm compares SMC-R on RDMA devices of the kernel with what else can use
// them, in two guests with soft RoCE (rxe): make bench-vm.
//
// Every measurement is made over all paths in turn, round after round, and what
// counts are the ratios within a round. The paths are:
//
//	RDMA WRITE    ib_write_lat and ib_write_bw of perftest, and cmtime for
//	              connections: what the device gives to a program of its own.
//	              8 connections are 8 queue pairs
//	smcr.Conn     pkg/smcr over pkg/rdma/verbs
//	kernel SMC-R  AF_SMC
//	rsockets      rstream of librdmacm, 8 times for 8 connections
//	TCP
//
// smcr.Conn, the kernel's SMC-R and TCP run the same load (hack/bench/load). That
// the kernel's connections were SMC-R is proved by its own counters.
//
// # Who owns what
//
// The main process starts the guests and in each of them itself as a worker. Both
// end with it, unless the guests were there before (-vm).
//
// # Limitations
//
// The guests have one processor each, and it is emulated (TCG): absolute figures
// mean nothing, and those who need many system calls or atomic instructions pay
// more for them than on a real processor. What a tool needs to start, as far as
// processor time goes, is measured beforehand and taken off; the tools' round
// trips are medians (ib_write_lat) or means (rstream).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == workerArg {
		exit(runWorker(os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench-vm: "+err.Error())
		os.Exit(1)
	}
	os.Exit(0)
}

// settings are the flags.
type settings struct {
	rounds   int
	duration time.Duration
	json     bool
	jsonFile string
	profile  string
	only     string
	paths    string
	vm       string
}

func parseFlags(args []string) (settings, error) {
	var s settings
	f := flag.NewFlagSet("bench-vm", flag.ContinueOnError)
	f.IntVar(&s.rounds, "rounds", 5, "rounds of each measurement")
	f.DurationVar(&s.duration, "time", 500*time.Millisecond, "length of a measurement")
	output := f.String("o", "table", "output: table or json")
	f.StringVar(&s.jsonFile, "json-file", "", "write JSON to this file too")
	f.StringVar(&s.profile, "profile", "", "write CPU profiles of the workers into this directory")
	f.StringVar(&s.only, "only", "", "measure only what has this in its name, like \"round trip\"")
	f.StringVar(&s.paths, "paths", "", "measure only these paths, separated by commas")
	f.StringVar(&s.vm, "vm", "", "use the guests of this name, see go run ./hack/vm up, instead of new ones")
	if err := f.Parse(args); err != nil {
		return s, err
	}
	switch *output {
	case "table":
	case "json":
		s.json = true
	default:
		return s, fmt.Errorf("-o: unknown output %q, there are table and json", *output)
	}
	if s.rounds < 1 || s.rounds > 1000 || s.duration < time.Millisecond || s.duration > 10*time.Second || f.NArg() > 0 {
		return s, errors.New("want -rounds from 1 to 1000, -time from 1ms to 10s, and no arguments")
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
	b.report.Note = "two guests under emulation (QEMU TCG), one processor each, Linux 6.12, soft RoCE, MTU 9000: " +
		"only ratios mean something; CPU is what this machine spent on both guests"
	if err := b.measure(ctx); err != nil {
		return err
	}
	for _, c := range b.report.Cases {
		c.Judge()
	}
	return b.print(os.Stdout)
}

func (b *bench) measure(ctx context.Context) (err error) {
	p, err := newPair(ctx, b.vm, b.log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	return b.rounds(ctx, p)
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
