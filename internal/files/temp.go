// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// A Temp is a temporary file with a lock of this process on it, until Replace, Remove, or the
// end of the process. So nobody has to guess by its age whether its writer still lives: a clock
// may jump.
type Temp struct {
	lock *Lock
}

// WriteLockedTemp is WriteTemp, but the file is locked, so that [RemoveTemps] leaves it alone.
func WriteLockedTemp(dir, pattern string, r io.Reader) (*Temp, error) {
	l, err := createLocked(dir, pattern)
	if err != nil {
		return nil, err
	}
	if err := fill(l.f, r, nil); err != nil {
		return nil, errors.Join(err, l.Remove())
	}
	return &Temp{l}, nil
}

// createLocked makes a file and locks it. Between the two, RemoveTemps of another process may
// find the file without a lock and remove it; then createLocked begins anew, with another name.
func createLocked(dir, pattern string) (*Lock, error) {
	for {
		f, err := os.CreateTemp(dir, pattern)
		if err != nil {
			return nil, err
		}
		l := &Lock{f}
		err = flock(f)
		switch {
		case err == nil && l.Stands():
			return l, nil
		case err == nil, errors.Is(err, ErrLocked):
			err = f.Close() // RemoveTemps has removed the file, or is about to
		default:
			err = errors.Join(err, l.Remove())
		}
		if err != nil {
			return nil, err
		}
	}
}

// Replace renames the file to path, over a file that is there. After an error the temporary
// file is removed.
func (t *Temp) Replace(path string) error {
	if err := os.Rename(t.lock.f.Name(), path); err != nil {
		return errors.Join(err, t.Remove())
	}
	return errors.Join(SyncDir(filepath.Dir(path)), t.lock.Unlock())
}

// Remove removes the file.
func (t *Temp) Remove() error { return t.lock.Remove() }

// RemoveTemps removes the temporary files of writers that were killed: those with the names of a
// pattern of [WriteLockedTemp] on which no process has a lock.
func RemoveTemps(dir, pattern string) error {
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	errs := []error{err}
	for _, path := range paths {
		l, err := tryLock(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW)
		switch {
		case err == nil:
			errs = append(errs, l.Remove())
		case errors.Is(err, ErrLocked): // its writer lives
		case errors.Is(err, fs.ErrNotExist): // it is in place, or somebody else removed it
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
