// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"errors"
	"os"
	"path"
	"path/filepath"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

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

// A program is built where it is kept, and one that was cut off there is built anew.
func TestGoBuild(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	const pkg = guestPackage + "/../cpio"
	build := func() []byte {
		t.Helper()
		out := filepath.Join(t.TempDir(), "program")
		if err := goBuild(t.Context(), out, path.Clean(pkg), BuildOptions{Test: true}); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	first := build()
	kept, lock, err := keep(path.Clean(pkg), BuildOptions{Test: true})
	if err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(kept); err != nil || !bytes.Equal(text, first) {
		t.Errorf("%d bytes are kept, %v, want the program's %d", len(text), err, len(first))
	}
	if err := errors.Join(os.Truncate(kept, int64(len(first)/2)), lock.Close()); err != nil { // as if killed while go writes
		t.Fatal(err)
	}
	for range 2 {
		if again := build(); !bytes.Equal(again, first) {
			t.Errorf("the program has %d bytes, want the %d of before", len(again), len(first))
		}
	}
}
