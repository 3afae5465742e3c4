// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// fakeBed is a bed without any process. It notes what is asked of it.
type fakeBed struct {
	paths []Path
	err   error // of SetUp
	did   []string
}

func (b *fakeBed) SetUp(context.Context) ([]Path, error) {
	b.note("set up")
	return b.paths, b.err
}

func (b *fakeBed) Close() error {
	b.note("close")
	return nil
}

func (b *fakeBed) note(format string, args ...any) {
	b.did = append(b.did, fmt.Sprintf(format, args...))
}

// fakePeers make a load of a fixed speed.
type fakePeers struct {
	bed       *fakeBed
	name      string
	ops       int           // of a load
	atStart   int           // operations of a load without duration
	startCost time.Duration // CPU of each load
	opCost    time.Duration // CPU of each operation
	takes     time.Duration // how long a load without duration takes
	fails     string        // what goes wrong: "start", "run" or "check"
	cpu       time.Duration // used so far
	ran       func()        // after each load
}

var errFake = errors.New("made to fail")

func (p *fakePeers) note(what string, l load.Load) error {
	p.bed.note("%s %s %c %v", what, p.name, l.Kind, l.Duration)
	if p.fails == what {
		return errFake
	}
	return nil
}

func (p *fakePeers) Start(_ context.Context, l load.Load) error { return p.note("start", l) }

func (p *fakePeers) Run(_ context.Context, l load.Load) (load.Result, error) {
	if err := p.note("run", l); err != nil {
		return load.Result{}, err
	}
	ops := p.ops
	if l.Duration == 0 {
		ops = p.atStart
		<-time.After(p.takes)
	}
	p.cpu += p.startCost + time.Duration(ops)*p.opCost
	if p.ran != nil {
		p.ran()
	}
	return load.Result{Ops: ops, Elapsed: time.Second, P50: time.Duration(p.ops) * time.Microsecond}, nil
}

func (p *fakePeers) Used() (Usage, error) { return Usage{CPU: p.cpu}, nil }

func (p *fakePeers) Check(context.Context, load.Load, load.Result) error {
	if p.fails == "check" {
		return errFake
	}
	return nil
}

// add adds a path to the bed.
func (b *fakeBed) add(p Path, peers *fakePeers) {
	peers.bed, peers.name = b, p.Name
	p.Peers = peers
	b.paths = append(b.paths, p)
}

func fakeEngine(t *testing.T, rounds int) *Engine {
	t.Helper()
	s := Settings{Rounds: rounds, Duration: time.Second}
	return &Engine{Settings: s, Report: &report.Report{}, Log: io.Discard, program: "test"}
}

// fakeJob has one figure, the median, against this base.
func (e *Engine) fakeJob(name, base string) Job {
	return e.Openings(1, Figure{&report.Case{Group: "group", Name: name, Unit: "us", Base: base}, P50})
}

func TestUsage_per(t *testing.T) {
	u := Usage{CPU: 4 * time.Microsecond, Counted: true, Switches: 8, UDPSends: 12, TCPSends: 16}
	want := report.Cost{Per: "round trip", CPUMicros: 1, Counted: true, Switches: 2, UDPSends: 3, TCPSends: 4}
	if got := u.per("round trip", 4); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := u.per("round trip", 0), (report.Cost{Per: "round trip", Counted: true}); got != want {
		t.Errorf("of nothing: %+v, want %+v", got, want)
	}
	less := Usage{CPU: -time.Second, Switches: -1, UDPSends: -1, TCPSends: -1}
	if got, want := less.per("round trip", 1), (report.Cost{Per: "round trip"}); got != want {
		t.Errorf("less than the start cost: %+v", got)
	}
}
