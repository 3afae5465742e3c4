// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/report"
)

var update = flag.Bool("update", false, "write testdata anew")

// The pictures of a run are those in testdata: sizes over three decades of throughput, and connections over
// a few times of a round trip, where one path was measured less far, and one needs to be escaped.
func TestWrite(t *testing.T) {
	r := exampleReport()
	dir := t.TempDir()
	if err := Write(filepath.Join(dir, "new"), r); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "new", "*"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, filepath.Base(f))
	}
	want := []string{"roundtrip-conns.svg", "stream-size.svg"}
	if d := cmp.Diff(want, names); d != "" {
		t.Fatalf("the files: %s", d)
	}
	for i, f := range files {
		got, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", names[i])
		if *update {
			if err := os.WriteFile(golden, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatalf("%v (go test ./bench/plot -update writes it)", err)
		}
		if d := cmp.Diff(string(want), string(got)); d != "" {
			t.Errorf("%s: %s", golden, d)
		}
		checkXML(t, names[i], got)
	}
}

// checkXML reads a picture as a browser does, which takes no picture that is not well formed.
func checkXML(t *testing.T, name string, text []byte) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(string(text)))
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
	}
}

func TestWrite_fails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Write(file, exampleReport()); err == nil {
		t.Error("a file is no directory")
	}
}

// exampleReport has a chart of each kind of axis, and one without any case.
func exampleReport() *report.Report {
	r := &report.Report{
		CPU: "some CPU", Cores: 2, Kernel: "6.1.0-37-amd64", Go: "go1.26", Rounds: 3,
		Charts: []report.Chart{
			{Name: "stream-size", Title: "Streams", Where: "some veth pair", X: report.WriteBytes, Y: "throughput"},
			{Name: "roundtrip-conns", Title: "Round trips <of 64 B>", Where: "two pods", X: report.Connections, Y: "round trip, p50"},
			{Name: "nothing", Title: "Not measured", X: report.Connections, Y: "throughput"},
		},
	}
	add := func(chart, unit string, at float64, paths map[string][]float64) {
		c := &report.Case{Unit: unit, Base: "TCP", Points: []report.Point{{Chart: chart, At: at}}}
		for _, p := range slices.Sorted(maps.Keys(paths)) {
			for _, v := range paths[p] {
				c.Add(p, v, 0.1, report.Cost{})
			}
		}
		c.Judge()
		r.Cases = append(r.Cases, c)
	}
	add("stream-size", "Gbit/s", 1<<20, map[string][]float64{"TCP": {24, 20, 30}, "smcr.Conn": {28, 31, 25}})
	add("stream-size", "Gbit/s", 64, map[string][]float64{"TCP": {0.04, 0.05, 0.03}, "smcr.Conn": {0.2, 0.1, 0.3}})
	add("stream-size", "Gbit/s", 4096, map[string][]float64{"TCP": {2, 3, 2.5}, "smcr.Conn": {6, 7, 5}})
	add("roundtrip-conns", "us", 1, map[string][]float64{"TCP": {25, 20, 60}, "haproxy & co": {80, 70, 95}})
	add("roundtrip-conns", "us", 8, map[string][]float64{"TCP": {100, 90, 130}})
	add("", "us", 8, map[string][]float64{"TCP": {1}}) // in no chart
	return r
}

func TestDecades(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []float64
		want   string
	}{
		{"within one decade", []float64{3, 8}, "2 5 10"},
		{"several", []float64{0.3, 30}, "0.2 0.5 1 2 5 10 20 50"},
		{"many", []float64{0.03, 30}, "0.01 0.1 1 10 100"},
		{"on the lines", []float64{1, 100}, "1 2 5 10 20 50 100"},
		{"one value", []float64{7}, "5 10"},
		{"one value on a line", []float64{10}, "10 20"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, ticks := decades(tt.values, 400, 100)
			var labels []string
			for _, k := range ticks {
				labels = append(labels, k.Label)
			}
			if got := strings.Join(labels, " "); got != tt.want {
				t.Errorf("lines %s, want %s", got, tt.want)
			}
			for _, v := range tt.values {
				if y := a.at(v); y < 100 || y > 400 {
					t.Errorf("%v is outside of the plot: %v", v, y)
				}
			}
			if a.at(ticks[0].Value) != 400 || a.at(ticks[len(ticks)-1].Value) != 100 {
				t.Errorf("the lines do not span the plot: %+v", a)
			}
		})
	}
}

func TestAxis_at(t *testing.T) {
	a := axis{low: 1, high: 64, from: 0, to: 60}
	for v, want := range map[float64]float64{1: 0, 8: 30, 64: 60} {
		if got := a.at(v); got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%v is at %v, want %v", v, got, want)
		}
	}
	if got := (axis{low: 8, high: 8, from: 0, to: 60}).at(8); got != 30 {
		t.Errorf("a lone value is at %v, want the middle", got)
	}
}

func TestBytes(t *testing.T) {
	for v, want := range map[float64]string{64: "64 B", 1 << 10: "1 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB"} {
		if got := bytes(v); got != want {
			t.Errorf("%v is %q, want %q", v, got, want)
		}
	}
}
