// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
)

// maxFailures is how many tests may run again. If more fail, it is not the machine.
const maxFailures = 2

// failure is the tests of a package that failed.
type failure struct {
	pkg   string
	tests []string
}

// failures finds the failed tests in the output of go test. why is not empty if none may run again.
func failures(output string) (failed []failure, why string) {
	var tests []string
	n := 0
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\n")
		name, found := strings.CutPrefix(line, "--- FAIL: ")
		pkg, ended := strings.CutPrefix(line, "FAIL\t")
		switch {
		case strings.Contains(line, "DATA RACE"):
			return nil, "a data race is a defect however often it shows"
		case strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:"):
			return nil, "a test ended its process"
		case found:
			name, _, _ = strings.Cut(name, " ")
			tests = append(tests, name)
			n++
		case ended && (len(tests) == 0 || strings.HasSuffix(pkg, "]")): // [build failed], or by os.Exit
			return nil, "a package failed, and no test of it"
		case ended:
			pkg, _, _ = strings.Cut(pkg, "\t")
			failed = append(failed, failure{pkg, tests})
			tests = nil
		}
	}
	switch {
	case n > maxFailures:
		return nil, fmt.Sprintf("%d tests failed", n)
	case len(tests) > 0 || n == 0:
		return nil, "it is not said which tests failed"
	}
	return failed, ""
}
