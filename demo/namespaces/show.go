// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/test/netns/twonodes"
)

// A story is what is shown: twonodes.Applications or twonodes.Failover.
type story interface {
	Run(ctx context.Context) error
	LookAround() []string
	Close()
}

// show prints a story while it is told. It is owned by one goroutine.
type show struct {
	out    io.Writer
	began  time.Time
	checks []twonodes.Check
	story  story
	result func(ending) any // for JSON
}

// ending ends the JSON of every story.
type ending struct {
	Checks  []twonodes.Check `json:"checks"`
	Seconds float64          `json:"seconds"`
}

func newShow(o options, out io.Writer) *show {
	s := &show{out: out, began: time.Now()}
	cfg := twonodes.Config{Bin: o.bin, Captures: o.pcapDir, Quick: o.quick, Repeat: o.repeat}
	if o.verbose {
		cfg.AgentLog = func(node string) io.Writer { return &prefixed{out: out, prefix: node} }
	}
	if o.failover {
		f := twonodes.NewFailover(cfg, s)
		s.story = f
		s.result = func(e ending) any {
			return struct {
				twonodes.FailoverFindings
				ending
			}{f.Findings(), e}
		}
		return s
	}
	a := twonodes.NewApplications(cfg, s)
	s.story = a
	s.result = func(e ending) any {
		return struct {
			twonodes.Findings
			ending
		}{a.Findings(), e}
	}
	return s
}

// Progress implements twonodes.Audience.
func (s *show) Progress(line string) {
	fmt.Fprintf(s.out, "%6.1fs  %s\n", time.Since(s.began).Seconds(), line)
}

// Check implements twonodes.Audience.
func (s *show) Check(c twonodes.Check) {
	s.checks = append(s.checks, c)
	verdict := "ok"
	if !c.OK {
		verdict = "NOT SO"
	}
	s.Progress(fmt.Sprintf("  %-6s %s: %s", verdict, c.Name, c.Detail))
}

// Show implements twonodes.Audience.
func (s *show) Show(text string) { fmt.Fprint(s.out, text) }

func (s *show) failed() []twonodes.Check {
	var out []twonodes.Check
	for _, c := range s.checks {
		if !c.OK {
			out = append(out, c)
		}
	}
	return out
}

// keep shows how to look around, and waits.
func (s *show) keep(ctx context.Context) {
	commands := s.story.LookAround()
	if len(commands) == 0 {
		return
	}
	fmt.Fprintf(s.out, "\nkept until Ctrl-C; for example:\n  %s\n", strings.Join(commands, "\n  "))
	<-ctx.Done()
}

// summary prints the result for people.
func (s *show) summary(interrupted bool, seconds float64) {
	failed := s.failed()
	switch {
	case interrupted && len(failed) == 0:
		return
	case len(failed) == 0:
		fmt.Fprintf(s.out, "\n%d checks, all hold (%.0f s)\n", len(s.checks), seconds)
		return
	}
	fmt.Fprintf(s.out, "\n%d of %d checks do not hold:\n", len(failed), len(s.checks))
	for _, c := range failed {
		fmt.Fprintf(s.out, "  %s: %s\n", c.Name, c.Detail)
	}
}

// writeJSON writes what this run has to say.
func (s *show) writeJSON(w io.Writer, seconds float64) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(s.result(ending{s.checks, seconds}))
}

// prefixed puts a name in front of every line.
type prefixed struct {
	mu     sync.Mutex // guards what is below
	out    io.Writer
	prefix string
}

// Write implements io.Writer.
func (p *prefixed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(string(b)) {
		fmt.Fprintf(p.out, "%s: %s\n", p.prefix, strings.TrimRight(line, "\n"))
	}
	return len(b), nil
}
