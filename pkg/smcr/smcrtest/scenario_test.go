// SPDX-License-Identifier: Apache-2.0

package smcrtest_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/smcr/smcrtest"
)

// Scenarios are files in testdata:
//
//	world [seed=N] [peers=N] [rnics=(N,N)] [max-links=(N,N)] [max-conns=(N,N)]
//	      [linux=PEER] [interrupts] [rfc] [versions=(BITS,BITS)] [eids=(BITS,BITS)]
//	      [release=(N,N)] [routed] [subnets] [declines=PER-MILLE] [rmbe=BYTES] [send=BYTES]
//	      [delays] [loss=PER-MILLE] [retry=DURATION] [handover=STEPS] [trace]
//	connect NAME [from=PEER] [to=PEER] [at-once]   and 10 ms, until it stands or failed
//	burst NAME [from=PEER] [to=PEER] n=CONNECTIONS   named NAME0, NAME1 and so on
//	write NAME side=0|1 n=BYTES
//	read NAME side=0|1 [n=BYTES]
//	shutdown|close|abort NAME side=0|1
//	port-down|port-up|remove|insert|heal peer=N rnic=N
//	blackhole peer=N rnic=N [dir=both|in|out]
//	kill-link [of=PEER] [link=INDEX] [side=0|1]   at both sides without side=
//	restart peer=N
//	end peer=N   its link groups, in order
//	jump-clock peer=N by=DURATION
//	slow peer=N rnic=N for=DURATION
//	run DURATION
//	state    of all connections and groups
//	groups
//	finish
//
// Side 0 is the peer with the lower number. With trace, the messages under way
// are part of the output, but for TEST LINK.
func TestWorld_scenarios(t *testing.T) { scenarios(t, 0) }

// Each scenario is the same, message by message, when the groups of this project are
// replaced by what is restored from their snapshots after each step.
func TestHandover_scenarios(t *testing.T) {
	if n := scenarios(t, 1); n < 1000 {
		t.Errorf("%d handovers", n)
	}
}

// scenarios plays all of them, and returns how often a group was handed over.
func scenarios(t *testing.T, handover int) int {
	t.Helper()
	files, handovers := 0, 0
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		files++
		s := &scenario{handover: handover}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out := s.run(t, d)
			if err := s.w.Check(); err != nil && d.Cmd != "finish" {
				out += "\n" + err.Error()
			}
			if d.Cmd == "finish" {
				handovers += s.w.Handovers()
			}
			lines := append(s.lines, strings.TrimSpace(out))
			s.lines = nil
			return strings.Join(lines, "\n")
		})
	})
	if files == 0 {
		t.Fatal("no scenarios")
	}
	return handovers
}

type scenario struct {
	w        *smcrtest.World
	handover int // of all worlds
	lines    []string
}

func (s *scenario) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "world":
		s.world(t, d)
		return ""
	case "state":
		var b strings.Builder
		for _, n := range s.w.Names() {
			fmt.Fprintln(&b, s.w.Describe(n))
		}
		for _, g := range s.w.Groups() {
			fmt.Fprintln(&b, g)
		}
		return b.String()
	case "groups":
		return strings.Join(s.w.Groups(), "\n")
	case "finish":
		if err := s.w.Finish(); err != nil {
			return err.Error()
		}
		return "ok"
	}
	o := parseOp(t, d)
	n := s.w.Do(o)
	switch o.Kind {
	case smcrtest.OpConnect:
		if !d.HasArg("at-once") {
			s.w.Run(10 * time.Millisecond)
		}
		return s.w.Describe(o.Name)
	case smcrtest.OpWrite, smcrtest.OpRead:
		return fmt.Sprintf("%d bytes", n)
	default:
		return ""
	}
}

func parseOp(t *testing.T, d *datadriven.TestData) smcrtest.Op {
	t.Helper()
	kind, ok := smcrtest.OpKindOf(d.Cmd)
	if !ok {
		t.Fatalf("unknown command %q", d.Cmd)
	}
	o := smcrtest.Op{Kind: kind, N: 1 << 30}
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		o.Name = d.CmdArgs[0].Key
	}
	if kind == smcrtest.OpKillLink && !d.HasArg("side") {
		o.Side = -1
	}
	d.MaybeScanArgs(t, "side", &o.Side)
	d.MaybeScanArgs(t, "n", &o.N)
	d.MaybeScanArgs(t, "rnic", &o.RNIC)
	d.MaybeScanArgs(t, "link", &o.Link)
	for _, key := range []string{"from", "peer", "of"} {
		d.MaybeScanArgs(t, key, &o.Peer)
	}
	if o.Peer == 0 {
		o.To = 1
	}
	d.MaybeScanArgs(t, "to", &o.To)
	dur, dir := "", ""
	if kind == smcrtest.OpRun {
		dur = o.Name
	}
	d.MaybeScanArgs(t, "by", &dur)
	d.MaybeScanArgs(t, "for", &dur)
	if dur != "" {
		var err error
		if o.D, err = time.ParseDuration(dur); err != nil {
			t.Fatal(err)
		}
	}
	d.MaybeScanArgs(t, "dir", &dir)
	switch dir {
	case "in":
		o.Dir = smcrtest.Incoming
	case "out":
		o.Dir = smcrtest.Outgoing
	}
	return o
}

// numbers are the values of an argument.
func numbers(t *testing.T, d *datadriven.TestData, key string) []int {
	t.Helper()
	var v []int
	for _, a := range d.CmdArgs {
		if a.Key != key {
			continue
		}
		for _, s := range a.Vals {
			n, err := strconv.Atoi(strings.TrimSpace(s))
			if err != nil {
				t.Fatal(err)
			}
			v = append(v, n)
		}
	}
	return v
}

func (s *scenario) world(t *testing.T, d *datadriven.TestData) {
	cfg := smcrtest.Config{Seed: 1, RFC: d.HasArg("rfc"), Delays: d.HasArg("delays")}
	d.MaybeScanArgs(t, "seed", &cfg.Seed)
	d.MaybeScanArgs(t, "peers", &cfg.Peers)
	d.MaybeScanArgs(t, "loss", &cfg.Loss)
	cfg.Handover = s.handover
	d.MaybeScanArgs(t, "handover", &cfg.Handover)
	retry := ""
	d.MaybeScanArgs(t, "retry", &retry)
	if retry != "" {
		var err error
		if cfg.Retry, err = time.ParseDuration(retry); err != nil {
			t.Fatal(err)
		}
	}
	copy(cfg.RNICs[:], numbers(t, d, "rnics"))
	copy(cfg.MaxLinks[:], numbers(t, d, "max-links"))
	copy(cfg.MaxConns[:], numbers(t, d, "max-conns"))
	copy(cfg.Versions[:], numbers(t, d, "versions"))
	copy(cfg.EIDs[:], numbers(t, d, "eids"))
	copy(cfg.Release[:], numbers(t, d, "release"))
	cfg.Routed, cfg.Releases, cfg.Interrupts = d.HasArg("routed"), d.HasArg("releases"), d.HasArg("interrupts")
	cfg.Subnets = d.HasArg("subnets")
	d.MaybeScanArgs(t, "declines", &cfg.Declines)
	for _, i := range numbers(t, d, "linux") {
		cfg.Linux[i] = true
	}
	for _, n := range numbers(t, d, "rmbe") {
		cfg.RMBESizes = append(cfg.RMBESizes, uint32(n))
	}
	for _, n := range numbers(t, d, "send") {
		cfg.SendBuffers = append(cfg.SendBuffers, uint32(n))
	}
	s.w = smcrtest.New(cfg)
	if d.HasArg("trace") {
		s.w.Trace(func(format string, args ...any) {
			if line := fmt.Sprintf(format, args...); !strings.Contains(line, "TEST LINK") {
				s.lines = append(s.lines, line)
			}
		})
	}
}
