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
	// command returns the command that runs a part, and read understands its output.
	command func(part string) []string
	read    func(out string) outcome
	// stable: the tests of a part have the same names each time. One that is missing was not run then, because its
	// server did not start, say.
	stable bool
}

// ends is the name of a test of ours, in each part: it came to its end.
const ends = "the part ends"

// An outcome is whether the tests of a part passed. [ends] is in each.
type outcome map[string]bool

// asMany is the name of another test of ours, in each part of a suite that is not stable: no fewer tests
// were run than over plain TCP.
const asMany = "no fewer tests than over plain TCP"

// tests is how many there are, without ours.
func (o outcome) tests() (n int) {
	for test := range o {
		if test != ends && test != asMany {
			n++
		}
	}
	return n
}

// A record is what the tests of a part said in one mode, each time.
type record []outcome

// count adds [asMany] to the outcomes, unless the part never came to its end over plain TCP.
func count(plain record, others ...record) {
	least := -1
	for _, o := range plain {
		if n := o.tests(); o[ends] && (least < 0 || n < least) {
			least = n
		}
	}
	if least < 0 {
		return
	}
	for _, o := range plain {
		o[asMany] = true
	}
	for _, r := range others {
		for _, o := range r {
			o[asMany] = !o[ends] || o.tests() >= least
		}
	}
}

// failures is how often a test failed, or was not reached.
func (s suite) failures(r record, test string) (n int) {
	for _, o := range r {
		passed, known := o[test]
		if known && !passed || !known && (s.stable || !o[ends]) {
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
func (s suite) suspects(plain, other record) []string {
	var out []string
	for _, test := range names(plain) {
		if s.failures(other, test) > 0 && s.failures(plain, test) == 0 && plain.passed(test) > 0 {
			out = append(out, test)
		}
	}
	return out
}

// convicted are the suspects that failed often enough.
func (s suite) convicted(plain, other record) []string {
	return slices.DeleteFunc(s.suspects(plain, other), func(test string) bool { return s.failures(other, test) < enough })
}

// names returns the names of the tests in a record, sorted.
func names(r record) []string {
	all := map[string]bool{}
	for _, o := range r {
		maps.Copy(all, o)
	}
	return slices.Sorted(maps.Keys(all))
}
