// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

func TestEngine_Compare(t *testing.T) {
	e, b := fakeEngine(t, 2), &fakeBed{}
	b.add(Path{Name: "a"}, &fakePeers{ops: 10})
	b.add(Path{Name: "b"}, &fakePeers{ops: 20})
	b.add(Path{Name: "c", Can: func(l load.Load) bool { return l.Kind == load.Setup }}, &fakePeers{ops: 30})
	jobs := []Job{e.fakeJob("opening", "a"), e.RoundTrip("group", "", "a")}
	if err := e.Compare(t.Context(), "test", b, jobs); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"set up",
		"start a c 0s", "start b c 0s", "start c c 0s", "start a e 0s", "start b e 0s",
		"run a c 1s", "run b c 1s", "run c c 1s", "run a e 1s", "run b e 1s",
		"run b c 1s", "run c c 1s", "run a c 1s", "run b e 1s", "run a e 1s", // another one begins
		"close",
	}
	if d := cmp.Diff(want, b.did); d != "" {
		t.Error(d)
	}
	for _, c := range e.Report.Cases {
		c.Judge()
	}
	if n := len(e.Report.Cases); n != 3 {
		t.Fatalf("%d cases, want 3: p99 too, which has no row", n)
	}
	c := e.Report.Cases[0].Series[1]
	if c.Path != "b" || !slices.Equal(c.Values, []float64{20, 20}) || c.Ratio.Median != 2 || len(c.Seconds) != 2 {
		t.Errorf("the path b: %+v", c)
	}
	if p99 := e.Report.Cases[2]; len(p99.Series) != 0 {
		t.Errorf("what was not measured has a row: %+v", p99)
	}
}

func TestEngine_Compare_only(t *testing.T) {
	e, b := fakeEngine(t, 1), &fakeBed{}
	e.Only = "round trip"
	b.add(Path{Name: "a"}, &fakePeers{ops: 10})
	jobs := []Job{e.fakeJob("opening", "a"), e.RoundTrip("group", "", "a")}
	for range 2 { // the caller's jobs stay as they are
		b.did = nil
		if err := e.Compare(t.Context(), "test", b, jobs); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff([]string{"set up", "start a e 0s", "run a e 1s", "close"}, b.did); d != "" {
			t.Error(d)
		}
	}
}

func always(load.Load) bool { return true }

// What a path costs before its first operation is no cost of the operations.
func TestEngine_Compare_startCost(t *testing.T) {
	e, b := fakeEngine(t, 3), &fakeBed{}
	for _, p := range []Path{{Name: "a", StartCost: always}, {Name: "b"}} {
		// 4 ms to start, 1 ms for each operation, of which 5 cannot be had without.
		b.add(p, &fakePeers{ops: 25, atStart: 5, startCost: 4 * time.Millisecond, opCost: time.Millisecond})
	}
	if err := e.Compare(t.Context(), "test", b, []Job{e.fakeJob("opening", "a")}); err != nil {
		t.Fatal(err)
	}
	e.Report.Cases[0].Judge()
	var got []report.Cost
	for _, s := range e.Report.Cases[0].Series {
		got = append(got, s.Cost)
	}
	want := []report.Cost{{Per: "connection", CPUMicros: 1000}, {Per: "connection", CPUMicros: 1160}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// A path that takes very long is measured once, and the others in every round.
func TestEngine_Compare_slow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, b := fakeEngine(t, 2), &fakeBed{}
		slow := &fakePeers{ops: 7, atStart: 7, opCost: time.Millisecond, takes: slowLimit + time.Second}
		b.add(Path{Name: "slow", StartCost: always}, slow)
		b.add(Path{Name: "fast", StartCost: always}, &fakePeers{ops: 7, takes: slowLimit - time.Second})
		if err := e.Compare(t.Context(), "test", b, []Job{e.fakeJob("opening", "fast")}); err != nil {
			t.Fatal(err)
		}
		want := []string{
			"set up", "start slow c 0s", "run slow c 0s", "start fast c 0s", "run fast c 0s",
			"run fast c 1s", "run fast c 1s", "close",
		}
		if d := cmp.Diff(want, b.did); d != "" {
			t.Error(d)
		}
		s := e.Report.Cases[0].Series
		if len(s) != 2 || len(s[0].Values) != 1 || s[0].Costs[0].CPUMicros != 1000 || len(s[1].Values) != 2 {
			t.Errorf("series: %+v", s)
		}
	})
}

func TestEngine_Compare_fails(t *testing.T) {
	for _, tt := range []struct {
		fails string
		tool  bool
		did   string // by the path that fails
	}{
		{"start", false, "start"},
		{"run", false, "start run"},
		{"check", false, "start run"},
		{"start", true, "start"},
		{"run", true, "start run"},
		{"check", true, "start run"},
	} {
		name := tt.fails
		if tt.tool {
			name += " of a tool"
		}
		t.Run(name, func(t *testing.T) {
			e, b := fakeEngine(t, 3), &fakeBed{}
			var log strings.Builder
			e.Log = &log
			b.add(Path{Name: "bad", Tool: tt.tool}, &fakePeers{ops: 10, fails: tt.fails})
			b.add(Path{Name: "good"}, &fakePeers{ops: 10})
			err := e.Compare(t.Context(), "test", b, []Job{e.fakeJob("opening", "good")})
			const why = "opening over bad: made to fail"
			if tt.tool && err != nil || !tt.tool && (!errors.Is(err, errFake) || err.Error() != why) {
				t.Errorf("error: %v", err)
			}
			if tt.tool && !strings.Contains(log.String(), "test: left out from here on: "+why+"\n") {
				t.Errorf("the log does not say it: %s", log.String())
			}
			var bad []string
			good := 0
			for _, d := range b.did {
				switch f := strings.Fields(d); {
				case f[0] == "run" && f[1] == "good":
					good++
				case len(f) > 1 && f[1] == "bad":
					bad = append(bad, f[0])
				}
			}
			if got := strings.Join(bad, " "); got != tt.did {
				t.Errorf("the path that fails did %q, want %q", got, tt.did)
			}
			if want := map[bool]int{true: 3, false: 0}[tt.tool]; good != want {
				t.Errorf("%d loads over the other one, want %d", good, want)
			}
			if last := b.did[len(b.did)-1]; last != "close" {
				t.Errorf("it ends with %q", last)
			}
		})
	}
}

func TestEngine_In_setUpFails(t *testing.T) {
	b := &fakeBed{err: errFake}
	err := fakeEngine(t, 1).In(t.Context(), b, func([]Path) error {
		t.Error("measured in a bed that is none")
		return nil
	})
	if !errors.Is(err, errFake) || !slices.Equal(b.did, []string{"set up", "close"}) {
		t.Errorf("%v; %q", err, b.did)
	}
}

// An interruption ends the rounds between two loads. A tool that fails then is no
// tool that failed.
func TestEngine_Compare_interrupted(t *testing.T) {
	for _, fails := range []string{"", "check"} {
		t.Run("fails "+fails, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			e, b := fakeEngine(t, 2), &fakeBed{}
			var log strings.Builder
			e.Log = &log
			b.add(Path{Name: "a"}, &fakePeers{ops: 10})
			b.add(Path{Name: "b", Tool: true}, &fakePeers{ops: 10, ran: stop, fails: fails})
			b.add(Path{Name: "c"}, &fakePeers{ops: 10})
			if err := e.Compare(ctx, "test", b, []Job{e.fakeJob("opening", "a")}); err == nil {
				t.Error("no error")
			}
			if strings.Contains(log.String(), "left out") {
				t.Errorf("the log: %s", log.String())
			}
			want := []string{"set up", "start a c 0s", "start b c 0s", "start c c 0s", "run a c 1s", "run b c 1s", "close"}
			if d := cmp.Diff(want, b.did); d != "" {
				t.Error(d)
			}
		})
	}
}

// The load of a profile is longer than a measurement, but no longer than the longest one.
func TestEngine_Compare_longProfile(t *testing.T) {
	e, b := fakeEngine(t, 1), &fakeBed{}
	e.Profile = "dir"
	b.add(Path{Name: "a", Profile: func(int) (func() error, error) { return func() error { return nil }, nil }}, &fakePeers{ops: 10})
	job := e.fakeJob("opening", "a")
	job.Load.Duration = maxDuration - time.Second
	if err := e.Compare(t.Context(), "test", b, []Job{job}); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprint("run a c ", maxDuration); !slices.Contains(b.did, want) {
		t.Errorf("%q is not among %q", want, b.did)
	}
}

// Profiles come after the rounds, of the paths that have them, and end also when the
// load fails.
func TestEngine_Compare_profile(t *testing.T) {
	both := []string{"profile 0", "run b c 3s", "profile ends", "profile 1", "run b c 3s", "profile ends"}
	for _, tt := range []struct {
		name, dir string
		err       error // of the beginning
		want      []string
	}{
		{"none is asked for", "", nil, nil},
		{"of one of two paths", "dir", nil, both},
		{"it does not begin", "dir", errFake, []string{"profile 0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, b := fakeEngine(t, 1), &fakeBed{}
			e.Profile = tt.dir
			b.add(Path{Name: "a"}, &fakePeers{ops: 10})
			b.add(Path{Name: "b", Profile: func(job int) (func() error, error) {
				b.note("profile %d", job)
				return func() error { b.note("profile ends"); return nil }, tt.err
			}}, &fakePeers{ops: 10})
			err := e.Compare(t.Context(), "test", b, []Job{e.fakeJob("opening", "a"), e.fakeJob("again", "a")})
			if !errors.Is(err, tt.err) {
				t.Errorf("error: %v", err)
			}
			after := b.did[slices.Index(b.did, "run b c 1s")+1:] // of the first job
			after = after[slices.Index(after, "run b c 1s")+1:]
			if d := cmp.Diff(append(tt.want, "close"), after); d != "" {
				t.Error(d)
			}
			if n := len(e.Report.Cases[0].Series[1].Values); n != 1 {
				t.Errorf("%d values, want those of the rounds only", n)
			}
		})
	}
}
