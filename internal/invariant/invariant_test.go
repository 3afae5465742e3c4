// SPDX-License-Identifier: Apache-2.0

package invariant_test

import (
	"testing"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// panicOf runs f and returns what it panicked with, nil if it returned.
func panicOf(f func()) (v any) {
	defer func() { v = recover() }()
	f()
	return nil
}

func TestMust(t *testing.T) {
	if got := panicOf(func() { invariant.Must(true, "unused") }); got != nil {
		t.Errorf("Must(true) panicked with %v", got)
	}
	want := "invariant: cursor beyond the buffer"
	if got := panicOf(func() { invariant.Must(false, "cursor beyond the buffer") }); got != want {
		t.Errorf("Must(false) panicked with %v, want %q", got, want)
	}
}

func TestMust_allocatesNothing(t *testing.T) {
	n := len(t.Name())
	if got := testing.AllocsPerRun(1000, func() { invariant.Must(n > 0, "empty name") }); got != 0 {
		t.Errorf("Must allocates %v times per call, want 0", got)
	}
}

func BenchmarkMust(b *testing.B) {
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		invariant.Must(i >= 0, "negative counter")
	}
}
