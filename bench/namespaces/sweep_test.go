// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
)

// Each job has a point in one of the charts, which is where its load is.
func TestBench_sweepJobs(t *testing.T) {
	e, err := engine.New("test", engine.Settings{Rounds: 1, Duration: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	jobs := (&bench{e, 1}).sweepJobs("path", "pods")
	got := map[string]string{}
	for _, j := range jobs {
		c := j.Figures[0].Case
		if len(c.Points) != 1 || c.Base != pathTCP || j.Load.Duration != e.Duration/sweepPart {
			t.Errorf("%s: %+v of %v", c.Name, c, j.Load)
		}
		p := c.Points[0]
		swept, other := j.Load.SizeBytes, j.Load.Conns
		if p.At != float64(swept) {
			swept, other = other, swept
		}
		if p.At != float64(swept) {
			t.Errorf("%s is at %v", c.Name, p.At)
		}
		got[p.Chart] += fmt.Sprintf(" %d", swept)
		if want := map[load.Kind]string{load.Stream: "Gbit/s", load.Echo: "us"}[j.Load.Kind]; c.Unit != want || c.Lower != (want == "us") {
			t.Errorf("%s is in %s, lower is better: %v", c.Name, c.Unit, c.Lower)
		}
		if want := map[string]int{
			"path-stream-size": 1, "path-stream-conns": 64 << 10, "path-roundtrip-size": 1, "path-roundtrip-conns": 64,
		}[p.Chart]; other != want {
			t.Errorf("%s: the other one is %d, want %d", c.Name, other, want)
		}
	}
	const sizes, conns = " 64 256 1024 4096 16384 65536 262144 1048576", " 1 2 4 8 16 32 64"
	want := map[string]string{
		"path-stream-size": sizes, "path-stream-conns": conns, "path-roundtrip-size": sizes, "path-roundtrip-conns": conns,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, c := range e.Report.Charts {
		if want[c.Name] == "" {
			t.Errorf("chart %q has no points", c.Name)
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("there is no chart of %v", want)
	}
}
