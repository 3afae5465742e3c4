// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// coverPackages are the packages whose functions the tests are watched for.
const coverPackages = "./pkg/smcr/...,./pkg/rdma/rocev2"

// lines is a range of lines of a file that was executed.
type lines struct {
	file     string
	from, to int
}

// prover runs tests and remembers what they executed.
type prover struct {
	root, tmp string
	binaries  map[string]string  // by directory
	runs      map[string][]lines // by the test's name
	failed    map[string]bool    // reported once
}

// prove runs every test that a statement names and looks for functions that a
// statement names and none of its tests runs.
func prove(root string) (err error) {
	sections, err := load(os.DirFS(root))
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "rfcmatrix-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	p := prover{root: root, tmp: tmp, binaries: map[string]string{}, runs: map[string][]lines{}, failed: map[string]bool{}}
	var errs []error
	for _, sec := range sections {
		for _, s := range sec.statements {
			errs = append(errs, p.check(s))
		}
	}
	return errors.Join(errs...)
}

// check runs the tests of one statement.
func (p *prover) check(s *statement) error {
	var executed []lines
	for _, t := range s.tests {
		if t.test == "" {
			return nil // a script, which nobody watches
		}
		if p.failed[t.name] {
			return nil
		}
		ran, err := p.run(t)
		if err != nil {
			p.failed[t.name] = true
			return fmt.Errorf("%s: %s: %w", s.line, s.id, err)
		}
		executed = append(executed, ran...)
	}
	if len(s.tests) == 0 {
		return nil
	}
	var errs []error
	for _, c := range s.code {
		if !strings.HasPrefix(c.file, "pkg/smcr/") || c.symbol.from == 0 {
			continue // not watched, or not a function
		}
		hit := func(l lines) bool {
			return l.file == c.file && l.from <= c.symbol.to && l.to >= c.symbol.from
		}
		if !slices.ContainsFunc(executed, hit) {
			errs = append(errs, fmt.Errorf("%s: %s: none of its tests runs %s", s.line, s.id, c.name))
		}
	}
	return errors.Join(errs...)
}

// run runs one test, once.
func (p *prover) run(t reference) ([]lines, error) {
	if ran, ok := p.runs[t.name]; ok {
		return ran, nil
	}
	binary, err := p.build(t.dir)
	if err != nil {
		return nil, err
	}
	pattern := "^" + t.test + "$"
	if t.subtest != "" { // a table may add to the name
		pattern += "/^" + regexp.QuoteMeta(strings.ReplaceAll(t.subtest, " ", "_"))
	}
	profile := filepath.Join(p.tmp, "profile")
	cmd := exec.Command(binary, "-test.run="+pattern, "-test.v", "-test.coverprofile="+profile, "-test.timeout=5m")
	cmd.Dir = filepath.Join(p.root, t.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("run %s: %w\n%s", t.name, err, out)
	}
	want := "--- PASS: " + t.test
	if t.subtest != "" {
		want += "/"
	}
	if !bytes.Contains(out, []byte(want)) {
		return nil, fmt.Errorf("run %s: nothing ran, or it was skipped", t.name)
	}
	b, err := os.ReadFile(profile)
	if err != nil {
		return nil, err
	}
	p.runs[t.name] = parseProfile(string(b))
	return p.runs[t.name], nil
}

// build makes a test binary of a package, once.
func (p *prover) build(dir string) (string, error) {
	if b, ok := p.binaries[dir]; ok {
		return b, nil
	}
	binary := filepath.Join(p.tmp, strings.ReplaceAll(dir, "/", "-")+".test")
	cmd := exec.Command("go", "test", "-c", "-o", binary, "-coverpkg="+coverPackages, "./"+dir)
	cmd.Dir = p.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the tests of %s: %w\n%s", dir, err, out)
	}
	p.binaries[dir] = binary
	return binary, nil
}

var profileLine = regexp.MustCompile(`(?m)^(\S+\.go):(\d+)\.\d+,(\d+)\.\d+ \d+ ([1-9]\d*)$`)

// parseProfile returns what a coverage profile says was executed.
func parseProfile(text string) []lines {
	var all []lines
	for _, m := range profileLine.FindAllStringSubmatch(text, -1) {
		from, _ := strconv.Atoi(m[2]) // digits, by the pattern
		to, _ := strconv.Atoi(m[3])
		all = append(all, lines{inModule(m[1]), from, to})
	}
	return all
}

// inModule takes the module's name off the path of a file.
func inModule(file string) string {
	const module = "github.com/smcr-io/kube-smcr"
	return path.Clean(strings.TrimPrefix(file, module+"/"))
}
