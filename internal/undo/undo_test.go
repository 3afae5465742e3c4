// SPDX-License-Identifier: Apache-2.0

package undo_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/undo"
)

func mustDo(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestStack: what was done is taken back in reverse order, also after an error on the
// way, and what is kept stays.
func TestStack(t *testing.T) {
	var log []string
	step := func(name string, back error) undo.Step {
		return undo.Step{
			Name: name,
			Do:   func() error { log = append(log, "do "+name); return nil },
			Undo: func() error { log = append(log, "undo "+name); return back },
		}
	}
	boom, stuck := errors.New("boom"), errors.New("stuck")
	var s undo.Stack
	mustDo(t, s.Run(step("a", nil)))
	err := s.Run(step("b", stuck), undo.Step{Name: "c", Do: func() error { return nil }}, undo.Step{Name: "d", Do: func() error { return boom }})
	if !errors.Is(err, boom) || !errors.Is(err, stuck) {
		t.Errorf("error %v, want boom and stuck", err)
	}
	if diff := cmp.Diff([]string{"do a", "do b", "undo b", "undo a"}, log); diff != "" {
		t.Error(diff)
	}
	log = nil
	mustDo(t, s.Run(step("a", nil)))
	s.Did("b", step("b", stuck).Undo)
	if err := s.Back(); !errors.Is(err, stuck) || !strings.Contains(err.Error(), `take back "b"`) {
		t.Errorf("error %v, want that b is stuck", err)
	}
	if diff := cmp.Diff([]string{"do a", "undo b", "undo a"}, log); diff != "" {
		t.Error(diff)
	}
	log = nil
	mustDo(t, s.Run(step("a", nil)))
	s.Keep()
	mustDo(t, s.Back())
	if diff := cmp.Diff([]string{"do a"}, log); diff != "" {
		t.Error(diff)
	}
}
