// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// waiter waits in Go's network poller for a descriptor of libibverbs, which
// keeps it: the waiter has a duplicate.
type waiter struct {
	file *os.File
	raw  syscall.RawConn
}

func newWaiter(fd int, name string) (*waiter, error) {
	// The flag belongs to what both descriptors share.
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("make descriptor of %s non-blocking: %w", name, err)
	}
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor of %s: %w", name, err)
	}
	w := &waiter{file: os.NewFile(uintptr(own), name)}
	if w.raw, err = w.file.SyscallConn(); err == nil {
		err = w.file.SetReadDeadline(time.Time{}) // fails if the poller does not take it
	}
	if err != nil {
		_ = w.file.Close()
		return nil, fmt.Errorf("wait for %s: %w", name, err)
	}
	return w, nil
}

// wait calls try until it returns true, and between two calls waits until the
// descriptor is readable. After close it returns an error.
func (w *waiter) wait(try func(fd uintptr) bool) error { return w.raw.Read(try) }

// until bounds the waits from now on.
func (w *waiter) until(t time.Time) error { return w.file.SetReadDeadline(t) }

// close wakes who waits.
func (w *waiter) close() error { return w.file.Close() }
