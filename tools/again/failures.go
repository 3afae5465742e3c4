// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// maxFailures is how many tests may run again, each subtest counted. If more fail, it is not the machine.
const maxFailures = 2

// failure is a test that failed.
type failure struct {
	pkg, test string
	seed      string // that the test drew last; "": none
}

var (
	failLine = regexp.MustCompile(`^( *)--- FAIL: (\S+)`)
	seedLine = regexp.MustCompile(`\b` + testenv.SeedEnv + `=(\d+)$`)
)

// failures finds the failed tests in the output of go test. why is not empty if none may run again.
func failures(output string) (failed []failure, why string) {
	var leaves []string // tests that failed and of which no subtest has
	ended := 0          // of failed, those whose package is known
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
			if n := len(leaves); n > 0 && strings.HasPrefix(fail[2], leaves[n-1]+"/") {
				leaves = leaves[:n-1]
			}
			leaves = append(leaves, fail[2])
			if fail[1] == "" {
				failed = append(failed, failure{test: fail[2]})
			}
		case seed != nil && ended < len(failed):
			failed[len(failed)-1].seed = seed[1]
		case end && (ended == len(failed) || strings.HasSuffix(pkg, "]")): // [build failed], or by os.Exit
			return nil, "a package failed, and no test of it"
		case end:
			pkg, _, _ = strings.Cut(pkg, "\t")
			for ; ended < len(failed); ended++ {
				failed[ended].pkg = pkg
			}
		}
	}
	switch {
	case len(leaves) > maxFailures:
		return nil, fmt.Sprintf("%d tests failed", len(leaves))
	case ended < len(failed) || len(failed) == 0:
		return nil, "it is not said which tests failed"
	}
	return failed, ""
}
