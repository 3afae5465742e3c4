// SPDX-License-Identifier: Apache-2.0

package apps

import (
	"context"
	"maps"
	"slices"
)

// A suite is the tests of an application.
type suite struct {
	name     string
	programs []string // that it needs of the distribution
	// prepare changes a copy of the suite, for the bed that it is on.
	prepare func(context.Context, *bed) error
	// quick are parts that are short; all returns all of those in a directory.
	quick []string
	all   func(dir string) ([]string, error)
	// leftOut are parts that are not run, and why.
	leftOut map[string]string
	// command is that which runs a part, and read reads what it wrote.
	command func(part string) []string
	read    func(out string) outcome
}

// ends is the name of a test of ours, in each part: it came to its end.
const ends = "the part ends"

// An outcome is whether the tests of a part passed. [ends] is in each.
type outcome map[string]bool

// failed says whether a test failed, or was not reached.
func (o outcome) failed(test string) bool {
	passed, known := o[test]
	return known && !passed || !known && !o[ends]
}

// A record is what the tests of a part said in one mode, each time.
type record []outcome

// failures is how often a test failed.
func (r record) failures(test string) (n int) {
	for _, o := range r {
		if o.failed(test) {
			n++
		}
	}
	return n
}

// passed is how often a test passed.
func (r record) passed(test string) (n int) {
	for _, o := range r {
		if o[test] {
			n++
		}
	}
	return n
}

// suspects are the tests that failed in a mode so far, and passed over plain TCP each
// time that they were reached, once at least.
func suspects(plain, other record) []string {
	var out []string
	for _, test := range names(plain) {
		if other.failures(test) > 0 && plain.failures(test) == 0 && plain.passed(test) > 0 {
			out = append(out, test)
		}
	}
	return out
}

// convicted are the suspects that failed often enough.
func convicted(plain, other record) []string {
	return slices.DeleteFunc(suspects(plain, other), func(test string) bool { return other.failures(test) < enough })
}

// names are those of the tests in a record, sorted.
func names(r record) []string {
	all := map[string]bool{}
	for _, o := range r {
		maps.Copy(all, o)
	}
	return slices.Sorted(maps.Keys(all))
}
