// SPDX-License-Identifier: Apache-2.0

package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// ErrLocked says that another process has the lock.
var ErrLocked = errors.New("another process has the lock")

// A Lock is a lock that this process has until Unlock, Remove, or the end of the process.
type Lock struct {
	f *os.File
}

// TryLock locks a file, and makes it if there is none. The error is ErrLocked if another
// process has the lock.
func TryLock(path string) (*Lock, error) {
	return tryLock(path, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW)
}

// TryLockDir locks a directory. The error is fs.ErrNotExist if there is none, and
// ErrLocked if another process has the lock.
func TryLockDir(path string) (*Lock, error) {
	return tryLock(path, os.O_RDONLY|syscall.O_DIRECTORY)
}

// LockWithin is TryLock, but waits until the lock is free. If ctx ends first, the error is
// ErrLocked and that of the context.
func LockWithin(ctx context.Context, path string) (*Lock, error) {
	return wait(ctx, func() (*Lock, error) { return TryLock(path) })
}

// LockDirWithin is TryLockDir, but waits as LockWithin does.
func LockDirWithin(ctx context.Context, path string) (*Lock, error) {
	return wait(ctx, func() (*Lock, error) { return TryLockDir(path) })
}

func wait(ctx context.Context, try func() (*Lock, error)) (*Lock, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		l, err := try()
		if !errors.Is(err, ErrLocked) {
			return l, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ErrLocked, ctx.Err())
		}
	}
}

// tryLock opens the file and locks it. Between the two, another process may remove the
// file (Remove) and release its lock. Then the lock is on a file that nobody else can open
// any more, and tryLock begins anew:
//
//	other process         this process
//	flock
//	                      open (the old file)
//	remove, close
//	                      flock (the old file) succeeds
//	                      the path has no file, or another one: open again
func tryLock(path string, flags int) (*Lock, error) {
	for {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			return nil, err
		}
		l := &Lock{f}
		err = flock(f)
		switch {
		case err == nil && l.Stands():
			return l, nil
		case err == nil:
			err = f.Close()
		default:
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return nil, err
		}
	}
}

func flock(f *os.File) error {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EWOULDBLOCK):
			return ErrLocked
		case err != nil:
			return &fs.PathError{Op: "lock", Path: f.Name(), Err: err}
		default:
			return nil
		}
	}
}

// Stands tells whether the locked file is still the one at its path. If it is not, the
// lock keeps nobody out.
func (l *Lock) Stands() bool {
	ours, err := l.f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(l.f.Name())
	return err == nil && os.SameFile(ours, now)
}

// Unlock releases the lock and leaves the file.
func (l *Lock) Unlock() error { return l.f.Close() }

// Remove removes the file while it is locked, and then releases the lock. A process that
// opened the file before finds out by Stands that its lock is of no use.
func (l *Lock) Remove() error { return errors.Join(os.Remove(l.f.Name()), l.f.Close()) }
