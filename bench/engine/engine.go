// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/smcr-io/kube-smcr/bench/plot"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// Engine is one run of a comparison.
type Engine struct {
	Settings
	Report  *report.Report
	Log     io.Writer // the progress, of beds too
	program string
}

// Group is a part of the comparison. One that fails does not keep the others from
// being measured.
type Group struct {
	Name    string
	Measure func(context.Context) error
}

// New returns a run without results, or with those of a file. The program's name begins each line of progress.
func New(program string, s Settings) (*Engine, error) {
	r, err := report.New(s.Rounds, s.Duration)
	if s.From != "" {
		r, err = report.Read(s.From)
	}
	return &Engine{Settings: s, Report: r, Log: os.Stderr, program: program}, err
}

// Logf tells the progress.
func (e *Engine) Logf(format string, args ...any) {
	fmt.Fprintf(e.Log, "%s: %s\n", e.program, fmt.Sprintf(format, args...))
}

// Run measures the groups and prints the report as the flags say. What was measured
// before a mistake or an interruption is printed all the same.
func (e *Engine) Run(ctx context.Context, w io.Writer, groups ...Group) error {
	if e.From != "" {
		return e.show(w)
	}
	var errs []error
	for _, g := range groups {
		if ctx.Err() != nil {
			break
		}
		if err := g.Measure(ctx); err != nil && ctx.Err() == nil {
			errs = append(errs, fmt.Errorf("%s: %w", g.Name, err))
		}
	}
	if ctx.Err() != nil {
		errs = append(errs, errors.New("interrupted"))
	}
	return errors.Join(append(errs, e.print(w))...)
}

// Value notes a figure that is taken by other means than rounds; less is better. The
// targets are targets of the path.
func (e *Engine) Value(group, name, unit, base, path string, value float64, targets ...report.Target) {
	var c *report.Case
	for _, o := range e.Report.Cases {
		if o.Group == group && o.Name == name {
			c = o
		}
	}
	if c == nil {
		c = &report.Case{Group: group, Name: name, Unit: unit, Lower: true, Base: base}
		e.Report.Cases = append(e.Report.Cases, c)
	}
	c.Add(path, value, 0, report.Cost{})
	c.Targets = append(c.Targets, targets...)
}

// print judges the cases and writes the report. Without any case an older file of JSON
// stays.
func (e *Engine) print(w io.Writer) error {
	if len(e.Report.Cases) == 0 && len(e.Report.Micro) == 0 {
		return nil
	}
	for _, c := range e.Report.Cases {
		c.Judge()
	}
	return e.show(w)
}

// show writes the report, and its plots.
func (e *Engine) show(w io.Writer) error {
	if e.Plot != "" {
		if err := plot.Write(e.Plot, e.Report); err != nil {
			return err
		}
	}
	if e.JSONFile != "" {
		f, err := os.Create(e.JSONFile)
		if err != nil {
			return err
		}
		if err := errors.Join(e.Report.WriteJSON(f), f.Close()); err != nil {
			return err
		}
	}
	if e.JSON {
		return e.Report.WriteJSON(w)
	}
	return e.Report.WriteTable(w)
}
