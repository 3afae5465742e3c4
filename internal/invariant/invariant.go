// SPDX-License-Identifier: Apache-2.0

package invariant

const prefix = "invariant: "

// Must panics with msg unless cond holds. It is inlined and never allocates
// while cond holds.
func Must(cond bool, msg string) {
	if !cond {
		fail(msg)
	}
}

// fail is kept out of line so that Must stays below the inlining budget.
//
//go:noinline
func fail(msg string) {
	panic(prefix + msg)
}
