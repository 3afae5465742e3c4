// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// checkout makes one of a module with two programs, of which one has a package of its own.
func checkout(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.Program("go"), testenv.Program("git"))
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":          "module m\n\ngo 1.24\n",
		"a/main.go":       "package main\n\nimport \"m/x\"\n\nfunc main() { x.X() }\n",
		"b/main.go":       "package main\n\nfunc main() {}\n",
		"x/x.go":          "package x\n\nfunc X() {}\n",
		"x/x_test.go":     "package x\n\nimport \"testing\"\n\nfunc TestX(*testing.T) { X() }\n",
		"x/testdata/data": "1",
		"charts/c.yaml":   "a: b\n",
		"docs/page.md":    "# Page\n",
	} {
		write(t, dir, name, text)
	}
	if out, err := exec.Command("git", "-C", dir, "init", "-q").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	f := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func variables(t *testing.T, dir string) map[string]string {
	t.Helper()
	var b strings.Builder
	if err := printVariables(&b, dir); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(b.String()) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		all[strings.TrimPrefix(name, "KUBE_SMCR_INPUT_")] = value
	}
	return all
}

// A variable changes with what its program is made of, and with nothing else.
func TestPrintVariables(t *testing.T) {
	testenv.Builds("*") // go list
	dir := checkout(t)
	before := variables(t, dir)
	all := []string{"checkout", "m_a", "m_b", "m_x_test", "machine", "product"}
	if got := slices.Sorted(maps.Keys(before)); !slices.Equal(got, all) {
		t.Fatalf("variables %q, want %q", got, all)
	}
	for _, tc := range []struct {
		name, text string
		changes    []string
	}{
		{"docs/page.md", "# Other\n", []string{"checkout"}},
		{"x/x_test.go", "package x\n\nimport \"testing\"\n\nfunc TestX(*testing.T) {}\n", []string{"checkout", "m_x_test"}},
		{"x/testdata/data", "2", []string{"checkout", "m_x_test", "product"}},
		{"charts/c.yaml", "a: c\n", []string{"checkout", "product"}},
		{"b/main.go", "package main\n\nfunc main() { println() }\n", []string{"checkout", "m_b", "product"}},
		{"x/x.go", "package x\n\nfunc X() { println() }\n", []string{"checkout", "m_a", "m_x_test", "product"}},
		{"x/other.go", "//go:build !cgo && cgo\n\npackage x\n", []string{"checkout", "m_a", "m_x_test", "product"}},
		{"x/new.go", "package x\n", []string{"checkout", "m_a", "m_x_test", "product"}},
		{"go.mod", "module m\n\ngo 1.23\n", []string{"checkout", "m_a", "m_b", "m_x_test", "product"}},
	} {
		write(t, dir, tc.name, tc.text)
		after := variables(t, dir)
		var changed []string
		for _, name := range all {
			if before[name] != after[name] {
				changed = append(changed, name)
			}
		}
		if !slices.Equal(changed, tc.changes) {
			t.Errorf("%s: %q change, want %q", tc.name, changed, tc.changes)
		}
		before = after
	}
}

// What was unpacked without git has variables, too.
func TestPrintVariables_archive(t *testing.T) {
	testenv.Builds("*") // go list
	dir := checkout(t)
	if err := os.RemoveAll(filepath.Join(dir, ".git")); err != nil {
		t.Fatal(err)
	}
	before := variables(t, dir)
	write(t, dir, "charts/c.yaml", "a: d\n")
	if after := variables(t, dir); after["product"] == before["product"] || after["m_a"] != before["m_a"] {
		t.Errorf("%v, then %v", before, after)
	}
}

// Two checkouts of the same content have the same times, which are not those of today.
func TestStampFiles(t *testing.T) {
	times := func(dir string) map[string]time.Time {
		all := map[string]time.Time{}
		for _, name := range []string{".", "x", "x/x.go", "b/main.go", "x/testdata", "x/testdata/data"} {
			i, err := os.Stat(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			all[name] = i.ModTime()
		}
		return all
	}
	one, two := checkout(t), checkout(t)
	write(t, two, "b/main.go", "package main\n")
	for _, dir := range []string{one, two} {
		if err := stampFiles(dir); err != nil {
			t.Fatal(err)
		}
	}
	a, b := times(one), times(two)
	for name, at := range a {
		if at.After(time.Now().AddDate(-1, 0, 0)) {
			t.Errorf("%s is of %v", name, at)
		}
		if same := at.Equal(b[name]); same != (name != "b/main.go") {
			t.Errorf("%s is of %v and of %v", name, at, b[name])
		}
	}
}
