// SPDX-License-Identifier: Apache-2.0

package undo

import (
	"errors"
	"fmt"
	"slices"
)

// A Step is one step of a set-up and how to take it back.
type Step struct {
	Name string
	Do   func() error
	Undo func() error // nil if there is nothing to take back
}

// A Stack has the steps to take back when a later step of a set-up fails. The zero value
// is empty and ready. It is owned by one goroutine.
type Stack struct {
	done []Step
}

// Run does the steps in order. When one fails, Run takes back all steps that were done, in
// reverse order, and returns the step's error together with the errors of taking back.
func (s *Stack) Run(steps ...Step) error {
	for _, step := range steps {
		if err := step.Do(); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", step.Name, err), s.Back())
		}
		s.done = append(s.done, step)
	}
	return nil
}

// Did adds a step that was done without Run, and how to take it back.
func (s *Stack) Did(name string, back func() error) {
	s.done = append(s.done, Step{Name: name, Undo: back})
}

// Back takes back all steps that were done, the last one first. It goes on after an error.
// After Back the stack is empty.
func (s *Stack) Back() error {
	var errs []error
	for _, step := range slices.Backward(s.done) {
		if step.Undo == nil {
			continue
		}
		if err := step.Undo(); err != nil {
			errs = append(errs, fmt.Errorf("take back %q: %w", step.Name, err))
		}
	}
	s.done = nil
	return errors.Join(errs...)
}

// Keep empties the stack: the set-up is complete, and is not taken back.
func (s *Stack) Keep() { s.done = nil }
