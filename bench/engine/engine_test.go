// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/report"
)

// Figures that were measured before an error or an interruption are printed.
func TestEngine_Run(t *testing.T) {
	for _, tt := range []struct {
		name   string
		fails  string // what goes wrong in the first group
		err    string
		groups int // groups that are measured after the first
	}{
		{"all is measured", "", "", 1},
		{"a group fails", "run", "first: round trip over bad: made to fail", 1},
		{"interrupted", "interrupted", "interrupted", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			e := fakeEngine(t, 2)
			e.JSONFile = filepath.Join(t.TempDir(), "report.json")
			group := func(name string, bad *fakePeers) (*fakeBed, Group) {
				b := &fakeBed{}
				b.add(Path{Name: "good"}, &fakePeers{ops: 10})
				b.add(Path{Name: "bad"}, bad)
				return b, Group{name, func(ctx context.Context) error {
					return e.Compare(ctx, name, b, []Job{e.fakeJob("round trip", "good")})
				}}
			}
			bad := &fakePeers{ops: 20, fails: tt.fails}
			if tt.fails == "interrupted" {
				bad.ran = stop
			}
			_, first := group("first", bad)
			beds, second := group("second", &fakePeers{ops: 20})
			var table strings.Builder
			err := e.Run(ctx, &table, first, second)
			if got := fmt.Sprint(err); err != nil && got != tt.err || err == nil && tt.err != "" {
				t.Errorf("error %q, want %q", got, tt.err)
			}
			if n := strings.Count(strings.Join(beds.did, "\n"), "run good"); n != 2*tt.groups {
				t.Errorf("%d loads in the second group, want %d", n, 2*tt.groups)
			}
			if n := strings.Count(table.String(), "round trip   good"); n != 1+tt.groups {
				t.Errorf("the table has %d rows, want %d:\n%s", n, 1+tt.groups, table.String())
			}
			var r report.Report
			text, err := os.ReadFile(e.JSONFile)
			if err = errors.Join(err, json.Unmarshal(text, &r)); err != nil || len(r.Cases) != 1+tt.groups {
				t.Errorf("JSON: %v: %s", err, text)
			}
		})
	}
}

func TestEngine_Run_json(t *testing.T) {
	e := fakeEngine(t, 1)
	e.JSON = true
	b := &fakeBed{}
	b.add(Path{Name: "base"}, &fakePeers{ops: 10})
	b.add(Path{Name: "path"}, &fakePeers{ops: 5})
	job := e.fakeJob("round trip", "base")
	job.Figures[0].Case.Targets = []report.Target{{Path: "path", Against: "base", Limit: 0.5}}
	var out strings.Builder
	err := e.Run(t.Context(), &out, Group{"group", func(ctx context.Context) error {
		return e.Compare(ctx, "test", b, []Job{job})
	}})
	if err != nil {
		t.Fatal(err)
	}
	var r report.Report
	if err := json.Unmarshal([]byte(out.String()), &r); err != nil || len(r.Cases) != 1 {
		t.Fatalf("%v: %s", err, out.String())
	}
	if c := r.Cases[0]; !c.Targets[0].Reached || c.Series[1].Ratio.Median != 0.5 {
		t.Errorf("it was not judged: %+v", c)
	}
}

// What a run wrote is printed and drawn again as it was, without measuring.
func TestEngine_Run_from(t *testing.T) {
	dir := t.TempDir()
	e := fakeEngine(t, 2)
	e.JSONFile, e.Plot = filepath.Join(dir, "report.json"), filepath.Join(dir, "first")
	b := &fakeBed{}
	b.add(Path{Name: "base"}, &fakePeers{ops: 10, opCost: time.Millisecond})
	b.add(Path{Name: "path"}, &fakePeers{ops: 5, opCost: time.Millisecond})
	job := e.fakeJob("round trip", "base")
	job.Figures[0].Case.Targets = []report.Target{{Path: "path", Against: "base", Limit: 0.5}}
	job.Figures[0].Case.Points = []report.Point{{Chart: "chart", At: 64}}
	e.Report.Charts = []report.Chart{{Name: "chart", Title: "Round trips", X: report.MessageBytes, Y: "round trip"}}
	var first strings.Builder
	if err := e.Run(t.Context(), &first, Group{"group", func(ctx context.Context) error {
		return e.Compare(ctx, "test", b, []Job{job})
	}}); err != nil {
		t.Fatal(err)
	}

	again, err := New("test", Settings{From: e.JSONFile, Plot: filepath.Join(dir, "again")})
	if err != nil {
		t.Fatal(err)
	}
	var second strings.Builder
	err = again.Run(t.Context(), &second, Group{"group", func(context.Context) error {
		t.Error("it measured")
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(first.String(), second.String()); d != "" {
		t.Error("the table:", d)
	}
	var pictures [2]string
	for i, name := range []string{"first", "again"} {
		text, err := os.ReadFile(filepath.Join(dir, name, "chart.svg"))
		if err != nil {
			t.Fatal(err)
		}
		pictures[i] = string(text)
	}
	if d := cmp.Diff(pictures[0], pictures[1]); d != "" || !strings.Contains(pictures[0], "Round trips") {
		t.Errorf("the picture: %s\n%s", pictures[0], d)
	}
}

// There is nothing to print without a file of JSON.
func TestNew_from(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.json")
	if err := os.WriteFile(bad, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{bad, bad + ".none"} {
		if _, err := New("test", Settings{From: file}); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// A run that fails before its first figure does not write over the figures of another.
func TestEngine_Run_nothing(t *testing.T) {
	e := fakeEngine(t, 1)
	e.JSONFile = filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(e.JSONFile, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := &fakeBed{err: errFake}
	var out strings.Builder
	err := e.Run(t.Context(), &out, Group{"group", func(ctx context.Context) error {
		return e.Compare(ctx, "test", b, nil)
	}})
	if !errors.Is(err, errFake) || out.String() != "" {
		t.Errorf("%v; printed %q", err, out.String())
	}
	if text, err := os.ReadFile(e.JSONFile); err != nil || string(text) != "before" {
		t.Errorf("the file has %q, %v", text, err)
	}
}

// A table has the figures of all paths, in whatever order the paths report them.
func TestEngine_Value(t *testing.T) {
	e := fakeEngine(t, 1)
	e.Value("g", "size", "KiB", "few", "few", 2)
	e.Value("g", "time", "us", "few", "few", 5)
	e.Value("g", "size", "KiB", "few", "many", 6, report.Target{Path: "many", Limit: 6})
	var got []string
	for _, c := range e.Report.Cases {
		c.Judge()
		for _, s := range c.Series {
			got = append(got, fmt.Sprintf("%s/%s %g %g", c.Name, s.Path, s.Spread.Median, s.Ratio.Median))
		}
	}
	if d := cmp.Diff([]string{"size/few 2 1", "size/many 6 3", "time/few 5 1"}, got); d != "" {
		t.Error(d)
	}
	if c := e.Report.Cases[0]; len(c.Targets) != 1 || !c.Targets[0].Reached {
		t.Errorf("the target of many: %+v", c.Targets)
	}
}
