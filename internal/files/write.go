// SPDX-License-Identifier: Apache-2.0

package files

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// tempPattern is the pattern of the names of Write's temporary files.
const tempPattern = ".tmp-*"

// Write replaces a file by one with content b and permissions perm, whatever the umask.
func Write(path string, b []byte, perm fs.FileMode) error {
	temp, err := WriteTemp(filepath.Dir(path), tempPattern, bytes.NewReader(b), func(f *os.File) error { return f.Chmod(perm) })
	if err != nil {
		return err
	}
	return Replace(temp, path)
}

// WriteTemp writes the content of r to a new file in dir, syncs it to the disk, and
// returns its path, for [Replace]. pattern is that of os.CreateTemp. prepare sets owner
// and permissions; nil leaves those of os.CreateTemp. After an error there is no file.
func WriteTemp(dir, pattern string, r io.Reader, prepare func(*os.File) error) (string, error) {
	f, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return "", err
	}
	if err = errors.Join(fill(f, r, prepare), f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// fill writes a temporary file down to the disk.
func fill(f *os.File, r io.Reader, prepare func(*os.File) error) error {
	if _, err := io.Copy(f, r); err != nil {
		return err
	}
	if prepare != nil {
		if err := prepare(f); err != nil {
			return err
		}
	}
	return f.Sync()
}

// Replace renames a file of WriteTemp to path, over a file that is there. After an error
// the temporary file is removed.
func Replace(temp, path string) error {
	if err := os.Rename(temp, path); err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return SyncDir(filepath.Dir(path))
}

// SyncDir syncs a directory, so that renames and removals in it survive a power cut.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
