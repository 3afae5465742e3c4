// SPDX-License-Identifier: Apache-2.0

package files

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestTryLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := TryLock(path)
	must(t, err)
	if _, err := TryLock(path); !errors.Is(err, ErrLocked) {
		t.Errorf("second: %v, want ErrLocked", err)
	}
	must(t, first.Unlock())
	second, err := TryLock(path)
	must(t, err)
	must(t, second.Remove())
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("file after Remove: %v", err)
	}
	must(t, os.Symlink("/etc/passwd", path))
	if _, err := TryLock(path); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("link: %v, want ELOOP", err)
	}
}

// TestTryLockDir: directories are found behind links, and not made.
func TestTryLockDir(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	must(t, os.Symlink(dir, link))
	if _, err := TryLockDir(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
	l, err := TryLockDir(link)
	must(t, err)
	if _, err := TryLockDir(dir); !errors.Is(err, ErrLocked) {
		t.Errorf("second: %v, want ErrLocked", err)
	}
	must(t, l.Unlock())
}

func TestLock_Stands(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l, err := TryLock(path)
	must(t, err)
	if !l.Stands() {
		t.Error("does not stand")
	}
	must(t, os.Remove(path))
	if l.Stands() {
		t.Error("stands without a file")
	}
	must(t, os.WriteFile(path, nil, 0o600))
	if l.Stands() {
		t.Error("stands with another file")
	}
	must(t, l.Unlock())
}

func TestLockWithin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l, err := TryLock(path)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	if _, err := LockWithin(ctx, path); !errors.Is(err, ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("held: %v", err)
	}
	held := l
	time.AfterFunc(2*lockPoll, func() { _ = held.Remove() })
	l, err = LockWithin(t.Context(), path)
	must(t, err)
	must(t, l.Unlock())
	if _, err := LockWithin(t.Context(), filepath.Join(path, "none")); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("no such directory: %v", err)
	}
}

// TestLock_excludes: whoever removes the file while others open it, at most one has
// the lock.
func TestLock_excludes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var holders atomic.Int32
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				l, err := TryLock(path)
				if errors.Is(err, ErrLocked) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders", n)
				}
				holders.Add(-1)
				if err := l.Remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
