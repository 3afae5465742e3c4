// SPDX-License-Identifier: Apache-2.0

// Package undo takes a set-up of several steps back when one of them fails. Each [Step]
// says how to do it and how to take it back; a [Stack] does the steps and remembers those
// that were done:
//
//	var s undo.Stack
//	if err := s.Run(steps...); err != nil {
//		return err // nothing is left
//	}
//	s.Keep() // or keep s, for its Back at the end
//
// Where the steps of a set-up follow from each other, so that there is no list of them,
// the set-up calls Did after each step, and Back when one fails.
//
// # Limitations
//
// A step that fails must take back itself what it did. If a step cannot be taken back, its
// error is returned, and the steps before it are taken back all the same.
package undo
