// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// maxFailures is how many test functions of one run, which may be of ninety packages, may run again. If more fail, it is not the
// machine. Subtests do not count: in one guest that is short of processors many fail, each because of the one before, and
// a defect fails again.
const maxFailures = 4

// longTest is how long a test takes of which only those direct subtests run again that failed: the scenarios of a cluster, which can
// be played one by one. Subtests of others may need what those before them left.
const longTest = 5 * time.Minute

// failure is a test that failed.
type failure struct {
	Pkg, Test string
	Parts     []string // of a long test, its direct subtests that failed; none: all run again
	Seed      string   // that the test drew last; "": none
	Flags     []string // of go test
}

// pattern is what -run takes for it.
func (f *failure) pattern() string {
	run := "^" + f.Test + "$"
	if len(f.Parts) > 0 {
		quoted := make([]string, len(f.Parts))
		for i, p := range f.Parts {
			quoted[i] = regexp.QuoteMeta(p)
		}
		run += "/^(" + strings.Join(quoted, "|") + ")$"
	}
	return run
}

// String implements fmt.Stringer.
func (f *failure) String() string {
	if len(f.Parts) == 0 {
		return f.Test
	}
	return f.Test + "/" + strings.Join(f.Parts, "|")
}

var (
	failLine = regexp.MustCompile(`^( *)--- FAIL: (\S+) \(([0-9.]+s)\)`)
	seedLine = regexp.MustCompile(`\b` + testenv.SeedEnv + `=(\d+)$`)
)

// failures finds the failed tests in the output of go test. why is not empty if none may run again.
func failures(output string) (failed []failure, why string) {
	ended := 0       // of failed, those whose package is known
	counted := false // the package's tests have all run: package testing says FAIL behind them
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\n")
		pkg, end := strings.CutPrefix(line, "FAIL\t")
		fail, seed := failLine.FindStringSubmatch(line), seedLine.FindStringSubmatch(line)
		switch {
		case strings.Contains(line, "DATA RACE"):
			return nil, "a data race is a defect however often it shows"
		case strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:"):
			return nil, "a test ended its process"
		case fail != nil:
			failed = noted(failed, ended, fail[1], fail[2], fail[3])
		case seed != nil && ended < len(failed):
			failed[len(failed)-1].Seed = seed[1]
		case line == "FAIL":
			counted = true
		case end && (ended == len(failed) || strings.HasSuffix(pkg, "]")): // [build failed], or by os.Exit
			return nil, "a package failed, and no test of it"
		case end && !counted:
			return nil, "a test ended its process"
		case end:
			counted = false
			pkg, _, _ = strings.Cut(pkg, "\t")
			for ; ended < len(failed); ended++ {
				failed[ended].Pkg = pkg
			}
		}
	}
	switch {
	case len(failed) > maxFailures:
		return nil, fmt.Sprintf("%d tests failed", len(failed))
	case ended < len(failed) || len(failed) == 0:
		return nil, "it is not said which tests failed"
	}
	return failed, ""
}

// noted adds what a line says of a test, or of a direct subtest of the long one that was added last: its lines come behind. Of failed,
// those before ended are of other packages.
func noted(failed []failure, ended int, indent, name, took string) []failure {
	const sub = "    "
	switch d, err := time.ParseDuration(took); {
	case indent == "":
		f := failure{Test: name}
		if err == nil && d >= longTest {
			f.Parts = []string{}
		}
		return append(failed, f)
	case indent == sub && ended < len(failed):
		f := &failed[len(failed)-1]
		if part, ok := strings.CutPrefix(name, f.Test+"/"); ok && f.Parts != nil {
			part, _, _ = strings.Cut(part, "/")
			f.Parts = append(f.Parts, part)
		}
	}
	return failed
}
