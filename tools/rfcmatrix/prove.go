// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
)

// proof says what to prove and how.
type proof struct {
	rows []string // beginnings of their numbers, or names of their files; none means all
	jobs int
	log  io.Writer
}

// claim is what is to be proven: that the tests of a statement fail without a function that it names.
type claim struct {
	s     *statement
	code  reference
	tests []reference
}

// prove switches each function off that a statement names and runs the tests of that
// statement: one of them must fail, or the statement says why none does.
func prove(root string, p proof) (err error) {
	ix, err := readSource(os.DirFS(root))
	if err != nil {
		return err
	}
	var all []claim
	for i := range documents {
		d := &documents[i]
		if _, err := fs.Stat(ix.repo, d.dir); err != nil {
			continue // update misses it
		}
		sections, err := d.load(ix)
		if err != nil {
			return err
		}
		all = append(all, claims(sections)...)
	}
	chosen := slices.DeleteFunc(slices.Clone(all), func(c claim) bool { return !p.wants(c.s) })
	if len(chosen) == 0 {
		return fmt.Errorf("-rows %s: no such row names a function and a test", strings.Join(p.rows, ","))
	}
	tmp, err := os.MkdirTemp("", "rfcmatrix-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	r, err := newRunner(root, tmp, targets(all))
	if err != nil {
		return err
	}
	return p.judge(chosen, r.survives)
}

// wants reports whether a statement is among those that were asked for.
func (p *proof) wants(s *statement) bool {
	if len(p.rows) == 0 {
		return true
	}
	file, _, _ := strings.Cut(path.Base(s.line), ".txt:")
	return slices.ContainsFunc(p.rows, func(row string) bool { return strings.HasPrefix(s.id, row) || file == row })
}

// claims lists what can be proven: of functions, by tests that run on any machine.
func claims(sections []*section) []claim {
	var all []claim
	for _, sec := range sections {
		for _, s := range sec.statements {
			tests := slices.DeleteFunc(slices.Clone(s.tests), func(t reference) bool {
				return t.test == "" || underTest(t.dir) || strings.HasPrefix(t.test, "Benchmark")
			})
			for _, c := range s.code {
				if c.symbol.line > 0 && len(tests) > 0 {
					all = append(all, claim{s, c, tests})
				}
			}
		}
	}
	return all
}

// target is the function that a claim is about.
func (c *claim) target() target {
	m := referenceForm.FindStringSubmatch(c.code.name)
	return target{path.Dir(c.code.file), m[2]}
}

// targets are the functions of claims.
func targets(all []claim) []target {
	var ts []target
	for _, c := range all {
		if t := c.target(); !slices.Contains(ts, t) {
			ts = append(ts, t)
		}
	}
	return ts
}

// judge asks of each claim whether its tests survive, several at a time, and compares
// that with what the statements say.
func (p *proof) judge(all []claim, survives func(claim) (bool, error)) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs, next, done := make([]error, len(all)), 0, 0
	work := func() {
		for {
			mu.Lock()
			i := next
			next++
			mu.Unlock()
			if i >= len(all) {
				return
			}
			c := all[i]
			alive, err := survives(c)
			if err == nil {
				err = c.verdict(alive)
			} else {
				err = fmt.Errorf("%s: %s: %w", c.s.line, c.s.id, err)
			}
			mu.Lock()
			errs[i] = err
			done++
			fmt.Fprintf(p.log, "%d/%d %s %s: %s\n", done, len(all), c.s.id, c.code.name, outcome(alive, err))
			mu.Unlock()
		}
	}
	for range max(p.jobs, 1) {
		wg.Go(work)
	}
	wg.Wait()
	return errors.Join(errs...)
}

func outcome(alive bool, err error) string {
	switch {
	case err != nil:
		return "NOT PROVEN"
	case alive:
		return "alive, with a reason"
	}
	return "dead"
}

// verdict compares what happened without the function with what the statement says. A
// reason that is not needed any more is an error, too.
func (c *claim) verdict(alive bool) error {
	excused := slices.ContainsFunc(c.s.aliveNames(), func(name string) bool { return name == c.code.name })
	switch {
	case alive && !excused:
		return fmt.Errorf("%s: %s: all its tests pass without %s: name one that fails, or say why in \"alive: %s: ...\"",
			c.s.line, c.s.id, c.code.name, c.code.name)
	case !alive && excused:
		return fmt.Errorf("%s: %s: a test fails without %s, so \"alive\" must not name it", c.s.line, c.s.id, c.code.name)
	}
	return nil
}
