// SPDX-License-Identifier: Apache-2.0

package linux

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

// Undo is a stack of what to take back when a later step of a set-up fails.
// The zero value is empty and ready. It is owned by one goroutine.
type Undo struct {
	done []Step
}

// Run does the steps in order. When one fails it takes back all that were
// done, in reverse order, and returns the failure together with what went
// wrong on the way back.
func (u *Undo) Run(steps ...Step) error {
	for _, s := range steps {
		if err := s.Do(); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", s.Name, err), u.Back())
		}
		u.done = append(u.done, s)
	}
	return nil
}

// Back takes back everything that was done, the last step first. It goes on
// after an error. After Back the stack is empty.
func (u *Undo) Back() error {
	var errs []error
	for _, s := range slices.Backward(u.done) {
		if s.Undo == nil {
			continue
		}
		if err := s.Undo(); err != nil {
			errs = append(errs, fmt.Errorf("take back %q: %w", s.Name, err))
		}
	}
	u.done = nil
	return errors.Join(errs...)
}

// Keep forgets what was done: the set-up is complete.
func (u *Undo) Keep() { u.done = nil }
