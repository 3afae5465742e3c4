// SPDX-License-Identifier: Apache-2.0

// Bench-vm compares SMC-R on RDMA devices of the kernel with what else can use
// them, in two guests with soft RoCE (rxe): make bench-vm.
//
// Every measurement is made over all paths in turn, round after round, and what
// counts are the ratios within a round: see package engine. The paths are:
//
//	RDMA WRITE    ib_write_lat and ib_write_bw of perftest, and cmtime for
//	              connections: what the device gives to a program of its own.
//	              8 connections are 8 queue pairs
//	smcr.Conn     pkg/smcr over pkg/rdma/verbs
//	kernel SMC-R  AF_SMC
//	rsockets      rstream of librdmacm, 8 times for 8 connections
//	TCP
//
// smcr.Conn, the kernel's SMC-R and TCP run the same load (bench/load). That
// the kernel's connections were SMC-R is proved by its own counters.
//
// Group iwarp (-groups iwarp) compares software iWARP in user space (pkg/rdma/softiwarp) with that of
// the kernel, siw, and with TCP: WRITEs, READs and round trips by the same code (bench/iwarpload), with
// and without CRCs, which both compute by tables there.
//
// Group sdp-siw (-groups sdp-siw) compares the Sockets Direct Protocol (pkg/sdp) on siw with TCP between the same guests: what a program of
// the node would gain by it where siw, or an RNIC in its place, is the only RDMA device.
//
// Group sdp-roce (-groups sdp-roce) compares SDP (pkg/sdp over pkg/rdma/verbs), by messages and from Buffer to Buffer, with raw READs
// (ib_read_bw), rsockets and TCP.
//
// Group transparent (-groups transparent) compares what unmodified programs of pods get, without SMC-R in them. A pod is a network namespace with a
// macvlan child of the interface of the guest's soft RoCE, and its programs have no rights:
//
//	TCP              pods that nobody attached
//	kernel datapath  pods of agents with datapath Kernel: sockets of TCP are the kernel's SMC-R
//	2 agents         pods of agents that carry their connections, SMC-R on soft RoCE in user space
//	AF_SMC           programs that open AF_SMC, in pods that nobody attached
//	1 relay          nginx's stream module in the server's pod
//	2 relays         and one in the client's pod, as sidecars are
//
// The same load runs over all of them, and redis-benchmark to redis over all but AF_SMC. After each measurement the counters of
// both kernels in the pods, and those of both agents if the pods are theirs, have to say that all connections went the way that the
// path's name says. SMC's buffers are as long in all of them; TCP's are the kernel's.
//
// Group receivers (-groups receivers) has smcr.Conn over the software device, from this machine to a guest, which is so much slower that it is
// what limits: how much more a node receives for its pods with two processors, and with two receiving sockets (soft.Config.Receivers). These
// guests are its own.
//
// # Who owns what
//
// The main process starts the guests and in each of them itself as a worker, for group receivers also one on this machine
// for each guest. All end with it, unless the guests were there before (-vm).
//
// # Limitations
//
// The guests have one processor each, but for two of group receivers, and it is emulated (TCG): absolute figures
// mean nothing, and those who need many system calls or atomic instructions pay
// more for them than on a real processor. What a tool needs to start, as far as
// processor time goes, is measured beforehand and taken off; the tools' round
// trips are medians (ib_write_lat) or means (rstream). haproxy does not run in the guests: it needs CMPXCHG16B, which
// they do not have (see package lab), so nginx is the relay.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
)

func main() { engine.Main("bench-vm", runWorker, run) }

// settings are the flags.
type settings struct {
	engine.Settings
	groups []string
	paths  string
	vm     string
}

var allGroups = []string{"smcr", "iwarp", "sdp-siw", "sdp-roce", "transparent", "receivers"}

func parseFlags(args []string) (settings, error) {
	var s settings
	f := flag.NewFlagSet("bench-vm", flag.ContinueOnError)
	output := s.Define(f, 500*time.Millisecond, "the workers")
	groups := f.String("groups", "smcr", "what to measure: smcr, iwarp, sdp-siw, sdp-roce, transparent, receivers, or several, separated by commas")
	f.StringVar(&s.paths, "paths", "", "measure only these paths, separated by commas")
	f.StringVar(&s.vm, "vm", "", "use the guests of this name, see go run ./tools/vm up, instead of new ones")
	if err := f.Parse(args); err != nil {
		return s, err
	}
	s.groups = strings.Split(*groups, ",")
	for _, g := range s.groups {
		if !slices.Contains(allGroups, g) {
			return s, fmt.Errorf("-groups: unknown group %q, there are %s", g, strings.Join(allGroups, ", "))
		}
	}
	if s.vm != "" && slices.Contains(s.groups, "receivers") {
		return s, fmt.Errorf("-vm: group receivers starts guests of its own: measure it by itself")
	}
	return s, s.Check(*output, f.NArg(), "", true)
}

func run(ctx context.Context, args []string) error {
	s, err := parseFlags(args)
	if err != nil {
		return err
	}
	e, err := engine.New("bench-vm", s.Settings)
	if err != nil {
		return err
	}
	e.Report.Note = "guests under emulation (QEMU TCG), two of one processor each unless said, Linux 6.12, soft RoCE or siw, MTU 9000: " +
		"only ratios mean something; CPU is what this machine spent on the guests of a path"
	var groups []engine.Group
	for _, name := range s.groups {
		p := &pair{name: s.vm, only: s.paths, profiles: s.Profile, log: e.Log}
		var bed engine.Bed = p
		jobs := s.jobs()
		switch name {
		case "iwarp":
			bed, jobs = &iwarpPair{pair: p}, s.iwarpJobs()
		case "sdp-siw":
			bed, jobs = &sdpPair{pair: p}, s.sdpJobs()
		case "sdp-roce":
			bed, jobs = &rocePair{p}, s.roceJobs()
		case "transparent":
			bed, jobs = &podPair{pair: p}, s.transparentJobs()
		case "receivers":
			bed, jobs = &ceiling{only: s.paths, log: e.Log}, s.ceilingJobs()
		}
		groups = append(groups, engine.Group{Name: name, Measure: func(ctx context.Context) error { return e.Compare(ctx, name, bed, jobs) }})
	}
	return e.Run(ctx, os.Stdout, groups...)
}
