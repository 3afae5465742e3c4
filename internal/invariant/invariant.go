// SPDX-License-Identifier: Apache-2.0

// Package invariant stops the program when its own state is wrong.
//
// A violated invariant is a bug of ours, never something a peer, a user or
// the kernel can cause: those are errors. A panic here is meant to be loud,
// because going on with a broken state would put wrong bytes into somebody
// else's memory.
//
// [Must] is for the data path: it takes a constant message and allocates
// nothing. [Check] formats its message and is for everywhere else; its
// arguments may escape to the heap even when the condition holds.
package invariant

import "fmt"

const prefix = "invariant: "

// Must panics with msg unless cond holds. It is inlined and never allocates
// while cond holds.
func Must(cond bool, msg string) {
	if !cond {
		fail(msg)
	}
}

// Check panics with the formatted message unless cond holds.
func Check(cond bool, format string, args ...any) {
	if !cond {
		fail(fmt.Sprintf(format, args...))
	}
}

// fail is kept out of line so that Must stays below the inlining budget.
//
//go:noinline
func fail(msg string) {
	panic(prefix + msg)
}
