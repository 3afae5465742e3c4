// SPDX-License-Identifier: Apache-2.0

package lab

import "testing"

func TestGlibcMinor(t *testing.T) {
	for _, c := range []struct {
		version string
		want    int
		ok      bool
	}{
		{"GLIBC_2.34", 34, true},
		{"GLIBC_2.2.5", 2, true},
		{"GLIBC_2.38", 38, true},
		{"GLIBC_PRIVATE", 0, false},
		{"IBVERBS_1.1", 0, false},
		{"", 0, false},
	} {
		t.Run(c.version, func(t *testing.T) {
			if got, ok := glibcMinor(c.version); got != c.want || ok != c.ok {
				t.Errorf("got %d, %v; want %d, %v", got, ok, c.want, c.ok)
			}
		})
	}
}

// This test is a program of this machine; if it is linked to a newer C library
// than the guests', that must be said.
func TestCheckLibc(t *testing.T) {
	if err := checkLibc("/proc/self/exe"); err != nil {
		t.Logf("this machine's programs do not run in guests: %v", err)
	}
	if err := checkLibc("/proc/self/cmdline"); err == nil {
		t.Error("a file that is no program has a good C library")
	}
}
