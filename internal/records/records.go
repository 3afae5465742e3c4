// SPDX-License-Identifier: Apache-2.0

package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/smcr-io/kube-smcr/internal/files"
)

// Dir is a directory of records. It need not exist.
type Dir struct {
	Path string
	// MaxBytes bounds the size of a file, MaxFiles the number of files that
	// are listed: a directory that was filled by accident must not fill memory.
	MaxBytes, MaxFiles int
}

// IsShortage reports whether an error is about what the process, or the machine, is short of: descriptors, or memory. What was not
// read for it, such as a record, says nothing of what it is about.
func IsShortage(err error) bool {
	for _, short := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS} {
		if errors.Is(err, short) {
			return true
		}
	}
	return false
}

// tempPattern is the pattern of the names of temporary files.
const tempPattern = ".tmp-*"

// Make makes the directory if it is missing.
func (d Dir) Make() error { return os.MkdirAll(d.Path, 0o700) }

// Write writes v as the record of a name. It refuses a text that [Dir.Read] would refuse.
func (d Dir) Write(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if len(b) > d.MaxBytes {
		return fmt.Errorf("record has %d bytes, at most %d are allowed", len(b), d.MaxBytes)
	}
	if err := d.Make(); err != nil {
		return err
	}
	temp, err := files.WriteLockedTemp(d.Path, tempPattern, bytes.NewReader(b))
	if err != nil {
		return err
	}
	return temp.Replace(filepath.Join(d.Path, name))
}

// Remove removes a record. It is no error if there is none.
func (d Dir) Remove(name string) error {
	err := os.Remove(filepath.Join(d.Path, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return files.SyncDir(d.Path)
}

// MoveTo moves a record to another directory of the same file system, which takes no room for its text.
func (d Dir) MoveTo(o Dir, name string) error {
	err := o.Make()
	if err == nil {
		err = os.Rename(filepath.Join(d.Path, name), filepath.Join(o.Path, name))
	}
	if err != nil {
		return err
	}
	return errors.Join(files.SyncDir(o.Path), files.SyncDir(d.Path))
}

// Read returns the text of a record. The error is fs.ErrNotExist if there is none.
func (d Dir) Read(name string) ([]byte, error) {
	// The open must not block on a pipe, nor follow a symbolic link.
	f, err := os.OpenFile(filepath.Join(d.Path, name), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, errors.New("is not a regular file")
	}
	b, err := io.ReadAll(io.LimitReader(f, int64(d.MaxBytes)+1))
	if err != nil {
		return nil, err
	}
	if len(b) > d.MaxBytes {
		return nil, fmt.Errorf("is longer than %d bytes", d.MaxBytes)
	}
	return b, nil
}

// Names lists the records, in the order of their names. If there are more than MaxFiles,
// it returns MaxFiles of them and an error. A missing directory counts as empty.
func (d Dir) Names() ([]string, error) {
	f, err := os.OpenFile(d.Path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0) // a pipe there must not block
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(d.MaxFiles + 1)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if len(names) > d.MaxFiles {
		names = names[:d.MaxFiles]
		err = fmt.Errorf("%s has more than %d files: clean it up", d.Path, d.MaxFiles)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return strings.HasPrefix(n, ".") }) // temporary files
	slices.Sort(names)
	return names, err
}

// RemoveStale removes the temporary files of writers that were killed. Those of writers that
// live are locked, so it may be called at any time.
func (d Dir) RemoveStale() error { return files.RemoveTemps(d.Path, tempPattern) }

// RemoveAll removes all records, and the directory.
func (d Dir) RemoveAll() error { return os.RemoveAll(d.Path) }

// CheckWritable tells whether a record could be written now.
func (d Dir) CheckWritable() error {
	if err := d.Make(); err != nil {
		return err
	}
	block := make([]byte, os.Getpagesize())
	temp, err := files.WriteLockedTemp(d.Path, tempPattern, bytes.NewReader(block))
	if err != nil {
		return err
	}
	return temp.Remove()
}
