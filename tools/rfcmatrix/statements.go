// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// section is a section of the RFC with its statements.
type section struct {
	number, title string
	line          string // file:line
	statements    []*statement
}

// statement is one thing that the RFC asks for.
type statement struct {
	id, level, text    string
	line               string // file:line
	codeText, testText string
	code, tests        []reference
	exception, linux   string
	unused, open       string
	alive              string
}

// reference is a name in the code, or the path of a file.
type reference struct {
	name string

	// Filled in by resolve.
	file               string
	symbol             symbol // of code
	dir, test, subtest string // of a test
}

// state is how far a statement has come.
type state uint8

const (
	tested state = iota
	implemented
	excepted
	notUsed
	open
	states
)

func (s state) String() string {
	return [states]string{"tested", "implemented", "exception", "not used", "open"}[s]
}

func (s *statement) state() state {
	switch {
	case s.exception != "":
		return excepted
	case s.unused != "":
		return notUsed
	case s.open != "" || len(s.code) == 0:
		return open
	case len(s.tests) > 0:
		return tested
	}
	return implemented
}

var (
	headLine      = regexp.MustCompile(`^§([0-9ABC][0-9.]*) (\S.*)$`)
	statementLine = regexp.MustCompile(`^R([0-9ABC][0-9.]*)-([0-9]+) (MUST|SHOULD|MAY) (\S.*)$`)
	fieldLine     = regexp.MustCompile(`^(code|test|exception|linux|unused|open|alive): (\S.*)$`)
)

// readStatements reads all files, in the order of their sections.
func (d *document) readStatements(repo fs.FS) ([]*section, error) {
	names, err := fs.Glob(repo, path.Join(d.dir, "*.txt"))
	if err != nil {
		return nil, err
	}
	var sections []*section
	for _, name := range names {
		b, err := fs.ReadFile(repo, name)
		if err != nil {
			return nil, err
		}
		got, err := parseStatements(name, string(b))
		if err != nil {
			return nil, err
		}
		sections = append(sections, got...)
	}
	if len(sections) == 0 {
		return nil, fmt.Errorf("%s: no statements", d.dir)
	}
	slices.SortStableFunc(sections, func(a, b *section) int { return compareNumbers(a.number, b.number) })
	for i := 1; i < len(sections); i++ {
		if a, b := sections[i-1], sections[i]; a.number == b.number {
			return nil, fmt.Errorf("%s: section %s is at %s, too", b.line, b.number, a.line)
		}
	}
	return sections, nil
}

// parseStatements reads one file.
func parseStatements(name, text string) ([]*section, error) {
	var p statementParser
	for i, line := range strings.Split(text, "\n") {
		if err := p.take(fmt.Sprintf("%s:%d", name, i+1), line); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", name, i+1, err)
		}
	}
	for _, sec := range p.sections {
		for _, s := range sec.statements {
			s.code, s.tests = references(s.codeText), references(s.testText)
			if err := s.check(); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", s.line, s.id, err)
			}
		}
	}
	return p.sections, nil
}

type statementParser struct {
	sections []*section
	last     int // number of the section's last statement
	current  *statement
	extend   func(string) // takes a continuation line
}

func (p *statementParser) take(where, line string) error {
	line = strings.TrimRight(line, " ")
	switch {
	case line == "" || strings.HasPrefix(line, "#"):
		p.extend = nil
		return nil
	case strings.HasPrefix(line, " "):
		if p.extend == nil {
			return errors.New("nothing to continue")
		}
		p.extend(" " + strings.TrimSpace(line))
		return nil
	}
	if m := headLine.FindStringSubmatch(line); m != nil {
		p.sections = append(p.sections, &section{number: m[1], title: m[2], line: where})
		p.last, p.current, p.extend = 0, nil, nil
		return nil
	}
	if m := statementLine.FindStringSubmatch(line); m != nil {
		return p.begin(where, m)
	}
	m := fieldLine.FindStringSubmatch(line)
	if m == nil {
		return fmt.Errorf("neither a section nor a statement nor a field: %q", line)
	}
	if p.current == nil {
		return fmt.Errorf("%s without a statement", m[1])
	}
	return p.field(m[1], m[2])
}

func (p *statementParser) begin(where string, m []string) error {
	if len(p.sections) == 0 || p.sections[len(p.sections)-1].number != m[1] {
		return fmt.Errorf("statement R%s-%s does not stand in its section", m[1], m[2])
	}
	n, err := strconv.Atoi(m[2])
	if err != nil || n <= p.last {
		return fmt.Errorf("statement R%s-%s after number %d", m[1], m[2], p.last)
	}
	p.last = n
	s := &statement{id: "R" + m[1] + "-" + m[2], level: m[3], text: m[4], line: where}
	sec := p.sections[len(p.sections)-1]
	sec.statements = append(sec.statements, s)
	p.current = s
	p.extend = func(more string) { s.text += more }
	return nil
}

func (p *statementParser) field(name, value string) error {
	s := p.current
	to := map[string]*string{
		"code": &s.codeText, "test": &s.testText,
		"exception": &s.exception, "linux": &s.linux, "unused": &s.unused, "open": &s.open, "alive": &s.alive,
	}[name]
	if *to != "" {
		return fmt.Errorf("%s: a second %s", s.id, name)
	}
	*to = value
	p.extend = func(more string) { *to += more }
	return nil
}

// references splits the value of code or test.
func references(text string) []reference {
	var all []reference
	for name := range strings.SplitSeq(text, ";") {
		if name = strings.TrimSpace(name); name != "" {
			all = append(all, reference{name: name})
		}
	}
	return all
}

// check finds what contradicts itself.
func (s *statement) check() error {
	switch {
	case s.unused != "" && s.level != "MAY":
		return errors.New("only a MAY can be unused")
	case s.unused != "" && (s.exception != "" || s.open != ""):
		return errors.New("unused, and an exception or open")
	case s.exception != "" && s.open != "":
		return errors.New("an exception, and open")
	case s.linux != "" && (s.exception != "" || s.unused != ""):
		return errors.New("an exception towards Linux of what is not done at all")
	case len(s.tests) > 0 && len(s.code) == 0:
		return errors.New("a test, but no code")
	}
	for _, name := range s.aliveNames() {
		if !slices.ContainsFunc(s.code, func(r reference) bool { return r.name == name }) {
			return fmt.Errorf("alive: %q is not among its code; the form is NAME, NAME: why", name)
		}
	}
	return nil
}

// aliveNames are the functions without which the tests of the statement pass.
func (s *statement) aliveNames() []string {
	if s.alive == "" {
		return nil
	}
	list, _, _ := strings.Cut(s.alive, ": ")
	names := strings.Split(list, ",")
	for i := range names {
		names[i] = strings.TrimSpace(names[i])
	}
	return names
}

// compareNumbers orders section numbers: 2 before 10 before A.
func compareNumbers(a, b string) int {
	return slices.CompareFunc(strings.Split(a, "."), strings.Split(b, "."), func(x, y string) int {
		if len(x) != len(y) {
			return cmp.Compare(len(x), len(y))
		}
		return cmp.Compare(x, y)
	})
}
