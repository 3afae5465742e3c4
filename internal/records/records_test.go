// SPDX-License-Identifier: Apache-2.0

package records

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newDir(path string) Dir { return Dir{Path: path, MaxBytes: 1 << 10, MaxFiles: 4} }

// files are all files of the directory, also those that are no records.
func (d Dir) files(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(d.Path)
	must(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func (d Dir) text(t *testing.T, name string) string {
	t.Helper()
	b, err := d.Read(name)
	must(t, err)
	return string(b)
}

func TestDir(t *testing.T) {
	d := newDir(filepath.Join(t.TempDir(), "deep", "records"))
	if names, err := d.Names(); len(names) > 0 || err != nil {
		t.Errorf("no directory: %v, %v", names, err)
	}
	must(t, errors.Join(d.Remove("a.json"), d.RemoveStale()))
	if _, err := d.Read("a.json"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no record: %v", err)
	}
	must(t, errors.Join(d.Write("b.json", 1), d.Write("a.json", []int{2}), d.Write("b.json", "three")))
	names, err := d.Names()
	if diff := cmp.Diff([]string{"a.json", "b.json"}, names); diff != "" || err != nil {
		t.Errorf("names: %v (-want +got)\n%s", err, diff)
	}
	if got := d.text(t, "b.json"); got != "\"three\"\n" {
		t.Errorf("record %q", got)
	}
	must(t, errors.Join(d.Remove("b.json"), d.CheckWritable()))
	if diff := cmp.Diff([]string{"a.json"}, d.files(t)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
	must(t, d.RemoveAll())
	if _, err := os.Lstat(d.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("directory after RemoveAll: %v", err)
	}
}

// TestDir_Read: what others put there neither blocks nor leads elsewhere.
func TestDir_Read(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		put        func(path string) error
	}{
		{"longest", "", func(path string) error { return os.WriteFile(path, make([]byte, 1<<10), 0o600) }},
		{"too long", "is longer than 1024 bytes", func(path string) error { return os.WriteFile(path, make([]byte, 1<<10+1), 0o600) }},
		{"directory", "is not a regular file", func(path string) error { return os.Mkdir(path, 0o700) }},
		{"pipe", "is not a regular file", func(path string) error { return syscall.Mkfifo(path, 0o600) }},
		{"link", "too many levels of symbolic links", func(path string) error { return os.Symlink("/etc/passwd", path) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newDir(t.TempDir())
			must(t, tt.put(filepath.Join(d.Path, "x.json")))
			_, err := d.Read("x.json")
			if got := fmt.Sprint(err); tt.want == "" && err != nil || !strings.Contains(got, tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// TestIsShortage: a record that cannot be read because descriptors or memory are short is no file to be ignored, as
// one is that is no record: its pod would be taken for one that is gone.
func TestIsShortage(t *testing.T) {
	for err, want := range map[error]bool{
		syscall.EMFILE: true, syscall.ENFILE: true, syscall.ENOMEM: true, syscall.ENOBUFS: true,
		syscall.EACCES: false, syscall.ELOOP: false, syscall.EIO: false, errors.New("is not a regular file"): false,
	} {
		if got := IsShortage(errors.Join(fs.ErrInvalid, &fs.PathError{Op: "open", Path: "a", Err: err})); got != want {
			t.Errorf("%v: %t", err, got)
		}
	}
}

// TestDir_writeTooLong: what could not be read is not written, and the record before stays.
func TestDir_writeTooLong(t *testing.T) {
	d := newDir(filepath.Join(t.TempDir(), "records"))
	text := strings.Repeat("x", d.MaxBytes-len(`""`)-len("\n"))
	if err := d.Write("a", text+"x"); err == nil || !strings.Contains(err.Error(), "has 1025 bytes, at most 1024 are allowed") {
		t.Errorf("error %v", err)
	}
	must(t, d.Write("a", text))
	if err := d.Write("a", text+"x"); err == nil {
		t.Error("no error")
	}
	if got := d.text(t, "a"); len(got) != d.MaxBytes {
		t.Errorf("record of %d bytes", len(got))
	}
	if diff := cmp.Diff([]string{"a"}, d.files(t)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

func TestDir_tooMany(t *testing.T) {
	d := newDir(t.TempDir())
	for i := range d.MaxFiles + 2 {
		must(t, d.Write(fmt.Sprint(i), i))
	}
	names, err := d.Names()
	if len(names) != d.MaxFiles || err == nil || !strings.Contains(err.Error(), "clean it up") {
		t.Errorf("names %v, error %v", names, err)
	}
}

// TestDir_failsEachStep has the file system refuse each step of a write: what was
// there stays, and nothing is left over.
func TestDir_failsEachStep(t *testing.T) {
	t.Run("marshal", func(t *testing.T) {
		d := newDir(filepath.Join(t.TempDir(), "x"))
		if err := d.Write("a", func() {}); err == nil {
			t.Error("no error")
		}
		if _, err := os.Lstat(d.Path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the directory was made: %v", err)
		}
	})
	t.Run("directory", func(t *testing.T) {
		d := newDir(filepath.Join(t.TempDir(), "x"))
		must(t, os.WriteFile(d.Path, nil, 0o600))
		if d.Write("a", 1) == nil || d.CheckWritable() == nil {
			t.Error("no error")
		}
		if _, err := d.Names(); err == nil {
			t.Error("names: no error")
		}
	})
	t.Run("rename", func(t *testing.T) {
		d := newDir(t.TempDir())
		must(t, os.MkdirAll(filepath.Join(d.Path, "a", "full"), 0o700))
		if d.Write("a", 1) == nil || d.Remove("a") == nil {
			t.Error("no error")
		}
		if diff := cmp.Diff([]string{"a"}, d.files(t)); diff != "" {
			t.Errorf("files (-want +got)\n%s", diff)
		}
	})
	t.Run("full disk", func(t *testing.T) {
		testenv.Need(t, testenv.Root, testenv.NetAdmin)
		d := newDir(t.TempDir())
		must(t, syscall.Mount("ks-full", d.Path, "tmpfs", 0, "size=16k"))
		t.Cleanup(func() { must(t, syscall.Unmount(d.Path, syscall.MNT_DETACH)) })
		must(t, d.Write("a", "before"))
		ballast := filepath.Join(d.Path, "ballast")
		if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("fill the disk: %v", err)
		}
		for what, err := range map[string]error{
			"a new record": d.Write("b", "new"), "another text": d.Write("a", "after"), "CheckWritable": d.CheckWritable(),
		} {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("%s: error %v, want ENOSPC", what, err)
			}
		}
		if got := d.text(t, "a"); got != "\"before\"\n" {
			t.Errorf("the record before is %q", got)
		}
		if diff := cmp.Diff([]string{"a", "ballast"}, d.files(t)); diff != "" {
			t.Errorf("files (-want +got)\n%s", diff)
		}
		must(t, d.Remove("a")) // a full disk is no reason to keep it
		must(t, os.Remove(ballast))
		must(t, errors.Join(d.CheckWritable(), d.Write("b", "new")))
	})
}

// TestDir_killed: what a writer leaves that is killed is no record, and goes, whatever its times
// say: the clock may have jumped since.
func TestDir_killed(t *testing.T) {
	for name, age := range map[string]time.Duration{"just now": 0, "long ago": 24 * time.Hour, "in the future": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			d := newDir(t.TempDir())
			must(t, d.Write("a", 1))
			left, at := filepath.Join(d.Path, ".tmp-1"), time.Now().Add(-age)
			must(t, errors.Join(os.WriteFile(left, []byte("{"), 0o600), os.Chtimes(left, at, at)))
			if names, err := d.Names(); len(names) != 1 || err != nil {
				t.Errorf("names %v, %v", names, err)
			}
			must(t, d.RemoveStale())
			if diff := cmp.Diff([]string{"a"}, d.files(t)); diff != "" {
				t.Errorf("files (-want +got)\n%s", diff)
			}
		})
	}
}

// TestDir_staleBesideWriters: no record is lost because somebody removes stale files meanwhile,
// though the clock jumps and makes each temporary file old at once.
func TestDir_staleBesideWriters(t *testing.T) {
	d := newDir(t.TempDir())
	var writers, others sync.WaitGroup
	done := make(chan struct{})
	others.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			temps, _ := filepath.Glob(filepath.Join(d.Path, tempPattern))
			for _, path := range temps {
				_ = os.Chtimes(path, time.Time{}, time.Unix(0, 0)) // it may be gone
			}
			if err := d.RemoveStale(); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range 2 {
		writers.Go(func() {
			for range 10 {
				if err := errors.Join(d.Write(fmt.Sprint(i), "text"), d.CheckWritable()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	close(done)
	others.Wait()
	if diff := cmp.Diff([]string{"0", "1"}, d.files(t)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

// TestDir_wholeRecords: readers see no part of a record, whoever writes.
func TestDir_wholeRecords(t *testing.T) {
	d := newDir(t.TempDir())
	text := strings.Repeat("x", 900)
	must(t, d.Write("a", text))
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 50 {
				if err := d.Write("a", text); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 500 {
			b, err := d.Read("a")
			if err != nil || len(b) != len(text)+3 {
				t.Errorf("read %d bytes: %v", len(b), err)
				return
			}
		}
	})
	wg.Wait()
	if diff := cmp.Diff([]string{"a"}, d.files(t)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}

// TestDir_noDirectory: a pipe in place of the directory, which has no writer, is an error at once.
func TestDir_noDirectory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	must(t, syscall.Mkfifo(path, 0o600))
	if _, err := newDir(path).Names(); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("error %v, want ENOTDIR", err)
	}
}
