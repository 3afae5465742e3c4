// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// ErrNoExchange means that a file system cannot exchange files.
var ErrNoExchange = errors.New("the file system cannot exchange two files")

// Exchange gives two files each other's names in one step, so that each name always has a
// file, and a program that replaces a file gets the file that was there.
func Exchange(a, b string) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("exchange %s and %s: %w: %w", a, b, ErrNoExchange, err)
	case err != nil:
		return fmt.Errorf("exchange %s and %s: %w", a, b, err)
	}
	return nil
}
