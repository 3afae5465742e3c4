// SPDX-License-Identifier: Apache-2.0

// Bench-vm compares SMC-R on RDMA devices of the kernel with what else can use
// them, in two guests with soft RoCE (rxe): make bench-vm.
//
// Every measurement is made over all paths of its group in turn, round after round, and
// what counts are the ratios within a round: see package engine. The groups are
// those of -groups:
//
//	smcr         SMC-R on soft RoCE against other uses of the same device
//	iwarp        software iWARP in user space (pkg/rdma/softiwarp) against siw, that of the kernel, and
//	             TCP: WRITEs, READs and round trips by the same code (bench/iwarpload), with and
//	             without CRCs, which both compute by tables there
//	sdp-siw      the Sockets Direct Protocol (pkg/sdp) on siw against TCP: what a program of the node
//	             would gain where siw, or an RNIC in its place, is the only RDMA device
//	sdp-roce     SDP on soft RoCE (pkg/sdp over pkg/rdma/verbs), by messages and from Buffer to Buffer,
//	             against raw READs (ib_read_bw), rsockets and TCP
//	transparent  unmodified programs in pods, on all ways that need no change of them
//	receivers    how much more a node receives for its pods with two processors, and with two receiving
//	             sockets (soft.Config.Receivers): smcr.Conn over the software device, from this machine
//	             to a guest of its own, which is so much slower that it is the limit
//
// The paths of group smcr are:
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
// In group transparent a pod is a network namespace with a macvlan child of the interface of the guest's soft RoCE,
// and its programs have no rights. The paths are:
//
//	TCP              pods that nobody attached
//	kernel datapath  pods of agents with datapath Kernel: sockets of TCP are the kernel's SMC-R
//	2 agents         pods of agents that carry their connections, SMC-R on soft RoCE in user space
//	AF_SMC           programs that open AF_SMC, in pods that nobody attached
//	1 relay          nginx's stream module in the server's pod
//	2 relays         another one in the client's pod besides, as sidecars are
//
// The same load runs over all of them, and redis-benchmark to redis over all but AF_SMC. After each measurement the counters of
// both kernels in the pods, and those of the agents if the pods have some, must say that all connections went the way that the
// path's name says. The buffers of SMC are equally long on all paths; those of TCP are the kernel's.
//
// # Who owns what
//
// The main process starts the guests and in each of them itself as a worker, for group receivers also one on this machine
// for each guest. All end with it, unless the guests were there before (-vm).
//
// # Limitations
//
// The guests have one processor each, except two guests of group receivers, and it is emulated (TCG). Absolute
// figures mean nothing, and paths with many system calls or atomic instructions pay
// more for them than on a real processor. The processor time that a tool takes to
// start is measured beforehand and subtracted. The tools' round trips are medians
// (ib_write_lat) or means (rstream). The relay is nginx, because haproxy needs CMPXCHG16B, which the guests do
// not have (see package lab).
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
