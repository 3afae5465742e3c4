// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
)

// In sets a bed up, calls measure with its paths, and closes the bed, whatever happens.
func (e *Engine) In(ctx context.Context, b Bed, measure func([]Path) error) (err error) {
	defer func() { err = errors.Join(err, b.Close()) }()
	paths, err := b.SetUp(ctx)
	if err != nil {
		return err
	}
	return measure(paths)
}

// Compare runs the jobs over the paths of a bed.
func (e *Engine) Compare(ctx context.Context, title string, b Bed, jobs []Job) error {
	return e.In(ctx, b, func(paths []Path) error { return e.Measure(ctx, title, jobs, paths) })
}

// course is one job over one path.
type course struct {
	job    *Job
	number int // of the job
	path   Path
	start  Usage        // of the load without any operation
	skip   float64      // what was done in it nevertheless
	slow   *measurement // the only one, of a path that takes very long
	out    bool         // left out
}

// measurement is what one load gave and used.
type measurement struct {
	load.Result
	used Usage
}

// Measure runs every job that is wanted over every path, round after round, and adds
// the cases to the report.
func (e *Engine) Measure(ctx context.Context, title string, jobs []Job, paths []Path) error {
	courses := e.courses(jobs, paths)
	began := time.Now()
	e.Logf("%s: start the paths", title)
	if err := e.each(ctx, courses, 0, func(c *course) error { return c.prepare(ctx) }); err != nil {
		return err
	}
	for round := range e.Rounds {
		e.Logf("%s: round %d of %d, after %v", title, round+1, e.Rounds, time.Since(began).Round(time.Second))
		err := e.each(ctx, courses, round, func(c *course) error {
			if c.slow != nil && round > 0 {
				return nil
			}
			return c.once(ctx)
		})
		if err != nil {
			return err
		}
	}
	if e.Profile == "" {
		return nil
	}
	return e.each(ctx, courses, 0, func(c *course) error { return c.profile(ctx) })
}

// courses has those of each job in a line of its own.
func (e *Engine) courses(jobs []Job, paths []Path) [][]*course {
	jobs = e.wanted(jobs)
	all := make([][]*course, len(jobs))
	for i := range jobs {
		for _, f := range jobs[i].Figures {
			e.Report.Cases = append(e.Report.Cases, f.Case)
		}
		for _, p := range paths {
			if p.Can == nil || p.Can(jobs[i].Load) {
				all[i] = append(all[i], &course{job: &jobs[i], number: i, path: p})
			}
		}
	}
	return all
}

// each does something with all courses, job after job, beginning with the path that
// has this number.
func (e *Engine) each(ctx context.Context, courses [][]*course, first int, do func(*course) error) error {
	for _, line := range courses {
		for i := range line {
			if err := ctx.Err(); err != nil {
				return err
			}
			c := line[(first+i)%len(line)]
			if c.out {
				continue
			}
			err := do(c)
			if err == nil {
				continue
			}
			err = fmt.Errorf("%s over %s: %w", c.job.name(), c.path.Name, err)
			if !c.path.Tool || ctx.Err() != nil {
				return err
			}
			e.Logf("left out from here on: %v", err) // the rounds before count
			c.out = true
		}
	}
	return nil
}

// prepare starts the path, and finds its cost without any operation, or with as few
// as can be.
func (c *course) prepare(ctx context.Context) error {
	l := c.job.Load
	l.Duration = 0
	if err := c.path.Start(ctx, l); err != nil || c.path.StartCost == nil || !c.path.StartCost(l) {
		return err
	}
	began := time.Now()
	m, err := c.measure(ctx, l)
	if err != nil {
		return err
	}
	if time.Since(began) > slowLimit && c.job.Per.Of(m.Result) > 0 {
		// It counts as the path's first round, and there is no other one.
		c.slow = &m
		return nil
	}
	c.start, c.skip = m.used, c.job.Per.Of(m.Result)
	return nil
}

func (c *course) measure(ctx context.Context, l load.Load) (m measurement, err error) {
	before, err := c.path.Used()
	if err != nil {
		return m, err
	}
	if m.Result, err = c.path.Run(ctx, l); err != nil {
		return m, err
	}
	after, err := c.path.Used()
	if err != nil {
		return m, err
	}
	m.used = after.Minus(before)
	return m, c.path.Check(ctx, l, m.Result)
}

// once measures one round and notes its figures.
func (c *course) once(ctx context.Context) error {
	m, err := measurement{}, error(nil)
	if c.slow != nil {
		m = *c.slow
	} else if m, err = c.measure(ctx, c.job.Load); err != nil {
		return err
	}
	cost := m.used.Minus(c.start).per(c.job.Per.Name, c.job.Per.Of(m.Result)-c.skip)
	for _, f := range c.job.Figures {
		if v := f.Of(m.Result); v > 0 {
			f.Case.Add(c.path.Name, v, m.Elapsed.Seconds(), cost)
		}
	}
	return nil
}

// profile runs the job once more, under the profiler, which costs time.
func (c *course) profile(ctx context.Context) error {
	if c.path.Profile == nil {
		return nil
	}
	end, err := c.path.Profile(c.number)
	if err != nil {
		return err
	}
	l := c.job.Load
	l.Duration = min(profileTimes*l.Duration, maxDuration)
	_, err = c.path.Run(ctx, l)
	return errors.Join(err, end())
}
