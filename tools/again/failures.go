// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// maxFailures is how many test functions of one run, which may be of ninety packages, may run again. If more fail, it is not the
// machine. Subtests do not count: in one guest that is short of processors many fail, each because of the one before, and
// a defect fails again.
const maxFailures = 4

// failure is a test that failed.
type failure struct {
	Pkg, Test string
	Seed      string   // that the test drew last; "": none
	Flags     []string // of go test
}

var (
	failLine = regexp.MustCompile(`^( *)--- FAIL: (\S+)`)
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
			if fail[1] == "" {
				failed = append(failed, failure{Test: fail[2]})
			}
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
