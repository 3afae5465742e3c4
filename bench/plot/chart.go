// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/bench/report"
)

// chart is what a picture shows.
type chart struct {
	report.Chart
	unit  string
	note  string // how it was measured
	lines []line
}

// line is one path.
type line struct {
	path string
	dots []dot // in the order of the X axis
}

// dot is a case over one path.
type dot struct {
	at float64
	report.Spread
}

// Write draws all charts of a report that have something to show into a directory, which
// it makes if need be.
func Write(dir string, r *report.Report) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, c := range charts(r) {
		f, err := os.Create(filepath.Join(dir, c.Name+".svg"))
		if err != nil {
			return err
		}
		if err := errors.Join(c.draw(f), f.Close()); err != nil {
			return fmt.Errorf("draw %s: %w", c.Name, err)
		}
	}
	return nil
}

// charts collects the charts of a report, without those that have nothing to show.
func charts(r *report.Report) []chart {
	var all []chart
	for _, c := range r.Charts {
		one := chart{Chart: c, note: note(r)}
		for _, measured := range r.Cases {
			one.add(measured)
		}
		for _, l := range one.lines {
			slices.SortFunc(l.dots, func(a, b dot) int { return cmp.Compare(a.at, b.at) })
		}
		if len(one.lines) > 0 {
			all = append(all, one)
		}
	}
	return all
}

// add takes a case in, if it has a point in the chart.
func (c *chart) add(measured *report.Case) {
	for _, p := range measured.Points {
		if p.Chart != c.Name {
			continue
		}
		for _, s := range measured.Series {
			if s.Spread.Min <= 0 {
				continue // it has no place on a logarithmic axis
			}
			i := slices.IndexFunc(c.lines, func(l line) bool { return l.path == s.Path })
			if i < 0 {
				i = len(c.lines)
				c.lines = append(c.lines, line{path: s.Path})
			}
			c.lines[i].dots = append(c.lines[i].dots, dot{p.At, s.Spread})
			c.unit = measured.Unit
		}
	}
}

// note says how the values were measured. What a distribution calls its kernel is too long.
func note(r *report.Report) string {
	kernel, _, _ := strings.Cut(r.Kernel, "-")
	return fmt.Sprintf("%s, %d cores, %s; medians of %d rounds, whiskers from minimum to maximum", r.CPU, r.Cores, r.Software(kernel), r.Rounds)
}

// places returns the places of the values on the X axis.
func (c *chart) places() []float64 {
	var all []float64
	for _, l := range c.lines {
		for _, d := range l.dots {
			all = append(all, d.at)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// place names a place of the X axis.
func (c *chart) place(at float64) string {
	if c.X.Bytes() {
		return bytes(at)
	}
	return plain(at)
}
