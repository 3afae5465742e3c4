// SPDX-License-Identifier: Apache-2.0

package place

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrInUse says that somebody else owns a directory.
var ErrInUse = errors.New("the directory is in use")

// TryLock makes and locks a directory. It is its caller's until the file is closed
// by all processes that have it.
func TryLock(dir string) (*os.File, error) {
	for {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		name := filepath.Join(dir, "lock")
		f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the directory was removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("lock %s: %w", name, ErrInUse)
			}
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		ours, err := f.Stat()
		theirs, err2 := os.Stat(name)
		if err == nil && err2 == nil && os.SameFile(ours, theirs) {
			return f, nil
		}
		_ = f.Close() // we locked a file that is removed
	}
}

// Names are those of the directories in a directory, which need not be there.
func Names(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
