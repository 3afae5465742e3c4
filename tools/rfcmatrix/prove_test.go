// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestInstrument(t *testing.T) {
	const src = `package p

func none() {
	work()
}

func one() int { return 1 }

func (t *T) two(n int) (io.Reader, error) { return t.r, nil }

func (t List[E]) named(n int) (size int, err error) { return n, nil }

func other() int { return 2 }

func outside(n int) int
`
	const want = `package p

func none() { if rfcmatrixOff == "d/p.none" { return  }; 
	work()
}

func one() int { if rfcmatrixOff == "d/p.one" { return *new(int) };  return 1 }

func (t *T) two(n int) (io.Reader, error) { if rfcmatrixOff == "d/p.T.two" { return *new(io.Reader), *new(error) };  return t.r, nil }

func (t List[E]) named(n int) (size int, err error) { if rfcmatrixOff == "d/p.List.named" { return  };  return n, nil }

func other() int { return 2 }

func outside(n int) int
`
	got, pkg, err := instrument("p.go", []byte(src), "d/p", []string{"none", "one", "T.two", "List.named", "outside"})
	if diff := cmp.Diff(want, string(got)); diff != "" || pkg != "p" || err != nil {
		t.Errorf("package %q, error %v (-want +got):\n%s", pkg, err, diff)
	}
	if got, _, err := instrument("p.go", []byte(src), "d/p", []string{"gone"}); got != nil || err != nil {
		t.Errorf("without a function: %q, %v", got, err)
	}
	if _, _, err := instrument("p.go", []byte("package"), "d/p", nil); err == nil {
		t.Error("no error for what is not Go")
	}
}

// module writes a module with these files and returns its root.
func module(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	files["go.mod"] = "module example.com/m\n\ngo 1.26\n"
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const provenCode = `package p

type T struct{ n int }

func (t *T) Add(n int) { t.n += n }

func Double(n int) int { return 2 * n }

func Quiet() {}

func Slow() bool { return true }
`

const provenTests = `package p

import "testing"

func TestAdd(t *testing.T) {
	x := &T{}
	x.Add(2)
	if x.n != 2 {
		t.Error(x.n)
	}
}

func TestTable(t *testing.T) {
	t.Run("doubles", func(t *testing.T) {
		if Double(2) != 4 {
			t.Error("no")
		}
	})
	t.Run("has no use for it", func(t *testing.T) {})
}

func TestQuiet(t *testing.T) { Quiet() }

func TestPanics(t *testing.T) { _ = [1]int{}[Double(1)-2] }

func TestSkipped(t *testing.T) { t.Skip("not here") }

func TestFails(t *testing.T) { t.Error("always") }
`

func TestProve(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	rows := []struct{ name, row, want string }{
		{"dead", "code: p.T.Add\ntest: p.TestAdd", ""},
		{"dead by a subtest", "code: p.Double\ntest: p.TestTable/doubles", ""},
		{"dead by a panic", "code: p.Double\ntest: p.TestPanics", ""},
		{"dead by the second test", "code: p.Double\ntest: p.TestQuiet; p.TestTable/doubles", ""},
		{"alive", "code: p.Double\ntest: p.TestTable/has no use for it", `all its tests pass without p.Double: name one that fails, or say why in "alive: p.Double: ..."`},
		{"one of two is alive", "code: p.T.Add; p.Double\ntest: p.TestAdd", "all its tests pass without p.Double"},
		{"alive, with a reason", "code: p.T.Add; p.Quiet\ntest: p.TestAdd; p.TestQuiet\nalive: p.Quiet: it does nothing.", ""},
		{"the reason is not needed", "code: p.T.Add\ntest: p.TestAdd\nalive: p.T.Add: it does nothing.", `a test fails without p.T.Add, so "alive" must not name it`},
		{"skipped", "code: p.Quiet\ntest: p.TestSkipped", "p.TestSkipped: nothing ran, or it was skipped"},
		{"fails anyway", "code: p.Quiet\ntest: p.TestFails", "p.TestFails fails with all functions on"},
		{"types cannot be switched off", "code: p.T\ntest: p.TestAdd", ""},
		{"no test", "code: p.Quiet", ""},
	}
	text := "§2 Links\n"
	for i, tt := range rows {
		text += fmt.Sprintf("\nR2-%d MUST Do it.\n%s\n", i+1, tt.row)
	}
	root := module(t, map[string]string{"docs/rfc7609/2.txt": text, "pkg/p/p.go": provenCode, "pkg/p/p_test.go": provenTests})
	for _, when := range []string{"first", "with what is known"} {
		var log bytes.Buffer
		err := prove(root, proof{jobs: 2, log: &log})
		for i, tt := range rows {
			said := ""
			for line := range strings.Lines(err.Error()) {
				if strings.Contains(line, fmt.Sprintf(": R2-%d: ", i+1)) {
					said += line
				}
			}
			if (said == "") != (tt.want == "") || !strings.Contains(said, tt.want) {
				t.Errorf("%s, %s: %q, want %q\n%s", tt.name, when, said, tt.want, &log)
			}
		}
	}
	if err := prove(root, proof{rows: []string{"R2-11", "R2-12"}}); err == nil || !strings.Contains(err.Error(), "no such row names a function and a test") {
		t.Errorf("rows without a function, or without a test: %v", err)
	}
	after, err := os.ReadFile(filepath.Join(root, "pkg/p/p.go"))
	if err != nil || string(after) != provenCode {
		t.Errorf("the code was changed: %v\n%s", err, after)
	}
}

// What is known counts for the same binary and test data only.
func TestRunner_remembers(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	files := map[string]string{
		"docs/rfc7609/2.txt": "§2 Links\nR2-1 MUST Do it.\ncode: p.Double\ntest: p.TestTable/doubles\n",
		"pkg/p/p.go":         provenCode, "pkg/p/p_test.go": provenTests,
	}
	known := func() int {
		entries, err := os.ReadDir(filepath.Join(cache, "kube-smcr", "rfcmatrix"))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	for _, tt := range []struct {
		name, file, text string
		want             int
	}{
		{"new", "", "", 1},
		{"the same", "", "", 1},
		{"other code", "pkg/p/more.go", "package p\n\nvar More = 1\n", 2},
		{"other data", "pkg/p/testdata/x", "y", 3},
	} {
		if tt.file != "" {
			files[tt.file] = tt.text
		}
		if err := prove(module(t, files), proof{log: &bytes.Buffer{}}); err != nil {
			t.Fatal(err)
		}
		if got := known(); got != tt.want {
			t.Errorf("%s: %d outcomes are known, want %d", tt.name, got, tt.want)
		}
	}
}

func TestProof_wants(t *testing.T) {
	sections, err := parseStatements("docs/rfc7609/3-links.txt", "§3.5 Links\n\nR3.5-1 MUST A.\n\nR3.5-2 MUST B.\n")
	if err != nil {
		t.Fatal(err)
	}
	for rows, want := range map[string]string{
		"": "R3.5-1 R3.5-2", "R3.5-2": "R3.5-2", "R3": "R3.5-1 R3.5-2", "3-links": "R3.5-1 R3.5-2", "R4,R3.5-1": "R3.5-1", "4-memory": "", "5": "",
	} {
		p := proof{rows: strings.FieldsFunc(rows, func(r rune) bool { return r == ',' })}
		var got []string
		for _, s := range sections[0].statements {
			if p.wants(s) {
				got = append(got, s.id)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %v, want %q", rows, got, want)
		}
	}
}

// Claims are judged by several at a time, and all errors come back.
func TestProof_judge(t *testing.T) {
	s := &statement{id: "R1-1", line: "f:1"}
	var all []claim
	for range 20 {
		all = append(all, claim{s: s, code: reference{name: "p.F"}})
	}
	both := make(chan struct{})
	errBoom := errors.New("boom")
	var log bytes.Buffer
	p := proof{jobs: 2, log: &log}
	err := p.judge(all, func(claim) (bool, error) {
		select {
		case both <- struct{}{}:
		case <-both:
		}
		return false, errBoom
	})
	if !errors.Is(err, errBoom) || strings.Count(err.Error(), "f:1: R1-1: boom") != len(all) {
		t.Errorf("error %v", err)
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) != len(all) || !slices.Contains(lines, "20/20 R1-1 p.F: NOT PROVEN") {
		t.Errorf("log:\n%s", &log)
	}
}
