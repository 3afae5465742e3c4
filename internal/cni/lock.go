// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// attachmentLock is held by the one call that works on the devices of an
// attachment. Runtimes should make one call at a time, but a second one must
// not take back what the first one has just made.
type attachmentLock struct {
	f *os.File
}

// lockAttachment waits for the lock, until ctx ends. It is a file that is there
// only while a call runs or one was killed; the lock itself ends with the
// process.
func lockAttachment(ctx context.Context, dataDir, containerID, ifName string) (*attachmentLock, error) {
	if err := checkKey(containerID, ifName); err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	path := filepath.Join(dataDir, "locks", containerID+"-"+ifName+".lock")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		l, err := tryLock(path)
		if l != nil || err != nil {
			return l, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("lock attachment: another call for interface %s of container %s runs: %w", ifName, containerID, ctx.Err())
		}
	}
}

// tryLock returns nil without an error when another call has the lock.
func tryLock(path string) (*attachmentLock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		var same bool
		// Who had the lock removed the file: this one is locked, but not the
		// one that the next call opens.
		if same, err = isFile(f, path); err == nil && same {
			return &attachmentLock{f}, nil
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("lock attachment: %w", err)
	}
	return nil, errors.Join(err, f.Close())
}

func isFile(f *os.File, path string) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(opened, named), err
}

// unlock removes the file while it is locked, and gives it free.
func (l *attachmentLock) unlock() error {
	if l == nil {
		return nil
	}
	return errors.Join(os.Remove(l.f.Name()), l.f.Close())
}
