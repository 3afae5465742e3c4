// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestRun runs tests of a module that fail always, once, or in a way after which nothing runs again.
func TestRun(t *testing.T) {
	const once = `
func TestOnce(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Error("too slow")
	}
}
`
	const counted = `
func TestCounted(t *testing.T) {
	b, _ := os.ReadFile("count")
	os.WriteFile("count", append(b, 'x'), 0o600)
}
`
	const seeded = `
func TestSeeded(t *testing.T) {
	seed := os.Getenv("KUBE_SMCR_SEED")
	if seed == "" {
		seed = "7"
		if _, err := os.Stat("drew"); err == nil {
			seed = "8"
		}
		os.WriteFile("drew", nil, 0o600)
	}
	t.Run("sub", func(t *testing.T) {
		t.Logf("KUBE_SMCR_SEED=%s", seed)
		if seed == "7" {
			t.Error("wrong")
		}
	})
}
`
	always := func(name string) string { return "func Test" + name + "(t *testing.T) { t.Error(\"wrong\") }\n" }
	for name, tt := range map[string]struct {
		tests string
		err   string // in the error; "": none
		out   string // in the output
	}{
		"all is well":   {counted, "", `ok\s+example.com/m`},
		"a flaky test":  {once + counted, "", `(?s)--- FAIL: TestOnce.*too slow.*ok\s+example.com/m.*FLAKY\texample.com/m\tTestOnce: failed, and passed`},
		"a failed test": {counted + always("A"), "example.com/m failed twice", `(?s)--- FAIL: TestA.*--- FAIL: TestA`},
		"one of each":   {once + always("B"), "example.com/m failed twice", `(?s)again: TestOnce of example.com/m, alone.*again: TestB of example.com/m, alone.*--- FAIL: TestB`},
		"a seed":        {seeded, "example.com/m failed twice", `(?s)=7.*again: TestSeeded.*=7`},
		"a seed, twice": {once + strings.ReplaceAll(seeded, `if seed == "7"`, `if os.Getenv("KUBE_SMCR_SEED") == ""`), "", `(?s)again: TestOnce.*again: TestSeeded.*FLAKY`},
		"subtests":      {"func TestA(t *testing.T) { for _, n := range []string{\"x\", \"y\", \"z\"} { t.Run(n, func(t *testing.T) { t.Error() }) } }", "example.com/m failed twice", `(?s)again: TestA of example.com/m, alone.*FAIL`},
		"many":          {always("A") + always("B") + always("C") + always("D") + always("E"), "5 tests failed", `FAIL`},
		"a panic":       {`func TestPanic(t *testing.T) { panic("oops") }`, "nothing runs again: a test ended its process", `panic: oops`},
		"an exit":       {`func TestExit(t *testing.T) { os.Exit(3) }`, "nothing runs again: a package failed, and no test of it", `FAIL`},
		"a typo":        {`func TestX(t *testing.T) { y }`, "nothing runs again: a package failed, and no test of it", `build failed`},
	} {
		t.Run(name, func(t *testing.T) {
			writeModule(t, tt.tests)
			var out bytes.Buffer
			err := run(t.Context(), &out, []string{"-vet=off", "./..."})
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q; output:\n%s", err, tt.err, &out)
			}
			if !regexp.MustCompile(tt.out).Match(out.Bytes()) {
				t.Errorf("output does not match %q:\n%s", tt.out, &out)
			}
			if b, err := os.ReadFile("count"); err == nil && len(b) != 1 {
				t.Errorf("a test that passed ran %d times", len(b))
			}
		})
	}
}

// writeModule makes a module with tests, in which the test runs from then on, without what CI tells this command.
func writeModule(t *testing.T, tests string) {
	t.Helper()
	dir := t.TempDir()
	for file, text := range map[string]string{
		"go.mod":    "module example.com/m\n\ngo 1.26\n",
		"m_test.go": "package m\n\nimport (\n\"os\"\n\"testing\"\n)\n\nvar _ = os.Exit\n\n" + tests,
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	t.Setenv("GOFLAGS", "") // those of this module are not for that one
	t.Setenv(laterEnv, "")
}

func TestFailures(t *testing.T) {
	for name, tt := range map[string]struct{ output, why string }{
		"a data race":         {"==================\nWARNING: DATA RACE\n--- FAIL: TestA (0.1s)\nFAIL\tp\t0.1s\n", "a data race is a defect"},
		"a time-out":          {"panic: test timed out after 1s\nFAIL\tp\t1s\n", "a test ended its process"},
		"a process that dies": {"fatal error: all goroutines are asleep\nFAIL\tp\t1s\n", "a test ended its process"},
		"one that is killed":  {"--- FAIL: TestA (0.1s)\nsignal: killed\nFAIL\tp\t1s\nFAIL\n", "a test ended its process"},
		"nothing":             {"", "it is not said which tests failed"},
		"cut off":             {"--- FAIL: TestA (0.1s)\n", "it is not said which tests failed"},
	} {
		if failed, why := failures(tt.output); failed != nil || !strings.Contains(why, tt.why) {
			t.Errorf("%s: %v, %q, want %q", name, failed, why, tt.why)
		}
	}
	failed, why := failures("ok  \ta\t1s\n--- FAIL: TestA (0.1s)\n    --- FAIL: TestA/sub (0.1s)\n        x_test.go:1: panic: not one\nFAIL\nFAIL\tb\t1s\n--- FAIL: TestB (0.1s)\n    x_test.go:1: KUBE_SMCR_SEED=12\nFAIL\nFAIL\tc\t1s\nFAIL\n")
	if why != "" || len(failed) != 2 || failed[0].Pkg != "b" || failed[0].Seed != "" || failed[1].Pkg != "c" || failed[1].Test != "TestB" || failed[1].Seed != "12" {
		t.Errorf("%v, %q", failed, why)
	}

	const long = "--- FAIL: TestLong (1387.70s)\n    --- FAIL: TestLong/a+b (61.00s)\n        --- FAIL: TestLong/a+b/deep (1.00s)\n    --- FAIL: TestLong/c (400.00s)\nFAIL\nFAIL\tp\t1400s\n"
	for name, tt := range map[string]struct{ output, run, told string }{
		"a long one":             {long, `^TestLong$/^(a\+b|c)$`, "TestLong/a+b|c"},
		"a long one as such":     {"--- FAIL: TestLong (1387.70s)\n    x_test.go:1: wrong\nFAIL\nFAIL\tp\t1400s\n", "^TestLong$", "TestLong"},
		"a short one's subtests": {strings.Replace(long, "1387", "138", 1), "^TestLong$", "TestLong"},
	} {
		failed, why := failures(tt.output)
		if why != "" || len(failed) != 1 || failed[0].pattern() != tt.run || failed[0].String() != tt.told {
			t.Errorf("%s: %+v, %q, want %q", name, failed, why, tt.run)
		}
	}
}
