// SPDX-License-Identifier: Apache-2.0

package tidy_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestWhatTheRaceDetectorHidesIsJudged: a test that judges less under the race detector, by underRaceDetector or by
// a function that reads it, is also run without: by .ci/run, and by make test-attack for the workflow.
func TestWhatTheRaceDetectorHidesIsJudged(t *testing.T) {
	attacks := matchOf(t, "Makefile", `(?m)^attack-tests := (.+)\$\$()$`)[""]
	steps := matchOf(t, ".ci/run", `(?m)^step .* -run='(.+)\$' \./(\S+) `)
	found := 0
	for dir, uses := range testFunctions(t) {
		hidden := map[string]bool{"underRaceDetector": true}
		for more := true; more; {
			more = false
			for name, idents := range uses {
				if !hidden[name] && slices.ContainsFunc(idents, func(i string) bool { return hidden[i] }) {
					hidden[name], more = true, true
				}
			}
		}
		for _, name := range slices.Sorted(maps.Keys(hidden)) {
			if !strings.HasPrefix(name, "Test") {
				continue
			}
			found++
			if !attacks.MatchString(name) {
				t.Errorf("%s: %s judges less under the race detector, and attack-tests of the Makefile do not have it", dir, name)
			}
			if step := steps[dir]; step == nil || !step.MatchString(name) {
				t.Errorf("%s: %s judges less under the race detector, and no step of .ci/run runs it without", dir, name)
			}
		}
	}
	if found == 0 {
		t.Error("no test reads underRaceDetector: this test checks nothing")
	}
}

// matchOf are the patterns of go test -run in a file, by package.
func matchOf(t *testing.T, file, line string) map[string]*regexp.Regexp {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]*regexp.Regexp{}
	for _, m := range regexp.MustCompile(line).FindAllStringSubmatch(string(text), -1) {
		all[m[2]] = regexp.MustCompile(m[1] + "$")
	}
	if len(all) == 0 {
		t.Fatalf("%s has no line like %s", file, line)
	}
	return all
}

// testFunctions are the functions of each package's tests, but for methods, with the identifiers in each.
func testFunctions(t *testing.T) map[string]map[string][]string {
	t.Helper()
	all := map[string]map[string][]string{}
	for _, f := range sources(t) {
		if !f.is("_test.go") {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), f.name, f.text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("parse: %v", err)
		}
		dir := path.Dir(f.name)
		if all[dir] == nil {
			all[dir] = map[string][]string{}
		}
		for _, d := range tree.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil {
				continue
			}
			ast.Inspect(fn, func(n ast.Node) bool {
				if i, ok := n.(*ast.Ident); ok {
					all[dir][fn.Name.Name] = append(all[dir][fn.Name.Name], i.Name)
				}
				return true
			})
		}
	}
	return all
}
