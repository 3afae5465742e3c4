// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// names are the files of a directory.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	for _, tt := range []struct {
		text string
		perm fs.FileMode
	}{{"old", 0o600}, {"new and longer", 0o644}, {"", 0o666}} {
		must(t, Write(path, []byte(tt.text), tt.perm))
		b, err := os.ReadFile(path)
		must(t, err)
		st, err := os.Stat(path)
		must(t, err)
		if string(b) != tt.text || st.Mode() != tt.perm {
			t.Errorf("%q with mode %v, want %q with %v", b, st.Mode(), tt.text, tt.perm)
		}
	}
	if diff := cmp.Diff([]string{"a"}, names(t, filepath.Dir(path))); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

// TestWrite_fails has each step fail: what was there stays, and nothing else does.
func TestWrite_fails(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name  string
		want  []string
		write func(dir string) error
	}{
		{"no directory", nil, func(dir string) error { return Write(filepath.Join(dir, "none", "a"), nil, 0o600) }},
		{"read", nil, func(dir string) error {
			_, err := WriteTemp(dir, "x-*", brokenReader{broken}, nil)
			return err
		}},
		{"prepare", nil, func(dir string) error {
			_, err := WriteTemp(dir, "x-*", strings.NewReader("x"), func(*os.File) error { return broken })
			return err
		}},
		{"rename", []string{"a"}, func(dir string) error {
			must(t, os.MkdirAll(filepath.Join(dir, "a", "full"), 0o700))
			return Write(filepath.Join(dir, "a"), nil, 0o600)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.write(dir) == nil {
				t.Error("no error")
			}
			if diff := cmp.Diff(tt.want, names(t, dir)); diff != "" {
				t.Errorf("files (-want +got)\n%s", diff)
			}
		})
	}
}

type brokenReader struct{ err error }

func (r brokenReader) Read([]byte) (int, error) { return 0, r.err }

func TestWrite_fullDisk(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	dir := t.TempDir()
	must(t, syscall.Mount("ks-full", dir, "tmpfs", 0, "size=16k"))
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	path := filepath.Join(dir, "a")
	must(t, Write(path, []byte("before"), 0o600))
	if err := Write(path, make([]byte, 32<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v, want ENOSPC", err)
	}
	if b, err := os.ReadFile(path); string(b) != "before" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if diff := cmp.Diff([]string{"a"}, names(t, dir)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}
